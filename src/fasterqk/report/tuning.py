"""A search on paper: every value tried, what was chosen, and why."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasterqk.report.cells import mean_of
from fasterqk.report.figure import save_figure
from fasterqk.report.style import COLORS, plotting
from fasterqk.report.tables import save_table

TITLES = {"lr": "base rate", "qk_ratio": "multiplier of QK"}
COLUMNS = ("stage", "value", "validation accuracy", "at epoch", "note")
Found = Mapping[str, Any]


def save_tuning(found: Found, out: Path) -> dict[str, dict[str, str]]:
    """Write the table and the figure of what ``experiments.tuning.tune`` found; returns their paths."""
    name, title = f"tune-{found['task']}", f"Search for rates: {found['task']}"
    why = " ".join(reason(found, stage) for stage in found["stages"].values())
    caption = (
        f"Best validation accuracy of runs of at most {found['epochs']} epochs that end when it no longer "
        f"rises (patience {found['patience']}); {found['seeds']} seeds for the best values, one for the "
        f"others. {why}"
    )
    columns = [{"key": key, "label": key} for key in COLUMNS]
    table = save_table(out, name, title=title, caption=caption, columns=columns, rows=tuning_rows(found))
    return {"table": table, "figure": _save_figure(found, out, name, title, caption)}


def tuning_rows(found: Found) -> list[dict[str, Any]]:
    """One row a value that was tried, in the order of the stages."""
    return [
        {
            "stage": TITLES[name],
            "value": row[name],
            "validation accuracy": None if row["diverged"] else row["accuracy"],
            "at epoch": ", ".join("–" if epoch is None else f"{epoch:g}" for epoch in row["epoch"]),
            "note": _note(row),
        }
        for name, stage in found["stages"].items()
        for row in stage["tried"]
    ]


def reason(found: Found, stage: Mapping[str, Any]) -> str:
    """What was chosen in a stage and why, in a sentence or two."""
    name = stage["field"]
    best = next(row for row in stage["tried"] if row["chosen"])
    seeds = best["accuracy"]["n"]
    text = (
        f"Chosen: {TITLES[name]} {best[name]:g}, the highest validation accuracy "
        f"({best['accuracy']['mean']:.4f}, mean of {seeds} seed{'s' if seeds > 1 else ''})."
    )
    if stage["not_told_apart"]:
        others = ", ".join(f"{value:g}" for value in stage["not_told_apart"])
        text += (
            f" Within one standard error of it ({stage['standard_error']:.4f} on "
            f"{found['validation_examples']} examples): {others}."
        )
    if name == "qk_ratio":
        equal = found["accuracy"]["equal_rates"]["mean"]
        text += f" With equal rates: {equal:.4f}."
    return text


def _note(row: Mapping[str, Any]) -> str:
    if row["diverged"]:
        return "diverged"
    return "chosen" if row["chosen"] else "finalist" if row["finalist"] else ""


def _save_figure(found: Found, out: Path, name: str, title: str, caption: str) -> dict[str, str]:
    with plotting():
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(1, 2, figsize=(7.4, 3.0), sharey=True, width_ratios=[3, 2])
        for axis, stage in zip(axes, found["stages"].values(), strict=True):
            _draw_stage(axis, stage)
        axes[0].set(ylabel="validation accuracy", title=f"1. base rate: {found['lr']:g}")
        axes[1].axhline(
            found["accuracy"]["equal_rates"]["mean"],
            color="0.4",
            linestyle="--",
            linewidth=1,
            label="equal rates",
        )
        axes[1].set(title=f"2. multiplier of QK: {found['qk_ratio']:g}")
        axes[1].legend(loc="best")
        return save_figure(figure, out, name, title=title, caption=caption, rows=_figure_rows(found))


def _draw_stage(axis: Any, stage: Mapping[str, Any]) -> None:
    name = stage["field"]
    shown = sorted((row for row in stage["tried"] if not row["diverged"]), key=lambda row: row[name])
    values, means = [row[name] for row in shown], [mean_of(row["accuracy"]) for row in shown]
    axis.plot(values, means, color=COLORS[0], marker="o", markersize=4)
    best = next(row for row in shown if row["chosen"])
    axis.plot(best[name], mean_of(best["accuracy"]), "o", color=COLORS[1], markersize=9, fillstyle="none")
    axis.set(xscale="log", xlabel=TITLES[name])
    if name == "qk_ratio":
        axis.set_xticks(values, [f"{value:g}" for value in values])
        axis.minorticks_off()


def _figure_rows(found: Found) -> list[dict[str, Any]]:
    return [
        {
            "stage": row["stage"],
            "value": row["value"],
            "validation_accuracy": mean_of(row["validation accuracy"]),
        }
        for row in tuning_rows(found)
    ]
