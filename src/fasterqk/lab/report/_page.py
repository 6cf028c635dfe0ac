"""In which order the report shows things: as the paper does, then whatever else there is."""

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasterqk import __version__
from fasterqk.console import cell_text, duration_text, is_interval, mean_of, number_text
from fasterqk.errors import InputError
from fasterqk.files import write_text
from fasterqk.lab.report._explorer import CHART_SCRIPTS
from fasterqk.lab.report._html import (
    Links,
    comparison_html,
    curves_html,
    examples_html,
    figure_html,
    fit_curves,
    fit_examples,
    fit_tables,
    page_html,
    table_html,
)
from fasterqk.lab.report._records import load_comparisons, load_curves, load_examples
from fasterqk.lab.report._tables import load_documents, load_tables

_FIGURE = re.compile(r"fig(?:ure)?[-_]?0*(\d+)")

_TABLE = re.compile(r"table\d*(?:[-_]|$)")

# What the tables measure, in the paper's order; the made-up languages need no data and come first.
_DATA = {
    "agreement": "Agreement",
    "kvqa": "Key-value questions",
    "squad": "SQuAD",
    "sva": "Subject-verb agreement",
    "hatexplain": "HateXplain",
}


@dataclass(frozen=True, order=True)
class Group:
    """A chapter of the report; the fields are its place, so groups sort in the paper's order."""

    kind: int
    number: int
    slug: str
    title: str


def group_of(name: str) -> Group:
    """The chapter that the document ``name`` belongs to: its figure, its data, or the first word of its name.

    >>> [group_of(name).title for name in ("fig2-dtap", "table-squad-paper-end", "measure-scores")]
    ['Figure 2', 'SQuAD', 'Measure']
    """
    figure = _FIGURE.match(name)
    if figure:
        number = int(figure[1])
        return Group(0, number, f"figure-{number}", f"Figure {number}")
    table = _TABLE.match(name)
    word = re.split(r"[-_.]", name[table.end() :] if table else name)[0].lower()
    if table and not word:
        return Group(1, 0, "tables", "Tables")
    if word in _DATA:
        return Group(1, 1 + list(_DATA).index(word), word, _DATA[word])
    return Group(1 if table else 2, 1 + len(_DATA), word, word.capitalize())


def in_groups(kinds: dict[str, list[dict[str, Any]]]) -> list[tuple[Group, list[tuple[str, dict[str, Any]]]]]:
    """Chapters in order, each with its ``(kind, document)`` pairs.

    ``kinds`` maps a kind (``figures``, ``tables``, ...) to its documents; within a chapter the kinds keep
    the order of that mapping and documents are sorted by name, numbers by value.
    """
    chapters: dict[Group, list[tuple[str, dict[str, Any]]]] = {}
    for kind, documents in kinds.items():
        for document in sorted(documents, key=lambda one: _natural(one["name"])):
            chapters.setdefault(group_of(document["name"]), []).append((kind, document))
    return sorted(chapters.items(), key=lambda item: item[0])


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


# --- The summary of a report: sentences made from comparisons and from the store, never written by hand ---

# What a reader calls each attention metric, in the order in which the first one present tells the story.
_ATTENTION = {
    "mrta": ("mean attention on relevant tokens", 3),
    "ac": ("the share of instances with most attention on relevant tokens (AC, percent)", 1),
    "acmc": ("the share that is also confidently right (ACMC, percent)", 1),
}
_COST = {"accuracy": ("test accuracy", 3), "train_accuracy": ("training accuracy", 3), "loss": ("loss", None)}


def what_was_run(out: Path) -> str | None:
    """One sentence about the cells of the store, or None when it is empty."""
    from fasterqk.lab.runs._store import Store
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
    """For every arm but the first: what sharpened, against which null, at which cost and at matched loss."""
    baseline, *others = comparison["arms"]
    metric = next((key for key in _ATTENTION if mean_of(baseline["metrics"].get(key)) is not None), None)
    levels = comparison.get("matched") or []
    told = []
    for arm in others:
        sentences = [] if metric is None else [_sharpened(baseline, arm, metric)]
        sentences += [*_cost(baseline, arm), *_matched(levels, baseline, arm, metric)]
        if sentences:
            told.append(" ".join(sentences))
    return told


def _sharpened(baseline: Mapping[str, Any], arm: Mapping[str, Any], metric: str) -> str:
    name, digits = _ATTENTION[metric]
    before, after = baseline["metrics"][metric], arm["metrics"].get(metric)
    if mean_of(after) is None:
        return f"With {_arm(arm)} there is no number for {name}."
    sentence = (
        f"With {_arm(arm)}, {name} is {cell_text(after, digits)} against {cell_text(before, digits)}"
        f" with {_arm(baseline)}"
    )
    null = mean_of((arm.get("null") or {}).get(metric))
    if null is None:
        return sentence + "; uniform attention was not measured."
    above = mean_of(after) or 0.0
    verdict = "" if above > null else ", so this arm is no sharper than that"
    return f"{sentence}; uniform attention would give {number_text(null, digits)}{verdict}."


def _cost(baseline: Mapping[str, Any], arm: Mapping[str, Any]) -> list[str]:
    parts = []
    for key, (name, digits) in _COST.items():
        before, after = baseline["metrics"].get(key), arm["metrics"].get(key)
        if mean_of(before) is not None and mean_of(after) is not None:
            parts.append(f"{name} {cell_text(after, digits)} instead of {cell_text(before, digits)}")
    if baseline.get("seconds") and arm.get("seconds"):
        parts.append(f"{arm['seconds'] / baseline['seconds']:.2f} times the training time")
    return [f"What it costs: {', '.join(parts)}."] if parts else []


