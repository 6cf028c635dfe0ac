"""The report: one self-contained HTML page, under three megabytes, from whatever a results folder holds."""

import base64
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fasterqk import __version__
from fasterqk.console import mean_of
from fasterqk.errors import InputError
from fasterqk.files import plain, write_text
from fasterqk.pages import CHART_SCRIPTS, json_text, page_html, write_explorer
from fasterqk_lab.figures._documents import Document, comparison_table, html_table, load_documents, page_text
from fasterqk_lab.figures._style import themed
from fasterqk_lab.page._cells import cell_documents
from fasterqk_lab.page._claims import count_verdicts, read_claims, signed_text
from fasterqk_lab.page._summary import (
    answer,
    comparison_sentences,
    count,
    effects,
    forest,
    see_at_equal_loss,
    see_in_dtap,
    what_was_run,
)
from fasterqk_lab.page._terms import TERMS, Definitions, terms_in

PAGE_BYTES = 3_000_000
# Shares of the page; a cell of a table takes about 90 bytes with its markup.
_IMAGE_BYTES = 1_700_000
_ONE_IMAGE_BYTES = 600_000
_EXAMPLES_BYTES = 350_000
_CURVES_BYTES = 350_000
_TABLE_CELLS = 5_000
_POINTS_PER_CELL = 200

REPORT_SCRIPTS = (*CHART_SCRIPTS, *(f"report-{part}.js" for part in ("tables", "curves", "examples", "main")))
_FOLDERS = ("comparisons", "figures", "curves", "examples", "tables")
QUESTION = "Does faster query-key learning sharpen attention?"
# Tables of a chapter with more rows than this, taken together, are folded.
_ROWS_SHOWN = 12
_SENTENCES = 6
_EFFECTS = 30


def write_page(out: Path, path: Path | None = None, *, title: str | None = None) -> Path:
    """Write the report of the results folder ``out`` to ``path`` (default ``out/report.html``).

    Figures, tables, curves, comparisons, examples and claims are found in the folders of these names.
    ``title`` stands at the top instead of the question that the page answers. Returns the path; a page at
    its default place has the explorer beside it, and links to it. A folder that holds nothing to show is an
    error that says how to fill it.
    """
    out = Path(out)
    beside = path is None or Path(path).resolve() == (out / "report.html").resolve()
    path = out / "report.html" if path is None else Path(path)
    found = {folder: load_documents(out, folder) for folder in _FOLDERS}
    of_the_paper = any(found.values())
    for folder, documents in cell_documents(out, _taken(out, found)).items():
        found[folder] += documents
    if not any(found.values()):
        raise InputError(
            f"{str(out)!r} holds no figures, tables or examples, and no cells of a sweep or training; "
            f"make some with: fasterqk-lab reproduce all --out {str(out)!r}"
        )
    _check_pictures(out, found["figures"])
    comparisons = {one["name"]: one for one in found["comparisons"]}
    folders = {
        "comparisons": [html_table(comparison_table(one)) for one in found["comparisons"]],
        "figures": found["figures"],
        "curves": fit_curves(found["curves"]),
        "examples": fit_examples(found["examples"]),
        "tables": [html_table(one) for one in fit_tables(found["tables"])],
    }
    measured = [
        effect
        for name, one in sorted(comparisons.items(), key=lambda item: (chapter_of(item[0]), item[0]))
        for effect in effects(one, _task(name, comparisons))
    ]
    claims = [claim for document in load_documents(out, "claims") for claim in read_claims(document)]
    chapters = [_arrange(*chapter, comparisons) for chapter in in_chapters(folders)]
    run, missing = what_was_run(out)
    glance = pick_example(folders["examples"], comparisons)
    heading = title or (QUESTION if comparisons or claims else f"Results in {out.resolve().name}")
    body = _body(
        title=heading,
        answer=answer(measured, "task" if of_the_paper else "setting")
        or " ".join(one["see"] for one in found["tables"] if one["name"].endswith("-cells-conditions")),
        forest=forest(measured[:_EFFECTS]),
        more_effects=max(0, len(measured) - _EFFECTS),
        glance=glance,
        claims=claims,
        verdicts=count_verdicts(claims),
        chapters=chapters,
        slugs={chapter.slug for chapter, *_ in chapters},
        chapter_of=chapter_of,
        run=run,
        missing="" if of_the_paper else missing,
        explorer=beside and of_the_paper,
        words=Definitions(),
        glossary={term: TERMS[term] for term in terms_in(_texts(plain([folders, claims])))},
        names=_names,
        number=page_text,
        mean=mean_of,
        signed=signed_text,
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
            **{folder: {one["name"]: one for one in folders[folder]} for folder in ("curves", "examples")},
        },
        folders=[_assets()],
    )
    if beside and of_the_paper:
        write_explorer(path.with_name("explorer.html"))
    return write_text(path, page)


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


