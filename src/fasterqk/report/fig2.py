"""Draws figure 2: a heat map a panel, attention against loss, and the table of all numbers."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fasterqk.attention import DTAP_EDGES
from fasterqk.experiments.fig2 import Fig2
from fasterqk.report.dtap import draw_dtap, dtap_rows
from fasterqk.report.figure import save_figure
from fasterqk.report.style import PARAMETERIZATION_COLORS, plotting
from fasterqk.report.tables import save_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 4
_SETTINGS = {
    "paper": "the paper's text and equation 1: scores are not scaled, the softmax is over all 50 tokens",
    "scaled": "the paper's text, with scores divided by the square root of 50 as in the released code",
    "closed": "the paper's text, with the softmax over the four next tokens only, as in the theory",
    "released": "the released notebooks' literal settings",
}


def write_fig2(data: Fig2, out: Path) -> dict[str, Any]:
    """Write both figures and the table under ``out``; returns the heat maps' paths and the others'."""
    name = "fig2" if data.protocol == "paper" else f"fig2-{data.protocol}"
    seeds = max(len(summary["seeds"]) for summary in data.summaries.values())
    setting = (
        f"Protocol {data.protocol}: {_SETTINGS[data.protocol]}. {seeds} seed{'s' if seeds > 1 else ''},"
        f" {data.panels[0].cell.evaluated} held-out sequences each."
    )
    title = f"Figure 2: attention and prediction on the toy language, {data.protocol}"
    with plotting():
        heat_maps = save_figure(
            draw_heat_maps(data),
            out,
            name,
            title=title,
            caption="Percent of held-out sequences by attention on distinct tokens and probability of the"
            f" right token, mean ± standard deviation over seeds. {setting}",
            rows=[
                {"panel": panel.name, "title": panel.title, **row}
                for panel in data.panels
                for row in dtap_rows(_table_of(data, panel.name), DTAP_EDGES)
            ],
        )
        along = save_figure(
            draw_along_training(data),
            out,
            f"{name}-loss",
            title=f"{title}: attention at equal loss",
            caption=f"Attention on held-out sequences against training loss; a line is one cell. {setting}",
            rows=_history_rows(data),
        )
    table = save_table(
        out,
        f"{name}-panels",
        title=title,
        caption=f"Means over seeds with 95% intervals. {setting}",
        columns=[{"key": key, "label": label} for key, label in _LABELS.items()],
        rows=[_table_row(data, panel.name) for panel in data.panels],
    )
    return {**heat_maps, "along_training": along, "table": table}


def draw_heat_maps(data: Fig2) -> "Figure":
    """One heat map a panel, four in a row; call inside ``plotting()``."""
    import matplotlib.pyplot as plt

    rows = -(-len(data.panels) // _COLUMNS)
    figure, axes = plt.subplots(rows, _COLUMNS, figsize=(11.5, 3.15 * rows), squeeze=False)
    for axis in axes.flat[len(data.panels) :]:
        axis.set_visible(False)
    image = None
    for place, panel in enumerate(data.panels):
        axis = axes.flat[place]
        summary = data.summaries[panel.name]
        title = f"({panel.name}) {panel.title}\n{_headline(summary)}"
        if summary["dtap"] is None:
            axis.set_title(title)
            axis.set_axis_off()
            continue
        deviation = summary["dtap_deviation"] if len(summary["seeds"]) > 1 else None
        image = draw_dtap(axis, summary["dtap"], summary["dtap_edges"], title, deviation=deviation)
        axis.title.set_fontsize(8)
        axis.set_xlabel("attention on distinct tokens" if place + _COLUMNS >= len(data.panels) else "")
        axis.set_ylabel("probability of the label" if place % _COLUMNS == 0 else "")
    if image is not None:
        bar = figure.colorbar(image, ax=axes.ravel().tolist(), label="% of sequences", shrink=0.6, aspect=30)
        bar.ax.grid(False)
    return figure


def draw_along_training(data: Fig2) -> "Figure":
    """Attention against training loss, one plot a parameterization; call inside ``plotting()``."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(panel.cell.parameterization for panel in data.panels))
    figure, axes = plt.subplots(
        1, len(names), figsize=(2.9 * max(len(names), 2), 3.1), sharey=True, squeeze=False
    )
    for axis, name in zip(axes[0], names, strict=True):
        _draw_parameterization(axis, data, name)
    axes[0, 0].set_ylabel("attention on distinct tokens")
    return figure


