"""The files that experiments write for people and for the page: figures, tables, and JSON documents.

A folder per kind, a file per document: effects, examples, claims, tables and figures.
Documents are checked when they are written and when they are read. The style of figures is readable in print
and safe for colour-blind readers; on the page its colours follow the reader's light or dark scheme.
"""

import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.attention.statistics import Interval
from fasterqk.console import is_interval
from fasterqk.errors import InputError
from fasterqk.files import plain, read_json, write_bytes, write_csv, write_text
from fasterqk_lab.compare import STANDS, VERDICTS, Effect, margin_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Document = dict[str, Any]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# The lists of the documents of a folder, with what each of their items has. An effect is what `effect_record`
# returns and, where known, ``ratio``: how much faster its arm's query-key circuit learns than the baseline's.
# A claim may have ``effect`` (the deciding one as text), ``remark``, ``experiment`` (the page links to its
# chapter) and ``group`` (the heading that it stands under).
_LISTS: dict[str, dict[str, tuple[str, ...]]] = {
    "effects": {"effects": ("arm", "score", "at", "stands", "before", "after", "difference")},
    "examples": {"examples": ("tokens", "relevance", "arms")},
    "tables": {"columns": ("key", "label"), "rows": ()},
    "claims": {"claims": ("claim", "where", "verdict")},
}
SOURCES = ("ours", "paper", "null")
# The columns of a table of effects.
EFFECT_COLUMNS = {key: key for key in ("arm", "score", "at", "loss")}
EFFECT_COLUMNS |= {"before": "baseline", "after": "value", "null": "null", "difference": "difference"}
EFFECT_COLUMNS |= {"p": "p (Holm)", "levels": "share of levels", "stands": "stands"}


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


def effect_record(effect: Effect) -> Document:
    """An effect as plain JSON data: what its arm changes against the baseline, as the rule decides it."""
    names = ("score", "at", "loss", "null", "p", "stands", "progress", "lowest", "missing")
    record: Document = plain(
        {"arm": effect.label, "before": effect.second, "after": effect.first, "difference": effect.value}
        | {name: getattr(effect, name) for name in names}
        | {"levels": effect.agreement}
    )
    return record