def _matched(
    levels: Sequence[Mapping[str, Any]],
    baseline: Mapping[str, Any],
    arm: Mapping[str, Any],
    metric: str | None,
) -> list[str]:
    if not levels or metric is None:
        return []
    lowest = levels[0]
    difference = (lowest.get("difference") or {}).get(arm["arm"], {}).get(metric)
    missing = [seed for name, seed in lowest.get("missing", []) if name in (arm["arm"], baseline["arm"])]
    late = f" {count(len(missing), 'cell')} never got there and could not be compared." if missing else ""
    if mean_of(difference) is None:
        return [f"At matched loss the arms could not be compared.{late}"]
    name, digits = _ATTENTION[metric]
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
    return (
        "sharper, beyond the noise between seeds"
        if mean > 0
        else "less sharp, beyond the noise between seeds"
    )


def _arm(arm: Mapping[str, Any]) -> str:
    ratio = arm.get("qk_ratio")
    named = str(arm["arm"])
    if ratio is None or number_text(ratio) in named:
        return named
    return f"{named} (query-key ratio {number_text(ratio)})"


def count(number: int, noun: str) -> str:
    """``number`` and the ``noun``, which takes an s in its first word unless there is one.

    >>> count(1, "figure"), count(2, "set of examples")
    ('1 figure', '2 sets of examples')
    """
    first, *rest = noun.split(" ")
    return " ".join([str(number), first if number == 1 else f"{first}s", *rest])


# --- The report: one self-contained HTML page from whatever a results folder holds ---

REPORT_SCRIPTS = (
    *CHART_SCRIPTS,
    "report-tables.js",
    "report-curves.js",
    "report-examples.js",
    "report-main.js",
)
_FRAGMENTS = {
    "comparisons": comparison_html,
    "figures": figure_html,
    "tables": table_html,
    "curves": curves_html,
    "examples": examples_html,
}

_NOUNS = {
    "comparisons": "comparison",
    "figures": "figure",
    "tables": "table",
    "curves": "set of training curves",
    "examples": "set of examples",
}


def write_page(out: Path, path: Path | None = None) -> Path:
    """Write the report of the results folder ``out`` to ``path`` (default ``out/report.html``).

    Figures, tables, training curves, comparisons and examples are found in the folders of these names.
    Returns the path. A folder that holds none of them is an error that says how to fill it.
    """
    out = Path(out)
    path = out / "report.html" if path is None else Path(path)
    kinds = {
        "comparisons": load_comparisons(out),
        "figures": _load_figures(out),
        "curves": fit_curves(load_curves(out)),
        "examples": fit_examples(load_examples(out)),
        "tables": fit_tables(load_tables(out)),
    }
    if not any(kinds.values()):
        raise InputError(
            f"{str(out)!r} holds no figures, tables or examples; "
            f"make some with: fasterqk reproduce all --out {str(out)!r}"
        )
    return write_text(path, _report_html(out, kinds, Links(out, path)))


def _report_html(out: Path, kinds: Mapping[str, list[dict[str, Any]]], links: Links) -> str:
    chapters = in_groups(dict(kinds))
    body = [
        '<header class="lead"><p class="kicker">fasterqk report</p>',
        "<h1>Does faster query-key learning sharpen attention?</h1>",
        _summary_html(out, kinds),
        _contents_html([group for group, _ in chapters]),
        "</header><main>",
    ]
    for group, documents in chapters:
        body.append(f'<section id="{html.escape(group.slug)}"><h2>{html.escape(group.title)}</h2>')
        body += [_FRAGMENTS[kind](document, links) for kind, document in documents]
        body.append("</section>")
    body.append(f"</main><footer><p>Made by fasterqk {html.escape(__version__)}. {_FOOTER}</p></footer>")
    data = {kind: {one["name"]: one for one in kinds[kind]} for kind in ("curves", "examples")}
    return page_html(
        title="fasterqk report",
        body="\n".join(body),
        styles=("base.css", "report.css"),
        scripts=REPORT_SCRIPTS,
        data=data,
    )


_FOOTER = (
    "± is the half width of a 95% interval over seeds; differences are paired by seed. "
    "The null is uniform attention over what each position may see."
)


def _load_figures(out: Path) -> list[dict[str, Any]]:
    figures = load_documents(out, "figures")
    for figure in figures:
        image = out / "figures" / f"{figure['name']}.svg"
        if not image.is_file():
            raise InputError(f"{str(image)!r} is missing beside its .json; make the figure again")
    return figures


def _summary_html(out: Path, kinds: Mapping[str, list[dict[str, Any]]]) -> str:
    counts = ", ".join(count(len(found), _NOUNS[kind]) for kind, found in kinds.items() if found)
    lines = [what_was_run(out), f"On this page: {counts}."]
    items = [f"<p>{html.escape(line)}</p>" for line in lines if line]
    for comparison in sorted(kinds["comparisons"], key=lambda one: (group_of(one["name"]), one["name"])):
        sentences = "".join(f"<li>{html.escape(line)}</li>" for line in comparison_sentences(comparison))
        title = html.escape(str(comparison.get("title") or comparison["name"]))
        setting = html.escape(str(comparison.get("setting") or ""))
        items.append(f'<h3>{title}</h3><p class="setting">{setting}</p><ul>{sentences}</ul>')
    return f'<div class="summary" id="summary">{"".join(items)}</div>'


def _contents_html(groups: list[Group]) -> str:
    links = "".join(
        f'<a href="#{html.escape(group.slug)}">{html.escape(group.title)}</a>' for group in groups
    )
    return f'<nav aria-label="Contents">{links}</nav>'
