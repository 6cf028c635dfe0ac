"""The report: one self-contained HTML page, under three megabytes, from whatever a results folder holds."""

import base64
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fasterqk import __version__
from fasterqk.errors import InputError
from fasterqk.files import write_text
from fasterqk.lab.report._html import CHART_SCRIPTS, json_text, render_page
from fasterqk.lab.report._records import Document, comparison_table, html_table, load_documents
from fasterqk.lab.report._summary import comparison_sentences, count, what_was_run

PAGE_BYTES = 3_000_000
# Shares of the page; a cell of a table takes about 90 bytes with its markup.
_IMAGE_BYTES = 1_700_000
_ONE_IMAGE_BYTES = 600_000
_EXAMPLES_BYTES = 350_000
_CURVES_BYTES = 350_000
_TABLE_CELLS = 5_000
_POINTS_PER_CELL = 200

REPORT_SCRIPTS = (*CHART_SCRIPTS, *(f"report-{part}.js" for part in ("tables", "curves", "examples", "main")))
# Folders in the order in which a chapter shows their documents, and what one document is called.
_NOUNS = {
    "comparisons": "comparison",
    "figures": "figure",
    "curves": "set of training curves",
    "examples": "set of examples",
    "tables": "table",
}


def write_page(out: Path, path: Path | None = None) -> Path:
    """Write the report of the results folder ``out`` to ``path`` (default ``out/report.html``).

    Figures, tables, training curves, comparisons and examples are found in the folders of these names.
    Returns the path. A folder that holds none of them is an error that says how to fill it.
    """
    out = Path(out)
    path = out / "report.html" if path is None else Path(path)
    folders = {
        "comparisons": [html_table(comparison_table(one)) for one in load_documents(out, "comparisons")],
        "figures": _load_figures(out),
        "curves": fit_curves(load_documents(out, "curves")),
        "examples": fit_examples(load_documents(out, "examples")),
        "tables": [html_table(one) for one in fit_tables(load_documents(out, "tables"))],
    }
    if not any(folders.values()):
        raise InputError(
            f"{str(out)!r} holds no figures, tables or examples; "
            f"make some with: fasterqk reproduce all --out {str(out)!r}"
        )
    counts = ", ".join(count(len(found), _NOUNS[folder]) for folder, found in folders.items() if found)
    page = render_page(
        "report.html",
        styles=("base.css", "report.css"),
        scripts=REPORT_SCRIPTS,
        data={folder: {one["name"]: one for one in folders[folder]} for folder in ("curves", "examples")},
        summary=[line for line in (what_was_run(out), f"On this page: {counts}.") if line],
        comparisons=[
            {**one, "sentences": comparison_sentences(one)}
            for one in sorted(folders["comparisons"], key=lambda one: (chapter_of(one["name"]), one["name"]))
        ],
        chapters=in_chapters(folders),
        links=Links(out, path),
        version=__version__,
    )
    return write_text(path, page)


def _load_figures(out: Path) -> list[Document]:
    figures = load_documents(out, "figures")
    for figure in figures:
        image = out / "figures" / f"{figure['name']}.svg"
        if not image.is_file():
            raise InputError(f"{str(image)!r} is missing beside its .json; make the figure again")
    return figures


# --- Chapters: in the order of the paper, then whatever else there is ---

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
class Chapter:
    """A chapter of the report; the fields are its place, so chapters sort in the paper's order."""

    kind: int
    number: int
    slug: str
    title: str


def chapter_of(name: str) -> Chapter:
    """The chapter that the document ``name`` belongs to: its figure, its data, or the first word of its name.

    >>> [chapter_of(name).title for name in ("fig2-dtap", "table-squad-paper-end", "measure-scores")]
    ['Figure 2', 'SQuAD', 'Measure']
    """
    figure = _FIGURE.match(name)
    if figure:
        number = int(figure[1])
        return Chapter(0, number, f"figure-{number}", f"Figure {number}")
    table = _TABLE.match(name)
    word = re.split(r"[-_.]", name[table.end() :] if table else name)[0].lower()
    if table and not word:
        return Chapter(1, 0, "tables", "Tables")
    if word in _DATA:
        return Chapter(1, 1 + list(_DATA).index(word), word, _DATA[word])
    return Chapter(1 if table else 2, 1 + len(_DATA), word, word.capitalize())


