"""The summary of a report: sentences made from comparisons and from the store, never written by hand."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fasterqk.attention import score_of
from fasterqk.console import cell_text, duration_text, is_interval, mean_of, number_text

# Attention scores in words; sentences are about the first of them that was measured.
_ATTENTION = {
    "mrta": "mean attention on relevant tokens",
    "ac": "the share of instances with most attention on relevant tokens (AC, percent)",
    "acmc": "the share that is also confidently right (ACMC, percent)",
}
_COST = {"accuracy": "test accuracy", "train_accuracy": "training accuracy", "loss": "loss"}


def what_was_run(out: Path) -> str | None:
    """One sentence about the cells of the store, or None when it is empty."""
    from fasterqk.lab.runs import Store
    from fasterqk.lab.runs._table import summaries

    found = summaries(Store(out))
    if not found:
        return None
    states = Counter(summary.state for summary in found)
    kinds = Counter(summary.kind or "unknown" for summary in found)
    seconds = sum(summary.seconds or 0 for summary in found)
    names = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    sentence = f"{count(len(found), 'cell')} in the store ({names}), {states['done']} finished"
    for state, number in sorted(states.items()):
        if state != "done":
            sentence += f", {number} {state}"
    return sentence + (f"; together they computed for {duration_text(seconds)}." if seconds else ".")


def comparison_sentences(comparison: Mapping[str, Any]) -> list[str]:
    """One text per arm after the first: how sharp it is, the null, what it costs, and at matched loss."""
    baseline, *others = comparison["arms"]
    score = next((key for key in _ATTENTION if mean_of(baseline["metrics"].get(key)) is not None), None)
    levels = comparison.get("matched") or []
    found = []
    for arm in others:
        sentences = [] if score is None else [_sharpened(baseline, arm, score)]
        sentences += [*_cost(baseline, arm), *_matched(levels, baseline, arm, score)]
        if sentences:
            found.append(" ".join(sentences))
    return found


def _sharpened(baseline: Mapping[str, Any], arm: Mapping[str, Any], score: str) -> str:
    name, digits = _ATTENTION[score], score_of(score).digits
    before, after = baseline["metrics"][score], arm["metrics"].get(score)
    if mean_of(after) is None:
        return f"With {_arm(arm)} there is no number for {name}."
    sentence = (
        f"With {_arm(arm)}, {name} is {cell_text(after, digits)} against {cell_text(before, digits)}"
        f" with {_arm(baseline)}"
    )
    null = mean_of((arm.get("null") or {}).get(score))
    if null is None:
        return sentence + "; uniform attention was not measured."
    above = mean_of(after) or 0.0
    verdict = "" if above > null else ", so this arm is no sharper than that"
    return f"{sentence}; uniform attention would give {number_text(null, digits)}{verdict}."


def _cost(baseline: Mapping[str, Any], arm: Mapping[str, Any]) -> list[str]:
    parts = []
    for key, name in _COST.items():
        before, after = baseline["metrics"].get(key), arm["metrics"].get(key)
        digits = score_of(key).digits
        if mean_of(before) is not None and mean_of(after) is not None:
            parts.append(f"{name} {cell_text(after, digits)} instead of {cell_text(before, digits)}")
    if baseline.get("seconds") and arm.get("seconds"):
        parts.append(f"{arm['seconds'] / baseline['seconds']:.2f} times the training time")
    return [f"What it costs: {', '.join(parts)}."] if parts else []


def _matched(
    levels: Sequence[Mapping[str, Any]],
    baseline: Mapping[str, Any],
    arm: Mapping[str, Any],
    score: str | None,
) -> list[str]:
    if not levels or score is None:
        return []
    lowest = levels[0]
    difference = (lowest.get("difference") or {}).get(arm["arm"], {}).get(score)
    missing = [seed for name, seed in lowest.get("missing", []) if name in (arm["arm"], baseline["arm"])]
    late = f" {count(len(missing), 'cell')} never got there and could not be compared." if missing else ""
    if mean_of(difference) is None:
        return [f"At matched loss the arms could not be compared.{late}"]
    name, digits = _ATTENTION[score], score_of(score).digits
    return [
        f"At the same training loss ({number_text(lowest['loss'])}) the difference in {name} is"
        f" {cell_text(difference, digits)}, paired by seed: {_verdict(difference)}.{late}"
    ]


def _verdict(difference: Any) -> str:
    mean = mean_of(difference) or 0.0
    half_width = difference.get("half_width") if is_interval(difference) else None
    if half_width is None:
        return "one seed, so nothing is known about the noise"
    if abs(mean) <= half_width:
        return "no difference beyond the noise between seeds"
    return f"{'sharper' if mean > 0 else 'less sharp'}, beyond the noise between seeds"


def _arm(arm: Mapping[str, Any]) -> str:
    ratio = arm.get("qk_ratio")
    named = str(arm["arm"])
    if ratio is None or number_text(ratio) in named:
        return named
    return f"{named} (query-key ratio {number_text(ratio)})"


def count(number: int, noun: str) -> str:
    """A number and its noun in the singular or plural; the first word of the noun takes the s.

    >>> count(1, "figure"), count(2, "set of examples")
    ('1 figure', '2 sets of examples')
    """
    first, *rest = noun.split(" ")
    return " ".join([str(number), first if number == 1 else f"{first}s", *rest])
