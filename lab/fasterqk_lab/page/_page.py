"""The report: one self-contained HTML page, under three megabytes, from whatever a results folder holds."""

import base64
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fasterqk import __version__
from fasterqk.errors import InputError
from fasterqk.files import plain, write_text
from fasterqk.pages import CHART_SCRIPTS, json_text, page_html, write_explorer
from fasterqk_lab.compare import VERDICTS
from fasterqk_lab.figures._documents import Document, load_documents, themed
from fasterqk_lab.page._cells import Cell, cell_documents, read_cells, what_was_run
from fasterqk_lab.page._words import (
    TERMS,
    Definitions,
    Row,
    answer,
    count,
    effects_table,
    forests,
    html_table,
    null_change,
    page_text,
    read_rows,
    sentences,
    signed_text,
    terms_in,
)

PAGE_BYTES = 3_000_000
# Shares of the page; a cell of a table takes about 90 bytes with its markup.
_IMAGE_BYTES = 1_700_000
_ONE_IMAGE_BYTES = 600_000
_EXAMPLES_BYTES = 350_000
_CURVES_BYTES = 350_000
_TABLE_CELLS = 5_000
_POINTS_PER_CELL = 200

REPORT_SCRIPTS = (*CHART_SCRIPTS, *(f"report-{part}.js" for part in ("tables", "curves", "examples", "main")))
_FOLDERS = ("effects", "figures", "curves", "examples", "tables")
QUESTION = "Does faster query-key learning sharpen attention?"
# Tables of a chapter with more rows than this, taken together, are folded.
_ROWS_SHOWN = 12
_EFFECTS = 30
_SEE_AT_EQUAL_LOSS = (
    "Compare the lines at the same loss: a line that lies higher attends more to the relevant words."
)
_SEE_IN_DTAP = "Further right: more attention on the relevant words. Further up: surer of the right answer."


def write_page(out: Path, path: Path | None = None, *, title: str | None = None) -> Path:
    """Write the report of the results folder ``out`` to ``path`` (default ``out/report.html``).

    Effects, figures, tables, curves, examples and claims are found in the folders of these names.
    ``title`` stands at the top instead of the question that the page answers. Returns the path; a page at
    its default place has the explorer beside it, and links to it. A folder that holds nothing to show is an
    error that says how to fill it.
    """
    out = Path(out)
    beside = path is None or Path(path).resolve() == (out / "report.html").resolve()
    path = out / "report.html" if path is None else Path(path)
    documents = {folder: load_documents(out, folder) for folder in _FOLDERS}
    of_the_paper = any(documents.values())
    cells = read_cells(out)
    slugs = {chapter_of(document["name"]).slug for group in documents.values() for document in group}
    for folder, of_cells in cell_documents(_uncovered(cells, slugs)).items():
        documents[folder] += of_cells
    if not any(documents.values()):
        raise InputError(
            f"{str(out)!r} holds no figures, tables or examples, and no cells of a sweep or training; "
            f"make some with: fasterqk-lab reproduce all --out {str(out)!r}"
        )
    folders = {
        "effects": documents["effects"],
        "figures": documents["figures"],
        "curves": fit_curves(documents["curves"]),
        "examples": fit_examples(documents["examples"]),
        "tables": [html_table(table) for table in fit_tables(documents["tables"])],
    }
    chapters = [_arrange(*chapter) for chapter in in_chapters(folders)]
    rows = [row for chapter in chapters for row in chapter.effects]
    empty = dict.fromkeys(("effect", "remark", "experiment", "group"), "")
    claims = [empty | claim for document in load_documents(out, "claims") for claim in document["claims"]]
    groups: dict[str, list[Document]] = {}
    for claim in claims:
        groups.setdefault(claim["group"], []).append(claim)
    run = what_was_run(cells) if cells else ""
    unfinished = run and not of_the_paper and any(cell.about.state != "done" for cell in cells)
    glance = pick_example(folders["examples"], documents["effects"])
    heading = title or (QUESTION if rows or claims else f"Results in {out.resolve().name}")
    reached = [table["see"] for table in documents["tables"] if table["name"].endswith("-cells-conditions")]
    said = " ".join(sentence for chapter in chapters for sentence in chapter.sentences)
    body = _body(
        title=heading,
        answer=answer(rows) or " ".join(reached),
        forests=forests(rows[:_EFFECTS]),
        more_effects=max(0, len(rows) - _EFFECTS),
        glance=glance,
        claims=groups,
        verdicts=f"{count(len(claims), 'claim')}: {count_verdicts(claims)}",
        chapters=chapters,
        slugs={chapter.place.slug for chapter in chapters},
        chapter_of=chapter_of,
        run=run,
        missing=f"{run}. Only what is done is on this page." if unfinished else "",
        explorer=beside and of_the_paper,
        words=Definitions(),
        glossary={term: TERMS[term] for term in terms_in([said, json_text(plain([folders, claims]))])},
        names=_names,
        number=page_text,
        signed=signed_text,
        null_change=null_change,
        links=Links(out, path),
        version=__version__,
    )
    page = page_html(
        heading,
        body,
        styles=("base.css", "report.css"),
        scripts=REPORT_SCRIPTS,
        data={
            "glance": glance,
            **{
                folder: {document["name"]: document for document in folders[folder]}
                for folder in ("curves", "examples")
            },
        },
        folders=[_assets()],
    )
    if beside and of_the_paper:
        write_explorer(path.with_name("explorer.html"))
    return write_text(path, page)


