"""The report: a self-contained HTML page, under three megabytes, of a results folder.

It shows figures and tables (as in docs/results), examples of attention, and claims. ``fasterqk_lab.compare``
decides the standing of an effect (``stands``); the page only repeats it.
"""

import base64
import os
import re
import shlex
import tempfile
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fasterqk import __version__
from fasterqk.attention.scores import SCORES
from fasterqk.console import cell_text, is_interval, mean_of
from fasterqk.errors import InputError
from fasterqk.files import plain, write_text
from fasterqk.pages import CHART_SCRIPTS, json_text, page_html, write_explorer
from fasterqk_lab.compare import LEVEL, LOSS, STANDS, VERDICTS, Effect
from fasterqk_lab.figures import save_forest
from fasterqk_lab.figures._documents import Document, load_documents, read_effect, themed
from fasterqk_lab.page._cells import Cell, read_cells, save_cells, what_was_run

PAGE_BYTES = 3_000_000
# Limits for parts of the page; a table cell takes about 90 bytes with its markup.
_IMAGE_BYTES = 1_700_000
_ONE_IMAGE_BYTES = 600_000
_EXAMPLES_BYTES = 350_000
_TABLE_CELLS = 5_000

REPORT_SCRIPTS = (*CHART_SCRIPTS, *(f"report-{part}.js" for part in ("tables", "examples", "main")))
_FOLDERS = ("effects", "figures", "examples", "tables")
QUESTION = "Does faster query-key learning sharpen attention?"
ATTENTION = "mrta"
# The tables of a chapter are folded if they have more rows than this in total.
_ROWS_SHOWN = 12
# The chart of the first screen: its name, its largest number of effects, and the width of its labels.
_OVERVIEW, _EFFECTS, _LABEL = "overview", 30, 30
_SEE_IN_DTAP = "Further right: more attention on the relevant words. Further up: surer of the right answer."


def write_page(out: Path, path: Path | None = None, *, title: str | None = None) -> Path:
    """Write the report of the results folder ``out`` to ``path`` (default ``out/report.html``).

    Effects, figures, tables, examples and claims come from the folders of these names. ``title`` replaces the
    question at the top. A page at the default path also writes the explorer next to it, and links to it.
    Returns the path; raises if the folder has nothing to show.
    """
    out = Path(out)
    beside = path is None or Path(path).resolve() == (out / "report.html").resolve()
    path = out / "report.html" if path is None else Path(path)
    with tempfile.TemporaryDirectory() as drawn:
        page = _page(out, path, Path(drawn), title, beside)
    return write_text(path, page)


def _page(out: Path, path: Path, drawn: Path, title: str | None, beside: bool) -> str:
    """The page; documents of cells without an experiment are written to the folder ``drawn``."""
    documents = {folder: load_documents(out, folder) for folder in _FOLDERS}
    of_the_paper = any(documents.values())
    cells = read_cells(out)
    slugs = {chapter_of(document["name"]).slug for group in documents.values() for document in group}
    reached = save_cells(_uncovered(cells, slugs), drawn)
    for folder in _FOLDERS:
        # The page cannot link to temporary files.
        documents[folder] += [{**document, "file": ""} for document in load_documents(drawn, folder)]
    if not any(documents.values()):
        raise InputError(
            f"{str(out)!r} has no figures, tables, examples or cells; "
            f"make some with: fasterqk-lab reproduce all --out {shlex.quote(str(out))}"
        )
    shown = {
        "figures": documents["figures"],
        "examples": fit_examples(documents["examples"]),
        "tables": [html_table(table) for table in fit_tables(documents["tables"])],
    }
    chapters = [_arrange(*chapter) for chapter in in_chapters(shown)]
    sentence = answer(
        (chapter_of(document["name"]).title, effect)
        for document in documents["effects"]
        for effect in document["effects"]
    )
    overview = _save_overview(documents["effects"], drawn)
    empty = dict.fromkeys(("effect", "remark", "experiment", "group"), "")
    claims = [empty | claim for document in load_documents(out, "claims") for claim in document["claims"]]
    groups: dict[str, list[Document]] = {}
    for claim in claims:
        groups.setdefault(claim["group"], []).append(claim)
    run = what_was_run(cells) if cells else ""
    unfinished = run and not of_the_paper and any(cell.about.state != "done" for cell in cells)
    glance = pick_example(shown["examples"], documents["effects"])
    heading = title or (QUESTION if overview or claims else f"Results in {out.resolve().name}")
    body = _body(
        title=heading,
        answer=sentence or reached,
        overview=overview,
        glance=glance,
        claims=groups,
        verdicts=f"{count(len(claims), 'claim')}: {count_verdicts(claims)}",
        chapters=chapters,
        slugs={chapter["place"].slug for chapter in chapters},
        chapter_of=chapter_of,
        run=run,
        missing=f"{run}. This page shows only finished cells." if unfinished else "",
        explorer=beside and of_the_paper,
        mark=mark,
        glossary={term: TERMS[term] for term in terms_in([json_text(plain([shown, claims]))])},
        links=Links(out, path, drawn),
        version=__version__,
    )
    if beside and of_the_paper:
        write_explorer(path.with_name("explorer.html"))
    return page_html(
        heading,
        body,
        styles=("base.css", "report.css"),
        scripts=REPORT_SCRIPTS,
        data={"glance": glance, "examples": {document["name"]: document for document in shown["examples"]}},
        folders=[_assets()],
    )


