"""The charts that all experiments share: a forest of arms, a difference over losses, points, heat maps.

Each is saved under a name in a folder; ``about`` are the ``title``, ``caption`` and ``see`` of a figure.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.attention.statistics import Interval
from fasterqk_lab.compare import STANDS, Effect
from fasterqk_lab.figures._documents import (
    COLORS,
    DTAP_COLOURS,
    HEATMAP,
    PAPER,
    draw_dtap,
    dtap_rows,
    effect_record,
    plotting,
    save_figure,
)

# How an effect is drawn, by what it shows.
STANDS_COLORS = dict(zip(STANDS, (*COLORS[:2], "#737373", "#737373"), strict=True))


@contextmanager
def _plots(
    count: int, most: int, size: tuple[float, float], margin: tuple[float, float] = (0.0, 0.0), **options: Any
) -> Iterator[tuple[Any, list[Any]]]:
    """A figure with ``count`` plots of ``size`` inches, at most so many in a line; ``margin`` is added."""
    columns = max(1, min(most, count))
    lines = -(-max(1, count) // columns)
    figsize = margin[0] + size[0] * columns, margin[1] + size[1] * lines
    with plotting() as plt:
        figure, axes = plt.subplots(lines, columns, figsize=figsize, squeeze=False, **options)
        for axis in axes.flat[count:]:
            axis.set_visible(False)
        yield figure, list(axes.flat)


def save_forest(
    effects: Sequence[Effect],
    titles: Mapping[str, str],
    out: Path,
    name: str,
    *,
    names: Mapping[str, str] = {},
    **about: Any,
) -> dict[str, str]:
    """Draw every effect as a line from the baseline (ring) to the arm (dot), one panel per score.

    The dotted mark is the null; the difference stands at the right. ``titles`` maps the scores to panels,
    three in a line.
    """
    labels = list(dict.fromkeys(effect.label for effect in effects))
    size, margin = (3.4, 1.0 + 0.3 * max(1, len(labels))), (2.2, 0.3)
    with _plots(len(titles), 3, size, margin, sharey=True) as (figure, axes):
        for axis, (score, text) in zip(axes, titles.items(), strict=False):
            shown = [effect for effect in effects if effect.score == score]
            draw_forest(axis, shown, [labels.index(effect.label) for effect in shown])
            axis.set_title(text, fontsize=10)
        axes[0].set_yticks(range(len(labels)), [names.get(label, label) for label in labels])
        axes[0].set_ylim(len(labels) - 0.4, -0.6)
        _forest_legend(figure, effects)
        read = any(effect.loss is not None for effect in effects)
        moment = "at the same training loss" if read else "after training"
        about.setdefault("see", f"Ring: the baseline. Dot: the arm, {moment}. Dotted mark: the null.")
        return save_figure(figure, out, name, rows=map(effect_record, effects), **about)


def draw_forest(axis: Any, effects: Sequence[Effect], places: Sequence[float]) -> None:
    """Draw the effects of one score on ``axis``, each at its place from the top."""
    for place, effect in zip(places, effects, strict=True):
        color = STANDS_COLORS[effect.stands]
        if effect.null is not None:
            axis.plot(
                [effect.null] * 2, [place - 0.35, place + 0.35], color="#737373", linestyle=":", linewidth=1.4
            )
        axis.plot([effect.second.mean, effect.first.mean], [place] * 2, color=color, linewidth=2, alpha=0.55)
        axis.plot(
            effect.second.mean, place, "o", markerfacecolor="white", markeredgecolor=color, markersize=8
        )
        axis.plot(effect.first.mean, place, "o", color=color, markersize=5.5)
        axis.annotate(
            effect_text(effect),
            (1.02, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8.5,
            color=color,
            annotation_clip=False,
        )
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
    axis.margins(x=0.1)
    axis.locator_params(axis="x", nbins=4)


def effect_text(effect: Effect) -> str:
    """The difference with its interval and the number of seeds; a number that others print has none."""
    digits = 1 if effect.margin >= 1 else 3
    text = f"{effect.value.mean:+.{digits}f}"
    if effect.value.n > 1:
        text += f" ± {effect.value.half_width:.{digits}f}"
    return f"{text}  n = {effect.value.n}" if effect.value.n else text


def _forest_legend(figure: Any, effects: Sequence[Effect]) -> None:
    from matplotlib.lines import Line2D

    marks = {
        stands: Line2D([], [], marker="o", linestyle="none", color=STANDS_COLORS[stands])
        for stands in dict.fromkeys(effect.stands for effect in effects)
    }
    if marks:
        figure.legend(list(marks.values()), list(marks), loc="outside lower center", ncols=4, fontsize=9)


def save_curve(
    effects: Sequence[Effect],
    titles: Mapping[str, str],
    out: Path,
    name: str,
    *,
    title: str,
    caption: str,
    names: Mapping[str, str] = {},
) -> dict[str, str]:
    """Draw differences over all training losses that both arms pass, with pointwise intervals."""
    with_curve = list(dict.fromkeys(effect.label for effect in effects if effect.curve))
    labels = with_curve[: len(COLORS)]
    left_out = f"The first {len(labels)} of {len(with_curve)} arms. " if len(with_curve) > len(labels) else ""
    with _plots(len(titles), len(titles), (3.6, 3.2), (1.0, 0.0)) as (figure, axes):
        for axis, (score, text) in zip(axes, titles.items(), strict=False):
            for place, label in enumerate(labels):
                for effect in effects:
                    if (effect.label, effect.score) == (label, score) and effect.curve:
                        _draw_curve(axis, effect, COLORS[place], names.get(label, label))
            axis.axhline(0, color="0.3", linewidth=1)
            axis.set(xlabel="training loss (training goes to the right)", ylabel="difference", title=text)
            loss_axis(axis)
        if len(labels) > 1:
            axes[0].legend(loc="best", fontsize=8)
        return save_figure(
            figure,
            out,
            name,
            title=f"{title}: the difference over all losses",
            caption=f"Band: pointwise 95% interval. Dashed: the level that decides. {left_out}{caption}",
            rows=[
                {"arm": effect.label, "score": effect.score, "loss": loss, "difference": value}
                for effect in effects
                for loss, value in effect.curve
            ],
            see="Above zero: more than the baseline at the same training loss.",
        )


def _draw_curve(axis: Any, effect: Effect, color: str, label: str) -> None:
    losses = [loss for loss, _ in effect.curve]
    means = np.array([value.mean for _, value in effect.curve])
    halves = np.nan_to_num(np.array([value.half_width for _, value in effect.curve]))
    axis.plot(losses, means, color=color, label=label)
    axis.fill_between(losses, means - halves, means + halves, color=color, alpha=0.15, linewidth=0)
    if effect.loss is not None:
        axis.axvline(effect.loss, color="0.4", linestyle="--", linewidth=1)


def loss_axis(axis: Any) -> None:
    """A logarithmic axis that falls to the right, with plain numbers where it spans a decade or so."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xscale("log")
    low, high = axis.get_xlim()
    if high < 30 * low:
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 6, 8)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.invert_xaxis()


