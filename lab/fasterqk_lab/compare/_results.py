"""The one form of a result: a tidy table, one value per row, and the histories that values were read from.

A *comparison* is a set of arms that are compared with each other over the same seeds. Everything it measured
is in rows ``(experiment, arm, seed, at, loss, score, value)``, where ``experiment`` names the comparison and
``at`` says when a value was read:

- ``end``: after training; ``best``: at the evaluation that validation prefers;
- ``level``: where the training loss first falls to the level that decides, ``loss`` (see ``_rule``);
- ``loss``: the same at other levels, of which the lowest is the lowest that all cells reach;
- any other moment is defined by its experiment (``equal entropy``).
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fasterqk.attention.statistics import Interval, common_levels, interval, matched_loss
from fasterqk.errors import InputError
from fasterqk.files import csv_text, write_text

END, BEST, LEVEL, LOSS = "end", "best", "level", "loss"
# Scores that every layer, and heads of it, may have beside the whole model.
LAYER_SCORES = ("mrta", "ac", "acmc", "entropy")
# Significant digits of the real numbers in a table.
DIGITS = 6

Record = Mapping[str, Any]
History = Sequence[Record]
Cell = tuple[str, int]
Histories = Mapping[Any, History]  # by cell: an arm and a seed


class Value(NamedTuple):
    """One row of a tidy table."""

    experiment: str
    arm: str
    seed: int
    at: str
    loss: float | None
    score: str
    value: float


def write_values(path: Path, values: Iterable[Value]) -> Path:
    """Write a tidy table as CSV. A value that two rules read at one moment is written once."""
    rows = (value._replace(loss=_rounded(value.loss), value=_rounded(value.value)) for value in values)
    return write_text(path, csv_text(row._asdict() for row in {row[:-1]: row for row in rows}.values()))


def read_values(path: Path) -> Iterator[Value]:
    """The rows of a tidy table."""
    if not path.is_file():
        raise InputError(f"{str(path)!r} is missing; name a folder of results, such as lab/paper/results")
    with path.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if set(row) != set(Value._fields):
                raise InputError(f"{str(path)!r} has other columns than {', '.join(Value._fields)}")
            loss = float(row["loss"]) if row["loss"] else None
            place = row["experiment"], row["arm"], int(row["seed"]), row["at"], loss, row["score"]
            yield Value(*place, float(row["value"]))


def _rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


# --- Values of cells ---


def flat(document: Record, prefix: str = "") -> dict[str, float]:
    """The numbers of nested scores under flat names: ``{"null": {"ac": 3}}`` has ``null_ac``.

    >>> flat({"mrta": 0.5, "null": {"mrta": 0.1}, "plausibility": {"auprc": 0.7}, "dtap": [[1]]})
    {'mrta': 0.5, 'null_mrta': 0.1, 'auprc': 0.7}
    """
    numbers: dict[str, float] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            numbers |= flat(value, prefix if name == "plausibility" else f"{prefix}{name}_")
        elif is_number(value):
            numbers[prefix + name] = float(value)
    return numbers


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def moments(result: Record) -> dict[str, dict[str, float]]:
    """The numbers of a finished cell at the end and at its best validation epoch."""
    if "test" not in result:  # of the toy language
        return {END: {name: value for name, value in flat(result).items() if name != "seed"}}
    numbers: dict[str, Any] = {"loss": result["loss"]}
    numbers |= {
        f"{split}_{name}": result[split][name]
        for split in ("train", "validation", "test")
        for name in ("loss", "accuracy", "f1")
        if name in (result.get(split) or {})
    }
    numbers |= flat({name: value for name, value in result["test"].items() if name not in ("loss", "groups")})
    if "majority_accuracy" in numbers:
        numbers["null_test_accuracy"] = numbers["majority_accuracy"]
    for group, values in (result["test"].get("groups") or {}).items():
        for value, entry in values.items():
            score = f"accuracy, {group} {value}"
            numbers |= {score: entry["accuracy"], null_name(score): entry["majority_accuracy"]}
    return {END: numbers} | ({BEST: flat(result["best"])} if result.get("best") else {})


# --- Everything that one comparison measured ---


@dataclass(frozen=True, eq=False)
class Measured:
    """A comparison with its values, and the histories of its cells where these are at hand.

    ``baselines`` maps an arm to the arm with equal rates that it is compared with; the first arm is the
    baseline of all arms that it does not name.
    """

    name: str
    values: Sequence[Value]
    histories: Mapping[Cell, History] = field(default_factory=dict)
    baselines: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def arms(self) -> list[str]:
        """The arms, in order."""
        return list(dict.fromkeys([arm for arm, _ in self.histories] or [value.arm for value in self.values]))

    @cached_property
    def _table(self) -> dict[tuple[str, float | None, str, str], dict[int, float]]:
        table: dict[tuple[str, float | None, str, str], dict[int, float]] = {}
        for value in self.values:
            table.setdefault((value.at, value.loss, value.arm, value.score), {})[value.seed] = value.value
        return table

    def of(self, arm: str, score: str, at: str = LEVEL, loss: float | None = None) -> dict[int, float]:
        """The value of every seed; of ``level`` and ``loss`` where they were read at this ``loss``."""
        return self._table.get((at, _rounded(loss), arm, score), {})

    def interval(self, arm: str, score: str, at: str = LEVEL, loss: float | None = None) -> Interval | None:
        """The mean over the seeds that have a value, with its interval; None if no seed has."""
        values = self.of(arm, score, at, loss)
        return interval(values.values()) if values else None

    def losses(self, at: str, arm: str, score: str) -> list[float]:
        """The training losses at which an arm was read, the lowest first."""
        places = (place for place in self._table if (place[0], *place[2:]) == (at, arm, score))
        return sorted(place[1] for place in places if place[1] is not None)

    def baseline_of(self, arm: str) -> str:
        """The arm with equal rates that ``arm`` is compared with."""
        return self.baselines.get(arm, self.arms[0])

    def first(self, seeds: int | None) -> "Measured":
        """The comparison over its first ``seeds`` alone (None: all); later seeds were added after looking."""
        if seeds is None:
            return self
        known = {seed for _, seed in self.histories} | {value.seed for value in self.values}
        planned = sorted(known)[:seeds]
        values = [value for value in self.values if value.seed in planned]
        histories = {cell: history for cell, history in self.histories.items() if cell[1] in planned}
        return replace(self, values=values, histories=histories)

    def null(self, arm: str, score: str, at: str, loss: float | None, which: str = "null") -> float | None:
        """The mean score of uniform attention or of a random ranking; that at the end if only it is known."""
        for moment, level in ((at, loss), (END, None)):
            if values := self.of(arm, null_name(score, which), moment, level):
                return fmean(values.values())
        return None


def measured(
    name: str,
    cells: Mapping[Cell, Record],
    *,
    baselines: Mapping[str, str] | None = None,
    derive: Callable[[Record], Record] = lambda record: record,
    level: float | None = None,
    losses: Sequence[float] = (),
    more: Sequence[Value] = (),
) -> Measured:
    """Everything that ``cells`` measured: their results at the end, at the best epoch and at equal loss.

    ``derive`` adds scores to a record of a history; ``more`` are values that an experiment computed itself.
    ``level`` decides instead of the baseline's best validation loss, where it was named before the run;
    arms are read at ``losses`` too. A cell that did not reach a loss, or diverged, has no value there.
    """
    finished = {cell: result for cell, result in cells.items() if not result.get("diverged")}
    histories: dict[Cell, History] = {
        cell: [derive(record) for record in result.get("history", ())] for cell, result in finished.items()
    }
    compared_with = baselines_of(dict.fromkeys(arm for arm, _ in cells), baselines or {})
    values = [
        Value(name, arm, seed, at, None, score, value)
        for (arm, seed), result in finished.items()
        for at, numbers in moments(result).items()
        for score, value in numbers.items()
    ]
    stopped = {cell: histories[cell] for cell, result in finished.items() if result.get("reached")}
    for lowest in (*lowest_levels(stopped or histories), *losses):
        values += values_at(name, histories, LOSS, lowest)
    for baseline in dict.fromkeys(compared_with.values()):
        of_baseline = [history for (arm, _), history in histories.items() if arm == baseline]
        decides = deciding_level(of_baseline) if level is None else level
        if decides is not None:
            compared = {
                (arm, seed): history
                for (arm, seed), history in histories.items()
                if baseline in (arm, compared_with[arm])
            }
            values += values_at(name, compared, LEVEL, decides)
    diverged: dict[Cell, History] = {cell: () for cell in cells if cell not in finished}
    rounded = [value._replace(loss=_rounded(value.loss)) for value in (*values, *more)]
    return Measured(name, rounded, {**histories, **diverged}, compared_with)


def baselines_of(arms: Iterable[str], baselines: Mapping[str, str]) -> dict[str, str]:
    """The baseline of every arm: the one it is given, itself if it is one, else the first arm.

    >>> baselines_of(["a", "b", "c", "d"], {"d": "c"})
    {'a': 'a', 'b': 'a', 'c': 'c', 'd': 'c'}
    """
    names = list(arms)
    itself = {baseline: baseline for baseline in baselines.values()}
    return {arm: (itself | dict(baselines)).get(arm, names[0]) for arm in names}


def lowest_levels(histories: Histories, count: int = 3) -> list[float]:
    """The lowest training loss that all cells reach, and higher losses that they share."""
    return common_levels(histories, count) if any(histories.values()) else []


def deciding_level(baselines: Iterable[History]) -> float | None:
    """The mean training loss at which cells of the baseline have their best validation loss.

    This is where a person would stop. It is fixed by the baseline alone. A cell without a validation loss
    counts with its last training loss.

    >>> deciding_level([[{"loss": 1.0, "validation_loss": 2.0}, {"loss": 0.5, "validation_loss": 3.0}]])
    1.0
    """
    chosen = [_best_record(history)["loss"] for history in baselines if history]
    known = [loss for loss in chosen if loss is not None and isfinite(loss)]
    return fmean(known) if known else None


def _best_record(history: History) -> Record:
    judged = [record for record in history if is_number(record.get("validation_loss"))]
    return min(judged, key=lambda record: record["validation_loss"]) if judged else history[-1]


def values_at(name: str, histories: Mapping[Cell, History], at: str, level: float) -> list[Value]:
    """The values of all cells where their training loss first falls to ``level``."""
    return [
        Value(name, arm, seed, at, level, score, value)
        for (arm, seed), history in histories.items()
        for score, value in value_at(history, level).items()
    ]


def value_at(history: History, level: float, scores: Sequence[str] | None = None) -> dict[str, float]:
    """The scores of one cell where its training loss first falls to ``level``; empty if it never does."""
    if not history:
        return {}
    if scores is None:
        scores = [name for name, value in history[-1].items() if is_number(value) and name != "loss"]
    [crossing] = matched_loss({("", 0): history}, scores, [level])
    return {name: value.mean for name, value in crossing["arms"].get("", {}).items()}


def null_name(score: str, which: str = "null") -> str:
    """The name of a null of a score, in histories and in tables.

    >>> null_name("carried_layer_2_best_head_mrta"), null_name("layer_1_ac", "permuted")
    ('carried_layer_2_best_head_null_mrta', 'layer_1_permuted_ac')
    >>> null_name("sufficiency_5")
    'null_sufficiency_5'
    """
    kind = next((kind for kind in LAYER_SCORES if score.endswith(f"_{kind}")), score)
    return f"{score.removesuffix(kind)}{which}_{kind}"


def above_random(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with comprehensiveness and sufficiency minus those of random rankings.

    >>> above_random({"aopc_sufficiency": 0.5, "null_aopc_sufficiency": 0.2})
    {'aopc_sufficiency': 0.5, 'null_aopc_sufficiency': 0.2, 'aopc_sufficiency_above_random': 0.3}
    """
    names = ("aopc_comprehensiveness", "aopc_sufficiency")
    known = [name for name in names if name in record and f"null_{name}" in record]
    return dict(record) | {f"{name}_above_random": record[name] - record[f"null_{name}"] for name in known}
