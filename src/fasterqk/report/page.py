"""The report: one self-contained HTML page from whatever a results folder holds."""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasterqk import __version__
from fasterqk.errors import InputError
from fasterqk.files import write_text
from fasterqk.report.budget import fit_curves, fit_examples, fit_tables
from fasterqk.report.comparisons import load_comparisons
from fasterqk.report.curves import load_curves
from fasterqk.report.documents import load_documents
from fasterqk.report.examples import load_examples
from fasterqk.report.explorer import CHART_SCRIPTS
from fasterqk.report.fragments import comparison_html, curves_html, examples_html, figure_html, table_html
from fasterqk.report.html import page_html
from fasterqk.report.links import Links
from fasterqk.report.order import Group, group_of, in_groups
from fasterqk.report.summary import comparison_sentences, count, what_was_run
from fasterqk.report.tables import load_tables

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