class Point(NamedTuple):
    """A dot of a scatter plot, with its name; dots of one kind have one colour."""

    label: str
    kind: str
    x: float
    y: float


# The vertical axis is never so short that noise between seeds looks like an effect.
LEAST_SPAN = 0.1
# From the left edge of a name to its dot.
LEADER: dict[str, Any] = {
    "arrowstyle": "-",
    "color": "0.75",
    "linewidth": 0.6,
    "relpos": (0, 0.5),
    "shrinkA": 0,
    "shrinkB": 3,
}


def save_scatter(
    points: Sequence[Point],
    axes: tuple[str, str],
    out: Path,
    name: str,
    *,
    null: float | None = None,
    joined: str = "",
    **about: Any,
) -> dict[str, str]:
    """Draw named points over two scores, which ``axes`` names; those of the kind ``joined`` by a line.

    ``null`` is the null of the horizontal score.
    """
    colors = dict(zip(dict.fromkeys(point.kind for point in points), COLORS, strict=False))
    with plotting() as plt:
        figure, axis = plt.subplots(figsize=(7.4, 5.0))
        for kind, color in colors.items():
            places = [(point.x, point.y) for point in points if point.kind == kind]
            line = "-" if kind == joined else "none"
            axis.plot(*np.transpose(places), color=color, marker="o", linestyle=line, linewidth=1, label=kind)
        if null is not None:
            axis.axvline(null, color="0.4", linestyle="--", linewidth=1, label="uniform attention")
        axis.set(xlabel=axes[0], ylabel=axes[1])
        axis.legend(loc="lower center", ncols=4, bbox_to_anchor=(0.5, 1.0))
        low, high = axis.get_ylim()
        more = max(0.0, LEAST_SPAN - (high - low)) / 2
        axis.set_ylim(low - more, high + more)
        _label_points(axis, points, colors)
        return save_figure(figure, out, name, rows=[point._asdict() for point in points], **about)


