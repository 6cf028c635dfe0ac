"""What experiments leave for the page: JSON documents, one folder per kind, one file per document.

Effects, training curves, examples, claims and tables are described here, figures in ``_style``. Documents are
checked when they are written and when they are read.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fasterqk.console import is_interval
from fasterqk.errors import InputError
from fasterqk.files import plain, read_json, write_csv, write_text
from fasterqk_lab.compare import STANDS, VERDICTS, Effect

Document = dict[str, Any]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# The lists of the documents of a folder, with what each of their items has.
_LISTS: dict[str, dict[str, tuple[str, ...]]] = {
    "effects": {"effects": ("arm", "score", "at", "stands", "before", "after", "difference")},
    "curves": {"metrics": ("key", "label"), "cells": ("arm", "points")},
    "examples": {"examples": ("tokens", "relevance", "arms")},
    "tables": {"columns": ("key", "label"), "rows": ()},
    "claims": {"claims": ("claim", "where", "verdict")},
}
SOURCES = ("ours", "paper", "null")


def save_document(out: Path, folder: str, name: str, document: Document) -> Path:
    """Check ``document`` and write it as ``out/FOLDER/NAME.json``; returns the path."""
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} cannot name a file; use letters, digits, dots, dashes, underscores")
    content = plain({"name": name, **document})
    _check(folder, content, f"{folder}/{name}.json")
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
        _check(folder, document, repr(str(path)))
        documents.append({**empty, "title": path.stem, **document, "name": path.stem})
    return documents


def _check(folder: str, document: Document, where: str) -> None:
    """An InputError that begins with ``where`` unless the document is one of this folder."""
    for name, keys in _LISTS.get(folder, {}).items():
        if not isinstance(document.get(name), list):
            raise InputError(f"{where} has no list {name!r}")
        for item in document[name]:
            if not isinstance(item, Mapping) or not set(keys) <= set(item):
                raise InputError(f"{where}: {item!r:.80} in {name!r} has no {' and '.join(map(repr, keys))}")
    for effect in document["effects"] if folder == "effects" else ():
        _check_choice(effect["stands"], STANDS, where)
        if not all(is_interval(effect[key]) for key in ("before", "after", "difference")):
            raise InputError(f"{where}: 'before', 'after' or 'difference' of {effect!r:.80} is no interval")
    for claim in document["claims"] if folder == "claims" else ():
        _check_choice(claim["verdict"], VERDICTS, where)
    for index, example in enumerate(document["examples"] if folder == "examples" else ()):
        _check_example(example, document.get("arms") or (), f"{where}, example {index}")
    if folder == "tables":
        keys = tuple(column["key"] for column in document["columns"])
        for column in document["columns"]:
            _check_choice(column.get("source", SOURCES[0]), SOURCES, where)
        for row in document["rows"]:
            for key in row:
                _check_choice(key, keys, where)


def _check_choice(value: Any, choices: Sequence[str], where: str) -> None:
    if value not in choices:
        raise InputError(f"{where}: {value!r} is not one of {', '.join(choices)}")


def _check_example(example: Document, arms: Sequence[str], where: str) -> None:
    length = len(example["tokens"])
    if len(example["relevance"]) != length:
        raise InputError(f"{where}: {length} tokens but {len(example['relevance'])} relevance marks")
    for arm, reading in example["arms"].items():
        if arm not in arms:
            raise InputError(f"{where}: {arm!r} is not one of the arms {arms}")
        if not isinstance(reading, Mapping) or not isinstance(reading.get("layers"), Mapping):
            raise InputError(f"{where}, {arm!r} has no 'layers'")
        rows = list(reading["layers"].items())
        rows += [(layer, head) for layer, heads in (reading.get("heads") or {}).items() for head in heads]
        for layer, weights in rows:
            if len(weights) != length:
                raise InputError(f"{where}, {arm!r}, {layer!r}: {length} tokens but {len(weights)} weights")


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
    names = ("score", "at", "loss", "null", "p", "stands", "progress", "lowest", "missing")
    record: Document = plain(
        {"arm": effect.label, "before": effect.second, "after": effect.first, "difference": effect.value}
        | {name: getattr(effect, name) for name in names}
        | {"levels": effect.agreement}
    )
    return record


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
    """Write ``out/curves/NAME.json``, what cells measured along training; returns its path.

    ``x`` is ``{key, label}``. A metric is ``{key, label}`` and, where wanted, ``log`` (a logarithmic axis)
    and ``null`` (the value of uniform attention, drawn as a line). A cell is ``{arm, seed, points}`` with
    one mapping per point, of which only the keys that are drawn are kept.

    >>> save_curves(Path("out"), "demo", title="Demo", caption="", x={"key": "step", "label": "step"},
    ...             metrics=[{"key": "loss", "label": "training loss", "log": True}],
    ...             cells=[{"arm": "r = 1", "seed": 0, "points": [{"step": 0, "loss": 1.6}]}])
    PosixPath('out/curves/demo.json')
    """
    keys = [metric.get("key") for metric in (x, *metrics)]
    drawn = [
        {"arm": cell["arm"], "seed": cell.get("seed")}
        | {"points": [{key: point.get(key) for key in keys} for point in cell["points"]]}
        for cell in cells
    ]
    document = {"title": title, "caption": caption, "x": x, "metrics": metrics, "cells": drawn}
    return save_document(out, "curves", name, document)


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
    def rounded(weights: Iterable[float], digits: int) -> list[float]:
        return [round(float(weight), digits) for weight in weights]

    heads = (reading.get("heads") or {}).items()
    return {
        **reading,
        "layers": {layer: rounded(weights, 4) for layer, weights in reading["layers"].items()},
        **({"heads": {layer: [rounded(row, 3) for row in rows] for layer, rows in heads}} if heads else {}),
    }


def save_claims(out: Path, claims: Iterable[Mapping[str, str]], name: str = "paper", *, title: str) -> Path:
    """Write ``out/claims/NAME.json`` and return its path; the page shows the claims in this order.

    A claim has ``claim`` (its text), ``where`` (its place in the paper) and ``verdict``, and where known
    ``effect`` (the deciding one as text), ``remark``, ``experiment`` (which decides it: the page links to its
    chapter) and ``group`` (the heading that it stands under).

    >>> claim = {"claim": "Attention is sharper", "where": "Table 1", "verdict": "not run"}
    >>> save_claims(Path("out"), [claim], title="Claims")
    PosixPath('out/claims/paper.json')
    """
    return save_document(out, "claims", name, {"title": title, "claims": list(claims)})


def save_table(
    out: Path,
    name: str,
    *,
    title: str,
    caption: str,
    rows: Iterable[Mapping[str, Any]],
    columns: Sequence[Mapping[str, Any]] | Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Write ``out/tables/NAME.{json,csv}`` and return their paths by suffix.

    ``columns`` maps keys to labels (None: the keys of the rows) or lists columns in full: ``{key, label}``
    and, where wanted, ``digits`` (places after the point) and ``source``
    (``"paper"`` for the paper's own numbers, ``"null"`` for uniform attention), which the page sets apart. A
    row maps keys of columns to a number, a text, None, or an interval: any dataclass or mapping with
    ``mean``, ``half_width`` and ``n``, which become three columns in the CSV.

    >>> save_table(Path("out"), "demo", title="Demo", caption="Two arms.",
    ...            columns=[{"key": "arm", "label": "arm"}, {"key": "mrta", "label": "MRTA", "digits": 3}],
    ...            rows=[{"arm": "r = 1", "mrta": {"mean": 0.31, "half_width": 0.02, "n": 5}}])
    {'json': 'out/tables/demo.json', 'csv': 'out/tables/demo.csv'}
    """
    rows = plain(list(rows))
    if columns is None:
        columns = {key: key.replace("_", " ") for row in rows for key in row}
    if isinstance(columns, Mapping):
        columns = [{"key": key, "label": label} for key, label in columns.items()]
    document = {"title": title, "caption": caption, "columns": columns, "rows": rows}
    path = save_document(out, "tables", name, document)
    keys = [column["key"] for column in columns]
    flat = flat_rows({key: row.get(key) for key in keys} for row in rows)
    return {"json": str(path), "csv": str(write_csv(path.with_suffix(".csv"), flat))}


