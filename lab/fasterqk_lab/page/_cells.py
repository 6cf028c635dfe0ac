"""Any sweep or training as documents of the page, made from the cells of its store.

Cells of one kind and task are a *group*, and become a chapter. Cells that differ in nothing but their seed
have the same *condition*, which is named by the settings in which it differs from the others of its group.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasterqk.attention import interval, matched_loss
from fasterqk.console import duration_text, mean_of, number_text
from fasterqk.errors import InputError
from fasterqk.files import canonical_json, plain
from fasterqk_lab.figures._documents import Document, page_text

# What is drawn of a training; of another function's history, its first numbers.
_DRAWN: dict[str, dict[str, Any]] = {
    "loss": {"label": "training loss", "log": True},
    "mrta": {"label": "attention on relevant tokens (MRTA)"},
    "test_accuracy": {"label": "test accuracy"},
}
_ACROSS = {"epoch": "epoch", "step": "step"}
_SCORES = {"accuracy": "test.accuracy", "mrta": "test.mrta", "ac": "test.ac", "acmc": "test.acmc"}
_OTHERS_DRAWN = 4
# These documents have no file that the page could link to.
_UNWRITTEN = {"see": "", "alt": "", "file": ""}
# More conditions than this cannot be told apart in one chart.
CONDITIONS_DRAWN = 14


@dataclass(frozen=True)
class _Cell:
    name: str
    state: str
    kind: str
    fields: dict[str, Any]
    seconds: float | None
    result: dict[str, Any]
    error: str

    @property
    def seed(self) -> Any:
        return self.fields.get("seed", 0)

    @property
    def group(self) -> str:
        """The task of a training, else the kind of its configuration."""
        return str(self.fields.get("task") or self.kind)

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in self.fields.items() if name != "seed"}

    @property
    def history(self) -> list[Mapping[str, Any]]:
        """What was measured along the way; nothing of a training that diverged."""
        found = self.result.get("history")
        if self.result.get("diverged") or not isinstance(found, list):
            return []
        return [point for point in found if isinstance(point, Mapping)]


def cell_documents(out: Path, taken: Iterable[str] = ()) -> dict[str, list[Document]]:
    """Comparisons, curves and tables of all groups of cells under ``out`` whose name is not ``taken``.

    Empty lists where the store has no cells.
    """
    groups: dict[str, list[_Cell]] = {}
    for cell in _cells(out):
        groups.setdefault(cell.group, []).append(cell)
    documents: dict[str, list[Document]] = {"comparisons": [], "curves": [], "tables": []}
    for group, cells in sorted(groups.items()):
        if group not in taken:
            for folder, found in _group_documents(group, cells).items():
                documents[folder] += [{**_UNWRITTEN, **plain(document)} for document in found]
    return documents


def _cells(out: Path) -> list[_Cell]:
    from fasterqk_lab.runs import Store
    from fasterqk_lab.runs._store import read_result, read_sealed
    from fasterqk_lab.runs._table import flatten, summarize, with_lists_as_text

    found = []
    for folder in Store(out).cells():
        about = summarize(folder)
        result = (read_result(folder) or {}).get("result", {}) if about.state == "done" else {}
        error = ""
        if about.state == "failed":
            try:
                error = str((read_sealed(folder / "error.json") or {}).get("line", ""))
            except InputError as damage:
                error = str(damage)
        fields = flatten(with_lists_as_text(about.fields))
        kind = about.kind or "unknown"
        found.append(_Cell(folder.name, about.state, kind, fields, about.seconds, result, error))
    return found


def _group_documents(group: str, cells: Sequence[_Cell]) -> dict[str, list[Document]]:
    name = re.sub(r"[^A-Za-z0-9]+", "", group).lower() or "cells"
    done = [cell for cell in cells if cell.state == "done"]
    everywhere, varied = _varied(cells), _varied(done)
    labels = {cell.name: _label(cell.settings, varied) for cell in done}
    setting = _what_was_done(group, cells, len({_label(cell.settings, everywhere) for cell in cells}))
    return {
        "comparisons": _comparisons(name, group, done, labels, varied, setting),
        "curves": _curves(name, group, done, labels, setting),
        "tables": [
            table
            for table in (
                _condition_table(name, group, done, varied, setting),
                _settings_table(name, group, cells, everywhere),
                _cell_table(name, group, cells, everywhere, setting),
            )
            if table["rows"]
        ],
    }


def _varied(cells: Sequence[_Cell]) -> list[str]:
    """The settings that differ between ``cells``, in the order of their configuration."""
    names = dict.fromkeys(name for cell in cells for name in cell.settings)
    known = [cell for cell in cells if cell.fields]
    return [name for name in names if len({repr(cell.settings.get(name)) for cell in known}) > 1]


def _label(settings: Mapping[str, Any], varied: Sequence[str]) -> str:
    """A condition by its differences: ``qk_ratio 30, lr 0.001``."""
    return ", ".join(f"{name} {_shown(settings.get(name))}" for name in varied) or "all cells"


def _by_value(value: Any) -> tuple[bool, Any]:
    number = isinstance(value, int | float)
    return not number, value if number else str(value)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number_text(value) if isinstance(value, int | float) else str(value) or "none"


def _what_was_done(group: str, cells: Sequence[_Cell], conditions: int) -> str:
    states = Counter(cell.state for cell in cells)
    seconds = sum(cell.seconds or 0 for cell in cells)
    told = f"{group}: {len(cells)} cell{'s' if len(cells) > 1 else ''}"
    told += f" of {conditions} conditions" if conditions > 1 else ""
    others = [
        f"{states[state]} {state}" for state in ("failed", "stopped", "running", "damaged") if states[state]
    ]
    told += f", {states['done']} done" + (f", {', '.join(others)}" if others else "")
    return told + (f", {duration_text(seconds)} of computing" if seconds else "")


# --- Comparisons: each condition with equal rates against those that differ from it in the ratio alone ---


def _comparisons(
    name: str,
    group: str,
    done: Sequence[_Cell],
    labels: Mapping[str, str],
    varied: Sequence[str],
    setting: str,
) -> list[Document]:
    others = [one for one in varied if one != "qk_ratio"]
    by_ratio = "qk_ratio" in varied and any(cell.settings.get("qk_ratio") == 1 for cell in done)
    sets: dict[str, list[_Cell]] = {}
    for cell in done:
        sets.setdefault(_label(cell.settings, others) if by_ratio else "", []).append(cell)
    found = []
    for place, (shared, cells) in enumerate(sorted(sets.items())):
        arms: dict[str, list[_Cell]] = {}
        for cell in sorted(cells, key=lambda one: _order(one, by_ratio)):
            label = _label(cell.settings, ["qk_ratio"]) if by_ratio else labels[cell.name]
            arms.setdefault(label, []).append(cell)
        measured = {
            arm: own for arm, own in arms.items() if any(_score(cell, "mrta") is not None for cell in own)
        }
        if len(measured) < 2 or (by_ratio and next(iter(measured.values()))[0].settings.get("qk_ratio") != 1):
            continue
        found.append(
            {
                "name": f"{name}-cells-{place}" if len(sets) > 1 else f"{name}-cells",
                "title": f"{group}, {shared}" if by_ratio and others else group,
                "setting": setting,
                "caption": setting,
                "arms": [_arm(arm, own) for arm, own in measured.items()],
                "matched": _matched(measured),
            }
        )
    return found


def _order(cell: _Cell, by_ratio: bool) -> tuple[Any, ...]:
    """Equal rates first, then rising ratios; without ratios, conditions in order of their settings."""
    ratio = cell.settings.get("qk_ratio")
    number = float(ratio) if isinstance(ratio, int | float) else 0.0
    return (by_ratio and ratio != 1, number, canonical_json(plain(cell.settings)), str(cell.seed))


def _score(cell: _Cell, name: str) -> float | None:
    value: Any = cell.result
    for key in _SCORES[name].split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _loss(cell: _Cell) -> float | None:
    value = cell.result.get("loss")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _null(cells: Sequence[_Cell]) -> float | None:
    nulls = [
        (cell.result.get("test") or {}).get("null") or {}
        for cell in cells
        if _score(cell, "mrta") is not None
    ]
    found = [one["mrta"] for one in nulls if isinstance(one.get("mrta"), int | float)]
    return sum(found) / len(found) if found else None


def _arm(arm: str, cells: Sequence[_Cell]) -> Document:
    metrics = {"loss": interval([_loss(cell) for cell in cells])}
    metrics |= {name: interval([_score(cell, name) for cell in cells]) for name in _SCORES}
    return {
        "arm": arm,
        "qk_ratio": cells[0].settings.get("qk_ratio"),
        "seeds": len(cells),
        "metrics": metrics,
        "null": {"mrta": _null(cells)},
    }


def _matched(arms: Mapping[str, Sequence[_Cell]]) -> list[dict[str, Any]]:
    histories: dict[tuple[Any, Any], Any] = {
        (arm, cell.seed): [point for point in cell.history if point.get("loss") is not None]
        for arm, cells in arms.items()
        for cell in cells
    }
    points = [point for history in histories.values() for point in history]
    drawn = [name for name in ("mrta", "test_accuracy") if points and all(name in point for point in points)]
    return matched_loss(histories, drawn) if drawn else []


# --- Curves and tables ---


def _curves(
    name: str, group: str, done: Sequence[_Cell], labels: Mapping[str, str], setting: str
) -> list[Document]:
    cells = [cell for cell in done if cell.history]
    points = [point for cell in cells for point in cell.history]
    numbers = [
        key for key in dict.fromkeys(key for point in points for key in point) if _is_number(points, key)
    ]
    across = next((key for key in _ACROSS if key in numbers), None)
    if not points or across is None:
        return []
    drawn = [key for key in _DRAWN if key in numbers]
    drawn = drawn or [key for key in numbers if key not in _ACROSS][:_OTHERS_DRAWN]
    null = _null(cells)
    metrics = [
        {"key": key, "label": key, **_DRAWN.get(key, {})} | ({"null": null} if key == "mrta" and null else {})
        for key in drawn
    ]
    arms = sorted(
        dict.fromkeys(labels[cell.name] for cell in cells),
        key=lambda arm: min(_order(cell, True) for cell in cells if labels[cell.name] == arm),
    )
    caption = f"{setting}."
    if len(arms) > CONDITIONS_DRAWN:
        caption += f" The first {CONDITIONS_DRAWN} of {len(arms)} conditions; the table has all of them."
    shown = arms[:CONDITIONS_DRAWN]
    return [
        {
            "name": f"{name}-cells",
            "title": f"{group}: along training",
            "caption": caption,
            "x": {"key": across, "label": _ACROSS[across]},
            "metrics": metrics,
            "cells": [
                {
                    "arm": arm,
                    "seed": cell.seed,
                    "points": [{key: point.get(key) for key in (across, *drawn)} for point in cell.history],
                }
                for arm in shown
                for cell in cells
                if labels[cell.name] == arm
            ],
        }
    ]


def _is_number(points: Sequence[Mapping[str, Any]], key: str) -> bool:
    found = [point[key] for point in points if point.get(key) is not None]
    return bool(found) and all(isinstance(one, int | float) and not isinstance(one, bool) for one in found)


def _condition_table(
    name: str, group: str, done: Sequence[_Cell], varied: Sequence[str], setting: str
) -> Document:
    """What each condition reached: its loss, and its attention beside that of uniform attention."""
    from fasterqk_lab.runs._table import headline

    conditions: dict[str, list[_Cell]] = {}
    for cell in sorted(done, key=lambda one: _order(one, True)):
        conditions.setdefault(_label(cell.settings, varied), []).append(cell)
    numbers = dict.fromkeys(key for cell in done for key in headline(cell.result) if key != "diverged")
    rows = []
    for own in conditions.values():
        found = [headline(cell.result) for cell in own]
        row: dict[str, Any] = {one: _shown(own[0].settings.get(one)) for one in varied}
        row["seeds"] = len(own)
        diverged = sum(bool(one.get("diverged")) for one in found)
        if diverged:
            row["diverged"] = diverged
        for key in numbers:
            values = [one.get(key) for one in found if not one.get("diverged")]
            row[key] = interval(values) if values else None
        rows.append(row)
    keys = dict.fromkeys(key for row in rows for key in row)
    return {
        "name": f"{name}-cells-conditions",
        "see": _what_was_reached(group, rows),
        "title": f"{group}: what each condition reached",
        "caption": f"Mean over seeds, ± the half width of a 95% interval. {setting}.",
        "columns": [_column(key) for key in keys],
        "rows": plain(rows),
    }


def _what_was_reached(group: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The range of the numbers of all conditions, in a sentence."""
    parts = []
    for key in ("mass", "accuracy", "loss"):
        found = [mean for row in rows if (mean := mean_of(plain(row.get(key)))) is not None]
        if not found:
            continue
        low, high = page_text(min(found)), page_text(max(found))
        parts.append(
            f"{_NAMES[key]} is {low}" if low == high else f"{_NAMES[key]} is between {low} and {high}"
        )
        nulls = [mean for row in rows if (mean := mean_of(plain(row.get("null")))) is not None]
        if key == "mass" and nulls:
            parts[-1] += f" (uniform attention: {page_text(sum(nulls) / len(nulls))})"
    seeds = sum(row["seeds"] for row in rows)
    counted = "one training" if seeds == 1 else f"{seeds} cells"
    return f"In {counted} of {group}, {', '.join(parts)}." if parts else ""