def _save_overview(documents: Sequence[Document], drawn: Path) -> Document | None:
    """Draw the change in attention of all comparisons for the first screen; None without comparisons."""
    effects: dict[str, Effect] = {}
    for document in documents:
        records = [record for record in document["effects"] if record["score"] == ATTENTION]
        for record in (record for record in records if record["difference"]["mean"] is not None):
            named = document["title"], f"{chapter_of(document['name']).title}: {record['arm']}"
            label = textwrap.fill(named[len(records) > 1], _LABEL)
            if label in effects:
                label = textwrap.fill(f"{document['name']}: {record['arm']}", _LABEL)
            effects[label] = replace(read_effect(record), label=label)
    if not effects:
        return None
    more = f" {len(effects) - _EFFECTS} more are in the chapters." if len(effects) > _EFFECTS else ""
    about: Any = {"title": "Attention on the relevant words", "caption": f"n is the number of seeds.{more}"}
    save_forest([*effects.values()][:_EFFECTS], {ATTENTION: ""}, drawn, _OVERVIEW, png=False, **about)
    return next(document for document in load_documents(drawn, "figures") if document["name"] == _OVERVIEW)


def count_verdicts(claims: Sequence[Mapping[str, str]]) -> str:
    """The number of claims by verdict, in words.

    >>> count_verdicts([{"verdict": "confirmed"}, {"verdict": "not run"}, {"verdict": "not run"}])
    'confirmed 1, not run 2'
    """
    counts = Counter(claim["verdict"] for claim in claims)
    return ", ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS if counts[verdict])


def _assets() -> Traversable:
    return files("fasterqk_lab.page").joinpath("assets")


def _body(**values: Any) -> str:
    """The body of the page; text from data is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    template = _assets().joinpath("report.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(**values)


# --- The answer, the cells and the example of the first screen ---

_SAID_FIRST = {
    "more": "puts more attention on the relevant words",
    "less": "puts less attention on the relevant words",
    "too small to matter": "changes attention on the relevant words too little to matter",
    "open": "leaves open whether attention on the relevant words changes",
}
_SAID_THEN = {"too small to matter": "a change too small to matter"}


def answer(effects: Iterable[tuple[str, Document]]) -> str:
    """The effect of faster query-key learning at equal loss, by chapter, in one sentence, or ``""``.

    ``effects`` are chapters with records of :func:`fasterqk_lab.figures.effect_record`.
    """
    faster = [
        (chapter, effect["stands"])
        for chapter, effect in effects
        if (effect["score"], effect.get("loss") is not None) == (ATTENTION, True)
        and effect["at"] in (LEVEL, LOSS)
        and (effect.get("ratio") is None or effect["ratio"] > 1)
    ]
    totals = Counter(chapter for chapter, _ in faster)
    parts: list[str] = []
    for stands in STANDS:
        counts = Counter(chapter for chapter, shown in faster if shown == stands)
        places = [
            chapter if number == totals[chapter] else f"{chapter} ({number} of {totals[chapter]})"
            for chapter, number in counts.items()
        ]
        if places:
            words = _SAID_THEN.get(stands, stands) if parts else _SAID_FIRST[stands]
            parts.append(f"{words} in {', '.join(places)}")
    return f"At equal training loss, faster query-key learning {'; '.join(parts)}." if parts else ""


def count(number: int, noun: str) -> str:
    """A number and its noun: ``1 cell``, ``2 cells``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _uncovered(cells: Sequence[Cell], slugs: set[str]) -> list[Cell]:
    """The cells without a document: all of them if there are no documents, else trainings on other tasks."""
    # Experiments named after the setting they vary (layers, ablation, ...) run on HateXplain.
    others = any(slug not in _DATA and not slug.startswith("figure-") for slug in slugs)
    covered = slugs | ({"hatexplain"} if others else set())
    return [cell for cell in cells if not slugs or ("task" in cell.fields and cell.group not in covered)]