def _label_points(axis: Any, points: Sequence[Point], colors: Mapping[str, str]) -> None:
    """Names in a column beside each of the two crowds that the widest horizontal gap separates."""
    low, high = axis.get_ylim()
    left, right = axis.get_xlim()
    ordered = sorted(points, key=lambda point: point.x)
    gaps = [after.x - before.x for before, after in pairwise(ordered)]
    middle = gaps.index(max(gaps)) + 1 if gaps else len(ordered)
    for crowd in filter(None, (ordered[:middle], ordered[middle:])):
        column = crowd[-1].x + 0.05 * (right - left)
        crowd.sort(key=lambda point: -point.y)
        heights = _spread([point.y for point in crowd], (high - low) / 26)
        for point, height in zip(crowd, heights, strict=True):
            axis.annotate(
                point.label,
                (point.x, point.y),
                xytext=(column, height),
                va="center",
                fontsize=8.5,
                color=colors[point.kind],
                bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
                arrowprops=LEADER,
            )
    axis.set_xlim(left, right + 0.36 * (right - left))


def _spread(heights: Sequence[float], step: float) -> list[float]:
    """Falling ``heights`` moved apart to at least ``step``, each crowd around its own middle.

    >>> [round(height, 6) for height in _spread([0.5, 0.5, 0.1], 0.2)]
    [0.6, 0.4, 0.1]
    """
    # Groups of names that touch, as (sum of wished middles, how many); a group is `step` times as high.
    groups: list[tuple[float, int]] = []
    for height in heights:
        groups.append((height, 1))
        while len(groups) > 1:
            (upper, above), (lower, below) = groups[-2:]
            if upper / above - lower / below >= (above + below) / 2 * step:
                break
            groups[-2:] = [(upper + lower, above + below)]
    return [
        total / count + (count - 1) / 2 * step - place * step
        for total, count in groups
        for place in range(count)
    ]


# --- Panels: lines and points over one another, in plots side by side ---


class Line(NamedTuple):
    """Numbers or intervals over ``across``; None and nan are left out. ``style`` is matplotlib's.

    Intervals are drawn as bars, with ``band`` in the style as a band.
    """

    label: str
    across: Iterable[float]
    up: Iterable[Interval | float | None]
    style: Mapping[str, Any] = {}


def lines_of(
    rows: Iterable[Mapping[str, Any]],
    across: str,
    up: str,
    by: Callable[[Mapping[str, Any]], tuple[str, Any]],
) -> list[Line]:
    """Rows as lines: the column ``up`` over the column ``across``; ``by`` gives the label and style of a row.

    >>> lines_of([{"r": 1, "mass": 0.2}, {"r": 10, "mass": 0.5}], "r", "mass", lambda row: ("trained", {}))
    [Line(label='trained', across=[1, 10], up=[0.2, 0.5], style={})]
    """
    lines: dict[str, tuple[list[Any], list[Any], Any]] = {}
    for row in rows:
        label, style = by(row)
        x, y, _ = lines.setdefault(label, ([], [], style))
        x.append(row[across])
        y.append(row[up])
    return [Line(label, *line) for label, line in lines.items()]


@dataclass(frozen=True)
class Panel:
    """One plot; ``log`` names its logarithmic axes, ``null`` is the height of a dotted line.

    The horizontal axis of one that ``falls`` goes down to the right. ``more`` is for ``Axes.set``.
    """

    title: str
    axes: tuple[str, str]
    lines: Sequence[Line]
    log: str = "x"
    limits: tuple[float | None, float | None] = (None, None)
    null: float | None = None
    legend: Mapping[str, Any] | None = None
    falls: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


def save_panels(
    panels: Sequence[Panel],
    out: Path,
    name: str,
    *,
    columns: int = 4,
    size: tuple[float, float] = (3.0, 2.9),
    share: bool = False,
    rows: Iterable[Mapping[str, Any]] | None = None,
    **about: Any,
) -> dict[str, str]:
    """Draw ``panels``, ``columns`` in a line, each of ``size`` inches; with ``share`` a line has one scale.

    ``rows`` is the table behind the figure, unless it is the points themselves.
    """
    with _plots(len(panels), columns, size, sharey="row" if share else False) as (figure, axes):
        for axis, panel in zip(axes, panels, strict=False):
            for line in panel.lines:
                _draw_line(axis, line)
            if panel.null is not None:
                axis.axhline(panel.null, color="0.5", linewidth=0.9, linestyle=":")
            scales = {f"{letter}scale": "log" for letter in panel.log}
            axis.set(title=panel.title, xlabel=panel.axes[0], ylabel=panel.axes[1], **scales, **panel.more)
            if panel.falls:
                axis.invert_xaxis()
            if panel.limits != (None, None):
                axis.set_ylim(*panel.limits)
            if panel.legend is not None:
                axis.legend(**{"loc": "best", "fontsize": 8, **panel.legend})
        if rows is None:
            rows = [
                {"panel": panel.title, "line": line.label, panel.axes[0]: x, panel.axes[1]: value}
                for panel in panels
                for line in panel.lines
                for x, value in _points(line)
            ]
        return save_figure(figure, out, name, rows=rows, **about)


