"""Tables and figures of two arms: at the end, at the best validation epoch, at equal loss, along training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fasterqk.attention import SCORES, STRONGER_NULLS, score_of, title_of
from fasterqk.console import is_interval
from fasterqk_lab.figures import (
    COLORS,
    DTAP_COLOURS,
    draw_dtap,
    dtap_rows,
    plotting,
    save_comparison,
    save_curves,
    save_examples,
    save_figure,
    save_table,
)
from fasterqk_lab.training import TrainResult

ARM_NAMES = {"baseline": "baseline", "faster_qk": "faster QK"}
# Scores that are compared with uniform attention; rollout and every layer have them.
UNIFORM = [score.name for score in SCORES.values() if score.tables and score.null == "uniform"]
# Where printed numbers come from.
SOURCES = {"paper": "paper", "released": "notebooks"}


def flat_scores(table: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The scores of one arm, each as its flat name (``sufficiency_5``) and its cell."""
    groups = {*(score.group for score in SCORES.values()), *STRONGER_NULLS}
    for name, value in table.items():
        if is_interval(value):
            yield name, value
        elif name in groups:
            for key, cell in value.items():
                # The group is part of the name, except that of "auprc" and the like.
                whole = f"{name}_{key}"
                alone = key in SCORES and whole not in SCORES and name not in STRONGER_NULLS
                yield (key if alone else whole), cell


