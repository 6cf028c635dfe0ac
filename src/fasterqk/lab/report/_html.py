"""One self-contained HTML page: styles, scripts and data inside, nothing from the network."""

import base64
import hashlib
import html
import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fasterqk.console import cell_text, is_interval, mean_of
from fasterqk.files import plain


def asset(name: str) -> str:
    """The text of a file in ``report/assets``."""
    return files("fasterqk.lab.report").joinpath("assets", name).read_text(encoding="utf-8")


def page_html(
    *, title: str, body: str, styles: Sequence[str], scripts: Sequence[str], data: Any = None
) -> str:
    """The page; ``styles`` and ``scripts`` name assets, which are joined in order into one of each.

    ``data`` is what the scripts find as JSON in the element ``#data``. The page's security policy forbids
    every request and runs no script but its own, so even a text that slipped through unescaped is inert.
    """
    style = "\n".join(asset(name) for name in styles)
    code = "\n".join(asset(name) for name in scripts)
    script = f'(() => {{\n"use strict";\n{code}\n}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
</head>
<body>
{body}
<script type="application/json" id="data">{json_text(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def json_text(value: Any) -> str:
    """``value`` as JSON that may stand inside a script element: no ``<``, ``>`` or ``&`` in it.

    >>> json_text("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(plain(value), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# --- Keeps the report under three megabytes: what is too large is thinned, and says so ---

PAGE_BYTES = 3_000_000
# Shares of the page; a cell of a table takes about 90 bytes with its markup.
IMAGE_BYTES = 1_700_000
ONE_IMAGE_BYTES = 600_000
_EXAMPLES_BYTES = 350_000
_CURVES_BYTES = 350_000
_TABLE_CELLS = 5_000
_POINTS_A_CELL = 200


def fit_examples(sets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The example sets, each cut to its share of the page; ``total`` says how many there were."""
    share = _EXAMPLES_BYTES // max(1, len(sets))
    fitted = []
    for document in sets:
        kept: list[Mapping[str, Any]] = []
        used = 0
        for example in document["examples"]:
            used += len(json_text(example))
            if used > share:
                break
            kept.append(example)
        fitted.append({**document, "examples": kept, "total": len(document["examples"])})
    return fitted


def fit_tables(tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tables, cut after the rows that fit; a cut table says so in its caption."""
    left = _TABLE_CELLS
    fitted = []
    for table in tables:
        rows = table["rows"][: left // max(1, len(table["columns"]))]
        left -= len(rows) * len(table["columns"])
        note = f" The first {len(rows)} of {len(table['rows'])} rows; the file has all of them."
        caption = table.get("caption") or ""
        fitted.append(
            {**table, "rows": rows, "caption": caption if rows == table["rows"] else caption + note}
        )
    return fitted


def fit_curves(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The curves with as many points a cell as fit; first and last points are always kept."""
    points = _POINTS_A_CELL
    while True:
        fitted = [
            {
                **document,
                "cells": [{**cell, "points": _thinned(cell["points"], points)} for cell in document["cells"]],
            }
            for document in documents
        ]
        if points <= 2 or len(json_text(fitted)) <= _CURVES_BYTES:
            return fitted
        points = max(2, points // 2)


def _thinned(points: list[Any], wanted: int) -> list[Any]:
    if len(points) <= wanted:
        return points
    last = len(points) - 1
    return [points[round(k * last / (wanted - 1))] for k in range(wanted)]


# --- Where the files of a results folder lie as seen from the page, and which pictures fit into it ---

# What may stand unchanged in a data address inside a quoted attribute; quotes and ampersands may not.
_SAFE = " <>/:;=?@[]^`{|}~!$'()*+,"


class Links:
    """Addresses for one page; pictures are taken in until the page is full."""

    def __init__(self, out: Path, page: Path) -> None:
        self.out = out
        self._base = os.path.relpath(out.resolve(), page.resolve().parent)
        self._left = IMAGE_BYTES

    def to(self, folder: str, name: str, text: str) -> str:
        """A link with ``text`` to a file of the results folder."""
        address = quote(Path(self._base, folder, name).as_posix())
        return f'<a href="{escape(address)}">{escape(text)}</a>'

    def picture(self, name: str) -> str | None:
        """The figure as a data address: SVG, or PNG when that is too large; None when neither fits.

        As pictures, several SVGs can use the same ids, and a script inside one is dead.
        """
        for suffix, address in (("svg", _svg_address), ("png", _png_address)):
            path = self.out / "figures" / f"{name}.{suffix}"
            if not path.is_file():
                continue
            found = address(path)
            if len(found) <= min(ONE_IMAGE_BYTES, self._left):
                self._left -= len(found)
                return found
        return None


def _svg_address(path: Path) -> str:
    # Percent-encoding leaves nearly all of an SVG as it is, where base64 would add a third.
    return "data:image/svg+xml," + quote(path.read_text(encoding="utf-8"), safe=_SAFE)


def _png_address(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")


# --- The pieces of the report as HTML. Everything that comes from data goes through ``escape`` ---

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
