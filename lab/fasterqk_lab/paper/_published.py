"""The published results of a checkout: tidy tables in `lab/paper/results`, histories in `lab/paper/cells`."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk_lab.compare import Measured, Value, read_values
from fasterqk_lab.runs import read_cells

# `lab/paper` of the checkout.
FOLDER = Path(__file__).parents[2] / "paper"


class Published:
    """Everything that is published, comparison by comparison."""

    def __init__(self, folder: Path = FOLDER) -> None:
        if not (folder / "results").is_dir():
            raise InputError(
                f"{str(folder)!r} has no folder 'results'; name the folder lab/paper of a checkout"
            )
        self.folder = folder

    @cached_property
    def _values(self) -> dict[str, list[Value]]:
        values: dict[str, list[Value]] = {}
        for path in sorted((self.folder / "results").glob("*.csv")):
            for value in read_values(path):
                values.setdefault(value.experiment, []).append(value)
        return values

    @cached_property
    def _histories(self) -> dict[str, dict[tuple[str, int], list[Mapping[str, Any]]]]:
        histories: dict[str, dict[tuple[str, int], list[Mapping[str, Any]]]] = {}
        for path in sorted((self.folder / "cells").glob("*.jsonl*")):
            for line in read_cells(path):
                if "result" not in line:
                    continue
                parts = line.get("table") or line["experiment"], line.get("protocol")
                result = line["result"]
                records = [] if result.get("diverged") else result.get("history", [])
                name = "-".join(filter(None, parts))
                histories.setdefault(name, {})[line["arm"], line["seed"]] = list(map(above_random, records))
        return histories

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def measured(self, name: str) -> Measured:
        """The comparison ``name``: its values, and its histories where its cells are published."""
        if name not in self._values:
            raise InputError(f"no results of {name!r} in {str(self.folder / 'results')!r}")
        return Measured(name, self._values[name], self._histories.get(name, {}))


def above_random(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with what comprehensiveness and sufficiency are above those of random rankings.

    >>> above_random({"aopc_sufficiency": 0.5, "null_aopc_sufficiency": 0.2})
    {'aopc_sufficiency': 0.5, 'null_aopc_sufficiency': 0.2, 'aopc_sufficiency_above_random': 0.3}
    """
    names = ("aopc_comprehensiveness", "aopc_sufficiency")
    known = [name for name in names if name in record and f"null_{name}" in record]
    return dict(record) | {f"{name}_above_random": record[name] - record[f"null_{name}"] for name in known}
