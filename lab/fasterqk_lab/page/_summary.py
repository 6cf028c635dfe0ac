"""What effects say, in words and as charts: the answer of the page, sentences of its chapters, forests.

``fasterqk_lab.compare`` decides what an effect shows; the page repeats that (``stands``) and adds no rule.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10, nan

from fasterqk.attention.scores import title_of
from fasterqk.attention.statistics import Interval
from fasterqk.console import number_text
from fasterqk.errors import InputError
from fasterqk_lab.compare import LEVEL, LOSS, STANDS
from fasterqk_lab.figures._documents import Document, page_text

ATTENTION = "mrta"


@dataclass(frozen=True)
class Row:
    """One effect of a document: what ``arm`` changes against its baseline in ``score``."""

    title: str
    chapter: str
    arm: str
    score: str
    at: str
    loss: float | None
    before: Interval
    after: Interval
    difference: Interval
    null: float | None
    stands: str
    levels: float | None
    progress: tuple[float, float] | None
    missing: int
    ratio: float | None

    @property
    def at_equal_loss(self) -> bool:
        return self.at in (LEVEL, LOSS) and self.loss is not None


def read_rows(document: Document, chapter: str) -> list[Row]:
    """The effects of a document in attention on relevant tokens, else in its first score that decides."""
    scores = [effect["score"] for effect in document["effects"]]
    score = ATTENTION if ATTENTION in scores else next(iter(scores), "")
    chosen = [effect for effect in document["effects"] if effect["score"] == score]
    return [
        Row(
            title=document["title"] if len(chosen) == 1 else f"{document['title']}: {effect['arm']}",
            chapter=chapter,
            missing=len(effect.get("missing") or ()) if effect.get("lowest") else 0,
            before=_interval(effect["before"]),
            after=_interval(effect["after"]),
            difference=_interval(effect["difference"]),
            **{key: effect[key] for key in ("arm", "score", "at", "stands")},
            **{key: effect.get(key) for key in ("loss", "null", "levels", "progress", "ratio")},
        )
        for effect in chosen
        if effect["difference"]["mean"] is not None
    ]


def _interval(value: Document) -> Interval:
    mean, half_width = (nan if value[key] is None else value[key] for key in ("mean", "half_width"))
    return Interval(mean, half_width, value.get("n") or 1)


def score_title(score: str) -> str:
    """What the page calls a score; experiments have scores of their own.

    >>> score_title("mrta"), score_title("carried_share")
    ('MRTA', 'carried share')
    """
    try:
        return title_of(score)
    except InputError:
        return score.replace("_", " ")


def signed_text(value: Interval | float, digits: int = 2) -> str:
    """A difference with its sign, and its half width where it has one.

    >>> signed_text(Interval(-0.5, 0.25, 3)), signed_text(0.123), signed_text(0.001)
    ('−0.50 ± 0.25', '+0.12', '0.00')
    """
    mean, half_width = (value.mean, value.half_width) if isinstance(value, Interval) else (value, nan)
    sign = "+" if mean > 0 and float(f"{mean:.{digits}f}") else ""
    spread = f" ± {number_text(half_width, digits)}" if isfinite(half_width) else ""
    return f"{sign}{number_text(mean, digits)}{spread}"


# --- Sentences ---

_SAID_FIRST = {
    "more": "puts more attention on the relevant words",
    "less": "puts less attention on the relevant words",
    "too small to matter": "changes attention on the relevant words too little to matter",
    "open": "leaves open whether attention on the relevant words changes",
}
_SAID_THEN = {"too small to matter": "a change too small to matter"}


def answer(rows: Sequence[Row]) -> str:
    """What faster query-key learning does at equal loss, by chapter, in one sentence; empty without any."""
    faster = [
        row
        for row in rows
        if row.score == ATTENTION and row.at_equal_loss and (row.ratio is None or row.ratio > 1)
    ]
    totals = Counter(row.chapter for row in faster)
    parts: list[str] = []
    for stands in STANDS:
        counts = Counter(row.chapter for row in faster if row.stands == stands)
        places = [
            chapter if number == totals[chapter] else f"{chapter} ({number} of {totals[chapter]})"
            for chapter, number in counts.items()
        ]
        if places:
            said = _SAID_THEN.get(stands, stands) if parts else _SAID_FIRST[stands]
            parts.append(f"{said} in {', '.join(places)}")
    return f"At equal training loss, faster query-key learning {'; '.join(parts)}." if parts else ""


def sentences(rows: Sequence[Row]) -> list[str]:
    """At most two sentences about the effects of a chapter."""
    if len(rows) == 1:
        return _about_one(rows[0])
    texts = []
    for score in dict.fromkeys(row.score for row in rows):
        chosen = [row for row in rows if row.score == score]
        counts = Counter(row.stands for row in chosen)
        counted = ", ".join(f"{counts[stands]} {stands}" for stands in STANDS if counts[stands])
        low, high = (signed_text(end(row.difference.mean for row in chosen), 3) for end in (min, max))
        texts.append(
            f"{score_title(score)}, {count(len(chosen), 'arm')} against the baseline: {counted};"
            f" differences from {low} to {high}."
        )
    return texts[:2]


def _about_one(row: Row) -> list[str]:
    """The values and the null where the arms were compared; then where that is, and whether it depends."""
    where = "At the end of training" if row.loss is None else f"At training loss {page_text(row.loss)}"
    null = "" if row.null is None else f" (null: {page_text(row.null)})"
    value = (
        f"{where}, {score_title(row.score)} is {page_text(row.after.mean)} with {row.arm} and"
        f" {page_text(row.before.mean)} with the baseline{null}: {signed_text(row.difference, 3)} over"
        f" {count(row.difference.n, 'seed')}, {row.stands}."
    )
    details = []
    if row.progress is not None:
        arm, baseline = (f"{100 * share:.0f}%" for share in row.progress)
        details.append(f"{row.arm} is there after {arm} of its training, the baseline after {baseline}")
    if row.levels is not None:
        details.append(
            f"the interval excludes zero on this side at {100 * row.levels:.0f}% of the losses that both pass"
        )
    if row.missing:
        details.append(
            f"this is the lowest common loss, as {count(row.missing, 'cell')} never reach the level"
        )
    text = "; ".join(details)
    return [value, f"{text[0].upper()}{text[1:]}."] if text else [value]


def count(number: int, noun: str) -> str:
    """A number and its noun: ``1 cell``, ``2 cells``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