def _texts(value: Any) -> Iterator[str]:
    """All texts inside plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _names(document: Document) -> list[str]:
    """What the columns and rows of a table are called."""
    heads = [text for _, text in document.get("heads") or ()]
    return heads + [text for line in document.get("lines") or () for _, text in line[:2]]


def _taken(out: Path, found: Mapping[str, list[Document]]) -> set[str]:
    """Groups of cells that the page leaves to the documents of the experiments that ran them.

    With documents, cells are shown if they are trainings on a task that no document is about.
    """
    from fasterqk_lab.runs import Store
    from fasterqk_lab.runs._table import summaries

    slugs = {chapter_of(one["name"]).slug for documents in found.values() for one in documents}
    if not slugs:
        return set()
    cells = summaries(Store(out))
    groups = {str(cell.fields.get("task") or cell.kind or "unknown"): "task" in cell.fields for cell in cells}
    # Experiments that are named after what they vary (layers, ablation, ...) run on HateXplain.
    others = {slug for slug in slugs if slug not in _DATA and not slug.startswith("figure-")}
    covered = slugs | ({"hatexplain"} if others else set())
    return {name for name, task in groups.items() if not task or name in covered}


def _check_pictures(out: Path, figures: list[Document]) -> None:
    for figure in figures:
        image = out / "figures" / f"{figure['name']}.svg"
        if not image.is_file():
            raise InputError(f"{str(image)!r} is missing beside its .json; make the figure again")


def _task(name: str, comparisons: Mapping[str, Document]) -> str:
    """The data of a comparison in a sentence; where two have the same data, also its protocol."""
    found = _IN_A_SENTENCE.get(chapter_of(name).slug)
    if found is None or "file" in comparisons[name]:  # cells are named by their settings
        return found if found and len(comparisons) == 1 else str(comparisons[name].get("title") or name)
    others = [
        other for other in comparisons if other != name and chapter_of(other).slug == chapter_of(name).slug
    ]
    return f"{found} ({name.rsplit('-', 1)[-1]})" if others else found


def pick_example(
    sets: Sequence[Document], comparisons: Mapping[str, Document] | None = None
) -> Document | None:
    """Which example the first screen shows, as ``{name, index, arms, titles, note}``; None without examples.

    It comes from the data set that is closest to what people write. Of the examples that both arms answer
    rightly (of all, if there are none) it is the shortest among the two thirds in which the arms differ most
    in their attention on relevant words; ``note`` says so. ``titles`` say what the arms are.
    """
    order = ["hatexplain", "sva", "squad", "agreement"]

    def place(one: Document) -> tuple[int, str]:
        slug = chapter_of(one["name"]).slug
        return (order.index(slug) if slug in order else len(order)), one["name"]

    for one in sorted(sets, key=place):
        arms = one["arms"][:2]
        examples = one["examples"]
        differences = {
            index: abs(masses[1] - masses[0])
            for index, example in enumerate(examples)
            if len(masses := [mass for arm in arms if (mass := _mass(example, arm)) is not None]) == 2
        }
        if not differences:
            continue
        right = [index for index in differences if _is_right(examples[index], arms)]
        ranked = sorted(right or differences, key=lambda index: -differences[index])
        most = ranked[: max(1, 2 * len(ranked) // 3)]
        chosen = min(most, key=lambda index: (len(examples[index]["tokens"]), index))
        among = " that both models answer rightly" if right else ""
        chosen_from = f"Chosen from {count(len(ranked), 'example')}{among}"
        compared = (comparisons or {}).get(one["name"]) or {"arms": []}
        ratios = {arm["arm"]: arm.get("qk_ratio") for arm in compared["arms"]}
        titles = [_arm_title(arm, ratios.get(arm)) for arm in arms]
        note = f"{chosen_from}: the shortest of the {len(most)} in which the models differ most."
        return {"name": one["name"], "index": chosen, "arms": arms, "titles": titles, "note": note}
    return None


def _arm_title(arm: str, ratio: float | None) -> str:
    if ratio is None:
        return arm
    return f"{arm}: {'equal learning rates' if ratio == 1 else f'query-key learning rate times {ratio:g}'}"


def _is_right(example: Document, arms: Sequence[str]) -> bool:
    return all(example["arms"][arm].get("prediction") == example.get("label") for arm in arms)


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


# The same where a sentence names them.
_IN_A_SENTENCE = {
    "jsonl": "your data",
    "agreement": "generated agreement",
    "kvqa": "generated key-value questions",
    "squad": "SQuAD",
    "sva": "subject-verb agreement",
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


def _arrange(
    chapter: Chapter, documents: list[tuple[str, Document]], comparisons: Mapping[str, Document]
) -> tuple[Chapter, list[str], list[tuple[str, Document]], list[tuple[str, Document]], bool]:
    """A chapter with its sentences, what it shows in order, its tables, and whether these are open.

    Attention at equal loss comes first and heat maps of single seeds' means last; each has a line that says
    what to see. Where curves can be drawn against the loss, they replace the picture of the same name.
    """
    own = [document for folder, document in documents if folder == "comparisons"]
    names = {(folder, document["name"]) for folder, document in documents}
    sentences = [
        f"{one['title']}: {text[0].lower()}{text[1:]}" if len(own) > 1 else text
        for one in own
        for text in comparison_sentences(comparisons[one["name"]])
    ]
    if len(sentences) > _SENTENCES:
        sentences[_SENTENCES:] = [f"{len(sentences) - _SENTENCES} more are in the tables below."]
    shown: list[tuple[int, str, Document]] = []
    tables = []
    for folder, document in documents:
        name = document["name"]
        compared = comparisons.get(re.sub(r"-(dtap|loss|by-layer)$", "", name))
        if folder in ("tables", "comparisons"):
            if folder == "tables" or ("tables", f"{name}-end") not in names:
                tables.append((folder, document))
            continue
        if folder == "curves":
            if _against_loss(document):
                see = see_at_equal_loss(compared) if compared else ""
                title = f"{document['title'].removesuffix(': along training')}: at equal training loss"
                shown.append((0, "equal-loss", {**document, "title": title, "see": see}))
            shown.append((2, "curves", document))
        elif folder == "examples":
            shown.append((3, "examples", document))
        elif name.endswith("-dtap"):
            see = document.get("see") or (see_in_dtap(compared) if compared else "")
            shown.append((4, "figures", {**document, "see": see}))
        elif not (name.endswith("-loss") and ("curves", name.removesuffix("-loss")) in names):
            shown.append((1, "figures", document))
    shown.sort(key=lambda item: item[0])
    rows = sum(len(document["lines"]) for _, document in tables)
    return chapter, sentences, [(kind, one) for _, kind, one in shown], tables, rows <= _ROWS_SHOWN


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
            found = address(path)
            if len(found) <= min(_ONE_IMAGE_BYTES, self._left):
                self._left -= len(found)
                return Markup(found)
        return None

    def width(self, name: str) -> int:
        """The width in pixels below which the text of a figure is too small to read."""
        head = (self._out / "figures" / f"{name}.svg").read_text(encoding="utf-8")[:2000]
        found = re.search(r'<svg[^>]*\swidth="([\d.]+)pt"', head)
        return round(float(found[1])) if found else 520


def _svg_address(path: Path) -> str:
    # Percent-encoding leaves nearly all of an SVG as it is, where base64 would add a third.
    return "data:image/svg+xml," + quote(themed(path.read_text(encoding="utf-8")), safe=_SAFE)


def _png_address(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
