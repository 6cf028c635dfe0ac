"""The tables of a two-arm experiment: at the end, at the best validation epoch, and at equal loss."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fasterqk.report.tables import save_table

ARM_NAMES = {"baseline": "baseline", "faster_qk": "faster QK"}
LABELS = {
    "loss": "training loss",
    "train_accuracy": "train accuracy",
    "validation_accuracy": "validation accuracy",
    "test_accuracy": "test accuracy",
    "train_f1": "train F1",
    "validation_f1": "validation F1",
    "test_f1": "test F1",
    "mrta": "MRTA",
    "ac": "AC, %",
    "acmc": "ACMC, %",
    "entropy": "attention entropy, nats",
    "auprc": "plausibility, AUPRC",
    "token_f1": "plausibility, token F1",
    "iou_f1": "plausibility, IOU F1",
}
# Where printed numbers come from.
SOURCES = {"paper": "paper", "released": "notebooks"}


def flat_metrics(table: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The metrics of one arm, each as its flat name (``sufficiency_5``) and its cell."""
    for name, value in table.items():
        if not isinstance(value, Mapping):
            continue
        if "mean" in value and "half_width" in value:
            yield name, value
        elif name in ("sufficiency", "comprehensiveness", "aopc"):
            yield from ((f"{name}_{key}", cell) for key, cell in value.items())
        elif name == "plausibility":
            yield from value.items()


def label(name: str) -> str:
    """What a metric is called in a table.

    >>> label("sufficiency_5"), label("mrta")
    ('sufficiency, top 5%', 'MRTA')
    """
    group, _, rest = name.partition("_")
    if name in LABELS:
        return LABELS[name]
    return f"{rest}, mean over k (AOPC)" if group == "aopc" else f"{group}, top {rest}%"


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
    """One row a metric at the end: both arms, their difference, their nulls, and others' numbers."""
    difference = dict(flat_metrics(summary["difference"]))
    return _arm_rows(summary["arms"], difference)


def best_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same where validation accuracy was best."""
    return _arm_rows({arm: entry["at_best_validation"] for arm, entry in summary["arms"].items()}, {})


def matched_rows(summary: Mapping[str, Any], names: Collection[str] = ()) -> list[dict[str, Any]]:
    """One row a loss level and metric, of all metrics or of those in ``names``."""
    rows = []
    for level in summary["matched"]:
        for name in next(iter(level["arms"].values()), {}):
            if names and name not in names:
                continue
            row = {"metric": label(name), "at loss": level["loss"]}
            row |= {arm: values[name] for arm, values in level["arms"].items()}
            difference = level["difference"].get("faster_qk")
            rows.append(row | {"difference": difference and difference[name]})
    return rows


def group_rows(summary: Mapping[str, Any], group: str) -> list[dict[str, Any]]:
    """Accuracy by group, one row a value of the group."""
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
    metrics = {arm: dict(flat_metrics(table)) for arm, table in arms.items()}
    rows = []
    for name in next(iter(metrics.values())):
        cells = {arm: table[name] for arm, table in metrics.items() if name in table}
        row: dict[str, Any] = {"metric": label(name)}
        row |= {arm: {key: cell[key] for key in ("mean", "half_width", "n")} for arm, cell in cells.items()}
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


def column_label(key: str) -> str:
    """What a column is called.

    >>> column_label("faster_qk"), column_label("released, baseline")
    ('faster QK', 'notebooks, baseline')
    """
    source, comma, arm = key.partition(", ")
    if not comma:
        return ARM_NAMES.get(key, key)
    return f"{SOURCES.get(source, source)}, {ARM_NAMES.get(arm, arm)}"


def _column(key: str) -> dict[str, Any]:
    source, comma, _ = key.partition(", ")
    column = {"key": key, "label": column_label(key)}
    if comma:
        column["source"] = "null" if source == "null" else "paper"
    return column
