"""A survey as text: counts for a terminal, and the section of docs/survey.md between two marks."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.files import write_text
from tools.survey.libraries import LIBRARIES
from tools.survey.survey import LABELLED, OUTCOMES, Entry


def count_outcomes(entries: Sequence[Entry]) -> dict[str, Any]:
    """Models, architectures and models per outcome; what perturbation judged and contradicted."""
    probed = [entry for entry in entries if "as" not in entry]
    labelled = [entry for entry in probed if entry["outcome"] in LABELLED]
    outcomes = Counter(entry["outcome"] for entry in entries)
    return {
        "models": len(entries),
        "architectures": len(probed),
        "outcomes": {outcome: outcomes[outcome] for outcome in OUTCOMES if outcomes[outcome]},
        "with blocks without softmax": sum(bool(entry.get("hybrid")) for entry in entries),
        "judged models": sum(bool(entry.get("judged")) for entry in labelled),
        "judged slices": sum(entry.get("judged", 0) for entry in labelled),
        "contradicted": sorted(entry["name"] for entry in labelled if entry.get("contradictions")),
        "differing": sorted(entry["name"] for entry in labelled if entry.get("differing")),
    }


def summary(library: str, entries: Sequence[Entry]) -> str:
    """The counts as text, one per line."""
    counts = count_outcomes(entries)
    rows = [f"{number:5d}  {OUTCOMES[outcome]}" for outcome, number in counts["outcomes"].items()]
    return "\n".join([f"{counts['models']} models of {library}", *rows, *_opinions(counts)])


def _opinions(counts: dict[str, Any]) -> list[str]:
    """Sentences about the perturbation and about blocks without a softmax."""
    wrong, differing = counts["contradicted"], counts["differing"]
    lines = [
        f"By perturbation {counts['judged slices']} slices of {counts['judged models']} labelled models were "
        f"judged; the labels of {len(wrong)} models are contradicted{_listed(wrong)}."
    ]
    if differing:
        lines.append(f"A small copy is labelled differently in {len(differing)} models{_listed(differing)}.")
    if counts["with blocks without softmax"]:
        lines.append(
            f"{counts['with blocks without softmax']} of the labelled models have blocks without a softmax, "
            "which stay at the base rate."
        )
    return lines


def _listed(names: Sequence[str]) -> str:
    return ": " + ", ".join(names) if names else ""


def section(library: str, entries: Sequence[Entry]) -> str:
    """The section of the page, in Markdown."""
    counts = count_outcomes(entries)
    total = len(LIBRARIES[library].names())
    by_outcome: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_outcome[entry["outcome"]].append(entry)
    parts = [
        f"`python -m tools.survey {library} --out {library}.jsonl --page docs/survey.md`, "
        f"{LIBRARIES[library].versions()}, {counts['models']} of {total} names"
        + (
            f", {counts['architectures']} architectures (names with the same modules, classes and layouts "
            "are one; the smallest is probed)"
            if counts["architectures"] < counts["models"]
            else ""
        )
        + ":",
        "",
        "| models | what happens |",
        "|---:|---|",
        *(f"| {number} | {OUTCOMES[outcome]} |" for outcome, number in counts["outcomes"].items()),
        "",
        " ".join(_opinions(counts)),
    ]
    for outcome in ("partly verified", "by name", "too large", "too slow", "died", "error"):
        if by_outcome[outcome]:
            parts += ["", f"**{outcome.capitalize()}**: {', '.join(_names(by_outcome[outcome]))}."]
    if by_outcome["refused"]:
        by_reason: dict[str, list[Entry]] = defaultdict(list)
        for entry in by_outcome["refused"]:
            by_reason[_reason(entry["why"])].append(entry)
        refusals = (f"{reason} ({', '.join(_names(refused))})" for reason, refused in by_reason.items())
        parts += ["", f"**Refused**: {'; '.join(refusals)}."]
    return "\n".join(parts)


def _names(entries: Sequence[Entry]) -> list[str]:
    """The names of the probed models, with the number of other names of the same architecture."""
    others = Counter(entry["as"] for entry in entries if "as" in entry)
    probed = sorted(entry["name"] for entry in entries if "as" not in entry)
    return [f"{name} and {others[name]} more" if others[name] else name for name in probed]


def _reason(why: str) -> str:
    """The class of a block without a softmax, or the beginning of the message."""
    if "forms no softmax" in why:
        return f"no softmax in {why.partition('(')[2].partition(')')[0]}"
    return why.partition(":")[0].lstrip("0123456789 ")


def write_section(page: str | Path, library: str, entries: Sequence[Entry]) -> Path:
    """Write the section between ``<!-- survey LIBRARY: begin -->`` and its end mark in ``page``."""
    begin, end = f"<!-- survey {library}: begin -->", f"<!-- survey {library}: end -->"
    try:
        text = Path(page).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--page {str(page)!r} cannot be read: {error}") from None
    before, mark, rest = text.partition(begin)
    _, closing, after = rest.partition(end)
    if not (mark and closing):
        raise InputError(f"--page {str(page)!r} has no lines {begin!r} and {end!r}; write them where it goes")
    return write_text(page, f"{before}{begin}\n{section(library, entries)}\n{end}{after}")
