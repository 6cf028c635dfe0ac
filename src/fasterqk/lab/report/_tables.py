"""The JSON files that experiments leave for the report: one folder a kind, one file a document."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fasterqk.console import is_interval
from fasterqk.errors import InputError
from fasterqk.files import plain, write_csv, write_text

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_name(name: str) -> str:
    """``name`` again, when it is fit to be a file name everywhere; an error that quotes it otherwise."""
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} cannot name a file; use letters, digits, dots, dashes, underscores")
    return name


def save_document(out: Path, folder: str, document: Mapping[str, Any]) -> Path:
    """Write ``out/FOLDER/NAME.json``, where NAME is the document's own ``name``; returns the path."""
    path = Path(out) / folder / f"{check_name(document['name'])}.json"
    text = json.dumps(plain(document), indent=1, ensure_ascii=False, allow_nan=False)
    return write_text(path, text + "\n")


def load_documents(out: Path, folder: str) -> list[dict[str, Any]]:
    """Every document of ``out/FOLDER``, sorted by file name; an unreadable one is an error that names it."""
    documents = []
    for path in sorted((Path(out) / folder).glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{str(path)!r} is not JSON ({error}); remove it or make it again") from None
        if not isinstance(document, dict):
            raise InputError(f"{str(path)!r} holds no JSON object; remove it or make it again")
        documents.append({**document, "name": path.stem})
    return documents


# --- A table on disk: JSON for the report, which can sort and copy it, and CSV for everybody else ---
# ``out/tables/NAME.json`` is ``{name, title, caption, columns, rows}``. A column is ``{key, label}`` and,
# where wanted, ``digits`` (places after the point) and ``source`` (``"paper"`` for the paper's own
# numbers, ``"null"`` for uniform attention), which the report sets apart. A row maps keys to a number, a
# text, null, or an interval ``{mean, half_width, n}``.

FOLDER = "tables"
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

    >>> save_table(Path("out"), "demo", title="Demo", caption="Two arms.",        # doctest: +SKIP
    ...            columns=[{"key": "arm", "label": "arm"}, {"key": "mrta", "label": "MRTA", "digits": 3}],
    ...            rows=[{"arm": "r = 1", "mrta": {"mean": 0.31, "half_width": 0.02, "n": 5}}])
    """
    document = {
        "name": name,
        "title": title,
        "caption": caption,
        "columns": [dict(column) for column in columns],
        "rows": [plain(row) for row in rows],
    }
    check_table(document, f"table {name!r}")
    path = save_document(out, FOLDER, document)
    csv = write_csv(path.with_suffix(".csv"), table_csv_rows(document))
    return {"json": str(path), "csv": str(csv)}


def load_tables(out: Path) -> list[dict[str, Any]]:
    """The tables of a results folder, checked, sorted by name."""
    tables = load_documents(out, FOLDER)
    for table in tables:
        check_table(table, repr(str(Path(out) / FOLDER / f"{table['name']}.json")))
    return tables


def check_table(table: Mapping[str, Any], where: str) -> None:
    """Raise an ``InputError`` that names ``where`` unless ``table`` has the format above."""
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


def table_csv_rows(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a table as flat CSV rows: an interval ``x`` becomes ``x``, ``x_half_width``, ``x_n``."""
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
