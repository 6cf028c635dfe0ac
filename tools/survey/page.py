"""A survey as text: counts for a terminal, and the section of docs/architectures.md between two marks."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fasterqk.circuits._libraries import LIBRARIES
from fasterqk.circuits._survey import LABELLED, OUTCOMES, Found
from fasterqk.errors import InputError
from fasterqk.files import write_text


def counted(lines: Sequence[Found]) -> dict[str, Any]:
    """Counts: by outcome, architectures apart, slices judged by perturbation, contradicted models."""
    probed = [line for line in lines if "as" not in line]
    labelled = [line for line in probed if line["outcome"] in LABELLED]
    return {
        "models": len(lines),
        "architectures": len(probed),
        "outcomes": {
            one: number for one in OUTCOMES if (number := sum(line["outcome"] == one for line in lines))
        },
        "with blocks without softmax": sum(bool(line.get("hybrid")) for line in lines),
        "judged models": sum(bool(line.get("judged")) for line in labelled),
        "judged slices": sum(line.get("judged", 0) for line in labelled),
        "contradicted": sorted(line["name"] for line in labelled if line.get("contradictions")),
        "differing": sorted(line["name"] for line in labelled if line.get("differing")),
    }


def summary(library: str, lines: Sequence[Found]) -> str:
    """The counts, one line each."""
    counts = counted(lines)
    rows = [f"{number:5d}  {OUTCOMES[one]}" for one, number in counts["outcomes"].items()]
    return "\n".join([f"{counts['models']} models of {library}", *rows, *_opinions(counts)])


def _opinions(counts: dict[str, Any]) -> list[str]:
    """In sentences: what perturbation said, and which models have blocks without a softmax."""
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


def section(library: str, lines: Sequence[Found]) -> str:
    """The section of the page, in Markdown."""
    counts = counted(lines)
    every = len(LIBRARIES[library].names())
    by: dict[str, list[Found]] = defaultdict(list)
    for line in lines:
        by[line["outcome"]].append(line)
    parts = [
        f"`fasterqk circuits --survey {library} --out {library}.jsonl --page docs/architectures.md`, "
        f"{LIBRARIES[library].versions()}, {counts['models']} of {every} names"
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
        *(f"| {number} | {OUTCOMES[one]} |" for one, number in counts["outcomes"].items()),
        "",
        " ".join(_opinions(counts)),
    ]
    for outcome in ("partly verified", "by name", "too large", "too slow", "died", "error"):
        if by[outcome]:
            parts += ["", f"**{outcome.capitalize()}**: {', '.join(_names(by[outcome]))}."]
    if by["refused"]:
        reasons = Counter(_reason(line["why"]) for line in by["refused"])
        told = (
            f"{reason} ({', '.join(_names([x for x in by['refused'] if _reason(x['why']) == reason]))})"
            for reason in reasons
        )
        parts += ["", f"**Refused**: {'; '.join(told)}."]
    return "\n".join(parts)


def _names(lines: Sequence[Found]) -> list[str]:
    """The names of architectures, with the number of other names that share each."""
    others = Counter(line["as"] for line in lines if "as" in line)
    own = sorted(line["name"] for line in lines if "as" not in line)
    return [f"{name} and {others[name]} more" if others[name] else name for name in own]


def _reason(why: str) -> str:
    """The class of a block without a softmax, or the beginning of the message."""
    if "forms no softmax" in why:
        return f"no softmax in {why.partition('(')[2].partition(')')[0]}"
    return why.partition(":")[0].lstrip("0123456789 ")


def write_section(page: str | Path, library: str, lines: Sequence[Found]) -> Path:
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
    return write_text(page, f"{before}{begin}\n{section(library, lines)}\n{end}{after}")
