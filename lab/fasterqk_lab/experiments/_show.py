"""What people see in the terminal: any summary of an experiment, printed in one way.

Nothing heavy is imported before there is something to print.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fasterqk.console import cell_text, is_interval, print_table

BASELINE, FASTER = "baseline", "faster_qk"
ARM_NAMES = {BASELINE: "baseline", FASTER: "faster QK"}
# When a value was read (`fasterqk_lab.compare`), in words.
BEST, END = "best validation epoch", "end"
AT_TEXTS = {"level": "equal loss", "loss": "lowest common loss", "end": END, "best": BEST}
# The columns of every table, and those of the numbers that others print.
COLUMNS = {
    "score": "score",
    "kind": "kind",
    "at": "at",
    "loss": "training loss",
    "arm": "arm",
    "value": "value",
    "null": "null",
    "difference": "difference",
    "p": "p (Holm)",
    "levels": "share of levels",
    "stands": "stands",
}
SOURCES = {"paper": "paper", "released": "notebooks"}


def arm_text(arm: str) -> str:
    """An arm as people read it."""
    return ARM_NAMES.get(arm, arm)


def show_summary(summary: Mapping[str, Any]) -> None:
    """Print a summary for people: comparisons, lists of rows as tables, single values, and the figures.

    Parts of a summary are printed one after the other; what is no row, number or text is left to JSON.
    """
    if "decides" in summary and "rows" in summary:
        summary = show_comparison(summary)
    for key, value in summary.items():
        name = key.replace("_", " ")
        if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
            rows = [{column: cell for column, cell in row.items() if _is_cell(cell)} for row in value]
            print_table(rows, title=f"\n{name}:")
        elif isinstance(value, Mapping) and "png" in value:
            print(f"figure: {value['png']}")
        elif isinstance(value, Mapping) and value and all(map(_is_cell, value.values())):
            if "json" not in value:  # the paths of a table
                print(f"{name}: {', '.join(f'{part} {cell_text(cell)}' for part, cell in value.items())}")
        elif isinstance(value, Mapping):
            show_summary(value)
        elif isinstance(value, str | int | float) and key not in ("experiment", "results", "exported"):
            print(f"{name}: {cell_text(value)}")


def _is_cell(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float) or is_interval(value)


def show_comparison(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Print the main scores of a comparison at equal loss and at the end; returns what else there is.

    The table that is written has all scores.
    """
    from fasterqk_lab.tasks import left_out

    print(f"\n{summary['title']}\n{summary['setting']}")
    rows = [row | {"arm": arm_text(row["arm"])} for row in summary["rows"] if _is_main(row["name"])]
    for at in dict.fromkeys(row["at"] for row in rows):
        moment = [row for row in rows if row["at"] == at]
        if at == BEST and not any("p" in row for row in moment):
            continue
        losses = [row["loss"] for row in moment if row["loss"] is not None]
        article = "the " * (at in (END, BEST))
        title = f"\nat {article}{at}" + (f" (training loss {losses[0]:.3g})" if losses else "")
        print_table(_terminal_rows(moment, len(summary["arms"]) == 2), title=title)
    late = dict.fromkeys(cell for effect in summary["effects"] for cell in effect["missing"])
    if late:
        print(f"\nthe lowest common loss decides, as these never reach the level: {'; '.join(late)}")
    diverged = {arm: entry["diverged"] for arm, entry in summary["arms"].items() if entry["diverged"]}
    if diverged:
        print(f"\ndiverged: {diverged}")
    if summary.get("skipped"):
        print(f"\nleft out of the data: {left_out(summary['skipped'])}")
    printed = ("title", "setting", "seeds", "decides", "arms", "rows", "effects", "skipped")
    return {key: value for key, value in summary.items() if key not in printed}


def _terminal_rows(rows: Sequence[Mapping[str, Any]], wide: bool) -> list[dict[str, Any]]:
    """One row per score with a column for either arm, or one per score and arm."""
    from fasterqk_lab.figures import wide_rows

    columns = {key: label for key, label in COLUMNS.items() if key not in ("at", "loss", "kind")} | SOURCES
    lines: Sequence[Mapping[str, Any]] = rows
    if wide:
        lines, columns = wide_rows(rows, columns)
    known = [key for key in columns if any(line.get(key) is not None for line in lines)]
    return [{columns[key]: line.get(key) for key in known} for line in lines]


def is_null(name: str) -> bool:
    """Whether a score is that of the model's attention made sharp or permuted, which is compared like it."""
    from fasterqk.attention.scores import STRONGER_NULLS

    return any(f"{null}_" in name for null in STRONGER_NULLS)


def _is_main(name: str) -> bool:
    """Whether the terminal shows a score: not per percentage, no stronger null, of layers mass and entropy.

    >>> [_is_main(name) for name in ("mrta", "sufficiency_5", "permuted_ac", "layer_1_mrta", "layer_1_ac")]
    [True, False, False, True, False]
    """
    from fasterqk.attention.scores import SCORES

    per_k = tuple(f"{score.name}_" for score in SCORES.values() if score.per_k)
    if name.startswith(per_k) or is_null(name):
        return False
    return not name.startswith(("layer_", "average_")) or name.endswith(("mrta", "entropy"))
