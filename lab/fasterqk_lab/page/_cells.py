"""Documents of the page for any sweep or training, made from the cells of its store.

Cells of one kind and task form a *group*, which becomes a chapter. Cells that differ only in their seed form
an arm, which is named by the settings that distinguish it from the other arms of its group.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fasterqk.attention.scores import title_of
from fasterqk.attention.statistics import interval
from fasterqk.console import duration_text, mean_of, number_text
from fasterqk.errors import InputError
from fasterqk.files import canonical_json, plain
from fasterqk_lab.compare import LEVEL, Effect, compare_arms, correct, measured
from fasterqk_lab.figures import (
    COLORS,
    Line,
    Panel,
    effect_record,
    save_document,
    save_forest,
    save_panels,
    save_table,
)
from fasterqk_lab.runs import Store
from fasterqk_lab.runs._store import read_result, read_sealed
from fasterqk_lab.runs._table import STATES, Summary, flatten, headline, summarize, with_lists_as_text

# The curves of a training; histories of other functions are drawn by their first numbers.
_DRAWN = {
    "loss": "training loss",
    "mrta": "attention on relevant tokens (MRTA)",
    "test_accuracy": "test accuracy",
}
_ACROSS = ("epoch", "step")
_OTHERS_DRAWN = 4
# The score that decides a comparison of arms, and the scores shown with it.
_DECIDES, _BESIDE = ("mrta",), ("ac", "acmc", "test_accuracy")
_LABELS = {"mass": "attention on relevant tokens (MRTA)", "null": "MRTA, uniform attention"}
_LABELS |= {"loss": "training loss", "accuracy": "test accuracy"}
# The most arms that can be distinguished in one chart: two for each colour.
ARMS_DRAWN = 2 * len(COLORS)

Points = list[Mapping[str, Any]]


@dataclass(frozen=True)
class Cell:
    """A cell of the store; its result is read on first access."""

    folder: Path
    about: Summary

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The flat settings of its configuration."""
        return flatten(with_lists_as_text(self.about.fields))

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in self.fields.items() if name != "seed"}

    @property
    def seed(self) -> Any:
        return self.fields.get("seed", 0)

    @property
    def ratio(self) -> float:
        return mean_of(self.fields.get("qk_ratio", 1)) or 1.0

    @property
    def group(self) -> str:
        """The task of a training, else the kind of its configuration."""
        return str(self.fields.get("task") or self.about.kind or "unknown")

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key: equal rates first, then rising ratios, then other settings."""
        return self.ratio != 1, self.ratio, canonical_json(plain(self.settings)), str(self.seed)

    @cached_property
    def result(self) -> dict[str, Any]:
        if self.about.state != "done":
            return {}
        return dict((read_result(self.folder) or {}).get("result", {}))

    @property
    def error(self) -> str:
        try:
            return str((read_sealed(self.folder / "error.json") or {}).get("line", ""))
        except InputError as damage:
            return str(damage)

    @property
    def history(self) -> Points:
        """The measurements along training; empty if it diverged."""
        history = self.result.get("history")
        if self.result.get("diverged") or not isinstance(history, list):
            return []
        return [point for point in history if isinstance(point, Mapping)]

    @property
    def losses(self) -> Points:
        """The points of the history with a loss; empty unless the cell can be compared in test attention."""
        test = self.result.get("test")
        if not isinstance(test, Mapping) or mean_of(test.get("mrta")) is None:
            return []
        points = [point for point in self.history if mean_of(point.get("loss")) is not None]
        return points if all(point["loss"] >= 0 for point in points) else []

    @property
    def compared(self) -> dict[str, Any]:
        """The part of the result that comparisons use; users' functions may return anything else as well."""
        test = {name: value for name, value in self.result["test"].items() if name != "groups"}
        last = {"loss": self.losses[-1]["loss"], "reached": self.result.get("reached")}
        return {**last, "test": test, "history": self.losses}


def read_cells(out: Path) -> list[Cell]:
    """All cells of the store in ``out``, sorted by their settings."""
    cells = [Cell(folder, summarize(folder)) for folder in Store(out).cells()]
    return sorted(cells, key=lambda cell: cell.order)


def what_was_run(cells: Sequence[Cell]) -> str:
    """The numbers of cells by state, and their computing time, in words."""
    states = Counter(cell.about.state for cell in cells)
    seconds = sum(cell.about.seconds or 0 for cell in cells)
    parts = [f"{states[state]} {state}" for state in STATES if states[state]]
    parts += [f"{duration_text(seconds)} of computing"] if seconds else []
    return f"{len(cells)} cell{'' if len(cells) == 1 else 's'}: {', '.join(parts)}"


