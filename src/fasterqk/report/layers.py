"""Where a deeper model looks and how sharply: rollout and every layer, both arms beside uniform attention."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fasterqk.report.arm_tables import ARM_NAMES, label
from fasterqk.report.arms import ARM_COLORS, describe
from fasterqk.report.cells import cell_text, mean_of
from fasterqk.report.figure import save_figure
from fasterqk.report.style import plotting
from fasterqk.report.tables import save_table

COLUMNS = {
    "attention": "attention",
    "metric": "metric",
    "at": "at",
    "loss": "training loss",
    **ARM_NAMES,
    "difference": "difference",
    "null": "null",
}
# What the figure shows of every layer, and the name of its axis.
PANELS = {"mrta": "attention on relevant tokens", "entropy": "attention entropy, nats"}
MEASURED = (
    "Test split, at equal loss the part of it that is looked at along training; mean and 95% interval over "
    "seeds. "
    "Entropy is that of rollout's row, and in a layer the mean of its heads'."
)
Rows = Sequence[Mapping[str, Any]]


def save_layers(
    rows: Rows, out: Path, name: str, *, title: str, summary: Mapping[str, Any]
) -> dict[str, dict[str, str]]:
    """Write the table and the figure of ``rows`` (from ``summarize_layers``); returns their paths."""
    setting = describe(summary)
    columns: list[dict[str, Any]] = [{"key": key, "label": text} for key, text in COLUMNS.items()]
    columns[-1]["source"] = "null"
    return {
        "table": save_table(
            out,
            f"{name}-by-layer",
            title=f"{title}: attention by layer",
            caption=f"{MEASURED} {setting}.",
            columns=columns,
            rows=[{**row, "metric": label(row["metric"])} for row in rows],
        ),
        "figure": _save_figure(rows, out, f"{name}-by-layer", title, setting),
    }


def as_text(rows: Rows, metric: str) -> list[dict[str, str]]:
    """One metric of every layer, for people to read."""
    return [
        {COLUMNS[key]: cell_text(row[key]) for key in COLUMNS if key != "metric"}
        for row in rows
        if row["metric"] == metric
    ]


def _save_figure(rows: Rows, out: Path, name: str, title: str, setting: str) -> dict[str, str]:
    at_equal_loss = [row for row in rows if row["at"] == "equal loss"]
    panels = {metric: [row for row in at_equal_loss if row["metric"] == metric] for metric in PANELS}
    # Rollout always has an entropy; the layers have one where their heads were measured.
    panels = {metric: shown for metric, shown in panels.items() if metric == "mrta" or len(shown) > 1}
    losses = [row["loss"] for row in at_equal_loss]
    loss = f"training loss {losses[0]:.3f}" if losses else "equal loss, which no two runs share"
    with plotting():
        import matplotlib.pyplot as plt

        widths = [max(1, len(shown)) for shown in panels.values()]
        size = (1.8 + 1.1 * sum(widths), 3.4)
        figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, width_ratios=widths)
        for axis, (metric, shown) in zip(axes[0], panels.items(), strict=True):
            _draw(axis, shown)
            axis.set(ylabel=PANELS[metric], ylim=(0, 1 if metric == "mrta" else None))
        figure.suptitle(title)
        handles, labels = axes[0][0].get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=len(unique))
        return save_figure(
            figure,
            out,
            name,
            title=f"{title}: attention by layer",
            caption=f"Both arms at {loss}. {MEASURED} {setting}.",
            rows=[
                {key: row[key] for key in ("attention", "metric", "loss", "null")}
                | {arm: mean_of(row[arm]) for arm in ARM_NAMES}
                for shown in panels.values()
                for row in shown
            ],
        )


def _draw(axis: Any, shown: Rows) -> None:
    """Both arms of every row, and uniform attention."""
    for place, row in enumerate(shown):
        nulls: dict[str, Any] = {"color": "0.4", "linestyle": "--", "linewidth": 1}
        axis.plot([place - 0.35, place + 0.35], [row["null"]] * 2, **nulls, label="uniform attention")
        for shift, (arm, color) in zip((-0.12, 0.12), ARM_COLORS.items(), strict=True):
            mean, width = mean_of(row[arm]), (row[arm] or {}).get("half_width")
            if mean is not None:
                axis.errorbar(place + shift, mean, width, fmt="o", color=color, label=ARM_NAMES[arm])
    axis.set_xticks(range(len(shown)), [row["attention"] for row in shown])
    axis.grid(axis="x", visible=False)
