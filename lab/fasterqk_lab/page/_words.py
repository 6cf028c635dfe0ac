"""What the page says: effects in words and as charts, numbers and tables as it shows them, definitions.

``fasterqk_lab.compare`` decides what an effect shows; the page repeats that (``stands``) and adds no rule.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10, nan
from typing import Any

from fasterqk.attention.scores import SCORES, title_of
from fasterqk.attention.statistics import Interval
from fasterqk.console import cell_text, is_interval, mean_of, number_text
from fasterqk.errors import InputError
from fasterqk_lab.compare import LEVEL, LOSS, STANDS
from fasterqk_lab.figures._documents import EFFECT_COLUMNS, Document

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
    return {
        **document,
        "caption": document.get("setting") or "",
        "columns": [{"key": key, "label": label} for key, label in EFFECT_COLUMNS.items()],
        "rows": [
            {key: effect.get(key) for key in EFFECT_COLUMNS} | {"score": score_title(effect["score"])}
            for effect in document["effects"]
        ],
    }


# --- Tables as the page shows them ---


def html_table(table: Document) -> Document:
    """``table`` with its ``heads`` and ``lines`` of cells, each as ``(HTML attributes, text)``.

    Scripts sort by ``data-sort``; styles tell texts, our numbers, the paper's and the null's apart by class.
    Numbers that are compared have the same places after the point: those of a row where each row is another
    score, else those of a column.
    """
    columns, rows = table["columns"], table["rows"]
    heads = [
        ({"class": _class(column, *(row.get(column["key"]) for row in rows))}, column["label"])
        for column in columns
    ]
    by_row = any(column["key"] in ("metric", "score") for column in columns)
    largest_in = {column["key"]: _largest(row.get(column["key"]) for row in rows) for column in columns}
    lines = []
    for row in rows:
        largest = _largest(row.get(column["key"]) for column in columns if column["key"] not in _LEVELS)
        lines.append(
            [
                _html_cell(
                    column,
                    row.get(column["key"]),
                    largest if by_row and column["key"] not in _LEVELS else largest_in[column["key"]],
                )
                for column in columns
            ]
        )
    return {**table, "heads": heads, "lines": lines}


# Columns of the loss at which scores are read: they have their own scale.
_LEVELS = ("loss", "at loss")


def _largest(values: Iterable[Any]) -> float:
    return max((abs(mean) for value in values if (mean := mean_of(value)) is not None), default=0.0)


def _html_cell(column: Mapping[str, Any], value: Any, largest: float) -> tuple[dict[str, Any], str]:
    seeds = (
        f"{value['n']} seed{'s' if value['n'] > 1 else ''}" if is_interval(value) and value.get("n") else None
    )
    attributes = {"class": _class(column, value), "data-sort": mean_of(value), "title": seeds}
    digits = column.get("digits")
    if digits is None and mean_of(value) is not None and largest >= 0.1 and not isinstance(value, int):
        digits = _places(largest)
    return attributes, page_text(value, digits)


def _class(column: Mapping[str, Any], *values: Any) -> str:
    return "text" if all(isinstance(value, str) for value in values) else column.get("source", "ours")


_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def page_text(value: Any, digits: int | None = None) -> str:
    """A number or an interval as pages and their sentences show it, with as many places as its neighbours.

    Without ``digits`` numbers have three places below ten, one above, and none from a thousand on. What is
    too small for three places is a multiple of a power of ten. Whole numbers stay whole.

    >>> page_text(0.41), page_text(30.945), page_text(7), page_text({"mean": 2e-5, "half_width": 1.9e-7})
    ('0.410', '30.9', '7', '(2.00 ± 0.02) × 10⁻⁵')
    >>> page_text(1.5e-7), page_text({"mean": 0.40282, "half_width": 0.00007, "n": 5}), page_text(None)
    ('1.50 × 10⁻⁷', '0.403 ± <0.001', '–')
    """
    mean = mean_of(value)
    if mean is None or isinstance(value, int):
        return cell_text(value, None if mean is None else digits)
    half_width = value["half_width"] if is_interval(value) else None
    largest = max(abs(mean), half_width or 0.0)
    if digits is None and 0 < largest < 5e-4:
        power = floor(log10(largest))
        text = number_text(mean / 10**power, 2)
        if half_width is not None:
            text = f"({text} ± {number_text(half_width / 10**power, 2)})"
        return f"{text} × 10{str(power).translate(_SUPERSCRIPTS)}"
    places = _places(largest) if digits is None else digits
    text = number_text(mean, places)
    if half_width is None:
        return text
    rounded = number_text(half_width, places)
    if digits is None and half_width > 0 and not float(rounded):
        rounded = f"<{10**-places:g}"
    return f"{text} ± {rounded}"


def _places(largest: float) -> int:
    return 3 if largest < 10 else 1 if largest < 1000 else 0


# --- Definitions: every abbreviation of a page is explained where it occurs first ---

_LETTERS = "the query-key weights are {}, the output-value weights {}"
_FACTORIZED, _COLLAPSED = "two matrices (factorized)", "one matrix (collapsed)"
TERMS = {
    "MRTA": "mean relevant-token attention: the share of a model's attention, at the position that makes the"
    " prediction, that falls on relevant words; mean over instances",
    "AC": "attention confidence: percent of instances with at least half of the attention on relevant words",
    "ACMC": "percent of instances with at least half of the attention on relevant words and a probability of"
    " the right answer of at least one half",
    "DTAP": "instances counted by attention on relevant words (across) and by probability of the right answer"
    " (up)",
    "AOPC": "mean over several percentages k of tokens that are kept or removed",
    "AUPRC": "area under the precision-recall curve: are the most attended words those that people marked?",
    "IOU": "intersection over union of attended and marked words",
    "sufficiency": f"{SCORES['sufficiency'].description}; lower is better",
    "comprehensiveness": f"{SCORES['comprehensiveness'].description}; higher is better",
    "FAFO": _LETTERS.format(_FACTORIZED, _FACTORIZED),
    "FACO": _LETTERS.format(_FACTORIZED, _COLLAPSED),
    "CAFO": _LETTERS.format(_COLLAPSED, _FACTORIZED),
    "CACO": _LETTERS.format(_COLLAPSED, _COLLAPSED),
    "QK": "query-key circuit: the weights that decide where a model attends",
    "OV": "output-value circuit: the weights that decide what is read there",
    "null": "the score of uniform attention, or of a random ranking of the words",
    "baseline": "the arm in which all weights have the same learning rate",
    "rollout": "attention multiplied through all layers, from the last to the words",
}
_TERM = re.compile(rf"(?<![\w-])({'|'.join(TERMS)})(?![\w-])")
# Terms that are marked wherever they stand; the others are in the list of words only.
_MARKED = {term for term in TERMS if term.isupper() and len(term) > 1} - {"QK", "OV"}


def terms_in(texts: Iterable[Any]) -> list[str]:
    """The terms with a definition that occur in ``texts``, in the order of the list."""
    present = {term for text in texts if isinstance(text, str) for term in _TERM.findall(text)}
    return [term for term in TERMS if term in present]


class Definitions:
    """Defines each term where it occurs first on a page; marks it wherever it stands."""

    def __init__(self) -> None:
        self._defined: set[str] = set()

    def first(self, *texts: Any) -> list[tuple[str, str]]:
        """Terms of ``texts`` that the page has not defined so far, each with its definition."""
        new = [term for term in terms_in(texts) if term in _MARKED and term not in self._defined]
        self._defined |= set(new)
        return [(term, TERMS[term]) for term in new]

    @staticmethod
    def mark(text: Any) -> Any:
        """``text``, escaped, with every abbreviation that has a definition as an ``abbr`` element."""
        from markupsafe import Markup, escape

        def mark(match: re.Match[str]) -> str:
            term = match[1]
            return f'<abbr title="{escape(TERMS[term])}">{term}</abbr>' if term in _MARKED else term

        return Markup(_TERM.sub(mark, str(escape(text))))