def _points(line: Line) -> list[tuple[float, Interval]]:
    """The points of a line that are numbers; only intervals have a half width."""
    points = []
    for x, value in zip(line.across, line.up, strict=True):
        point = value if isinstance(value, Interval) else Interval(nan if value is None else value, nan, 1)
        points += [(x, point)] if isfinite(point.mean) else []
    return points


def _draw_line(axis: Any, line: Line) -> None:
    style = {"markersize": 4.5, "label": line.label or None, **line.style}
    band = style.pop("band", False)
    points = _points(line)
    places, means = [x for x, _ in points], np.array([value.mean for _, value in points])
    halves = np.nan_to_num(np.array([value.half_width for _, value in points]))
    [drawn] = axis.plot(places, means, **style)
    color = drawn.get_color()
    if band:
        axis.fill_between(places, means - halves, means + halves, color=color, alpha=0.13, linewidth=0)
    elif halves.any():
        axis.errorbar(places, means, yerr=halves, fmt="none", ecolor=color, elinewidth=0.8, capsize=2)


# --- Heat maps ---


def save_dtaps(
    tables: Mapping[str, Mapping[str, Any]],
    out: Path,
    name: str,
    *,
    caption: str,
    highest: float | None = None,
    **about: Any,
) -> dict[str, str]:
    """Draw the DTAP heat map of every arm, four in a line, on one scale of colours that ends at ``highest``.

    An arm without a table (``mean`` is None) diverged.
    """
    known = {arm: table for arm, table in tables.items() if table["mean"] is not None}
    cells = [cell for table in known.values() for row in table["mean"] for cell in row]
    several = len(tables) > 4
    with _plots(len(tables), 4, (2.9 if several else 3.8, 3.5)) as (figure, axes):
        image = None
        for axis, (arm, table) in zip(axes, tables.items(), strict=False):
            if arm in known:
                options = {"deviation": table["standard_deviation"], "highest": highest or max(cells)}
                image = draw_dtap(axis, table["mean"], table["edges"], arm, **options)
            else:
                axis.set_title(f"{arm}\ndiverged")
                axis.set_axis_off()
            axis.title.set_fontsize(9 if several else 11)
        if image is not None:
            shrink = {"shrink": 0.6, "aspect": 30} if several else {}
            figure.colorbar(image, ax=axes, label=DTAP_COLOURS, **shrink)
        rows = [
            {"arm": arm, **row}
            for arm, table in known.items()
            for row in dtap_rows(table["mean"], table["edges"])
        ]
        caption = f"Percent of instances, mean ± standard deviation over seeds. {caption}"
        return save_figure(figure, out, name, rows=rows, caption=caption, **about)


class Grid(NamedTuple):
    """A table of numbers: ``cells[i][j]`` in row i from the bottom and column j; nan is a dash."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: ArrayLike


def save_grids(
    grids: Sequence[Grid],
    axes: tuple[str, str],
    out: Path,
    name: str,
    *,
    digits: int = 3,
    limits: tuple[float, float] | None = None,
    **about: Any,
) -> dict[str, str]:
    """Draw heat maps with their numbers, at most four in a line.

    ``limits`` are the ends of the scale of colours; by default each heat map has its own scale.
    """
    with _plots(len(grids), 4, (4.0, 3.3)) as (figure, plots):
        for axis, grid in zip(plots, grids, strict=False):
            _draw_grid(axis, grid, digits, limits)
            axis.set(title=grid.title, xlabel=axes[0], ylabel=axes[1])
        rows = [
            {"grid": grid.title, axes[1]: row, axes[0]: column, "value": float(value)}
            for grid in grids
            for row, values in zip(grid.rows, np.asarray(grid.cells, dtype=float), strict=True)
            for column, value in zip(grid.columns, values, strict=True)
        ]
        return save_figure(figure, out, name, rows=rows, **about)


def _draw_grid(axis: Any, grid: Grid, digits: int, limits: tuple[float, float] | None) -> None:
    cells = np.asarray(grid.cells, dtype=float)
    low, high = limits or (np.nanmin(cells), np.nanmax(cells))
    axis.imshow(cells, cmap=HEATMAP, origin="lower", aspect="auto", vmin=low, vmax=high)
    axis.grid(visible=False)
    for (row, column), value in np.ndenumerate(cells):
        dark = np.isnan(value) or value - low > 0.55 * (high - low)
        text = "–" if np.isnan(value) else f"{value:.{digits}f}"
        color = "black" if dark else "white"
        axis.text(column, row, text, ha="center", va="center", fontsize=8 if digits > 2 else 6.5, color=color)
    axis.set_xticks(range(len(grid.columns)), grid.columns)
    axis.set_yticks(range(len(grid.rows)), grid.rows)