def read_effect(record: Document) -> Effect:
    """The effect that :func:`effect_record` wrote, without its curve."""

    def interval(name: str) -> Interval:
        value = {key: nan if number is None else number for key, number in record[name].items()}
        return Interval(value["mean"], value["half_width"], record[name].get("n") or 1)

    values = interval("difference"), interval("after"), interval("before")
    p = nan if record.get("p") is None else record["p"]
    about: Document = {"loss": record.get("loss"), "null": record.get("null"), "p": p, "p_of_difference": p}
    about["margin"] = margin_of(record["score"], values[2].mean)
    return Effect(record["arm"], record["score"], "more", *values, record["at"], **about)


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
    and, where wanted, ``source`` (``"paper"`` for the paper's own numbers, ``"null"`` for uniform attention),
    which the page sets apart. A row maps keys of columns to a number, a text, None, or an interval: any
    dataclass or mapping with ``mean``, ``half_width`` and ``n``, which become three columns in the CSV.

    >>> save_table(Path("out"), "demo", title="Demo", caption="Two arms.",
    ...            columns=[{"key": "arm", "label": "arm"}, {"key": "mrta", "label": "MRTA"}],
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
    rows = [{key: record[key] for key in EFFECT_COLUMNS} for record in map(effect_record, effects)]
    return save_table(out, name, title=title, caption=caption, rows=rows, columns=EFFECT_COLUMNS)


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


# --- Figures: one style ---

# Okabe and Ito's palette, in an order that also differs in lightness.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
PARAMETERIZATION_COLORS = {"FAFO": COLORS[0], "FACO": COLORS[1], "CAFO": COLORS[2], "CACO": COLORS[3]}
HEATMAP = "cividis"
DTAP_COLOURS = "% of instances (square-root scale)"
INK, QUIET, PAPER = "#1f2228", "#666666", "#fefefe"
# The colours on a dark page.
_DARK = {
    INK: "#e9e7e2",
    QUIET: "#a3a9b4",
    PAPER: "#1b1e24",
    "#4d4d4d": "#c3c8d1",
    "#737373": "#a3a9b4",
    "#808080": "#8d94a0",
    "#0072b2": "#56b4e9",
    "#d55e00": "#f28c4a",
    "#009e73": "#35c79b",
    "#cc79a7": "#e59ac6",
    "#e69f00": "#eebc3f",
    "#56b4e9": "#9fd2f2",
    "#000000": "#e9e7e2",
}

STYLE: dict[Any, Any] = {
    "backend": "Agg",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.labelsize": 11,
    "figure.constrained_layout.use": True,
    "figure.dpi": 100,
    "font.size": 11,
    "grid.alpha": 0.25,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "fasterqk",
    "text.color": INK,
    "xtick.color": INK,
    "xtick.labelsize": 10,
    "ytick.color": INK,
    "ytick.labelsize": 10,
}


@contextmanager
def plotting() -> Iterator[Any]:
    """Gives pyplot: inside no window is opened, and afterwards the user's matplotlib settings come back."""
    import matplotlib
    from cycler import cycler

    with matplotlib.rc_context(STYLE | {"axes.prop_cycle": cycler(color=COLORS)}):
        import matplotlib.pyplot as plt

        yield plt


def save_figure(
    figure: "Figure",
    out: Path,
    name: str,
    *,
    title: str,
    caption: str,
    rows: Iterable[Mapping[str, Any]],
    see: str = "",
    png: bool = True,
) -> dict[str, str]:
    """Write ``out/figures/NAME.{svg,png,csv,json}`` and return their paths by suffix.

    ``rows`` is the tidy table the figure shows. The JSON is for the report: title, caption, ``see`` (one line
    that says what to see in the figure, computed where it names a result), and a description of the axes for
    readers who do not see the picture.
    """
    import matplotlib.pyplot as plt

    document = {"title": title, "caption": caption, "see": see, "alt": describe_axes(figure)}

    folder = Path(out) / "figures"
    paths = {}
    if png:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        paths["png"] = str(write_bytes(folder / f"{name}.png", buffer.getvalue()))
    paths["svg"] = str(write_bytes(folder / f"{name}.svg", svg_bytes(figure)))
    plt.close(figure)
    paths["csv"] = str(write_csv(folder / f"{name}.csv", flat_rows(rows)))
    paths["json"] = str(save_document(out, "figures", name, document))
    return paths


def svg_bytes(figure: "Figure") -> bytes:
    """The figure as SVG, the same bytes every time."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def describe_axes(figure: "Figure") -> str:
    """Describe the axes of ``figure``, panel by panel, without colour bars."""
    panels: dict[str, list[str]] = {}
    for axes in figure.axes:
        across, up = axes.get_xlabel(), axes.get_ylabel()
        if axes.get_label() == "<colorbar>" or not (axes.has_data() or axes.get_title()):
            continue
        kind = "heat map of " if axes.images else ""
        shown = f"{kind}{up} against {across}" if across and up else kind + (up or across)
        names = [text for text in axes.get_legend_handles_labels()[1] if not text.startswith("_")]
        if names:
            shown += f" for {', '.join(dict.fromkeys(names))}"
        panels.setdefault(shown.strip(), []).append(axes.get_title())
    sentences = []
    for shown, titles in panels.items():
        named = ", ".join(title for title in titles if title)
        several = f"{len(titles)} panels" if len(titles) > 1 else ""
        head = f"{several} ({named})" if several and named else several or named
        sentences.append(f"{head}: {shown}" if head and shown else head or shown)
    return ". ".join(sentences).replace("\n", " ") + "." if sentences else ""


_BACKGROUND = re.compile(r'(<g id="patch_1">\s*<path [^>]*style="fill: )#ffffff')
_COLOUR = re.compile("|".join(_DARK))


def themed(svg: str) -> str:
    """The SVG of a figure with a transparent background, and colours that follow the scheme of the reader.

    >>> print(themed('<svg xmlns="x"><path style="stroke: #0072b2"/></svg>')[:60])
    <svg xmlns="x"><style>:root{--c1f2228:#1f2228;--c666666:#666
    """
    light, dark = (
        "".join(f"--c{name[1:]}:{colour};" for name, colour in pairs)
        for pairs in (((name, name) for name in _DARK), _DARK.items())
    )
    # Text without a colour of its own is black, which only a light page can show.
    text = f"text{{fill:var(--c{INK[1:]})}}"
    style = f"<style>:root{{{light}}}{text}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    drawn = _COLOUR.sub(lambda match: f"var(--c{match[0][1:]})", _BACKGROUND.sub(r"\1none", svg))
    return re.sub(r"(<svg\b[^>]*>)", lambda match: match[1] + style, drawn, count=1)


# --- The DTAP heat map, in the paper's orientation: attention to the right, probability upwards ---


def draw_dtap(
    axes: "Axes",
    dtap: ArrayLike,
    edges: Sequence[float],
    title: str | None = None,
    *,
    deviation: ArrayLike | None = None,
    highest: float = 100.0,
) -> Any:
    """Draw one DTAP table on ``axes`` and return the image (for a colour bar).

    ``dtap[i][j]`` is the percent of instances in probability row i (drawn from the bottom up) and mass
    column j (left to right). Cells are equally large whatever their edges; the edges stand at the
    borders. ``deviation`` adds a standard deviation to each cell, ``highest`` ends the colour scale:
    keep it equal between heat maps that are compared.
    """
    cells = np.asarray(dtap, dtype=float)
    if cells.shape != (len(edges) - 1, len(edges) - 1):
        raise InputError(f"a DTAP table of shape {cells.shape} does not fit {len(edges)} edges")
    from matplotlib.colors import PowerNorm

    # A square-root scale: most cells hold a few percent, and would all look alike on a linear one.
    scale = PowerNorm(0.5, vmin=0, vmax=highest)
    image = axes.imshow(cells, origin="lower", cmap=HEATMAP, norm=scale)
    spread = None if deviation is None else np.asarray(deviation, dtype=float)
    for (row, column), value in np.ndenumerate(cells):
        text = "0" if value == 0 else f"{value:.1f}"
        if spread is not None and np.isfinite(spread[row, column]) and (value or spread[row, column]):
            text += f"\n±{spread[row, column]:.1f}"
        # The colour map runs from dark to light, so dark text belongs on its upper half.
        color = "#111111" if scale(value) > 0.55 else "white"
        axes.text(
            column, row, text, ha="center", va="center", color=color, fontsize=8.5, alpha=1 if value else 0.6
        )
    borders = np.arange(len(edges)) - 0.5
    for border in borders[1:-1]:
        axes.axhline(border, color="white", linewidth=0.5, alpha=0.4)
        axes.axvline(border, color="white", linewidth=0.5, alpha=0.4)
    # The released edges end at 1.001 or 1.1 to close the last interval; what they mean is 1.
    names = [f"{min(edge, 1):g}" for edge in edges]
    axes.set_xticks(borders, names)
    axes.set_yticks(borders, names)
    axes.set(xlabel="attention on relevant tokens", ylabel="probability of the answer")
    axes.grid(False)
    if title:
        axes.set_title(title)
    return image


def dtap_rows(dtap: ArrayLike, edges: Sequence[float]) -> list[dict[str, float]]:
    """A DTAP table as tidy rows: the interval of probability, the interval of mass, percent of instances."""
    return [
        {
            "probability_from": edges[row],
            "probability_to": edges[row + 1],
            "mass_from": edges[column],
            "mass_to": edges[column + 1],
            "percent": float(percent),
        }
        for (row, column), percent in np.ndenumerate(np.asarray(dtap, dtype=float))
    ]