def save_cells(cells: Sequence[Cell], out: Path) -> str:
    """Write effects, figures and tables of all groups of ``cells`` in the format of experiments.

    Returns a sentence about the attention they reached; empty if there is none.
    """
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group, []).append(cell)
    return " ".join(filter(None, (_save_group(group, groups[group], out) for group in sorted(groups))))


def _save_group(group: str, cells: Sequence[Cell], out: Path) -> str:
    name = f"{re.sub(r'[^A-Za-z0-9]+', '', group).lower() or 'cells'}-cells"
    caption = f"{group}, {what_was_run(cells)}."
    done = [cell for cell in cells if cell.about.state == "done"]
    everywhere, varied = _varied(cells), _varied(done)
    arms: dict[str, list[Cell]] = {}
    for cell in done:
        arms.setdefault(_label(cell, varied), []).append(cell)
    effects, ratios = _effects(group, arms, [setting for setting in varied if setting != "qk_ratio"])
    if effects:
        records = [effect_record(effect) | {"ratio": ratios[effect.label]} for effect in effects]
        save_document(out, "effects", name, {"title": group, "effects": records})
        titles = {score: title_of(score) for score in dict.fromkeys(effect.score for effect in effects)}
        about: Any = {"title": f"{group}: at equal training loss", "caption": caption, "png": False}
        save_forest(effects, titles, out, name, **about)
    _save_curves(arms, out, name, f"{group}: along training", caption)
    conditions = _condition_rows(arms, varied)
    same = "All other settings are equal; fasterqk-lab runs show prints them."
    tables = {
        "conditions": ("results by condition", conditions, ""),
        "differences": ("differences between the configurations", _setting_rows(cells, everywhere), same),
        "every": ("all cells", _cell_rows(cells, everywhere), ""),
    }
    for kind, (title, rows, more) in tables.items():
        if rows:
            _save_table(rows, out, f"{name}-{kind}", f"{group}: {title}", f"{caption} {more}".strip())
    return _what_was_reached(conditions)


def _varied(cells: Sequence[Cell]) -> list[str]:
    """The settings that differ between ``cells``, in the order of the configuration."""
    names = dict.fromkeys(name for cell in cells for name in cell.settings)
    known = [cell for cell in cells if cell.fields]
    return [name for name in names if len({repr(cell.settings.get(name)) for cell in known}) > 1]


def _label(cell: Cell, varied: Sequence[str]) -> str:
    """The name of an arm by its distinguishing settings: ``qk_ratio 30, lr 0.001``."""
    return ", ".join(f"{name} {_shown(cell.settings.get(name))}" for name in varied) or "all cells"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number_text(value) if isinstance(value, int | float) else str(value or "none")


# --- Effects: each arm against the one with equal rates and otherwise equal settings, or against the first
# ---


def _effects(
    group: str, arms: Mapping[str, Sequence[Cell]], others: Sequence[str]
) -> tuple[list[Effect], dict[str, float]]:
    """The effects, and the ratio of each arm relative to that of its baseline."""
    trained = {arm: [cell for cell in cells if cell.losses] for arm, cells in arms.items()}
    trained = {arm: cells for arm, cells in trained.items() if cells}
    by_ratio = len({cells[0].ratio == 1 for cells in trained.values()}) == 2
    sets: dict[str, dict[str, list[Cell]]] = {}
    for arm, cells in trained.items():
        sets.setdefault(_label(cells[0], others) if by_ratio else "", {})[arm] = cells
    deciding: list[Effect] = []
    beside: list[Effect] = []
    ratios: dict[str, float] = {}
    for compared in sets.values():
        baseline = next(iter(compared.values()))[0]
        if by_ratio and baseline.ratio != 1:
            continue
        results = {(arm, cell.seed): cell.compared for arm, cells in compared.items() for cell in cells}
        values = measured(group, results)
        deciding += compare_arms(values, dict.fromkeys(_DECIDES, LEVEL))
        beside += compare_arms(values, dict.fromkeys(_BESIDE, LEVEL))
        ratios |= {arm: cells[0].ratio / baseline.ratio for arm, cells in compared.items()}
    return [*correct(deciding), *correct(beside)], ratios


# --- Curves and tables ---