# --- Forests: the effects of one score on one scale ---


@dataclass(frozen=True)
class Forest:
    """Effects as rows of a chart; ``across`` gives the place of a difference in percent of the width."""

    score: str
    rows: tuple[Row, ...]
    low: float
    high: float

    @property
    def title(self) -> str:
        name = "attention on the relevant words" if self.score == ATTENTION else score_title(self.score)
        return f"Change in {name}"

    def across(self, value: float) -> float:
        return round(100 * (value - self.low) / (self.high - self.low), 2)

    def ends(self, row: Row) -> tuple[float, float] | None:
        """The ends of the interval of ``row`` that the chart has room for."""
        if not isfinite(row.difference.half_width):
            return None
        return max(self.low, row.difference.low), min(self.high, row.difference.high)

    @property
    def ticks(self) -> list[float]:
        power = 10.0 ** floor(log10(self.high - self.low))
        step = power * next(part for part in (0.2, 0.5, 1, 2) if (self.high - self.low) / (part * power) <= 7)
        return [k * step for k in range(ceil(self.low / step), floor(self.high / step) + 1)]

    @property
    def digits(self) -> int:
        """Places after the point that tell ticks apart."""
        return max(0, -floor(log10(self.ticks[1] - self.ticks[0]) + 1e-9))


def null_change(row: Row) -> float | None:
    """Where the null stands, seen from the baseline."""
    return None if row.null is None else row.null - row.before.mean


def forests(rows: Sequence[Row]) -> list[Forest]:
    """One chart per score, attention first; an interval wider than all effects is cut at its edge."""
    charts = []
    for score in sorted(dict.fromkeys(row.score for row in rows), key=lambda name: name != ATTENTION):
        chosen = tuple(row for row in rows if row.score == score)
        largest = max(abs(row.difference.mean) for row in chosen)
        values = [0.0, *(row.difference.mean for row in chosen)]
        values += [null for row in chosen if (null := null_change(row)) is not None]
        for row in chosen:
            if row.difference.half_width <= largest:
                values += [row.difference.low, row.difference.high]
        low, high = min(values), max(values)
        margin = 0.06 * (high - low) or 0.1
        charts.append(Forest(score, chosen, low - margin, high + margin))
    return charts


def effects_table(document: Document) -> Document:
    """A document of effects as a table: its ``columns`` and ``rows``."""
    columns = ("score", "arm", "loss", "before", "after", "null", "difference", "p", "levels", "stands")
    labels = {"loss": "training loss", "before": "baseline", "after": "value"}
    labels |= {"p": "p (Holm)", "levels": "share of levels"}
    return {
        **document,
        "caption": document.get("setting") or "",
        "columns": [{"key": key, "label": labels.get(key, key)} for key in columns],
        "rows": [
            {key: effect.get(key) for key in columns} | {"score": score_title(effect["score"])}
            for effect in document["effects"]
        ],
    }