def _draw_parameterization(axis: "Axes", data: Fig2, name: str) -> None:
    own = [panel for panel in data.panels if panel.cell.parameterization == name]
    styles = dict(zip([panel.name for panel in own], ("-", "--", ":", "-."), strict=False))
    for (panel, seed), result in data.results.items():
        points = [point for point in result["history"] if point["loss"] is not None]
        if panel in styles and points:
            title = next(one.title for one in own if one.name == panel).removeprefix(name).lstrip(", ")
            axis.plot(
                [point["loss"] for point in points],
                [point["mrta"] for point in points],
                styles[panel],
                color=PARAMETERIZATION_COLORS[name],
                alpha=0.8,
                linewidth=1.1,
                label=f"({panel}) {title or 'QK 1x'}" if seed == 0 else None,
            )
    null = data.summaries[own[0].name]["null"]["mrta"]
    if null is not None:
        axis.axhline(null, color="0.5", linewidth=0.8, linestyle=(0, (1, 3)))
    axis.set(xscale="log", xlabel="training loss", title=name, ylim=(-0.02, 1.02))
    axis.invert_xaxis()
    axis.legend(loc="best", handlelength=2.2, fontsize=7)


def _headline(summary: dict[str, Any]) -> str:
    if summary["dtap"] is None:
        return "diverged"
    steps = f"{summary['steps'] / 1000:.0f}k steps"
    text = f"MRTA {summary['mrta']:.3f} (uniform {summary['null']['mrta']:.2f}), {steps}"
    marks = []
    if summary["capped"]:
        marks.append(f"{len(summary['capped'])} of {len(summary['seeds'])} hit the cap")
    if summary["diverged_seeds"]:
        marks.append(f"{len(summary['diverged_seeds'])} diverged")
    if summary["attend_query"]:
        marks.append(f"query token {summary['query_mass']:.2f}")
    return text + (f"\n{', '.join(marks)}" if marks else "")


_LABELS = {
    "panel": "panel",
    "title": "model",
    "mrta": "MRTA",
    "null": "uniform",
    "matched": "MRTA at equal loss",
    "ac": "AC",
    "acmc": "ACMC",
    "accuracy": "accuracy",
    "loss": "loss",
    "steps": "steps",
    "query_mass": "mass on the query token",
    "note": "",
}


def _table_row(data: Fig2, name: str) -> dict[str, Any]:
    summary = data.summaries[name]
    intervals = summary.get("intervals") or {}
    row: dict[str, Any] = {"panel": name, "title": summary["title"], "null": summary["null"]["mrta"]}
    row |= {key: intervals.get(key) for key in ("mrta", "ac", "acmc", "accuracy", "loss", "steps")}
    row["query_mass"] = intervals.get("query_mass") if summary["attend_query"] else None
    found = data.matched[0]["arms"].get(name) if data.matched else None
    row["matched"] = found["mrta"] if found else None
    row["note"] = " ".join(_headline(summary).split("\n")[1:])
    return row


def _table_of(data: Fig2, name: str) -> Any:
    found = data.summaries[name]["dtap"]
    size = len(DTAP_EDGES) - 1
    return np.full((size, size), np.nan) if found is None else found


def _history_rows(data: Fig2) -> list[dict[str, Any]]:
    return [
        {"panel": panel, "seed": seed, **point}
        for (panel, seed), result in data.results.items()
        for point in result["history"]
    ]
