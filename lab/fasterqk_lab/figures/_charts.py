"""The charts that all experiments share: a forest of arms, a difference over losses, points, heat maps."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.attention.statistics import Interval
from fasterqk_lab.compare import STANDS, Effect
from fasterqk_lab.figures._style import (
    COLORS,
    DTAP_COLOURS,
    HEATMAP,
    PAPER,
    draw_dtap,
    dtap_rows,
    plotting,
    save_figure,
)

# How an effect is drawn, by what it shows.
STANDS_COLORS = dict(zip(STANDS, (*COLORS[:2], "#737373", "#737373"), strict=True))
Names = Mapping[str, str]


def save_forest(
    effects: Sequence[Effect],
    titles: Mapping[str, str],
    out: Path,
    name: str,
    *,
    title: str,
    caption: str,
    names: Names | None = None,
    see: str = "",
) -> dict[str, str]:
    """Draw every effect as a line from the baseline (ring) to the arm (dot), one panel per score.

    The dotted mark is the null; the difference stands at the right. ``titles`` maps the scores to panels,
    three in a line.
    """
    names = names or {}
    labels = list(dict.fromkeys(effect.label for effect in effects))
    columns = min(max(1, len(titles)), 3)
    lines = -(-max(1, len(titles)) // columns)
    size = 2.2 + 3.4 * columns, 0.3 + lines * (1.0 + 0.3 * max(1, len(labels)))
    with plotting() as plt:
        figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, sharey=True)
        for axis, (score, text) in zip(axes.flat, titles.items(), strict=False):
            shown = [effect for effect in effects if effect.score == score]
            draw_forest(axis, shown, [labels.index(effect.label) for effect in shown])
            axis.set_title(text, fontsize=10)
        for axis in axes.flat[len(titles) :]:
            axis.set_visible(False)
        axes[0][0].set_yticks(range(len(labels)), [names.get(label, label) for label in labels])
        axes[0][0].set_ylim(len(labels) - 0.4, -0.6)
        _forest_legend(figure, effects)
        return save_figure(
            figure,
            out,
            name,
            title=title,
            caption=caption,
            rows=effect_rows(effects),
            see=see or "Ring: the baseline. Dot: the arm, at the same training loss. Dotted mark: the null.",
        )


def draw_forest(axis: Any, effects: Sequence[Effect], places: Sequence[int]) -> None:
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


def effect_rows(effects: Sequence[Effect]) -> list[dict[str, Any]]:
    """Effects as rows of a table."""
    return [
        {
            "arm": effect.label,
            "score": effect.score,
            "at": effect.at,
            "loss": effect.loss,
            "baseline": effect.second.mean,
            "value": effect.first.mean,
            "null": effect.null,
            "difference": effect.value.mean,
            "half_width": effect.value.half_width,
            "n": effect.value.n,
            "p": effect.p,
            "levels": effect.agreement,
            "stands": effect.stands,
        }
        for effect in effects
    ]


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
    names: Names | None = None,
) -> dict[str, str]:
    """Draw differences over all training losses that both arms pass, with pointwise intervals."""
    names = names or {}
    every = list(dict.fromkeys(effect.label for effect in effects if effect.curve))
    labels = every[: len(COLORS)]
    left_out = f"The first {len(labels)} of {len(every)} arms. " if len(every) > len(labels) else ""
    with plotting() as plt:
        figure, axes = plt.subplots(
            1, max(1, len(titles)), figsize=(1 + 3.6 * len(titles), 3.2), squeeze=False
        )
        for axis, (score, text) in zip(axes[0], titles.items(), strict=False):
            for place, label in enumerate(labels):
                for effect in effects:
                    if (effect.label, effect.score) == (label, score) and effect.curve:
                        _draw_curve(axis, effect, COLORS[place], names.get(label, label))
            axis.axhline(0, color="0.3", linewidth=1)
            axis.set(xlabel="training loss (training goes to the right)", ylabel="difference", title=text)
            loss_axis(axis)
        if len(labels) > 1:
            axes[0][0].legend(loc="best", fontsize=8)
        return save_figure(
            figure,
            out,
            name,
            title=f"{title}: the difference over all losses",
            caption=f"Band: pointwise 95% interval. Dashed: the level that decides. {left_out}{caption}",
            rows=[
                {"arm": effect.label, "score": effect.score, "loss": loss}
                | {"difference": value.mean, "half_width": value.half_width, "n": value.n}
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
    title: str,
    caption: str,
    see: str = "",
    null: float | None = None,
    joined: str = "",
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
        rows = [point._asdict() for point in points]
        return save_figure(figure, out, name, title=title, caption=caption, rows=rows, see=see)


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


def save_dtaps(
    tables: Mapping[str, Mapping[str, Any]], out: Path, name: str, *, title: str, caption: str
) -> dict[str, str]:
    """Draw the DTAP heat map of every arm side by side, on one scale of colours."""
    highest = max(cell for table in tables.values() for row in table["mean"] for cell in row)
    with plotting() as plt:
        figure, axes = plt.subplots(1, len(tables), figsize=(3.8 * len(tables), 3.5), squeeze=False)
        for axis, (arm, table) in zip(axes[0], tables.items(), strict=True):
            image = draw_dtap(
                axis,
                table["mean"],
                table["edges"],
                arm,
                deviation=table["standard_deviation"],
                highest=highest,
            )
        figure.colorbar(image, ax=axes[0].tolist(), label=DTAP_COLOURS)
        rows = [
            {"arm": arm, **row}
            for arm, table in tables.items()
            for row in dtap_rows(table["mean"], table["edges"])
        ]
        return save_figure(
            figure,
            out,
            name,
            title=f"{title}: DTAP",
            caption=f"Percent of instances, mean ± standard deviation over seeds. {caption}",
            rows=rows,
        )


def draw_grid(
    axis: Any,
    grid: ArrayLike,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    digits: int = 3,
    limits: tuple[float, float] | None = None,
) -> Any:
    """Draw a heat map with its numbers: ``grid[i][j]`` in row i from the bottom and column j; nan is a dash.

    ``limits`` are the ends of the scale of colours; returns the image, for a colour bar.
    """
    cells = np.asarray(grid, dtype=float)
    low, high = limits or (np.nanmin(cells), np.nanmax(cells))
    image = axis.imshow(cells, cmap=HEATMAP, origin="lower", aspect="auto", vmin=low, vmax=high)
    axis.grid(visible=False)
    for (row, column), value in np.ndenumerate(cells):
        dark = np.isnan(value) or value - low > 0.55 * (high - low)
        text = "–" if np.isnan(value) else f"{value:.{digits}f}"
        color = "black" if dark else "white"
        axis.text(column, row, text, ha="center", va="center", fontsize=8 if digits > 2 else 6.5, color=color)
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), rows)
    return image


def draw_intervals(
    axis: Any,
    across: Sequence[float],
    values: Sequence[Interval | None],
    *,
    band: bool = False,
    limits: tuple[float, float] = (-inf, inf),
    **style: Any,
) -> None:
    """Draw means over ``across`` with their intervals, as bars or a band that ends at ``limits``.

    None and nan are left out; a single seed has no interval.
    """
    points = [(x, value) for x, value in zip(across, values, strict=True) if value and isfinite(value.mean)]
    places = [x for x, _ in points]
    means = np.array([value.mean for _, value in points])
    halves = np.nan_to_num(np.array([value.half_width for _, value in points]))
    low, high = np.clip(means - halves, *limits), np.clip(means + halves, *limits)
    if not band:
        axis.errorbar(places, means, yerr=[means - low, high - means], capsize=2, **style)
        return
    [line] = axis.plot(places, means, **style)
    axis.fill_between(places, low, high, color=line.get_color(), alpha=0.13, linewidth=0)
