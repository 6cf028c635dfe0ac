"""What a sweep would still do, and how long it would take, judged by the cells already measured."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fasterqk.files import canonical_json, config_fields
from fasterqk.runs.spec import Spec
from fasterqk.runs.store import Store
from fasterqk.runs.summary import STATES, Summary, summaries, summarize


@dataclass(frozen=True)
class Plan:
    """The cells of a sweep by state, and an estimate for those that are left.

    ``seconds`` is the work that is left on one worker, None when nothing comparable was measured;
    ``low`` and ``high`` take the fastest and slowest comparable cell instead of their mean. ``basis``
    counts what the cells left were judged by: ``siblings`` (the same but for the seed), ``spec`` (others
    of this sweep), ``store`` (others of the same kind), or ``nothing``.
    """

    cells: int
    states: dict[str, int]
    left: int
    measured: int
    basis: dict[str, int]
    seconds: float | None
    low: float | None
    high: float | None

    def wall_seconds(self, workers: int) -> float | None:
        """The estimate when ``workers`` cells run at a time."""
        return None if self.seconds is None else self.seconds / max(1, min(workers, self.left))


def plan(spec: Spec, out: str | os.PathLike[str]) -> Plan:
    """The plan for ``spec`` on the store in ``out``; nothing is run or written."""
    store = Store(out)
    configs = {store.folder(cell.config): cell.config for cell in spec.cells}
    found = {folder: summarize(folder, with_config=False) for folder in configs if folder.exists()}
    states = {name: sum(1 for one in found.values() if one.state == name) for name in STATES}
    left = [configs[folder] for folder in configs if folder not in found or found[folder].state != "done"]
    siblings: dict[str, list[float]] = {}
    for folder, summary in found.items():
        if (seconds := _measured(summary)) is not None:
            siblings.setdefault(_but_the_seed(configs[folder]), []).append(seconds)
    here = [seconds for group in siblings.values() for seconds in group]
    elsewhere = [] if here or not left else _of_the_same_kind(store, type(left[0]).__name__)
    basis = dict.fromkeys(("siblings", "spec", "store", "nothing"), 0)
    estimates = []
    for config in left:
        name, measured = _comparable(siblings.get(_but_the_seed(config), []), here, elsewhere)
        basis[name] += 1
        if measured:
            estimates.append((fmean(measured), min(measured), max(measured)))
    complete = len(estimates) == len(left)
    mean, low, high = (sum(column) for column in zip(*estimates, strict=True)) if estimates else (0, 0, 0)
    return Plan(
        cells=len(configs),
        states=states,
        left=len(left),
        measured=len(here) or len(elsewhere),
        basis=basis,
        seconds=mean if complete else None,
        low=low if complete else None,
        high=high if complete else None,
    )


def _comparable(siblings: list[float], here: list[float], elsewhere: list[float]) -> tuple[str, list[float]]:
    for name, measured in (("siblings", siblings), ("spec", here), ("store", elsewhere)):
        if measured:
            return name, measured
    return "nothing", []


def _of_the_same_kind(store: Store, kind: str) -> list[float]:
    found = [_measured(summary) for summary in summaries(store) if summary.kind == kind]
    return [seconds for seconds in found if seconds is not None]


def _measured(summary: Summary) -> float | None:
    # A later attempt went on from a checkpoint: its seconds are not those of the whole cell.
    return summary.seconds if summary.attempt == 1 else None


def _but_the_seed(config: Any) -> str:
    fields: Mapping[str, Any] = config_fields(config)
    return canonical_json({name: value for name, value in fields.items() if name != "seed"})
