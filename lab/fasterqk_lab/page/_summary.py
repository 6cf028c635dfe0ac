"""What the numbers say, in words: effects at equal loss, the answer of the page, sentences of its chapters.

Every sentence is made from results. Its strength is that of its interval: a difference counts as clear when
the 95% interval over seeds excludes zero, and one seed never makes it clear.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasterqk.attention import score_of
from fasterqk.console import cell_text, duration_text, is_interval, mean_of, number_text
from fasterqk_lab.figures._documents import page_text

# Attention scores in words; sentences are about the first of them that was measured.
_ATTENTION = {
    "mrta": "mean attention on relevant tokens",
    "ac": "the share of instances with most attention on relevant tokens (AC, percent)",
    "acmc": "the share that is also confidently right (ACMC, percent)",
}
_COST = {"accuracy": "test accuracy", "train_accuracy": "training accuracy", "loss": "training loss"}


def what_was_run(out: Path) -> tuple[str, str]:
    """A sentence about the cells of the store, and one about those that are not done; empty without any."""
    from fasterqk_lab.runs import Store
    from fasterqk_lab.runs._table import summaries

    found = summaries(Store(out))
    if not found:
        return "", ""
    states = Counter(summary.state for summary in found)
    kinds = Counter(summary.kind or "unknown" for summary in found)
    seconds = sum(summary.seconds or 0 for summary in found)
    names = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    left = ", ".join(f"{number} {state}" for state, number in sorted(states.items()) if state != "done")
    sentence = f"{count(len(found), 'cell')} in the store ({names}), {states['done']} finished"
    sentence += f", {left}" if left else ""
    sentence += f"; together they computed for {duration_text(seconds)}." if seconds else "."
    missing = f"Of {count(len(found), 'cell')}, {states['done']} are done; not on this page: {left}."
    return sentence, missing if left else ""


# --- Effects: what an arm changes at equal training loss ---


@dataclass(frozen=True)
class Effect:
    """What ``arm`` changes against the baseline at the lowest common training loss.

    ``task`` names the data in a sentence, ``title`` in a chart. ``before`` and ``after`` are the attention
    scores of both arms there, ``difference`` and ``accuracy`` (of test accuracy) are paired by seed.
    """

    task: str
    title: str
    arm: str
    loss: float
    before: Any
    after: Any
    difference: Any
    null: float | None
    accuracy: Any
    seeds: int
    # How much faster the query-key circuit learns than in the baseline, where that is known.
    ratio: float | None = None

    @property
    def kind(self) -> str:
        """What :func:`clarity` says about the difference."""
        return clarity(self.difference)


def clarity(difference: Any) -> str:
    """``more`` or ``less`` where the interval excludes zero, else ``unclear``, or ``few`` seeds (1, 2)."""
    mean = mean_of(difference) or 0.0
    half_width = difference.get("half_width") if is_interval(difference) else None
    seeds = (difference.get("n") or 1) if is_interval(difference) else 1
    if half_width is None or seeds < 2:
        return "few"
    if abs(mean) > half_width:
        return "more" if mean > 0 else "less"
    return "few" if seeds == 2 else "unclear"


def effects(comparison: Mapping[str, Any], task: str = "") -> list[Effect]:
    """One effect per arm after the baseline that could be compared with it at equal loss."""
    baseline, *others = comparison["arms"]
    levels = comparison.get("matched") or []
    title = str(comparison.get("title") or comparison.get("name"))
    if not levels:
        return []
    lowest = levels[0]
    found = []
    for arm in others:
        difference = (lowest.get("difference") or {}).get(arm["arm"]) or {}
        score = next((name for name in _ATTENTION if mean_of(difference.get(name)) is not None), None)
        if score is None:
            continue
        values = lowest.get("arms") or {}
        found.append(
            Effect(
                task=(task or title) if len(others) == 1 else f"{task or title} ({arm['arm']})",
                title=title if len(others) == 1 else f"{title}: {arm['arm']}",
                arm=arm["arm"],
                loss=lowest["loss"],
                before=(values.get(baseline["arm"]) or {}).get(score),
                after=(values.get(arm["arm"]) or {}).get(score),
                difference=difference[score],
                null=mean_of((arm.get("null") or {}).get(score)),
                accuracy=difference.get("test_accuracy"),
                seeds=(difference[score].get("n") or 1) if is_interval(difference[score]) else 1,
                ratio=_ratio(baseline, arm),
            )
        )
    return found


def _ratio(baseline: Mapping[str, Any], arm: Mapping[str, Any]) -> float | None:
    before, after = mean_of(baseline.get("qk_ratio")), mean_of(arm.get("qk_ratio"))
    return after / before if before and after else None


def answer(measured: Sequence[Effect], unit: str = "task") -> str:
    """One sentence that says where attention is sharper at equal loss, where not, and what is not known.

    It is about the arms in which the query-key circuit learns faster, and empty without such arms. ``unit``
    is what the effects are counted in.

    >>> difference = {"mean": 0.3, "half_width": 0.1, "n": 5}
    >>> answer([Effect("SQuAD", "SQuAD", "r = 10", 0.1, 0.2, 0.5, difference, 0.1, None, 5)])[:50]
    'Yes, on the one task measured here: at equal train'
    """
    found = [one for one in measured if one.ratio is None or one.ratio > 1]
    if not found:
        return ""
    by_kind = {
        kind: [one for one in found if one.kind == kind] for kind in ("more", "less", "unclear", "few")
    }
    more = by_kind["more"]
    parts = []
    if more:
        parts.append(f"puts more attention on the relevant words in {_listed(more)}")
    if by_kind["less"]:
        words = "it puts less there" if more else "puts less attention on the relevant words"
        parts.append(f"{words} in {_listed(by_kind['less'])}")
    if by_kind["unclear"]:
        words = "it makes" if parts else "makes"
        parts.append(f"{words} no clear difference in {_listed(by_kind['unclear'])}")
    if not parts:
        parts.append("could be compared in too few seeds to be sure")
    parts += _hints(by_kind["few"])
    parts += _accuracy(found)
    sentence = f"at equal training loss, faster query-key learning {'; '.join(parts)}."
    tasks = len({one.task for one in found})
    if not more:
        return f"{'Not known yet' if len(by_kind['few']) == len(found) else 'Not here'}: {sentence}"
    if len(more) == len(found):
        where = {1: "on the one", 2: "on both"}.get(tasks, f"on all {tasks}")
        return f"Yes, {where} {unit}{'s' if tasks > 1 else ''} measured here: {sentence}"
    sharper = len({one.task for one in more})
    return f"Yes, on {sharper} of {tasks} {unit}s: {sentence}" if tasks > 1 else f"In part: {sentence}"


def _listed(found: Iterable[Effect]) -> str:
    """
    >>> from types import SimpleNamespace as One
    >>> _listed([One(task="a"), One(task="b"), One(task="c")])
    'a, b and c'
    """
    names = list(dict.fromkeys(one.task for one in found))
    if len(names) > 5:
        return f"{len(names)} settings"
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _hints(few: Sequence[Effect]) -> list[str]:
    parts = []
    for seeds, said in ((1, "a single seed points to {}"), (2, "the mean of two seeds points to {}")):
        for word, ups in (("more", True), ("less", False)):
            own = [one for one in few if one.seeds == seeds and ((mean_of(one.difference) or 0) > 0) is ups]
            if own:
                parts.append(f"in {_listed(own)} {said.format(word)}")
    return parts


def _accuracy(found: Sequence[Effect]) -> list[str]:
    measured = [one for one in found if mean_of(one.accuracy) is not None and one.seeds > 2]
    if not measured:
        return []
    parts = []
    for kind, word in (("more", "higher"), ("less", "lower")):
        own = [one for one in measured if clarity(one.accuracy) == kind]
        if own:
            parts.append(f"{word} in {_listed(own)}")
    if parts:
        return [f"test accuracy is {' and '.join(parts)}"]
    if any(clarity(one.accuracy) == "few" for one in measured):
        return []
    return ["test accuracy does not change clearly"]


# --- The chart of effects: one scale for all of them ---


@dataclass(frozen=True)
class Forest:
    """Effects as rows of a chart; ``across`` gives the place of a difference in percent of the width."""

    rows: tuple[Effect, ...]
    low: float
    high: float

    def across(self, value: float) -> float:
        return round(100 * (value - self.low) / (self.high - self.low), 2)

    def null(self, row: Effect) -> float | None:
        """Where uniform attention stands, seen from the baseline."""
        before = mean_of(row.before)
        return None if row.null is None or before is None else row.null - before

    def ends(self, row: Effect) -> tuple[float, float] | None:
        """The ends of the interval of ``row`` that the chart has room for."""
        mean, half_width = mean_of(row.difference), (row.difference or {}).get("half_width")
        if mean is None or half_width is None:
            return None
        return max(self.low, mean - half_width), min(self.high, mean + half_width)

    @property
    def ticks(self) -> list[float]:
        step = next(s for s in (0.05, 0.1, 0.2, 0.5, 1, 5, 10, 20, 50) if (self.high - self.low) / s <= 7)
        first = int(-(-self.low // step))
        return [round(k * step, 10) for k in range(first, int(self.high // step) + 1)]


def forest(found: Sequence[Effect]) -> Forest | None:
    """The chart of all effects; an interval that is wider than every effect is large is cut at its edge."""
    if not found:
        return None
    chart = Forest(tuple(found), 0, 1)
    largest = max(abs(mean_of(one.difference) or 0.0) for one in found)
    values = [0.0]
    for one in found:
        mean = mean_of(one.difference) or 0.0
        null = chart.null(one)
        values += [mean, *([] if null is None else [null])]
        half_width = one.difference.get("half_width") if is_interval(one.difference) else None
        if half_width is not None and half_width <= largest:
            values += [mean - half_width, mean + half_width]
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.1
    return Forest(tuple(found), low - margin, high + margin)


# --- Sentences of a chapter ---


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
    """What is worse at the end of training, what is better, and what does not differ beyond the intervals."""
    kinds = ("What it costs", "What it gains", "Within the noise", "From one seed")
    parts: dict[str, list[str]] = {kind: [] for kind in kinds}
    for key, name in _COST.items():
        before, after = baseline["metrics"].get(key), arm["metrics"].get(key)
        first, second = mean_of(before), mean_of(after)
        if first is None or second is None:
            continue
        better = second < first if score_of(key).better == "lower" else second > first
        noise = sum((_half_width(value) or 0.0) ** 2 for value in (before, after)) ** 0.5
        kind = "What it gains" if better else "What it costs"
        digits = score_of(key).digits
        texts = [page_text(value, digits) for value in (after, before)]
        if abs(second - first) <= noise or texts[0] == texts[1]:
            kind = "Within the noise"
        if all(is_interval(value) and value["half_width"] is None for value in (before, after)):
            kind = "From one seed"
        parts[kind].append(f"{name} {texts[0]} instead of {texts[1]}")
    if baseline.get("seconds") and arm.get("seconds"):
        kind = "What it costs" if arm["seconds"] > baseline["seconds"] else "What it gains"
        parts[kind].append(f"{arm['seconds'] / baseline['seconds']:.2f} times the training time")
    return [f"{kind}: {', '.join(said)}." for kind, said in parts.items() if said]


def _half_width(value: Any) -> float | None:
    return value.get("half_width") if is_interval(value) else None


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
    half_width = _half_width(difference)
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


def see_at_equal_loss(comparison: Mapping[str, Any]) -> str:
    """What to see where attention is drawn against training loss."""
    found = effects(comparison)
    if not found:
        return (
            "Compare the lines at the same loss: a line that lies higher attends more to the relevant words."
        )
    baseline = comparison["arms"][0]["arm"]
    parts = [f"{one.arm} {page_text(mean_of(one.after))}" for one in found[:3]]
    null = "" if found[0].null is None else f"; uniform attention would give {page_text(found[0].null)}"
    return (
        f"Compare at the same loss: at {page_text(found[0].loss)}, attention on the relevant words is"
        f" {', '.join(parts)} against {page_text(mean_of(found[0].before))} with {baseline}{null}."
    )


def see_in_dtap(comparison: Mapping[str, Any]) -> str:
    """What to see in the heat maps of attention and probability."""
    shares = [
        f"{page_text(mean_of(arm['metrics'].get('ac')), 1)}% with {arm['arm']}"
        for arm in comparison["arms"]
        if mean_of(arm["metrics"].get("ac")) is not None
    ]
    told = f" At least half of the attention is there in {' and '.join(shares)}." if shares else ""
    return (
        f"Further right: more attention on the relevant words. Further up: surer of the right answer.{told}"
    )


def count(number: int, noun: str) -> str:
    """A number and its noun in the singular or plural; the first word of the noun takes the s.

    >>> count(1, "figure"), count(2, "set of examples")
    ('1 figure', '2 sets of examples')
    """
    first, *rest = noun.split(" ")
    return " ".join([str(number), first if number == 1 else f"{first}s", *rest])