def effect_table(
    effects: Sequence[Effect], out: Path, name: str, *, title: str, caption: str
) -> dict[str, str]:
    """Write a table with one row per effect; returns its paths."""
    labels = {"before": "baseline", "after": "value", "p": "p (Holm)", "levels": "share of levels"}
    keys = ("arm", "score", "at", "loss", "before", "after", "null", "difference", "p", "levels", "stands")
    records = map(effect_record, effects)
    rows = [{key: record[key] for key in keys} for record in records]
    columns = {key: labels.get(key, key) for key in keys}
    return save_table(out, name, title=title, caption=caption, rows=rows, columns=columns)


def flat_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows for a CSV file: an interval ``x`` becomes ``x``, ``x_half_width`` and ``x_n``.

    >>> flat_rows([{"arm": "r = 1", "mrta": {"mean": 0.31, "half_width": 0.02, "n": 5}}])
    [{'arm': 'r = 1', 'mrta': 0.31, 'mrta_half_width': 0.02, 'mrta_n': 5}]
    """
    flat = []
    for row in plain(list(rows)):
        cells: dict[str, Any] = {}
        for key, value in row.items():
            if is_interval(value):
                cells |= {key: value["mean"], f"{key}_half_width": value["half_width"]}
                cells[f"{key}_n"] = value.get("n")
            else:
                cells[key] = value
        flat.append(cells)
    return flat


def wide_rows(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], joined: Sequence[str] = ("at", "score")
) -> tuple[list[Document], dict[str, str]]:
    """Rows with an ``arm`` and its ``value`` side by side: one row per moment and score, one column per arm.

    ``columns`` maps keys to labels; those of others' numbers (``paper``, ``released``) become one per arm.
    """
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    printed = [key for key in ("paper", "released") if key in columns]
    shared = [key for key in columns if key not in ("arm", "value", "kind", *printed)]
    wide: dict[Any, Document] = {}
    for row in rows:
        line = wide.setdefault(tuple(row[key] for key in joined), {})
        line |= {key: row[key] for key in shared if row.get(key) is not None}
        line[row["arm"]] = row["value"]
        line |= {f"{key}, {row['arm']}": row[key] for key in printed if key in row}
    before = shared.index("null")
    labels = {key: columns.get(key, key) for key in (*shared[:before], *arms, *shared[before:])}
    labels |= {f"{key}, {arm}": f"{columns[key]}, {arm}" for key in printed for arm in arms}
    return list(wide.values()), labels
