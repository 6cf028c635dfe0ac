"""The ablation in one picture: attention on relevant tokens against accuracy, a point an arm."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
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
LEAST_SPAN = 0.1
# From the left edge of a name to its point.
LEADER: dict[str, Any] = {
    "arrowstyle": "-",
    "color": "0.75",
    "linewidth": 0.6,
    "relpos": (0, 0.5),
    "shrinkA": 0,
    "shrinkB": 3,
}
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
            caption=f"Every arm where its training loss first falls to {level['loss']:.3f}, mean over seeds; "
            f"intervals are in the table. {setting}."
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
    at = f", at training loss {points[0]['loss']:.3f}" if points else ""
    axis.set(xlabel=f"attention on relevant tokens (MRTA){at}", ylabel="test accuracy")
    axis.legend(loc="lower center", ncols=4, bbox_to_anchor=(0.5, 1.0))
    # Never so narrow that noise between seeds looks like an effect.
    low, high = axis.get_ylim()
    more = max(0.0, LEAST_SPAN - (high - low)) / 2
    axis.set_ylim(low - more, high + more)
    _label_points(axis, points)


def _label_points(axis: Any, points: list[dict[str, Any]]) -> None:
    """Names in a column beside each of the two crowds that the widest gap in mass tells apart."""
    low, high = axis.get_ylim()
    left, right = axis.get_xlim()
    step = (high - low) / 26
    ordered = sorted(points, key=lambda point: point["mrta"])
    gaps = [after["mrta"] - before["mrta"] for before, after in pairwise(ordered)]
    middle = gaps.index(max(gaps)) + 1 if gaps else len(ordered)
    for crowd in filter(None, (ordered[:middle], ordered[middle:])):
        column = crowd[-1]["mrta"] + 0.05 * (right - left)
        crowd.sort(key=lambda point: -point["test_accuracy"])
        heights = _spread([point["test_accuracy"] for point in crowd], step)
        for point, height in zip(crowd, heights, strict=True):
            axis.annotate(
                point["arm"],
                (point["mrta"], point["test_accuracy"]),
                xytext=(column, height),
                va="center",
                fontsize=7.5,
                color=KIND_COLORS[point["kind"]],
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
                arrowprops=LEADER,
            )
    axis.set_xlim(left, right + 0.33 * (right - left))


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
