"""What the published results say: every claim of the paper with its verdict, and the open questions."""

from pathlib import Path
from typing import Any

from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option
from fasterqk_lab.figures import effect_record, effect_text, save_claims
from fasterqk_lab.page import count_verdicts
from fasterqk_lab.paper import FOLDER, Published, read_claims, read_lines, read_questions, save_picture

RESULTS_OPTION = Option(
    "results", str, "published results (default: lab/paper of the checkout)", metavar="DIR"
)


def _published(results: str | None) -> Published:
    return Published(Path(results) if results else FOLDER)


def write_claims(out: Path, results: str | None = None) -> list[dict[str, str]]:
    """Save the claims under ``out`` for the page, and return them as it shows them."""
    claims = [
        {
            "claim": claim.text,
            "where": claim.where,
            "verdict": claim.verdict,
            "effect": "" if not claim.effects or claim.effects[0].exact else effect_text(claim.effects[0]),
            "remark": claim.remark,
            "experiment": claim.command,
            "group": claim.group,
        }
        for claim in read_claims(_published(results))
    ]
    save_claims(out, claims, title="Every claim of the paper")
    return claims


def run(runner: CellRunner, results: str | None) -> dict[str, Any]:
    claims = write_claims(runner.out, results)
    return {"claims": claims, "verdicts": count_verdicts(claims), "evidence": "docs/results/claims.md"}


def run_questions(runner: CellRunner, results: str | None) -> dict[str, Any]:
    published = _published(results)
    questions = [
        {name: getattr(question, name) for name in ("title", "hypothesis", "verdict", "becomes")}
        | {
            name: [effect_record(effect) for effect in getattr(question, name)]
            for name in ("effects", "explored")
        }
        for question in read_questions(published)
    ]
    picture = save_picture(read_lines(published), runner.out / "figures")
    return {"questions": questions, "figure": str(picture)}


EXPERIMENT = Experiment(
    "claims",
    run,
    options=(RESULTS_OPTION,),
    examples=("fasterqk-lab reproduce claims --out out", "fasterqk-lab reproduce claims --json"),
    details="Reads lab/paper; nothing is trained. tools/publish.py writes the pages of docs/results.",
    trains=False,
)
QUESTIONS = Experiment(
    "questions",
    run_questions,
    options=(RESULTS_OPTION,),
    examples=("fasterqk-lab reproduce questions --out out", "fasterqk-lab reproduce questions --json"),
    details="Reads lab/paper; nothing is trained.",
    trains=False,
)
