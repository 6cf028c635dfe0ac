"""The pieces of the report as HTML. Everything that comes from data goes through ``escape``."""

from collections.abc import Mapping
from html import escape
from typing import Any

from fasterqk.report.cells import cell_text, is_interval, mean_of
from fasterqk.report.links import Links

# The columns of a comparison: label and digits after the point.
_METRICS = {
    "train_accuracy": ("training accuracy", 3),
    "accuracy": ("accuracy", 3),
    "loss": ("loss", None),
    "probability": ("probability", 3),
    "mrta": ("MRTA", 3),
    "ac": ("AC %", 1),
    "acmc": ("ACMC %", 1),
}
_SOURCES = {"metrics": ("ours", ""), "null": ("null", ", uniform"), "paper": ("paper", ", paper")}


def figure_html(figure: Mapping[str, Any], links: Links) -> str:
    """A figure with its caption and a link to the numbers it was drawn from."""
    name = figure["name"]
    title = escape(str(figure.get("title", name)))
    source = links.picture(name)
    if source:
        picture = f'<div class="scroll"><img alt="{title}" src="{source}"></div>'
    else:
        picture = f"<p>Too large for this page: {links.to('figures', f'{name}.svg', 'open the picture')}.</p>"
    numbers = links.to("figures", f"{name}.csv", "numbers (CSV)")
    return _figure("figure", figure, picture, numbers)


def table_html(table: Mapping[str, Any], links: Links) -> str:
    """A table that scripts can sort and copy; it reads as well without them."""
    numbers = links.to("tables", f"{table['name']}.csv", "numbers (CSV)")
    return _figure("table", table, _rows_html(table["columns"], table["rows"]), numbers)


def comparison_html(comparison: Mapping[str, Any], links: Links) -> str:
    """The arms of a comparison: each metric with its null and the paper's number, where known, beside it."""
    arms = comparison["arms"]
    columns: list[dict[str, Any]] = [{"key": "arm", "label": "arm"}]
    rows: list[dict[str, Any]] = [{"arm": arm["arm"]} for arm in arms]
    for metric, (label, digits) in _METRICS.items():
        for part, (source, suffix) in _SOURCES.items():
            values = [(arm.get(part) or {}).get(metric) for arm in arms]
            if all(value is None for value in values):
                continue
            key = f"{part}.{metric}"
            columns.append({"key": key, "label": label + suffix, "digits": digits, "source": source})
            for row, value in zip(rows, values, strict=True):
                row[key] = value
    document = {**comparison, "caption": comparison.get("setting", "")}
    numbers = links.to("comparisons", f"{comparison['name']}.json", "numbers (JSON)")
    return _figure("comparison", document, _rows_html(columns, rows), numbers)


def curves_html(curves: Mapping[str, Any], links: Links) -> str:
    """The place where scripts draw training curves."""
    place = f'<div class="curves" data-curves="{escape(curves["name"])}"></div>'
    return _figure("curves", curves, place, links.to("curves", f"{curves['name']}.json", "numbers (JSON)"))


def examples_html(examples: Mapping[str, Any], links: Links) -> str:
    """The place where scripts show single examples; a sensitive set waits for a click."""
    place = f'<div class="examples" data-examples="{escape(examples["name"])}"></div>'
    return _figure("examples", examples, place, "")


def _figure(kind: str, document: Mapping[str, Any], content: str, numbers: str) -> str:
    name = document["name"]
    title, caption = escape(str(document.get("title") or name)), escape(str(document.get("caption") or ""))
    return (
        f'<figure id="{kind}-{escape(name)}" class="{kind}"><h3>{title}</h3>{content}'
        f"<figcaption>{caption} {numbers}</figcaption></figure>"
    )


def _rows_html(columns: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    heads = ""
    for column in columns:
        textual = all(isinstance(row.get(column["key"]), str) for row in rows)
        kind = "text" if textual else _source(column)
        heads += f'<th scope="col" class="{kind}">{escape(str(column["label"]))}</th>'
    lines = "".join(
        "<tr>" + "".join(_cell_html(column, row.get(column["key"])) for column in columns) + "</tr>"
        for row in rows
    )
    table = f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>"
    return f'<div class="scroll"><table class="sortable">{table}</table></div>'


def _cell_html(column: Mapping[str, Any], value: Any) -> str:
    mean = mean_of(value)
    sort = "" if mean is None else f' data-sort="{mean!r}"'
    seeds = f' title="{value["n"]} seeds"' if is_interval(value) and value.get("n") else ""
    kind = "text" if isinstance(value, str) else _source(column)
    return f'<td class="{kind}"{sort}{seeds}>{escape(cell_text(value, column.get("digits")))}</td>'


def _source(column: Mapping[str, Any]) -> str:
    # Checked when the table was read, and put into an attribute: only known words get here.
    return {"paper": "paper", "null": "null"}.get(column.get("source", ""), "ours")