def in_chapters(folders: dict[str, list[Document]]) -> list[tuple[Chapter, list[tuple[str, Document]]]]:
    """Chapters in order, each with its ``(folder, document)`` pairs.

    ``folders`` maps a folder (``figures``, ``tables``, ...) to its documents; within a chapter the folders
    keep the order of that mapping and documents are sorted by name, numbers by value.
    """
    chapters: dict[Chapter, list[tuple[str, Document]]] = {}
    for folder, documents in folders.items():
        for document in sorted(documents, key=lambda one: _natural(one["name"])):
            chapters.setdefault(chapter_of(document["name"]), []).append((folder, document))
    return sorted(chapters.items(), key=lambda item: item[0])


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


# --- Fitting: what is too large is thinned, and says so ---


def fit_examples(sets: list[Document]) -> list[Document]:
    """The example sets, each cut to its share of the page; ``total`` says how many there were."""
    share = _EXAMPLES_BYTES // max(1, len(sets))
    fitted = []
    for document in sets:
        kept: list[Document] = []
        used = 0
        for example in document["examples"]:
            used += len(json_text(example))
            if used > share:
                break
            kept.append(example)
        fitted.append({**document, "examples": kept, "total": len(document["examples"])})
    return fitted


def fit_tables(tables: list[Document]) -> list[Document]:
    """The tables, cut after the rows that fit; a cut table says so in its caption."""
    left = _TABLE_CELLS
    fitted = []
    for table in tables:
        rows = table["rows"][: left // max(1, len(table["columns"]))]
        left -= len(rows) * len(table["columns"])
        caption = table["caption"] or ""
        if len(rows) < len(table["rows"]):
            caption += f" The first {len(rows)} of {len(table['rows'])} rows; the file has all of them."
        fitted.append({**table, "rows": rows, "caption": caption})
    return fitted


def fit_curves(documents: list[Document]) -> list[Document]:
    """The curves with as many points per cell as fit; first and last points are always kept."""
    points = _POINTS_PER_CELL
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


# --- Links to the files of the results folder, and pictures inside the page ---

# What may stand unchanged in a data address inside a quoted attribute; quotes and ampersands may not.
_SAFE = " <>/:;=?@[]^`{|}~!$'()*+,"


class Links:
    """Addresses for one page; pictures are taken in until the page is full."""

    def __init__(self, out: Path, page: Path) -> None:
        self._out = out
        self._base = os.path.relpath(out.resolve(), page.resolve().parent)
        self._left = _IMAGE_BYTES

    def to(self, file: str) -> str:
        """The address of a file of the results folder, as seen from the page."""
        return quote(Path(self._base, file).as_posix())

    def picture(self, name: str) -> str | None:
        """The figure as a data address: SVG, or PNG when that is too large; None when neither fits.

        As pictures, several SVGs can use the same ids, and a script inside one is dead.
        """
        from markupsafe import Markup

        for suffix, address in (("svg", _svg_address), ("png", _png_address)):
            path = self._out / "figures" / f"{name}.{suffix}"
            if not path.is_file():
                continue
            found = address(path)
            if len(found) <= min(_ONE_IMAGE_BYTES, self._left):
                self._left -= len(found)
                return Markup(found)
        return None


def _svg_address(path: Path) -> str:
    # Percent-encoding leaves nearly all of an SVG as it is, where base64 would add a third.
    return "data:image/svg+xml," + quote(path.read_text(encoding="utf-8"), safe=_SAFE)


def _png_address(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
