"""The tables of docs/architectures.md from the lines of a survey.

    python tests/architectures/survey_page.py survey.jsonl

writes them between the two marks in the page.
"""

import json
import sys
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
BEGIN, END = "<!-- survey: begin -->", "<!-- survey: end -->"
OUTCOMES = {
    "verified": "labelled, and the probe saw every kind of attention block",
    "partly verified": "labelled, the probe saw some of the blocks",
    "by name": "labelled by registry and names; the probe did not see it, and a note says so",
    "refused": "refused in one line, with the rule that leaves the block alone",
    "no attention": "no attention in it; refused",
    "not built": "no model of this type can be built from its default configuration",
    "too slow": "did not end in time",
    "died": "ended without an answer",
    "error": "ended in something else than a label or a refusal",
}


def tables(lines: list[dict[str, Any]], versions: str) -> str:
    """Markdown: counts, then who is in which outcome."""
    by: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        by[line["outcome"]].append(line)
    labelled = by["verified"] + by["partly verified"] + by["by name"]
    asked = [line for line in labelled if line.get("contradictions") is not None]
    wrong = [line["type"] for line in labelled if line.get("contradictions") or line.get("differing")]
    parts = [
        f"`python tests/architectures/survey.py --out survey.jsonl`, {date.today()}, {versions}:",
        "",
        "| model types | what happens |",
        "|---|---|",
        *(f"| {len(by[outcome])} | {words} |" for outcome, words in OUTCOMES.items() if by[outcome]),
        "",
        f"{len(asked)} of the labelled types return their own attention on inputs that could be guessed; it "
        f"contradicts the labels of {len(wrong)} of them{': ' + ', '.join(wrong) if wrong else ''}.",
        "",
        "| fused weight | verified in |",
        "|---|---|",
        *_by_weight([line for line in by["verified"] if line["split"]]),
        "",
        "**Verified, separate projections**: " + _names(line for line in by["verified"] if not line["split"]),
    ]
    for outcome in ("partly verified", "by name", "no attention", "too slow", "died", "error"):
        if by[outcome]:
            parts += ["", f"**{outcome.capitalize()}**: " + _names(by[outcome])]
    if by["refused"]:
        parts += [
            "",
            "**Refused**: " + "; ".join(f"{x['type']} ({_reason(x['why'])})" for x in by["refused"]),
        ]
    unbuilt: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in by["not built"]:
        unbuilt["part of another model" if " has no model for " in line["why"] else "default fails"].append(
            line
        )
    parts += [f"\n**Not built, {reason}**: " + _names(found) for reason, found in unbuilt.items()]
    return "\n".join(parts)


def _names(lines: Any) -> str:
    return ", ".join(sorted(line["type"] for line in lines)) + "."


def _by_weight(lines: list[dict[str, Any]]) -> list[str]:
    """A row for the names of fused modules, without their places, and the types that have them."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        leaves = {
            name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2] for name in line["split"]
        }
        leaves = {leaf.removesuffix("_weight").removesuffix("_bias") for leaf in leaves}
        found[", ".join(f"`{leaf}`" for leaf in sorted(leaves))].append(line["type"])
    return [f"| {leaves} | {', '.join(sorted(types))} |" for leaves, types in sorted(found.items())]


def _reason(why: str) -> str:
    """The class in parentheses of a block that has no softmax, or the beginning of the message."""
    if "forms no softmax" in why:
        return why.partition("(")[2].partition(")")[0]
    return why.partition(":")[0]


def main() -> None:
    import torch
    import transformers

    lines = [json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text("utf-8").splitlines()]
    latest = {line["type"]: line for line in lines}
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    text = PAGE.read_text("utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(
        f"{before}{BEGIN}\n{tables(list(latest.values()), versions)}\n{END}{rest.split(END)[1]}", "utf-8"
    )


if __name__ == "__main__":
    main()
