"""Attention of deeper models: rollout and every layer by itself, both arms beside uniform attention."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fasterqk.attention import SCORES, interval, matched_loss, paired_difference, title_of
from fasterqk.console import mean_of, print_table
from fasterqk.files import plain
from fasterqk_lab.experiments._arm_tables import ARM_COLORS, ARM_NAMES, UNIFORM, describe
from fasterqk_lab.experiments._arms import (
    BASELINE,
    FASTER,
    Comparison,
    Results,
    run_arms,
    save_comparison,
    show_arms,
)
from fasterqk_lab.experiments._registry import CellRunner
from fasterqk_lab.figures import plotting, save_figure, save_table
from fasterqk_lab.training._classification import flat

Rows = Sequence[Mapping[str, Any]]


def run_with_layers(comparison: Comparison, runner: CellRunner) -> dict[str, Any]:
    """Run what is not done yet, write everything, and return what :func:`save_with_layers` does."""
    return save_with_layers(comparison, run_arms(comparison, runner), runner)


def save_with_layers(comparison: Comparison, results: Results, runner: CellRunner) -> dict[str, Any]:
    """Write everything, and return the summary of both arms with ``by_layer`` and ``files``."""
    summary = save_comparison(comparison, results, runner)
    rows = summarize_layers(comparison, results)
    name = f"{comparison.name}-{comparison.protocol}"
    files = save_layers(rows, runner.out, name, title=comparison.title, summary=summary)
    return {**summary, "by_layer": rows, "files": {**summary["files"], "layers": files}}


def summarize_layers(comparison: Comparison, results: Results) -> list[dict[str, Any]]:
    """Mass, AC, ACMC and entropy of rollout and of every layer alone, at the end and at equal loss.

    One row for each: ``attention`` (rollout, layer average where it was measured, layer 1, ...),
    ``metric``, ``at`` (``end``: all test instances that are measured then; ``equal loss``: those looked at
    along training), ``loss``, both arms and their paired difference as intervals, and the ``null``. The
    stronger nulls of a score are rows of their own (``permuted_ac``), because they differ between the arms.
    """
    histories: dict[tuple[Any, Any], Any] = {
        cell: [] if result.diverged else result.history for cell, result in results.items()
    }
    at_end = {cell: {} if result.diverged else flat(result.test) for cell, result in results.items()}
    finished: list[dict[str, Any]] = next((history for history in histories.values() if history), [{}])
    names = [
        (attention, metric, f"{prefix}{metric}", f"{prefix}null_{metric}")
        for attention, prefix in _attentions(comparison)
        for name in UNIFORM
        for metric in (name, *(f"{null}_{name}" for null in SCORES[name].stronger_nulls))
        if f"{prefix}{metric}" in finished[-1]
    ]
    matched = matched_loss(histories, [key for _, _, key, _ in names])[:1]
    last = [history[-1] for history in histories.values() if history]
    rows: list[dict[str, Any]] = []
    for attention, metric, key, null in names:
        shared = {"attention": attention, "metric": metric}
        for level in matched:
            row = shared | {"null": _null(last, null), "at": "equal loss", "loss": level["loss"]}
            row |= {arm: level["arms"].get(arm, {}).get(key) for arm in comparison.arms}
            rows.append(row | {"difference": level["difference"].get(FASTER, {}).get(key)})
        row = shared | {"null": _null(at_end.values(), null), "at": "end", "loss": None}
        ends = {arm: [at_end[arm, seed].get(key) for seed in comparison.seeds] for arm in comparison.arms}
        row |= {arm: interval(values) for arm, values in ends.items()}
        rows.append(row | {"difference": paired_difference(ends[FASTER], ends[BASELINE])})
    return [plain(row) for row in rows]


def _attentions(comparison: Comparison) -> list[tuple[str, str]]:
    """What attention is read from, and how its metrics begin in a record of the history."""
    layers = comparison.arms[BASELINE].model.layers
    single = ((f"layer {n}", f"layer_{n}_") for n in range(1, layers + 1))
    return [("rollout", ""), ("layer average", "average_"), *single]


def _null(records: Iterable[Mapping[str, Any]], key: str) -> float | None:
    """What uniform attention scores; ACMC also depends on the predictions: mean over cells."""
    found = [record.get(key) for record in records if record]
    return interval(found).mean if found else None


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
LAYER_PANELS = {"mrta": "attention on relevant tokens", "entropy": "attention entropy, nats"}
MEASURED = (
    "Test split, at equal loss the part of it that is looked at along training; mean and 95% interval over "
    "seeds. "
    "Entropy is that of rollout's row, and in a layer the mean of its heads'."
)


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
            rows=[{**row, "metric": title_of(row["metric"])} for row in rows],
        ),
        "figure": _save_figure(rows, out, f"{name}-by-layer", title, setting),
    }


def rows_of_score(rows: Rows, metric: str) -> Rows:
    """One score of every layer, under the labels of the columns."""
    return [
        {COLUMNS[key]: row[key] for key in COLUMNS if key != "metric"}
        for row in rows
        if row["metric"] == metric
    ]


def _save_figure(rows: Rows, out: Path, name: str, title: str, setting: str) -> dict[str, str]:
    at_equal_loss = [row for row in rows if row["at"] == "equal loss"]
    panels = {metric: [row for row in at_equal_loss if row["metric"] == metric] for metric in LAYER_PANELS}
    # Rollout always has an entropy; the layers have one where their heads were measured.
    panels = {metric: shown for metric, shown in panels.items() if metric == "mrta" or len(shown) > 1}
    losses = [row["loss"] for row in at_equal_loss]
    loss = f"training loss {losses[0]:.3f}" if losses else "equal loss, which no two runs share"
    with plotting() as plt:
        widths = [max(1, len(shown)) for shown in panels.values()]
        size = (1.8 + 1.1 * sum(widths), 3.4)
        figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, width_ratios=widths)
        for axis, (metric, shown) in zip(axes[0], panels.items(), strict=True):
            _draw(axis, shown)
            axis.set(ylabel=LAYER_PANELS[metric], ylim=(0, 1 if metric == "mrta" else None))
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
            see="Compare each dot with the dashed mark below or above it, which is uniform attention.",
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


def show_with_layers(summary: dict[str, Any]) -> None:
    """Print the tables of both arms, and mass and entropy of every layer."""
    show_arms(summary)
    rows = summary["by_layer"]
    print_table(rows_of_score(rows, "mrta"), title="\nattention on relevant tokens by layer (test split)")
    sharpness = rows_of_score(rows, "entropy")
    if len({row["attention"] for row in sharpness}) > 1:
        print_table(sharpness, title="\nattention entropy by layer, nats (test split)")
    print(f"figure: {summary['files']['layers']['figure']['png']}\n")
