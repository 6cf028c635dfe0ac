"""The paper's main table: every data set with both arms, what uniform attention gets, and equal loss."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fasterqk.attention import STRONGER_NULLS, score_of, title_of
from fasterqk.console import print_table
from fasterqk.errors import InputError
from fasterqk_lab.experiments._arm_tables import bare, column_label, describe, flat_scores
from fasterqk_lab.experiments._arms import BASELINE, FASTER, Comparison, run_arms, summarize_arms
from fasterqk_lab.experiments._registry import (
    EPOCHS_OPTION,
    PROTOCOL_OPTION,
    CellRunner,
    Experiment,
    Option,
    seeds_option,
)
from fasterqk_lab.experiments.table_hatexplain import table_hatexplain
from fasterqk_lab.experiments.table_squad import SIZES, table_squad
from fasterqk_lab.experiments.table_sva import choose_arms
from fasterqk_lab.figures import COLORS, plotting, save_figure, save_table

# The columns of the paper's Table 1, as the summaries of two-arm experiments name them.
METRICS = (
    "train_accuracy",
    "test_accuracy",
    "train_f1",
    "test_f1",
    "ac",
    "acmc",
    "mrta",
    "sufficiency_5",
    "comprehensiveness_5",
)
DIFFERENCE = "difference"
AT_END = "end of training"

Summary = Mapping[str, Any]


def main_rows(parts: Mapping[str, Summary]) -> list[dict[str, Any]]:
    """Rows ``{dataset, at, setting, METRIC: value}`` from the summaries of several data sets.

    For each data set at the end of training: both arms, their paired difference, the null of both
    (uniform attention; for faithfulness a ranking by chance) and the paper's numbers; then both arms and
    their difference at the lowest training loss that all cells reach. Values are intervals or numbers.
    """
    return [row for dataset, summary in parts.items() for row in _rows(dataset, summary)]


def _rows(dataset: str, summary: Summary) -> Iterator[dict[str, Any]]:
    arms = summary["arms"]
    settings = {arm: _flat(arms[arm]) for arm in (BASELINE, FASTER)}
    end = {"dataset": dataset, "at": AT_END}
    for arm, cells in settings.items():
        yield end | {"setting": arm} | {name: bare(cell) for name, cell in cells.items()}
    difference = _flat(summary["difference"])
    yield end | {"setting": DIFFERENCE} | {name: bare(cell) for name, cell in difference.items()}
    for source in ("null", "paper"):
        for arm, cells in settings.items():
            numbers = {name: cell[source] for name, cell in cells.items() if cell.get(source) is not None}
            if numbers:
                yield end | {"setting": f"{source}, {arm}"} | numbers
    yield from _stronger_nulls(end, {arm: dict(flat_scores(arms[arm])) for arm in settings})
    if summary["matched"]:
        lowest = summary["matched"][0]
        at = {"dataset": dataset, "at": f"training loss {lowest['loss']:.3g}"}
        for arm, cells in lowest["arms"].items():
            yield at | {"setting": arm} | {name: cells[name] for name in METRICS if name in cells}
        for cells in lowest["difference"].values():
            yield at | {"setting": DIFFERENCE} | {name: cells[name] for name in METRICS if name in cells}
        yield from _stronger_nulls(at, lowest["arms"])


def _stronger_nulls(
    at: dict[str, Any], arms: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """One row per arm and stronger null that was measured."""
    for null, title in STRONGER_NULLS.items():
        for arm, cells in arms.items():
            found = {name: bare(cells[key]) for name in METRICS if cells.get(key := f"{null}_{name}")}
            if found:
                yield at | {"setting": f"{title}, {arm}"} | found


def _flat(table: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The cells of the columns that a summary has, under the names of the columns."""
    cells = dict(flat_scores(table))
    return {name: cells[name] for name in METRICS if cells.get(name)}


Row = Mapping[str, Any]
# What the picture shows, in units of one (AC and ACMC are percentages).
SHOWN = ("test_accuracy", "test_f1", "mrta", "ac", "acmc", "sufficiency_5", "comprehensiveness_5")
NAMES = {"paper": "the paper"}
NULL = (
    "Null: uniform attention; for faithfulness, tokens ranked by chance. Sharp null: all attention on one"
    " random token. Permuted null: the model's own attention, dealt out anew to the tokens."
)


def save_main(rows: Sequence[Row], out: Path, name: str, *, caption: str) -> dict[str, Any]:
    """Write the table (JSON and CSV) and the picture; returns their paths by kind."""
    columns = [{"key": key, "label": key} for key in ("dataset", "at", "setting")]
    columns += [{"key": key, "label": title_of(key)} for key in metric_columns(rows)]
    named = [{**row, "setting": column_label(row["setting"], NAMES)} for row in rows]
    title = "Faster query-key learning on real data"
    return {
        "table": save_table(out, name, title=title, caption=f"{NULL} {caption}", columns=columns, rows=named),
        "figure": _save_differences(rows, out, f"{name}-differences", title, caption),
    }


def metric_columns(rows: Sequence[Row]) -> list[str]:
    """The metrics that any data set has, in the paper's order."""
    return [name for name in METRICS if any(name in row for row in rows)]


