"""What experiments leave for the page: JSON documents, one folder per kind, one file per document.

Effects, training curves, examples and tables are described here, figures in ``_style``. Documents are
checked when they are written and when they are read.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fasterqk.console import cell_text, is_interval, mean_of, number_text
from fasterqk.errors import InputError
from fasterqk.files import plain, read_json, write_csv, write_text
from fasterqk_lab.compare import STANDS, Effect

Document = dict[str, Any]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def save_document(out: Path, folder: str, name: str, document: Document) -> Path:
    """Check ``document`` and write it as ``out/FOLDER/NAME.json``; returns the path."""
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} cannot name a file; use letters, digits, dots, dashes, underscores")
    content = plain({"name": name, **document})
    if folder in _CHECKS:
        _CHECKS[folder](content, f"{folder}/{name}.json")
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    return write_text(Path(out) / folder / f"{name}.json", text + "\n")


def load_documents(out: Path, folder: str) -> list[Document]:
    """Every document of ``out/FOLDER``, checked, sorted by file name; a bad one is an error that names it.

    A document has at least ``name``, ``title``, ``caption``, ``see`` (what to see in it) and ``alt``.
    """
    documents, empty = [], {"caption": "", "see": "", "alt": ""}
    for path in sorted((Path(out) / folder).glob("*.json")):
        document = read_json(path)
        if not isinstance(document, dict):
            raise InputError(f"{str(path)!r} holds no JSON object; remove it or make it again")
        if folder in _CHECKS:
            _CHECKS[folder](document, repr(str(path)))
        documents.append({**empty, "title": path.stem, **document, "name": path.stem})
    return documents


# --- Effects: what an arm changes against its baseline ---


def save_effects(
    out: Path, name: str, *, title: str, setting: str, effects: Sequence[Mapping[str, Any]]
) -> Path:
    """Write ``out/effects/NAME.json`` and return its path; effects that decide come first.

    An effect is what :func:`effect_record` returns and, where known, ``ratio``: how much faster its arm's
    query-key circuit learns than the baseline's.

    >>> save_effects(Path("out"), "demo", title="Demo", setting="3 seeds", effects=[
    ...     {"arm": "faster QK", "score": "mrta", "at": "level", "loss": 0.1, "stands": "more",
    ...      "before": {"mean": 0.2, "half_width": 0.01, "n": 3},
    ...      "after": {"mean": 0.7, "half_width": 0.01, "n": 3},
    ...      "difference": {"mean": 0.5, "half_width": 0.02, "n": 3}}])
    PosixPath('out/effects/demo.json')
    """
    return save_document(out, "effects", name, {"title": title, "setting": setting, "effects": effects})


def effect_record(effect: Effect) -> Document:
    """An effect as plain JSON data: what its arm changes against the baseline, as the rule decides it."""
    record: Document = plain(
        {
            "arm": effect.label,
            "score": effect.score,
            "at": effect.at,
            "loss": effect.loss,
            "before": effect.second,
            "after": effect.first,
            "difference": effect.value,
            "null": effect.null,
            "p": effect.p,
            "stands": effect.stands,
            "levels": effect.agreement,
            "progress": effect.progress,
            "lowest": effect.lowest,
            "missing": effect.missing,
        }
    )
    return record


def _check_effects(document: Document, where: str) -> None:
    if not isinstance(document.get("effects"), list):
        raise InputError(f"{where} has no list 'effects'")
    for effect in document["effects"]:
        if not isinstance(effect, Mapping) or not {"arm", "score", "at"} <= set(effect):
            raise InputError(f"{where}: effect {effect!r:.80} has no 'arm', 'score' and 'at'")
        if not all(is_interval(effect.get(key)) for key in ("before", "after", "difference")):
            raise InputError(f"{where}: 'before', 'after' or 'difference' of {effect!r:.80} is no interval")
        if effect.get("stands") not in STANDS:
            raise InputError(f"{where}: {effect.get('stands')!r} is not one of {', '.join(STANDS)}")


# --- Curves: what every cell measured along its training ---


def save_curves(
    out: Path,
    name: str,
    *,
    title: str,
    caption: str,
    x: Mapping[str, str],
    metrics: Sequence[Mapping[str, Any]],
    cells: Iterable[Mapping[str, Any]],
) -> Path:
    """Write ``out/curves/NAME.json`` and return its path; points keep only the keys that are drawn.

    ``x`` is ``{key, label}``. A metric is ``{key, label}`` and, where wanted, ``log`` (a logarithmic axis)
    and ``null`` (the value of uniform attention, drawn as a line). A cell is ``{arm, seed, points}`` with
    one mapping per point.

    >>> save_curves(Path("out"), "demo", title="Demo", caption="", x={"key": "step", "label": "step"},
    ...             metrics=[{"key": "loss", "label": "training loss", "log": True}],
    ...             cells=[{"arm": "r = 1", "seed": 0, "points": [{"step": 0, "loss": 1.6}]}])
    PosixPath('out/curves/demo.json')
    """
    keys = [x["key"], *(metric["key"] for metric in metrics)]
    drawn = [
        {
            "arm": cell["arm"],
            "seed": cell.get("seed"),
            "points": [{key: point.get(key) for key in keys} for point in cell["points"]],
        }
        for cell in cells
    ]
    document = {"title": title, "caption": caption, "x": x, "metrics": metrics, "cells": drawn}
    return save_document(out, "curves", name, document)


def _check_curves(document: Document, where: str) -> None:
    if not isinstance(document.get("metrics"), list) or not isinstance(document.get("cells"), list):
        raise InputError(f"{where} has no lists 'metrics' and 'cells'")
    for description in (document.get("x"), *document["metrics"]):
        if not isinstance(description, Mapping) or not {"key", "label"} <= set(description):
            raise InputError(f"{where}: {description!r} has no 'key' and 'label'")
    for cell in document["cells"]:
        if not isinstance(cell, Mapping) or "arm" not in cell or not isinstance(cell.get("points"), list):
            raise InputError(f"{where}: cell {cell!r:.80} has no 'arm' and 'points'")


# --- Examples: the tokens of single inputs with the attention that several arms pay to them ---


def save_examples(
    out: Path,
    name: str,
    *,
    title: str,
    arms: Sequence[str],
    examples: Iterable[Mapping[str, Any]],
    sensitive: bool,
    caption: str = "",
) -> Path:
    """Write ``out/examples/NAME.json`` and return its path; weights keep four decimals.

    An example is ``{tokens, relevance, label, arms}`` and, where wanted, ``read`` (index of the read
    position) and ``null`` (what uniform attention puts on the relevant tokens, if that is not their share).
    ``arms`` maps an arm to ``{prediction, probability, layers}``, where ``layers`` maps the name of a layer
    (``"layer 1"``, ``"rollout"``) to one weight per token and ``probability`` is that of the right answer.
    Where it has ``heads``, these map a name of ``layers`` to one row of weights per head; weights of heads
    keep three decimals. The report shows a ``sensitive`` set only after a click.

    >>> save_examples(Path("out"), "demo", title="Demo", arms=["r = 1"], sensitive=False,
    ...     examples=[{"tokens": ["a", "cat"], "relevance": [0, 1], "label": "animal",
    ...                "arms": {"r = 1": {"prediction": "animal", "probability": 0.9,
    ...                                   "layers": {"layer 1": [0.2, 0.8]}}}}])
    PosixPath('out/examples/demo.json')
    """
    document = {
        "title": title,
        "caption": caption,
        "sensitive": bool(sensitive),
        "arms": arms,
        "examples": [
            {**example, "arms": {arm: _rounded(reading) for arm, reading in example["arms"].items()}}
            for example in examples
        ],
    }
    return save_document(out, "examples", name, document)


def _rounded(reading: Mapping[str, Any]) -> Document:
    rounded = dict(reading)
    rounded["layers"] = {
        layer: [round(float(weight), 4) for weight in weights] for layer, weights in reading["layers"].items()
    }
    if reading.get("heads"):
        rounded["heads"] = {
            layer: [[round(float(weight), 3) for weight in weights] for weights in heads]
            for layer, heads in reading["heads"].items()
        }
    return rounded


def _check_examples(document: Document, where: str) -> None:
    if not isinstance(document.get("arms"), list) or not isinstance(document.get("examples"), list):
        raise InputError(f"{where} has no lists 'arms' and 'examples'")
    for index, example in enumerate(document["examples"]):
        here = f"{where}, example {index}"
        if not isinstance(example, Mapping) or not {"tokens", "relevance", "arms"} <= set(example):
            raise InputError(f"{here} has no 'tokens', 'relevance' and 'arms'")
        length = len(example["tokens"])
        if len(example["relevance"]) != length:
            raise InputError(f"{here}: {length} tokens but {len(example['relevance'])} relevance marks")
        for arm, reading in example["arms"].items():
            if arm not in document["arms"]:
                raise InputError(f"{here}: {arm!r} is not one of the arms {document['arms']}")
            if not isinstance(reading, Mapping) or not isinstance(reading.get("layers"), Mapping):
                raise InputError(f"{here}, {arm!r} has no 'layers'")
            rows = list(reading["layers"].items())
            rows += [(layer, head) for layer, heads in (reading.get("heads") or {}).items() for head in heads]
            for layer, weights in rows:
                if len(weights) != length:
                    raise InputError(
                        f"{here}, {arm!r}, {layer!r}: {length} tokens but {len(weights)} weights"
                    )


# --- Tables: JSON that the page shows, sorts and copies, and CSV for everybody else ---

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

    A column is ``{key, label}`` and, where wanted, ``digits`` (places after the point) and ``source``
    (``"paper"`` for the paper's own numbers, ``"null"`` for uniform attention), which the page sets apart. A
    row maps keys of columns to a number, a text, None, or an interval: any dataclass or mapping with
    ``mean``, ``half_width`` and ``n``, which become three columns in the CSV.

    >>> save_table(Path("out"), "demo", title="Demo", caption="Two arms.",
    ...            columns=[{"key": "arm", "label": "arm"}, {"key": "mrta", "label": "MRTA", "digits": 3}],
    ...            rows=[{"arm": "r = 1", "mrta": {"mean": 0.31, "half_width": 0.02, "n": 5}}])
    {'json': 'out/tables/demo.json', 'csv': 'out/tables/demo.csv'}
    """
    document = {"title": title, "caption": caption, "columns": columns, "rows": plain(list(rows))}
    path = save_document(out, "tables", name, document)
    csv = write_csv(path.with_suffix(".csv"), _csv_rows(document))
    return {"json": str(path), "csv": str(csv)}


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


# Checks of the documents of a folder: an InputError that names the second argument unless the first is good.
_CHECKS: dict[str, Callable[[Document, str], None]] = {
    "effects": _check_effects,
    "curves": _check_curves,
    "examples": _check_examples,
    "tables": _check_table,
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
        power = math.floor(math.log10(largest))
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
