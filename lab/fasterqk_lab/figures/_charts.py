"""The charts that all experiments share: a forest of arms, a difference over losses, points, heat maps."""

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.attention import Interval
from fasterqk_lab.compare import Effect
from fasterqk_lab.figures._style import (
    COLORS,
    DTAP_COLOURS,
    HEATMAP,
    draw_dtap,
    dtap_rows,
    plotting,
    save_figure,
)

# How an effect is drawn, by how it stands.
STANDING_COLORS = {"supports": COLORS[0], "against": COLORS[1], "small": "#737373", "open": "#737373"}
STANDING_WORDS = {"supports": "more", "against": "less", "small": "too small to matter", "open": "open"}
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

    The dotted mark is the null; the difference stands at the right. ``titles`` maps the scores to panels.
    """
    names = names or {}
    labels = list(dict.fromkeys(effect.label for effect in effects))
    height = 1.3 + 0.3 * max(1, len(labels))
    with plotting() as plt:
        figure, axes = plt.subplots(
            1, max(1, len(titles)), figsize=(2.2 + 3.4 * len(titles), height), squeeze=False, sharey=True
        )
        for axis, (score, text) in zip(axes[0], titles.items(), strict=False):
            draw_forest(axis, [effect for effect in effects if effect.score == score], labels)
            axis.set_title(text, fontsize=10)
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


def draw_forest(axis: Any, effects: Sequence[Effect], labels: Sequence[str]) -> None:
    """Draw the effects of one score on ``axis``, each at the height of its label."""
    for effect in effects:
        place, color = labels.index(effect.label), STANDING_COLORS[effect.corrected]
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
    """The difference with its interval and the number of seeds."""
    digits = 1 if effect.margin >= 1 else 3
    text = f"{effect.value.mean:+.{digits}f}"
    if effect.value.n > 1:
        text += f" ± {effect.value.half_width:.{digits}f}"
    return f"{text}  n = {effect.value.n}"


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
            "stands": STANDING_WORDS[effect.corrected],
        }
        for effect in effects
    ]


def _forest_legend(figure: Any, effects: Sequence[Effect]) -> None:
    from matplotlib.lines import Line2D

    marks = {
        STANDING_WORDS[standing]: Line2D(
            [], [], marker="o", linestyle="none", color=STANDING_COLORS[standing]
        )
        for standing in dict.fromkeys(effect.corrected for effect in effects)
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
    labels = list(dict.fromkeys(effect.label for effect in effects if effect.curve))[: len(COLORS)]
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
            caption=f"Band: pointwise 95% interval. Dashed: the level that decides. {caption}",
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
