"""Training curves on disk: what every cell measured along its training.

``out/curves/NAME.json`` is ``{name, title, caption, x, metrics, cells}``. ``x`` is ``{key, label}``; a
metric is ``{key, label}`` and, where wanted, ``log`` (a logarithmic axis) and ``null`` (the value of
uniform attention, drawn as a line). A cell is ``{arm, seed, points}`` with one mapping a point.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.files import plain
from fasterqk.report.documents import load_documents, save_document

FOLDER = "curves"


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

    >>> save_curves(Path("out"), "demo", title="Demo", caption="", x={"key": "step", "label": "step"},
    ...             metrics=[{"key": "loss", "label": "training loss", "log": True}],   # doctest: +SKIP
    ...             cells=[{"arm": "r = 1", "seed": 0, "points": [{"step": 0, "loss": 1.6}]}])
    """
    keys = [x["key"], *(metric["key"] for metric in metrics)]
    document = {
        "name": name,
        "title": title,
        "caption": caption,
        "x": dict(x),
        "metrics": [dict(metric) for metric in metrics],
        "cells": [
            {
                "arm": cell["arm"],
                "seed": cell.get("seed"),
                "points": [{key: plain(point.get(key)) for key in keys} for point in cell["points"]],
            }
            for cell in cells
        ],
    }
    check_curves(document, f"curves {name!r}")
    return save_document(out, FOLDER, document)


def load_curves(out: Path) -> list[dict[str, Any]]:
    """The training curves of a results folder, checked, sorted by name."""
    curves = load_documents(out, FOLDER)
    for document in curves:
        check_curves(document, repr(str(Path(out) / FOLDER / f"{document['name']}.json")))
    return curves


def check_curves(document: Mapping[str, Any], where: str) -> None:
    """Raise an ``InputError`` that names ``where`` unless ``document`` has the format above."""
    if not isinstance(document.get("metrics"), list) or not isinstance(document.get("cells"), list):
        raise InputError(f"{where} has no lists 'metrics' and 'cells'")
    for description in (document.get("x"), *document["metrics"]):
        if not isinstance(description, Mapping) or not {"key", "label"} <= set(description):
            raise InputError(f"{where}: {description!r} has no 'key' and 'label'")
    for cell in document["cells"]:
        if not isinstance(cell, Mapping) or "arm" not in cell or not isinstance(cell.get("points"), list):
            raise InputError(f"{where}: cell {cell!r:.80} has no 'arm' and 'points'")