def _save_curves(arms: Mapping[str, Sequence[Cell]], out: Path, name: str, title: str, caption: str) -> None:
    """Draw the history of every cell, if there is anything to draw."""
    cells = [(arm, cell) for arm, members in arms.items() for cell in members if cell.history]
    names = list(dict.fromkeys(arm for arm, _ in cells))
    points = [point for _, cell in cells for point in cell.history]
    keys = dict.fromkeys(key for point in points for key, value in point.items() if value is not None)
    texts = {key for point in points for key in keys if mean_of(point.get(key) or 0) is None}
    numbers = [key for key in keys if key not in texts]
    across = next((key for key in _ACROSS if key in numbers), None)
    drawn = [key for key in _DRAWN if key in numbers]
    drawn = drawn or [key for key in numbers if key not in _ACROSS][:_OTHERS_DRAWN]
    if across is None or not drawn:
        return
    nulls = [mean for _, cell in cells if (mean := mean_of(headline(cell.result).get("null"))) is not None]
    if len(names) > ARMS_DRAWN:
        caption += f" Only the first {ARMS_DRAWN} of {len(names)} conditions; the table has all of them."
    panels = []
    for key in drawn:
        lines: list[Line] = []
        for arm, cell in cells:
            place = names.index(arm)
            if place < ARMS_DRAWN:
                label = "" if any(line.label == arm for line in lines) else arm
                dashes = "--" if place >= len(COLORS) else "-"
                style = {"color": COLORS[place % len(COLORS)], "linestyle": dashes, "linewidth": 1}
                record = [point for point in cell.history if point.get(across) is not None]
                x, y = ([point.get(axis) for point in record] for axis in (across, key))
                lines.append(Line(label, x, y, style))  # type: ignore[arg-type]
        above = all(value > 0 for line in lines for value in line.up if isinstance(value, int | float))
        panel = Panel(_DRAWN.get(key, key), (across, ""), lines, log="y" if key == "loss" and above else "")
        null = sum(nulls) / len(nulls) if nulls and key == "mrta" else None
        panels.append(replace(panel, null=null, legend={} if key == drawn[0] and len(names) > 1 else None))
    about: Any = {"title": title, "caption": caption, "see": "One line per seed.", "png": False}
    save_panels(panels, out, f"{name}-along", size=(3.8, 3.2), **about)


def _condition_rows(arms: Mapping[str, Sequence[Cell]], varied: Sequence[str]) -> list[dict[str, Any]]:
    """The final numbers of each arm, such as its loss, its attention and the null of that."""
    rows: list[dict[str, Any]] = []
    for cells in arms.values():
        row: dict[str, Any] = {name: _shown(cells[0].settings.get(name)) for name in varied}
        headlines = [headline(cell.result) for cell in cells if not cell.result.get("diverged")]
        row["seeds"] = len(cells)
        if len(headlines) < len(cells):
            row["diverged"] = len(cells) - len(headlines)
        for key in dict.fromkeys(key for numbers in headlines for key in numbers):
            row[key] = interval([numbers.get(key) for numbers in headlines])
        rows.append(row)
    return rows


def _what_was_reached(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence about the attention of all arms."""
    masses, nulls = (
        [mean for row in rows if (mean := mean_of(plain(row.get(key)))) is not None]
        for key in ("mass", "null")
    )
    if not masses:
        return ""
    ends = " to ".join(dict.fromkeys((f"{min(masses):.3f}", f"{max(masses):.3f}")))
    null = f" (uniform attention: {sum(nulls) / len(nulls):.3f})" if nulls else ""
    return f"Attention on the relevant words is {ends}{null} after training."


def _setting_rows(cells: Sequence[Cell], varied: Sequence[str]) -> list[dict[str, Any]]:
    """Every setting that varies between the configurations, with its values."""
    rows = []
    for setting in (*varied, "seed") if len(cells) > 1 else ():
        values = [cell.fields[setting] for cell in cells if setting in cell.fields]
        values.sort(key=lambda value: (mean_of(value) is None, mean_of(value) or 0, str(value)))
        texts = list(dict.fromkeys(map(_shown, values)))
        if texts:
            rows.append({"setting": setting, "values": ", ".join(texts), "number": len(texts)})
    return rows


def _cell_rows(cells: Sequence[Cell], varied: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for cell in sorted(cells, key=lambda cell: cell.about.state != "failed"):
        row: dict[str, Any] = {"cell": cell.folder.name, "state": cell.about.state}
        row |= {name: _shown(cell.fields[name]) for name in (*varied, "seed") if name in cell.fields}
        row |= {key: value for key, value in headline(cell.result).items() if key not in row}
        row |= {"seconds": cell.about.seconds} if cell.about.seconds is not None else {}
        rows.append(row | ({"error": cell.error} if cell.about.state == "failed" else {}))
    return rows


def _save_table(rows: Sequence[Mapping[str, Any]], out: Path, name: str, title: str, caption: str) -> None:
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = [{"key": key, "label": _LABELS.get(key, key)} for key in keys]
    columns = [column | ({"source": "null"} if column["key"] == "null" else {}) for column in columns]
    save_table(out, name, title=title, caption=caption, columns=columns, rows=rows)