# The example of the first screen comes from the most natural data.
_EXAMPLES_FROM = ("hatexplain", "sva", "squad", "agreement")


def pick_example(sets: Sequence[Document], effects: Sequence[Document] = ()) -> Document | None:
    """The example of the first screen, as ``{name, index, arms, titles, note}``; None without examples.

    Of the examples that both arms answer correctly (or of all), it is the shortest among the two thirds with
    the largest difference in attention on relevant words; ``note`` says so. ``titles`` describe the arms.
    """
    ratios = {
        (document["name"], effect["arm"]): effect.get("ratio")
        for document in effects
        for effect in document["effects"]
    }
    order = {name: place for place, name in enumerate(_EXAMPLES_FROM)}
    for document in sorted(
        sets, key=lambda x: (order.get(chapter_of(x["name"]).slug, len(order)), x["name"])
    ):
        name, arms, examples = document["name"], document["arms"][:2], document["examples"]
        differences: dict[int, float] = {}
        for index, example in enumerate(examples):
            masses = [mass for arm in arms if (mass := _mass(example, arm)) is not None]
            if len(masses) == 2:
                differences[index] = abs(masses[1] - masses[0])
        if not differences:
            continue
        right = [
            index
            for index in differences
            if {examples[index]["arms"][arm].get("prediction") for arm in arms}
            == {examples[index].get("label")}
        ]
        ranked = sorted(right or differences, key=lambda index: -differences[index])
        varied = ranked[: max(1, 2 * len(ranked) // 3)]
        among = " that both models answer correctly" if right else ""
        faster = {
            arm: f"{arm}: query-key learning rate times {ratio:g}"
            for arm in arms
            if (ratio := ratios.get((name, arm)))
        }
        return {
            "name": name,
            "index": min(varied, key=lambda index: (len(examples[index]["tokens"]), index)),
            "arms": arms,
            "titles": [faster.get(arm, arm) for arm in arms],
            "note": f"Chosen from {count(len(ranked), 'example')}{among}: the shortest of the {len(varied)}"
            " in which the models differ most.",
        }
    return None


def _mass(example: Document, arm: str) -> float | None:
    """Attention of ``arm`` on the relevant words of an example, in rollout or else in the first layer."""
    layers = (example["arms"].get(arm) or {}).get("layers") or {}
    weights: list[float] = layers.get("rollout") or next(iter(layers.values()), [])
    total = sum(weights)
    if not total or not any(example["relevance"]):
        return None
    return float(sum(w * r for w, r in zip(weights, example["relevance"], strict=True)) / total)


# --- Chapters: in the order of the paper, then all others ---

_FIGURE = re.compile(r"fig(?:ure)?[-_]?0*(\d+)")
_TABLE = re.compile(r"table\d*(?:[-_]|$)")

# The data of tables in the paper's order; your own data and generated languages come first.
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
    """A chapter of the report; its fields sort chapters in the paper's order."""

    kind: int
    number: int
    slug: str
    title: str


def chapter_of(name: str) -> Chapter:
    """The chapter of the document ``name``: its figure, its data, or the first word of its name.

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
    """The chapters in order, with their ``(folder, document)`` pairs.

    ``folders`` maps folders (``figures``, ``tables``, ...) to documents. Within a chapter, folders keep the
    order of the mapping, and documents are sorted by name, with numbers by value.
    """
    chapters: dict[Chapter, list[tuple[str, Document]]] = {}
    for folder, documents in folders.items():
        for document in sorted(documents, key=lambda document: _natural(document["name"])):
            chapters.setdefault(chapter_of(document["name"]), []).append((folder, document))
    return sorted(chapters.items(), key=lambda item: item[0])


def _arrange(place: Chapter, documents: list[tuple[str, Document]]) -> dict[str, Any]:
    """A chapter of the page: figures, then examples, then heat maps, as ``(kind, document)``, and tables."""
    ranked: list[tuple[int, str, Document]] = []
    for folder, document in documents:
        if document["name"].endswith("-dtap"):
            ranked.append((2, folder, {**document, "see": document["see"] or _SEE_IN_DTAP}))
        elif folder != "tables":
            ranked.append((int(folder == "examples"), folder, document))
    figures = [(folder, document) for _, folder, document in sorted(ranked, key=lambda item: item[0])]
    tables = [document for folder, document in documents if folder == "tables"]
    short = sum(len(document["lines"]) for document in tables) <= _ROWS_SHOWN
    return {"place": place, "figures": figures, "tables": tables, "open": short}


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


# --- Fitting: documents that are too large are cut, with a note ---


def fit_examples(sets: list[Document]) -> list[Document]:
    """The example sets, each cut to its share of the page; ``total`` is the original number of examples.

    If the examples do not fit with their heads, the heads are left out first.
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
    """The tables, cut to the rows that fit, with a note in the caption."""
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


# --- Tables as the page shows them ---


def html_table(table: Document) -> Document:
    """``table`` with its ``heads`` and ``lines`` of cells, each as ``(HTML attributes, text)``.

    Scripts sort by ``data-sort``; classes distinguish texts, our numbers, the paper's and the null's.
    """
    columns, rows = table["columns"], table["rows"]
    heads = [
        ({"class": _class(column, *(row.get(column["key"]) for row in rows))}, column["label"])
        for column in columns
    ]
    lines = [[_html_cell(column, row.get(column["key"])) for column in columns] for row in rows]
    return {**table, "heads": heads, "lines": lines}


def _html_cell(column: Mapping[str, Any], value: Any) -> tuple[dict[str, Any], str]:
    seeds = count(value["n"], "seed") if is_interval(value) and value.get("n") else None
    return {"class": _class(column, value), "data-sort": mean_of(value), "title": seeds}, cell_text(value)


def _class(column: Mapping[str, Any], *values: Any) -> str:
    return "text" if all(isinstance(value, str) for value in values) else column.get("source", "ours")


# --- Definitions of abbreviations ---

_WORDS: dict[str, str] = tomllib.loads(_assets().joinpath("terms.toml").read_text(encoding="utf-8"))
# The registry of scores has their descriptions.
TERMS = {
    term: text.format(description=SCORES[term].description if term in SCORES else "")
    for term, text in _WORDS.items()
}
_TERM = re.compile(rf"(?<![\w-])({'|'.join(TERMS)})(?![\w-])")
# Terms that are marked in the text; the others are only in the glossary.
_MARKED = {term for term in TERMS if term.isupper() and len(term) > 1} - {"QK", "OV"}


def terms_in(texts: Iterable[Any]) -> list[str]:
    """The defined terms that occur in ``texts``, in the order of the glossary."""
    present = {term for text in texts if isinstance(text, str) for term in _TERM.findall(text)}
    return [term for term in TERMS if term in present]


def mark(text: Any) -> Any:
    """The escaped ``text`` with every defined abbreviation as an ``abbr`` element."""
    from markupsafe import Markup, escape

    def marked(match: re.Match[str]) -> str:
        term = match[1]
        return f'<abbr title="{escape(TERMS[term])}">{term}</abbr>' if term in _MARKED else term

    return Markup(_TERM.sub(marked, str(escape(text))))


# --- Links to the files of the results folder, and pictures inside the page ---

# Characters that need no encoding in a data address inside a quoted attribute: not quotes and ampersands.
_SAFE = " <>/:;=?@[]^`{|}~!$'()*+,"


class Links:
    """Addresses for one page; pictures are embedded until the page is full."""

    def __init__(self, out: Path, page: Path, drawn: Path) -> None:
        self._folders = [out / "figures", drawn / "figures"]
        self._base = os.path.relpath(out.resolve(), page.resolve().parent)
        self._left = _IMAGE_BYTES

    def to(self, file: str) -> str:
        """The address of a file of the results folder, relative to the page."""
        return quote(Path(self._base, file).as_posix())

    def picture(self, name: str) -> str | None:
        """The figure as a data address: SVG, or PNG if that is too large; None if neither fits.

        Inside an ``img``, several SVGs can use the same ids, and their scripts do not run.
        """
        from markupsafe import Markup

        for suffix, address in (("svg", _svg_address), ("png", _png_address)):
            path = self._find(f"{name}.{suffix}")
            data = address(path) if path.is_file() else ""
            if data and len(data) <= min(_ONE_IMAGE_BYTES, self._left):
                self._left -= len(data)
                return Markup(data)
        return None

    def width(self, name: str) -> int:
        """The width in pixels below which the text of a figure is too small to read."""
        path = self._find(f"{name}.svg")
        if not path.is_file():
            raise InputError(f"{str(path)!r}, which belongs to a .json, is missing; make the figure again")
        width = re.search(r'<svg[^>]*\swidth="([\d.]+)pt"', path.read_text(encoding="utf-8")[:2000])
        return round(float(width[1])) if width else 520

    def _find(self, file: str) -> Path:
        paths = [folder / file for folder in self._folders]
        return next((path for path in paths if path.is_file()), paths[0])


def _svg_address(path: Path) -> str:
    # Percent-encoding leaves an SVG almost unchanged; base64 would add a third.
    return "data:image/svg+xml," + quote(themed(path.read_text(encoding="utf-8")), safe=_SAFE)


def _png_address(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
