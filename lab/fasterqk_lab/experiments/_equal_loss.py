"""Arms at equal training loss, score by score: value, null, difference to the first arm, and corrected p.

Some scores *decide*: an experiment names them before it is run. All others are exploratory. The p-values of
either kind are corrected for how many comparisons there are of it (:func:`fasterqk.attention.holm`).
"""

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

from fasterqk.attention import Interval, holm, interval, matched_loss, paired_difference
from fasterqk.console import mean_of, print_table
from fasterqk.files import plain
from fasterqk_lab.experiments._arms import Results
from fasterqk_lab.figures import COLORS, plotting, save_figure, save_table

Histories = Mapping[tuple[Any, Any], Sequence[Mapping[str, Any]]]
Rows = Sequence[Mapping[str, Any]]
COLUMNS = {
    "score": "score",
    "kind": "kind",
    "loss": "training loss",
    "arm": "arm",
    "value": "value",
    "null": "null",
    "difference": "difference",
    "p": "p (Holm)",
    "missing": "cells missing",
}
DECIDES, EXPLORATORY = "decides", "exploratory"


def histories_of(results: Results) -> dict[tuple[Any, Any], Sequence[Mapping[str, Any]]]:
    """The histories of all cells; a diverged one has none, so that it is listed as missing."""
    return {cell: [] if result.diverged else result.history for cell, result in results.items()}


def compare_at_equal_loss(
    histories: Histories,
    scores: Mapping[str, str],
    *,
    decides: Sequence[str],
    nulls: Mapping[str, str] | None = None,
    levels: int | Sequence[float] = 3,
) -> dict[str, Any]:
    """Every score of every arm at the losses that all cells reach, as plain JSON data.

    ``scores`` maps names in the histories to titles, ``nulls`` some of them to the names of their nulls.
    ``rows`` has one row for each loss, score and arm, also of an arm without any value; the first loss is
    the lowest, and p-values are those at it. ``missing`` lists the cells that never came there.
    """
    nulls = {name: null for name, null in (nulls or {}).items() if name in scores}
    matched = matched_loss(histories, [*scores, *nulls.values()], levels)
    arms = dict.fromkeys(arm for arm, _ in histories)
    rows: list[dict[str, Any]] = []
    for level in matched:
        for name, title in scores.items():
            for arm in arms:
                values = level["arms"].get(arm, {})
                row: dict[str, Any] = {"score": title, "kind": DECIDES if name in decides else EXPLORATORY}
                row |= {"loss": level["loss"], "arm": arm, "value": values.get(name)}
                row["null"] = values[nulls[name]].mean if values and name in nulls else None
                row["difference"] = level["difference"].get(arm, {}).get(name)
                row["missing"] = sum(lost == arm for lost, _ in level["missing"])
                rows.append(row)
    lowest = matched[0]["loss"] if matched else None
    return plain(
        {
            "loss": lowest,
            "decides": list(decides),
            "rows": corrected(rows, lowest),
            "missing": matched[0]["missing"] if matched else [],
        }
    )


def corrected(rows: Rows, lowest: float | None) -> list[dict[str, Any]]:
    """``rows`` with p-values, corrected over all differences of one kind.

    These are the differences at the loss ``lowest`` and those without a loss; the others get none.
    """
    families: dict[str, dict[int, Interval]] = {}
    for place, row in enumerate(rows):
        if row["difference"] is not None and row["loss"] in (None, lowest):
            families.setdefault(row["kind"], {})[place] = _interval(row["difference"])
    p_values = {place: p for family in families.values() for place, p in holm(family).items()}
    return [{**row, "p": p_values.get(place)} for place, row in enumerate(rows)]


def _interval(found: Interval | Mapping[str, Any]) -> Interval:
    """An interval, also of what :func:`fasterqk.files.plain` made of one."""
    if isinstance(found, Interval):
        return found
    mean, half = (nan if found[name] is None else found[name] for name in ("mean", "half_width"))
    return Interval(mean, half, found["n"])


def save_rows(rows: Rows, out: Path, name: str, *, title: str, caption: str) -> dict[str, str]:
    """Write ``rows`` as a table; returns its paths."""
    columns = [{"key": key, "label": label} for key, label in COLUMNS.items()]
    columns[list(COLUMNS).index("null")]["source"] = "null"
    shown = [{key: row[key] for key in COLUMNS} for row in rows]
    return save_table(out, name, title=title, caption=caption, columns=columns, rows=shown)