_NAMES = {"mass": "attention on the relevant words", "accuracy": "test accuracy", "loss": "the training loss"}


def _column(key: str) -> dict[str, Any]:
    names = {"mass": "attention on relevant tokens (MRTA)", "null": "MRTA, uniform attention"}
    names |= {"loss": "training loss", "accuracy": "test accuracy"}
    return {"key": key, "label": names.get(key, key)} | ({"source": "null"} if key == "null" else {})


def _settings_table(name: str, group: str, cells: Sequence[_Cell], varied: Sequence[str]) -> Document:
    """What differs between the configurations: every setting that varies, with its values."""
    rows = []
    for setting in (*varied, "seed") if len(cells) > 1 else ():
        found = [cell.fields[setting] for cell in cells if setting in cell.fields]
        values = dict.fromkeys(_shown(value) for value in sorted(found, key=_by_value))
        if values:
            rows.append({"setting": setting, "values": ", ".join(values), "number": len(values)})
    return {
        "name": f"{name}-cells-differences",
        "title": f"{group}: what differs between the configurations",
        "caption": "All other settings are the same in all cells; fasterqk-lab runs show prints them.",
        "columns": [{"key": key, "label": key} for key in ("setting", "values", "number")],
        "rows": rows,
    }


def _cell_table(
    name: str, group: str, cells: Sequence[_Cell], varied: Sequence[str], setting: str
) -> Document:
    from fasterqk_lab.runs._table import headline

    rows = []
    for cell in sorted(cells, key=lambda one: (one.state != "failed", *_order(one, True))):
        row: dict[str, Any] = {"cell": cell.name, "state": cell.state}
        row |= {one: _shown(cell.fields.get(one)) for one in (*varied, "seed") if one in cell.fields}
        row |= {key: value for key, value in headline(cell.result).items() if key not in row}
        row |= {"seconds": cell.seconds} if cell.seconds is not None else {}
        rows.append(row | ({"error": cell.error} if cell.error else {}))
    keys = dict.fromkeys(key for row in rows for key in row)
    return {
        "name": f"{name}-cells-every",
        "title": f"{group}: every cell",
        "caption": f"{setting}.",
        "columns": [_column(key) for key in keys],
        "rows": plain(rows),
    }