def count_verdicts(claims: Sequence[Mapping[str, str]]) -> str:
    """How many claims have which verdict.

    >>> count_verdicts([{"verdict": "confirmed"}, {"verdict": "not run"}, {"verdict": "not run"}])
    'confirmed 1, not run 2'
    """
    counts = Counter(claim["verdict"] for claim in claims)
    return ", ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS if counts[verdict])


def _assets() -> Traversable:
    return files("fasterqk_lab.page").joinpath("assets")


def _body(**values: Any) -> str:
    """The body of the page; autoescape is on: text from data is shown as text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    template = _assets().joinpath("report.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(**values)


def _names(document: Document) -> list[str]:
    """What the columns and rows of a table are called."""
    heads = [text for _, text in document.get("heads") or ()]
    return heads + [text for line in document.get("lines") or () for _, text in line[:2]]


def _uncovered(cells: Sequence[Cell], slugs: set[str]) -> list[Cell]:
    """The cells that no document is about: all without documents, else trainings on other tasks."""
    # Experiments that are named after what they vary (layers, ablation, ...) run on HateXplain.
    others = any(slug not in _DATA and not slug.startswith("figure-") for slug in slugs)
    covered = slugs | ({"hatexplain"} if others else set())
    return [cell for cell in cells if not slugs or (cell.is_training and cell.group not in covered)]


# The example of the first screen comes from the data that are closest to what people write.
_EXAMPLES_FROM = ("hatexplain", "sva", "squad", "agreement")


def pick_example(sets: Sequence[Document], effects: Sequence[Document] = ()) -> Document | None:
    """Which example the first screen shows, as ``{name, index, arms, titles, note}``; None without examples.

    Of the examples that both arms answer rightly (of all, if there are none) it is the shortest among the two
    thirds in which the arms differ most in their attention on relevant words; ``note`` says so. ``titles``
    say what the arms are.
    """

    def place(examples: Document) -> tuple[int, str]:
        slug = chapter_of(examples["name"]).slug
        return _EXAMPLES_FROM.index(slug) if slug in _EXAMPLES_FROM else len(_EXAMPLES_FROM), examples["name"]

    for document in sorted(sets, key=place):
        arms, examples = document["arms"][:2], document["examples"]
        masses = {index: [_mass(example, arm) for arm in arms] for index, example in enumerate(examples)}
        differences = {
            index: abs(pair[1] - pair[0])
            for index, pair in masses.items()
            if len(pair) == 2 and pair[0] is not None and pair[1] is not None
        }
        if not differences:
            continue
        right = [
            index
            for index in differences
            if {examples[index]["arms"][arm].get("prediction") for arm in arms}
            == {examples[index].get("label")}
        ]
        ranked = sorted(right or differences, key=lambda index: -differences[index])
        most = ranked[: max(1, 2 * len(ranked) // 3)]
        among = " that both models answer rightly" if right else ""
        ratios = {
            effect["arm"]: effect.get("ratio")
            for of_comparison in effects
            if of_comparison["name"] == document["name"]
            for effect in of_comparison["effects"]
        }
        return {
            "name": document["name"],
            "index": min(most, key=lambda index: (len(examples[index]["tokens"]), index)),
            "arms": arms,
            "titles": [
                f"{arm}: query-key learning rate times {ratios[arm]:g}" if ratios.get(arm) else arm
                for arm in arms
            ],
            "note": f"Chosen from {count(len(ranked), 'example')}{among}: the shortest of the {len(most)}"
            " in which the models differ most.",
        }
    return None


def _mass(example: Document, arm: str) -> float | None:
    """Attention of ``arm`` on the relevant words of an example, in rollout or the first layer there is."""
    layers = (example["arms"].get(arm) or {}).get("layers") or {}
    weights: list[float] = layers.get("rollout") or next(iter(layers.values()), [])
    total = sum(weights)
    if not total or not any(example["relevance"]):
        return None
    return float(sum(w * r for w, r in zip(weights, example["relevance"], strict=True)) / total)


# --- Chapters: in the order of the paper, then whatever else there is ---

_FIGURE = re.compile(r"fig(?:ure)?[-_]?0*(\d+)")
_TABLE = re.compile(r"table\d*(?:[-_]|$)")

# What the tables measure, in the paper's order; the made-up languages need no data and come first.
_DATA = {
    "jsonl": "Your data",
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
        for document in sorted(documents, key=lambda document: _natural(document["name"])):
            chapters.setdefault(chapter_of(document["name"]), []).append((folder, document))
    return sorted(chapters.items(), key=lambda item: item[0])


@dataclass(frozen=True)
class Arranged:
    """A chapter as the page shows it: its effects, figures in order as ``(kind, document)``, and tables."""

    place: Chapter
    effects: list[Row]
    figures: list[tuple[str, Document]]
    tables: list[tuple[str, Document]]

    @property
    def sentences(self) -> list[str]:
        return sentences(self.effects)

    @property
    def open(self) -> bool:
        """Whether its tables are short enough to be shown unfolded."""
        return sum(len(document["lines"]) for _, document in self.tables) <= _ROWS_SHOWN


def _arrange(place: Chapter, documents: list[tuple[str, Document]]) -> Arranged:
    """A chapter: attention at equal loss comes first, heat maps last; effects without a table become one."""
    tabulated = {document["name"] for folder, document in documents if folder == "tables"}
    titles = {document["name"]: document["title"] for folder, document in documents if folder == "effects"}
    chapter = Arranged(place, [], [], [])
    ordered: list[tuple[int, str, Document]] = []
    for folder, document in documents:
        if folder == "effects":
            chapter.effects.extend(read_rows(document, place.title))
            if document["name"] not in tabulated:
                chapter.tables.append((folder, html_table(effects_table(document))))
        elif folder == "tables":
            chapter.tables.append((folder, document))
        elif folder == "curves":
            if _against_loss(document):
                title = f"{titles.get(document['name'], place.title)}: at equal training loss"
                ordered.append((0, "equal-loss", {**document, "title": title, "see": _SEE_AT_EQUAL_LOSS}))
            ordered.append((2, folder, document))
        elif document["name"].endswith("-dtap"):
            ordered.append((4, folder, {**document, "see": document["see"] or _SEE_IN_DTAP}))
        else:
            ordered.append((3 if folder == "examples" else 1, folder, document))
    chapter.figures.extend(
        (kind, document) for _, kind, document in sorted(ordered, key=lambda item: item[0])
    )
    return chapter


def _against_loss(curves: Document) -> bool:
    keys = {metric["key"] for metric in curves["metrics"]}
    arms = {cell["arm"] for cell in curves["cells"]}
    return {"loss", "mrta"} <= keys and curves["x"]["key"] != "loss" and len(arms) > 1


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


# --- Fitting: what is too large is thinned, and says so ---


def fit_examples(sets: list[Document]) -> list[Document]:
    """The example sets, each cut to its share of the page; ``total`` says how many there were.

    Where the share has no room for all examples with their heads, the heads go first.
    """
    share = _EXAMPLES_BYTES // max(1, len(sets))
    fitted = []
    for document in sets:
        examples = document["examples"]
        if sum(len(json_text(example)) for example in examples) > share:
            examples = [_without_heads(example) for example in examples]
        kept: list[Document] = []
        used = 0
        for example in examples:
            used += len(json_text(example))
            if used > share:
                break
            kept.append(example)
        fitted.append({**document, "examples": kept, "total": len(examples)})
    return fitted


def _without_heads(example: Document) -> Document:
    arms = {
        arm: {name: value for name, value in reading.items() if name != "heads"}
        for arm, reading in example["arms"].items()
    }
    return {**example, "arms": arms}


def fit_tables(tables: list[Document]) -> list[Document]:
    """The tables, cut after the rows that fit; a cut table says so in its caption."""
    left = _TABLE_CELLS
    fitted = []
    for table in tables:
        rows = table["rows"][: left // max(1, len(table["columns"]))]
        left -= len(rows) * len(table["columns"])
        caption = table["caption"] or ""
        if len(rows) < len(table["rows"]):
            rest = (
                "fasterqk-lab runs list shows all of them" if "file" in table else "the file has all of them"
            )
            caption += f" The first {len(rows)} of {len(table['rows'])} rows; {rest}."
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
            data = address(path)
            if len(data) <= min(_ONE_IMAGE_BYTES, self._left):
                self._left -= len(data)
                return Markup(data)
        return None

    def width(self, name: str) -> int:
        """The width in pixels below which the text of a figure is too small to read."""
        path = self._out / "figures" / f"{name}.svg"
        if not path.is_file():
            raise InputError(f"{str(path)!r} is missing beside its .json; make the figure again")
        width = re.search(r'<svg[^>]*\swidth="([\d.]+)pt"', path.read_text(encoding="utf-8")[:2000])
        return round(float(width[1])) if width else 520


def _svg_address(path: Path) -> str:
    # Percent-encoding leaves nearly all of an SVG as it is, where base64 would add a third.
    return "data:image/svg+xml," + quote(themed(path.read_text(encoding="utf-8")), safe=_SAFE)


def _png_address(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