def difference_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Faster QK minus baseline, one row per data set, score and moment, the paper's own beside."""
    found = []
    for row in rows:
        if row["setting"] == DIFFERENCE:
            source = AT_END if row["at"] == AT_END else "equal training loss"
            values = {name: row[name] for name in SHOWN if name in row}
        elif row["setting"] == "paper, faster_qk":
            source = "the paper"
            base = next(
                r for r in rows if r["setting"] == "paper, baseline" and r["dataset"] == row["dataset"]
            )
            values = {name: row[name] - base[name] for name in SHOWN if name in row and name in base}
        else:
            continue
        for name, value in values.items():
            unit = 0.01 if score_of(name).high == 100 else 1.0
            mean, half = (value["mean"], value["half_width"]) if isinstance(value, Mapping) else (value, None)
            if mean is not None:
                about = {"dataset": row["dataset"], "metric": name, "measured": source}
                width = None if half is None else half * unit
                found.append(about | {"difference": mean * unit, "half_width": width})
    return found


def _save_differences(rows: Sequence[Row], out: Path, name: str, title: str, caption: str) -> dict[str, str]:
    shown = difference_rows(rows)
    datasets = list(dict.fromkeys(row["dataset"] for row in shown))
    metrics = [metric for metric in SHOWN if any(row["metric"] == metric for row in shown)]
    styles: dict[str, dict[str, Any]] = {
        AT_END: {"color": COLORS[0], "marker": "o"},
        "equal training loss": {"color": COLORS[1], "marker": "D"},
        "the paper": {"color": "0.45", "marker": "x"},
    }
    with plotting() as plt:
        figure, axes = plt.subplots(
            1, max(1, len(datasets)), figsize=(3.7 * max(1, len(datasets)), 3.1), sharey=True, squeeze=False
        )
        for axis, dataset in zip(axes[0], datasets, strict=False):
            axis.axvline(0, color="0.3", linewidth=1)
            for shift, (source, style) in zip((-0.22, 0.0, 0.22), styles.items(), strict=True):
                own = [row for row in shown if (row["dataset"], row["measured"]) == (dataset, source)]
                axis.errorbar(
                    [row["difference"] for row in own],
                    [metrics.index(row["metric"]) + shift for row in own],
                    xerr=[row["half_width"] or 0.0 for row in own],
                    linestyle="none",
                    markersize=4.5,
                    elinewidth=1.4,
                    label=source,
                    **style,
                )
            axis.set(title=dataset, xlabel="faster QK minus baseline")
        axes[0][0].set_yticks(range(len(metrics)), [_axis_label(metric) for metric in metrics])
        axes[0][0].invert_yaxis()
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(styles))
        return save_figure(
            figure,
            out,
            name,
            title=f"{title}: differences",
            caption=f"95% intervals. {caption}",
            rows=shown,
            see="Right of the line: higher with faster QK. An interval that crosses the line is no clear"
            " difference.",
        )


def _axis_label(metric: str) -> str:
    text = title_of(metric).replace(", %", "")
    return f"{text}\n(lower is better)" if score_of(metric).better == "lower" else text


def classification_tables(
    runner: CellRunner, protocol: str, seeds: int, epochs: int | None
) -> dict[str, Comparison]:
    """The two arms of the data sets whose answer is a class."""
    sva, _ = choose_arms(runner, protocol, "whole", seeds, epochs)
    return {"SVA": sva, "HateXplain": table_hatexplain(protocol, seeds, epochs)}


def _squad(size: str, protocol: str, seeds: int, epochs: int | None) -> Comparison:
    protocols = table_squad(size, seeds=seeds, epochs=epochs)
    if protocol not in protocols:
        raise InputError(f"--squad {size} has no protocol {protocol!r}; choose --squad paper")
    return protocols[protocol]


def run(
    runner: CellRunner, protocol: str, seeds: int, squad: str | None, squad_seeds: int, epochs: int | None
) -> dict[str, Any]:
    comparisons = classification_tables(runner, protocol, seeds, epochs)
    if squad:
        comparisons[f"SQuAD, {squad}"] = _squad(squad, protocol, squad_seeds, epochs)
    summaries = {
        dataset: summarize_arms(comparison, run_arms(comparison, runner))
        for dataset, comparison in comparisons.items()
    }
    rows = main_rows(summaries)
    caption = f"{'; '.join(describe(summary) for summary in summaries.values())}."
    if squad:
        caption += " Of SQuAD accuracy is exact match, and AC and ACMC count from .1 on, not from .5."
    return {
        "experiment": "table-main",
        "protocol": protocol,
        "rows": rows,
        "parts": summaries,
        "files": save_main(rows, runner.out, f"table-main-{protocol}", caption=caption),
    }


def show(summary: dict[str, Any]) -> None:
    words = ("dataset", "at", "setting")
    metrics = metric_columns(summary["rows"])
    print_table(
        [
            {
                **{key: row[key] for key in words},
                "setting": column_label(row["setting"], NAMES),
                **{title_of(key): row.get(key) for key in metrics},
            }
            for row in summary["rows"]
        ]
    )
    print(f"\nfigure: {summary['files']['figure']['png']}")


EXPERIMENT = Experiment(
    name="table-main",
    chapter="Main",
    options=(
        PROTOCOL_OPTION,
        seeds_option(5),
        Option("squad", str, "SQuAD too, in this size (accuracy is exact match)", choices=tuple(SIZES)),
        Option("squad_seeds", int, "how many of SQuAD", default=1),
        EPOCHS_OPTION,
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce table-main --out out          # trains what the store does not have yet",
        "fasterqk-lab reproduce table-main --squad small      # with SQuAD, in a size for one core",
        "fasterqk-lab reproduce table-main --protocol released --json",
        "fasterqk-lab reproduce table-main --seeds 1 --epochs 1 --workers 1",
    ),
    needs_data=True,
)