def save_panels(
    rows: Rows, titles: Sequence[str], out: Path, name: str, *, title: str, caption: str, see: str
) -> dict[str, str]:
    """Draw the scores with these ``titles`` at the lowest loss, one panel each; returns the paths."""
    lowest = min((row["loss"] for row in rows), default=None)
    shown = [row for row in rows if row["loss"] == lowest and row["score"] in titles and row["value"]]
    arms = list(dict.fromkeys(row["arm"] for row in shown))
    size = 1.6 + 2.2 * len(titles), 1.1 + 0.32 * len(arms)
    with plotting() as plt:
        figure, axes = plt.subplots(1, len(titles), figsize=size, squeeze=False, sharey=True)
        for axis, score in zip(axes[0], titles, strict=True):
            _draw(axis, [row for row in shown if row["score"] == score], arms, score)
        points = [
            {key: row[key] for key in ("score", "arm", "loss", "null")}
            | {"value": mean_of(row["value"]), "half_width": (row["value"] or {}).get("half_width")}
            for row in shown
        ]
        return save_figure(figure, out, name, title=title, caption=caption, rows=points, see=see)


def _draw(axis: Any, rows: Rows, arms: Sequence[str], title: str) -> None:
    """The arms from top to bottom: their values with intervals, and a mark at the null of each."""
    for row in rows:
        place = arms.index(row["arm"])
        half = row["value"]["half_width"] or 0.0
        axis.errorbar(mean_of(row["value"]) or 0.0, place, xerr=half, fmt="o", color=COLORS[1])
        if row["null"] is not None:
            axis.plot([row["null"]] * 2, [place - 0.3, place + 0.3], color="0.4", linestyle="--", linewidth=1)
    axis.set_yticks(range(len(arms)), arms, fontsize=9)
    axis.set_ylim(len(arms) - 0.4, -0.6)
    axis.locator_params(axis="x", nbins=4)
    axis.set_title(title, fontsize=9)
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", visible=True)


def show_rows(found: Mapping[str, Any], kind: str | None = None) -> None:
    """Print the rows at the lowest loss, of one kind or of both."""
    rows = [
        {COLUMNS[key]: row[key] for key in COLUMNS if key not in ("loss", "missing")}
        for row in found["rows"]
        if row["loss"] == found["loss"] and kind in (None, row["kind"])
    ]
    at = "no loss that all cells reach" if found["loss"] is None else f"training loss {found['loss']:.4g}"
    print_table(rows, title=f"\nat {at}; differences to the first arm, paired by seed")
    if found["missing"]:
        cells = ", ".join(f"{arm} (seed {seed})" for arm, seed in found["missing"])
        print(f"never at this loss: {cells}")


def paired_rows(
    values: Mapping[str, Mapping[int, float | None]], title: str, kind: str
) -> list[dict[str, Any]]:
    """One number per arm and seed as such rows, p-values corrected over the arms.

    A difference is over the seeds that have a number in both arms; ``missing`` counts the others of an arm,
    ``never`` lists them.
    """
    first, *others = values
    differences: dict[str, Interval] = {}
    for arm in others:
        both = [seed for seed, value in values[arm].items() if None not in (value, values[first].get(seed))]
        if both:
            pair = ([values[name][seed] for seed in both] for name in (arm, first))
            differences[arm] = paired_difference(*pair)
    rows = []
    for arm, own in values.items():
        known = [value for value in own.values() if value is not None]
        row: dict[str, Any] = {"score": title, "kind": kind, "loss": None, "arm": arm, "null": None}
        row |= {"value": interval(known) if known else None, "difference": differences.get(arm)}
        never = [seed for seed, value in own.items() if value is None]
        rows.append(row | {"missing": len(never), "never": never})
    return plain(corrected(rows, None))


def per_seed_at(histories: Histories, names: Sequence[str], levels: Sequence[float]) -> list[dict[str, Any]]:
    """``names`` of every cell at every loss of ``levels`` as rows for :meth:`CellRunner.add_per_seed`."""
    rows = []
    for level in levels:
        for (arm, seed), history in histories.items():
            [found] = matched_loss({(arm, seed): history}, names, [level])
            for name, value in found["arms"].get(arm, {}).items():
                row = {"arm": arm, "seed": seed, "at": f"training loss {level:.6g}", "score": name}
                rows.append(row | {"value": value.mean})
    return rows
