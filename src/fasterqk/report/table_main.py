"""The main table on disk, and one picture of it: what faster query-key learning changes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fasterqk.experiments.table_main import METRICS
from fasterqk.report.arm_tables import ARM_NAMES, label
from fasterqk.report.figure import save_figure
from fasterqk.report.style import COLORS, plotting
from fasterqk.report.tables import save_table

Row = Mapping[str, Any]
# What the picture shows, in units of one (AC and ACMC are percentages).
SHOWN = ("test_accuracy", "test_f1", "mrta", "ac", "acmc", "sufficiency_5", "comprehensiveness_5")
PERCENT = ("ac", "acmc")
NAMES = {"null": "null", "paper": "the paper"}
NULL = "Null: uniform attention; for faithfulness, tokens ranked by chance."


def save_main(rows: Sequence[Row], out: Path, name: str, *, caption: str) -> dict[str, Any]:
    """Write the table (JSON and CSV) and the picture; returns their paths by kind."""
    columns = [{"key": key, "label": key} for key in ("dataset", "at", "setting")]
    columns += [{"key": key, "label": label(key)} for key in metric_columns(rows)]
    named = [{**row, "setting": setting_name(row["setting"])} for row in rows]
    title = "Faster query-key learning on real data"
    return {
        "table": save_table(out, name, title=title, caption=f"{NULL} {caption}", columns=columns, rows=named),
        "figure": _save_differences(rows, out, f"{name}-differences", title, caption),
    }


def metric_columns(rows: Sequence[Row]) -> list[str]:
    """The metrics that any data set has, in the paper's order."""
    return [name for name in METRICS if any(name in row for row in rows)]


def setting_name(setting: str) -> str:
    """What a row of the table is called.

    >>> setting_name("null, faster_qk"), setting_name("difference")
    ('null, faster QK', 'difference')
    """
    source, comma, arm = setting.partition(", ")
    if not comma:
        return ARM_NAMES.get(setting, setting)
    return f"{NAMES[source]}, {ARM_NAMES[arm]}"


def difference_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Faster QK minus baseline, one row a data set, metric and moment, the paper's own beside."""
    found = []
    for row in rows:
        if row["setting"] == "difference":
            source = "end of training" if row["at"] == "end of training" else "equal training loss"
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
            unit = 0.01 if name in PERCENT else 1.0
            mean, half = (value["mean"], value["half_width"]) if isinstance(value, Mapping) else (value, None)
            if mean is not None:
                found.append(
                    {
                        "dataset": row["dataset"],
                        "metric": name,
                        "measured": source,
                        "difference": mean * unit,
                        "half_width": None if half is None else half * unit,
                    }
                )
    return found


def _save_differences(rows: Sequence[Row], out: Path, name: str, title: str, caption: str) -> dict[str, str]:
    shown = difference_rows(rows)
    datasets = list(dict.fromkeys(row["dataset"] for row in shown))
    metrics = [metric for metric in SHOWN if any(row["metric"] == metric for row in shown)]
    styles = {
        "end of training": {"color": COLORS[0], "marker": "o"},
        "equal training loss": {"color": COLORS[1], "marker": "D"},
        "the paper": {"color": "0.45", "marker": "x"},
    }
    with plotting():
        import matplotlib.pyplot as plt

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
                    color=style["color"],
                    marker=style["marker"],
                )
            axis.set(title=dataset, xlabel="faster QK minus baseline")
        axes[0][0].set_yticks(range(len(metrics)), [_axis_label(metric) for metric in metrics])
        axes[0][0].invert_yaxis()
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(styles))
        return save_figure(
            figure, out, name, title=f"{title}: differences", caption=f"95% intervals. {caption}", rows=shown
        )


def _axis_label(metric: str) -> str:
    text = label(metric).replace(", %", "")
    return f"{text}\n(lower is better)" if metric.startswith("sufficiency") else text
