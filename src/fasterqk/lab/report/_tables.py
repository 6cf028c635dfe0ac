"""Tables of the report: JSON that the page shows, sorts and copies, and CSV for everybody else.

``out/tables/NAME.json`` is ``{name, title, caption, columns, rows}``. A column is ``{key, label}`` and,
where wanted, ``digits`` (places after the point) and ``source`` (``"paper"`` for the paper's own numbers,
``"null"`` for uniform attention), which the page sets apart. A row maps keys to a number, a text, null, or
an interval ``{mean, half_width, n}``.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fasterqk.attention import SCORES, score_of, title_of
from fasterqk.console import cell_text, is_interval, mean_of
from fasterqk.errors import InputError
from fasterqk.files import plain, write_csv
from fasterqk.lab.report._records import Document, load_documents, save_document

SOURCES = ("ours", "paper", "null")


def save_table(
    out: Path,
    name: str,
    *,
    title: str,
    caption: str,
    columns: Sequence[Mapping[str, Any]],
    rows: Iterable[Mapping[str, Any]],
) -> dict[str, str]:
    """Write ``out/tables/NAME.{json,csv}`` and return their paths by suffix.

    Every key of a row must be a column. Intervals may be any dataclass or mapping with ``mean``,
    ``half_width`` and ``n``; in the CSV they become three columns.

    >>> save_table(Path("out"), "demo", title="Demo", caption="Two arms.",
    ...            columns=[{"key": "arm", "label": "arm"}, {"key": "mrta", "label": "MRTA", "digits": 3}],
    ...            rows=[{"arm": "r = 1", "mrta": {"mean": 0.31, "half_width": 0.02, "n": 5}}])
    {'json': 'out/tables/demo.json', 'csv': 'out/tables/demo.csv'}
    """
    document = {"title": title, "caption": caption, "columns": columns, "rows": plain(list(rows))}
    path = save_document(out, "tables", name, document, _check_table)
    csv = write_csv(path.with_suffix(".csv"), _csv_rows(document))
    return {"json": str(path), "csv": str(csv)}


def load_tables(out: Path) -> list[Document]:
    """The tables of a results folder, checked, sorted by name."""
    return load_documents(out, "tables", _check_table)


def _check_table(table: Document, where: str) -> None:
    if not isinstance(table.get("columns"), list) or not isinstance(table.get("rows"), list):
        raise InputError(f"{where} has no lists 'columns' and 'rows'")
    keys = []
    for column in table["columns"]:
        if not isinstance(column, Mapping) or not {"key", "label"} <= set(column):
            raise InputError(f"{where}: column {column!r} has no 'key' and 'label'")
        if column.get("source", "ours") not in SOURCES:
            raise InputError(f"{where}: source {column['source']!r} is not one of {', '.join(SOURCES)}")
        keys.append(column["key"])
    for row in table["rows"]:
        unknown = [key for key in row if key not in keys] if isinstance(row, Mapping) else [row]
        if unknown:
            raise InputError(f"{where}: {unknown[0]!r} in a row is no column; columns are {keys}")


def _csv_rows(table: Document) -> list[dict[str, Any]]:
    """Flat rows: an interval ``x`` becomes ``x``, ``x_half_width``, ``x_n``."""
    flat = []
    for row in table["rows"]:
        cells: dict[str, Any] = {}
        for column in table["columns"]:
            key, value = column["key"], row.get(column["key"])
            if is_interval(value):
                cells |= {key: value["mean"], f"{key}_half_width": value["half_width"]}
                cells[f"{key}_n"] = value.get("n")
            else:
                cells[key] = value
        flat.append(cells)
    return flat


# --- Tables as the page shows them ---

# Parts of an arm: the source of their numbers, and what their columns add to the title of a score.
_PARTS = {"metrics": ("ours", ""), "null": ("null", ", uniform"), "paper": ("paper", ", paper")}


def comparison_table(comparison: Document) -> Document:
    """A comparison with ``columns`` and ``rows``: each score of each arm beside its null and the paper's."""
    arms = comparison["arms"]
    columns: list[dict[str, Any]] = [{"key": "arm", "label": "arm"}]
    rows: list[dict[str, Any]] = [{"arm": arm["arm"]} for arm in arms]
    names = dict.fromkeys(name for arm in arms for part in _PARTS for name in arm.get(part) or {})
    order = list(SCORES)
    for name in sorted(names, key=lambda name: order.index(score_of(name).name)):
        for part, (source, suffix) in _PARTS.items():
            values = [(arm.get(part) or {}).get(name) for arm in arms]
            if all(value is None for value in values):
                continue
            key, digits = f"{part}.{name}", score_of(name).digits
            columns.append({"key": key, "label": title_of(name) + suffix, "digits": digits, "source": source})
            for row, value in zip(rows, values, strict=True):
                row[key] = value
    return {**comparison, "caption": comparison.get("setting"), "columns": columns, "rows": rows}


def html_table(table: Document) -> Document:
    """``table`` with its ``heads`` and ``lines`` of cells, each as ``(HTML attributes, text)``.

    Scripts sort by ``data-sort``; styles tell texts, our numbers, the paper's and the null's apart by class.
    """
    columns, rows = table["columns"], table["rows"]
    heads = [
        ({"class": _class(column, *(row.get(column["key"]) for row in rows))}, column["label"])
        for column in columns
    ]
    lines = [[_html_cell(column, row.get(column["key"])) for column in columns] for row in rows]
    return {**table, "heads": heads, "lines": lines}


def _html_cell(column: Mapping[str, Any], value: Any) -> tuple[dict[str, Any], str]:
    seeds = f"{value['n']} seeds" if is_interval(value) and value.get("n") else None
    attributes = {"class": _class(column, value), "data-sort": mean_of(value), "title": seeds}
    return attributes, cell_text(value, column.get("digits"))


def _class(column: Mapping[str, Any], *values: Any) -> str:
    return "text" if all(isinstance(value, str) for value in values) else column.get("source", "ours")
