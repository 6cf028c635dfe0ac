"""The ablation in one picture: attention on relevant tokens against accuracy, a point an arm."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasterqk.experiments.ablation import EQUAL, METRICS
from fasterqk.report.arm_tables import label
from fasterqk.report.cells import mean_of
from fasterqk.report.figure import save_figure
from fasterqk.report.style import COLORS, plotting
from fasterqk.report.tables import save_table

LABELS = {"arm": "arm"} | {
    name: label(name)
    for name in ("test_accuracy", "mrta", "ac", "acmc", "aopc_sufficiency", "aopc_comprehensiveness")
}
KIND_COLORS = {"QK alone": COLORS[1], "QK, and more": COLORS[4], "without faster QK": COLORS[0]}
Summary = Mapping[str, Any]


def save_ablation(summary: Summary, out: Path, *, title: str) -> dict[str, dict[str, str]]:
    """Write the table and the figure of ``summary`` (from ``experiments.ablation``); returns their paths."""
    name, setting = summary["experiment"], describe(summary)
    columns = [{"key": key, "label": key} for key in ("arm", "at", "loss")] + [
        {"key": key, "label": label(key)} for key in METRICS
    ]
    caption = (
        "Test split, mean and 95% interval over seeds; at equal loss where the training loss first falls "
        f"to the level, and at the end of training. {setting}."
    )
    table = save_table(out, name, title=title, caption=caption, columns=columns, rows=ablation_rows(summary))
    return {"table": table, "figure": _save_figure(summary, out, name, title, setting)}


def describe(summary: Summary) -> str:
    """What was run, in a few words."""
    seeds = len(summary["seeds"])
    return (
        f"{summary['experiment']}: {len(summary['arms'])} arms, {summary['epochs']} epochs at a constant "
        f"rate, {seeds} seed{'s' if seeds > 1 else ''}"
    )


def ablation_rows(summary: Summary) -> list[dict[str, Any]]:
    """One row for every arm at every loss level, and at the end."""
    rows = [
        {"arm": arm, "at": "equal loss", "loss": level["loss"], **metrics}
        for level in summary["matched"]
        for arm, metrics in level["arms"].items()
    ]
    for arm, entry in summary["arms"].items():
        ends = entry["end"]
        rows.append({"arm": arm, "at": "end", "loss": ends["loss"]} | {name: ends[name] for name in METRICS})
    return rows


def _save_figure(summary: Summary, out: Path, name: str, title: str, setting: str) -> dict[str, str]:
    level = summary["matched"][0] if summary["matched"] else {"loss": None, "arms": {}}
    points = [
        {
            "arm": arm,
            "kind": kind_of(arm),
            "loss": level["loss"],
            "mrta": mean_of(metrics["mrta"]),
            "mrta_half_width": metrics["mrta"]["half_width"],
            "test_accuracy": mean_of(metrics["test_accuracy"]),
            "test_accuracy_half_width": metrics["test_accuracy"]["half_width"],
        }
        for arm, metrics in level["arms"].items()
    ]
    with plotting():
        import matplotlib.pyplot as plt

        figure, axis = plt.subplots(figsize=(7.4, 5.0))
        _draw(axis, points, summary["null"]["mrta"])
        return save_figure(
            figure,
            out,
            name,
            title=title,
            caption=f"Every arm where its training loss first falls to {level['loss']:.3f}. {setting}."
            if level["loss"]
            else f"No loss is reached by all arms. {setting}.",
            rows=points,
        )


def kind_of(arm: str) -> str:
    """How an arm is drawn.

    >>> kind_of("QK ×30"), kind_of("QK ×30, MLP frozen"), kind_of("OV ÷30")
    ('QK alone', 'QK, and more', 'without faster QK')
    """
    if arm == EQUAL or (arm.startswith("QK ×") and "," not in arm):
        return "QK alone"
    return "QK, and more" if arm.startswith("QK ") else "without faster QK"


def _draw(axis: Any, points: list[dict[str, Any]], null: float | None) -> None:
    for kind, color in KIND_COLORS.items():
        own = [point for point in points if point["kind"] == kind]
        axis.errorbar(
            [point["mrta"] for point in own],
            [point["test_accuracy"] for point in own],
            xerr=[point["mrta_half_width"] or 0 for point in own],
            yerr=[point["test_accuracy_half_width"] or 0 for point in own],
            fmt="none",
            ecolor=color,
            elinewidth=0.8,
            alpha=0.3,
        )
        line = "-" if kind == "QK alone" else "none"
        axis.plot(
            [point["mrta"] for point in own],
            [point["test_accuracy"] for point in own],
            color=color,
            marker="o",
            linestyle=line,
            linewidth=1,
            label=kind,
        )
    if null is not None:
        axis.axvline(null, color="0.4", linestyle="--", linewidth=1, label="uniform attention")
    axis.set(xlabel="attention on relevant tokens (MRTA)", ylabel="test accuracy")
    axis.legend(loc="lower center", ncols=4, bbox_to_anchor=(0.5, 1.0))
    _label_points(axis, points)


def _label_points(axis: Any, points: list[dict[str, Any]]) -> None:
    """Names beside their points, moved up or down until none lies on another."""
    low, high = axis.get_ylim()
    left, right = axis.get_xlim()
    spacing, width = (high - low) / 30, (right - left) / 3
    placed: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: -point["test_accuracy"]):
        x, y = point["mrta"], point["test_accuracy"]
        while any(abs(x - other_x) < width and abs(y - other_y) < spacing for other_x, other_y in placed):
            y -= spacing / 4
        placed.append((x, y))
        axis.annotate(
            point["arm"],
            (x, point["test_accuracy"]),
            xytext=(x + (right - left) * 0.03, y),
            textcoords="data",
            va="center",
            fontsize=7.5,
            color=KIND_COLORS[point["kind"]],
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
        )