def bare(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The interval of a cell, without null and others' numbers."""
    return {key: cell[key] for key in ("mean", "half_width", "n")}


def save_tables(
    summary: Mapping[str, Any], out: Path, name: str, *, title: str, setting: str
) -> dict[str, dict[str, str]]:
    """Write all tables of ``summary`` as ``NAME-end`` and so on; returns their paths by kind and suffix."""
    kinds = {
        "end": ("at the end of training", "Mean and 95% interval over seeds, on the test split.", end_rows),
        "best": (
            "at the best validation epoch",
            "Every cell at its own best epoch; train accuracy on a fixed part of the training data.",
            best_rows,
        ),
        "matched": (
            "at equal training loss",
            "Both arms where their training loss first falls to the same level.",
            matched_rows,
        ),
    }
    saved = {
        kind: _save(out, f"{name}-{kind}", f"{title}: {when}", f"{what} {setting}.", rows(summary))
        for kind, (when, what, rows) in kinds.items()
    }
    for group in summary["arms"]["baseline"].get("groups") or {}:
        caption = f"Beside it the accuracy of always saying the most frequent class. {setting}."
        rows_of = group_rows(summary, group)
        saved[group] = _save(out, f"{name}-{group}", f"{title}: accuracy by {group}", caption, rows_of)
    return saved


def end_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per score at the end: both arms, their difference, their nulls, and others' numbers."""
    difference = dict(flat_scores(summary["difference"]))
    return _arm_rows(summary["arms"], difference)


def best_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same at the best validation epoch."""
    return _arm_rows({arm: entry["at_best_validation"] for arm, entry in summary["arms"].items()}, {})


def matched_rows(
    summary: Mapping[str, Any], chosen: Callable[[str], bool] = lambda name: True
) -> list[dict[str, Any]]:
    """One row per loss level and score, of all scores or of those that are ``chosen`` by name."""
    rows = []
    for level in summary["matched"]:
        for name in next(iter(level["arms"].values()), {}):
            if not chosen(name):
                continue
            row = {"metric": title_of(name), "at loss": level["loss"]}
            row |= {arm: values[name] for arm, values in level["arms"].items()}
            difference = level["difference"].get("faster_qk")
            rows.append(row | {"difference": difference and difference[name]})
    return rows


def group_rows(summary: Mapping[str, Any], group: str) -> list[dict[str, Any]]:
    """Accuracy by group, one row per value of the group."""
    arms = {arm: entry["groups"][group] for arm, entry in summary["arms"].items() if "groups" in entry}
    return [
        {
            group: int(value),
            "sentences": entry["n"],
            **{arm: groups[value]["accuracy"] for arm, groups in arms.items()},
            "null, most frequent class": entry["majority_accuracy"],
        }
        for value, entry in next(iter(arms.values())).items()
    ]


def _arm_rows(arms: Mapping[str, Mapping[str, Any]], difference: Mapping[str, Any]) -> list[dict[str, Any]]:
    metrics = {arm: dict(flat_scores(table)) for arm, table in arms.items()}
    rows = []
    for name in next(iter(metrics.values())):
        cells = {arm: table[name] for arm, table in metrics.items() if name in table}
        row: dict[str, Any] = {"metric": title_of(name)}
        row |= {arm: bare(cell) for arm, cell in cells.items()}
        if name in difference:
            row["difference"] = difference[name]
        row |= {f"null, {arm}": cell["null"] for arm, cell in cells.items() if cell["null"] is not None}
        for source in SOURCES:
            row |= {f"{source}, {arm}": cell[source] for arm, cell in cells.items() if source in cell}
        rows.append(row)
    return rows


def _save(out: Path, name: str, title: str, caption: str, rows: list[dict[str, Any]]) -> dict[str, str]:
    columns = [_column(key) for key in column_keys(rows)]
    return save_table(out, name, title=title, caption=caption, columns=columns, rows=rows)


def column_keys(rows: list[dict[str, Any]]) -> list[str]:
    """The keys of all rows in the order of a table: ours, the nulls, others' numbers."""
    sources = ["null", *SOURCES]

    def place(key: str) -> int:
        return sources.index(key.partition(",")[0]) + 1 if "," in key else 0

    return sorted(dict.fromkeys(key for row in rows for key in row), key=place)


def column_label(key: str, sources: Mapping[str, str] = SOURCES) -> str:
    """What a column is called, or a row of a table in which arms are rows.

    >>> column_label("faster_qk"), column_label("released, baseline")
    ('faster QK', 'notebooks, baseline')
    """
    source, comma, arm = key.partition(", ")
    if not comma:
        return ARM_NAMES.get(key, key)
    return f"{sources.get(source, source)}, {ARM_NAMES.get(arm, arm)}"


def _column(key: str) -> dict[str, Any]:
    source, comma, _ = key.partition(", ")
    column = {"key": key, "label": column_label(key)}
    if comma:
        column["source"] = "null" if source == "null" else "paper"
    return column


ARM_COLORS = {"baseline": COLORS[0], "faster_qk": COLORS[1]}
PANELS = {"mrta": "attention on relevant tokens (MRTA)", "test_accuracy": "test accuracy"}

Summary = Mapping[str, Any]
Results = Mapping[tuple[str, int], TrainResult]


def save_arms(summary: Summary, results: Results, out: Path, *, title: str) -> dict[str, Any]:
    """Write everything that shows ``summary`` (from ``experiments.arms``); returns the paths by kind."""
    name = f"{summary['experiment']}-{summary['protocol']}"
    setting = describe(summary)
    _save_epochs(summary, results, out, name, title, setting)
    _save_comparison(summary, out, name, title, setting)
    return {
        "tables": save_tables(summary, out, name, title=title, setting=setting),
        "dtap": _save_heat_maps(summary, out, f"{name}-dtap", title, setting),
        "loss": _save_loss_figure(summary, results, out, f"{name}-loss", title, setting),
    }


def save_arm_examples(
    summary: Summary, examples: Sequence[Mapping[str, Any]], out: Path, *, title: str, sensitive: bool
) -> None:
    """Write single examples with the attention of both arms, for the report to show."""
    named = [
        {**example, "arms": {ARM_NAMES[arm]: reading for arm, reading in example["arms"].items()}}
        for example in examples
    ]
    save_examples(
        out,
        f"{summary['experiment']}-{summary['protocol']}",
        title=f"{title}: where it looks",
        caption=f"Seed {summary['seeds'][0]}. {describe(summary)}.",
        arms=list(ARM_NAMES.values()),
        examples=named,
        sensitive=sensitive,
    )


def describe(summary: Summary) -> str:
    """What was run, in a few words."""
    seeds, baseline, faster = len(summary["seeds"]), *(summary["arms"][arm] for arm in ARM_NAMES)
    changed = [f"QK learning rate times {faster['qk_ratio']:g}"]
    if faster["lr"] != baseline["lr"]:
        changed.append(f"base rate {faster['lr']:g} instead of {baseline['lr']:g}")
    if faster["epochs"] != summary["epochs"]:
        changed.append(f"{faster['epochs']} epochs")
    return (
        f"{summary['experiment']}, protocol {summary['protocol']}: {summary['epochs']} epochs, "
        f"{seeds} seed{'s' if seeds > 1 else ''}, {', '.join(changed)} in the faster arm"
    )


def _save_heat_maps(summary: Summary, out: Path, name: str, title: str, setting: str) -> dict[str, str]:
    arms = {arm: entry["dtap"] for arm, entry in summary["arms"].items() if "dtap" in entry}
    rows = [
        {"arm": arm, **row} for arm, table in arms.items() for row in dtap_rows(table["mean"], table["edges"])
    ]
    highest = max((cell for table in arms.values() for row in table["mean"] for cell in row), default=100.0)
    with plotting() as plt:
        figure, axes = plt.subplots(1, max(1, len(arms)), figsize=(7.6, 3.5), squeeze=False)
        for axis, (arm, table) in zip(axes[0], arms.items(), strict=False):
            image = draw_dtap(
                axis,
                table["mean"],
                table["edges"],
                ARM_NAMES[arm],
                deviation=table["standard_deviation"],
                highest=highest,
            )
        if arms:
            figure.colorbar(image, ax=axes[0].tolist(), label=DTAP_COLOURS)
        caption = f"Percent of test instances, mean ± standard deviation over seeds. {setting}."
        return save_figure(figure, out, name, title=f"{title}: DTAP", caption=caption, rows=rows)


def _save_loss_figure(
    summary: Summary, results: Results, out: Path, name: str, title: str, setting: str
) -> dict[str, str]:
    """Attention and test accuracy against training loss, one line per cell: the idea in one picture."""
    rows = [
        {"arm": arm, "seed": seed, "epoch": point["epoch"], "loss": point["loss"]}
        | {key: point.get(key) for key in PANELS}
        for (arm, seed), result in results.items()
        for point in _finite(result)
    ]
    null = summary["arms"]["baseline"]["null"]["mrta"]
    with plotting() as plt:
        figure, axes = plt.subplots(1, len(PANELS), figsize=(7.4, 3.2))
        for axis, (key, label) in zip(axes, PANELS.items(), strict=True):
            for (arm, _), result in results.items():
                _draw_cell(axis, arm, _finite(result), key)
            axis.set(xlabel="training loss (training goes to the right)", ylabel=label)
            _loss_axis(axis)
        if null is not None:
            axes[0].axhline(null, color="0.4", linestyle="--", linewidth=1, label="uniform attention")
        handles, labels = axes[0].get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        axes[0].legend(unique.values(), unique.keys(), loc="best")
        return save_figure(
            figure,
            out,
            name,
            title=f"{title}: attention at equal loss",
            caption=f"A line is one cell, a point one evaluation on the test split. {setting}.",
            rows=rows,
        )


def _loss_axis(axis: Any) -> None:
    """A logarithmic axis that falls to the right, with plain numbers where it spans a decade or so."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xscale("log")
    low, high = axis.get_xlim()
    if high < 30 * low:
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 6, 8)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
    axis.invert_xaxis()


def _draw_cell(axis: Any, arm: str, points: Sequence[Mapping[str, Any]], key: str) -> None:
    shown = [point for point in points if point.get(key) is not None]
    axis.plot(
        [point["loss"] for point in shown],
        [point[key] for point in shown],
        color=ARM_COLORS[arm],
        label=ARM_NAMES[arm],
        alpha=0.8,
        linewidth=1.1,
        marker="o",
        markersize=2,
    )


def _save_epochs(summary: Summary, results: Results, out: Path, name: str, title: str, setting: str) -> None:
    null = summary["arms"]["baseline"]["null"]["mrta"]
    mass: dict[str, Any] = {"key": "mrta", "label": PANELS["mrta"]}
    save_curves(
        out,
        name,
        title=f"{title}: along training",
        caption=f"{setting}.",
        x={"key": "epoch", "label": "epoch"},
        metrics=[
            {"key": "loss", "label": "training loss", "log": True},
            mass if null is None else {**mass, "null": null},
            {"key": "test_accuracy", "label": "test accuracy"},
        ],
        cells=[
            {"arm": ARM_NAMES[arm], "seed": seed, "points": _finite(result)}
            for (arm, seed), result in results.items()
        ],
    )


def _save_comparison(summary: Summary, out: Path, name: str, title: str, setting: str) -> None:
    """All scores of the end but those with one value per percentage and those of validation."""
    arms = []
    for arm, entry in summary["arms"].items():
        cells = {
            name: cell
            for name, cell in flat_scores(entry)
            if not score_of(name).per_k and not name.startswith("validation_")
        }
        arms.append(
            {
                "arm": ARM_NAMES[arm],
                "qk_ratio": entry["qk_ratio"],
                "seeds": len(summary["seeds"]),
                "metrics": {name.removeprefix("test_"): bare(cell) for name, cell in cells.items()},
                "null": {
                    name: cell["null"] for name, cell in cells.items() if score_of(name).null == "uniform"
                },
            }
        )
    matched = [
        level
        | {
            part: {ARM_NAMES[arm]: values for arm, values in level[part].items()}
            for part in ("arms", "difference")
        }
        for level in summary["matched"]
    ]
    save_comparison(out, name, title=title, setting=setting, arms=arms, matched=matched)


def _finite(result: TrainResult) -> list[Mapping[str, Any]]:
    return [point for point in result.history if point["loss"] is not None]
