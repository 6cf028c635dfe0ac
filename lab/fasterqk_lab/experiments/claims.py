"""Every claim of the paper, what the published results say about it, and the verdict."""

from pathlib import Path
from typing import Any

from fasterqk.console import print_table
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option
from fasterqk_lab.figures import effect_text
from fasterqk_lab.page import Claim, count_verdicts, save_claims
from fasterqk_lab.paper import FOLDER, Published, read_claims

TITLE = "Every claim of the paper"
RESULTS_OPTION = Option(
    "results", str, "published results (default: lab/paper of the checkout)", metavar="DIR"
)


def claims_of(results: str | None) -> list[Claim]:
    """The claims as the page shows them."""
    return [
        Claim(
            claim=claim.text,
            where=claim.where,
            verdict=claim.verdict,
            effect="" if not claim.effects or claim.effects[0].exact else effect_text(claim.effects[0]),
            remark=claim.remark,
            experiment=claim.command,
            group=claim.group,
        )
        for claim in read_claims(Published(Path(results) if results else FOLDER))
    ]


def write_claims(out: Path, results: str | None = None) -> list[Claim] | None:
    """Save the claims under ``out`` for the page; None where no published results are at hand."""
    if results is None and not FOLDER.is_dir():
        return None
    claims = claims_of(results)
    save_claims(out, claims, title=TITLE)
    return claims


def run(runner: CellRunner, results: str | None) -> dict[str, Any]:
    claims = claims_of(results)
    save_claims(runner.out, claims, title=TITLE)
    return {"claims": claims, "verdicts": count_verdicts(claims)}


def show(summary: dict[str, Any]) -> None:
    rows = [
        {key: claim[key] for key in ("group", "claim", "verdict", "effect")} for claim in summary["claims"]
    ]
    print_table(rows, title=f"{len(rows)} claims: {summary['verdicts']}\n")
    print("\nevidence: docs/results/claims.md")


EXPERIMENT = Experiment(
    name="claims",
    chapter="Claims",
    options=(RESULTS_OPTION,),
    run=run,
    show=show,
    examples=("fasterqk-lab reproduce claims --out out", "fasterqk-lab reproduce claims --json"),
    details="Reads lab/paper; nothing is trained. tools/publish.py writes the pages of docs/results.",
    trains=False,
)
