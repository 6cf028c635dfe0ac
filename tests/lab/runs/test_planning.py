"""The plan: what is left, and an estimate no better than what was measured."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fasterqk.lab.runs import Plan, Store, plan, read_spec

SPEC = """
config = "cells_of_tests:Cell"
function = "cells_of_tests:double"
seeds = [0, 1]
[arms.small]
[arms.large]
scale = 10
"""


@pytest.fixture
def planned(tmp_path: Path, cells: ModuleType) -> Callable[[], Plan]:
    (tmp_path / "spec.toml").write_text(SPEC)
    return lambda: plan(read_spec(tmp_path / "spec.toml"), tmp_path)


def test_nothing_measured_is_no_estimate(planned: Callable[[], Plan], tmp_path: Path) -> None:
    found = planned()
    assert (found.cells, found.left, found.measured) == (4, 4, 0)
    assert (found.seconds, found.low, found.high, found.wall_seconds(2)) == (None, None, None, None)
    assert found.basis == {"siblings": 0, "spec": 0, "store": 0, "nothing": 4}
    assert not (tmp_path / "runs").exists()


def test_siblings_are_the_best_guide(planned: Callable[[], Plan], tmp_path: Path, cells: ModuleType) -> None:
    store = Store(tmp_path)
    store.save(cells.Cell(0), {}, attempt=1, seconds=2.0)
    store.save(cells.Cell(0, scale=10.0), {}, attempt=1, seconds=20.0)
    found = planned()
    assert (found.states["done"], found.left) == (2, 2)
    assert found.seconds == 22.0  # one small and one large cell are left
    assert found.basis["siblings"] == 2
    assert found.wall_seconds(2) == 11.0
    assert found.wall_seconds(8) == 11.0


def test_without_siblings_the_rest_of_the_sweep(
    planned: Callable[[], Plan], tmp_path: Path, cells: ModuleType
) -> None:
    Store(tmp_path).save(cells.Cell(0), {}, attempt=1, seconds=2.0)
    found = planned()
    assert found.basis == {"siblings": 1, "spec": 2, "store": 0, "nothing": 0}
    assert found.seconds == 6.0


def test_without_any_the_same_kind_elsewhere(
    planned: Callable[[], Plan], tmp_path: Path, cells: ModuleType
) -> None:
    for seed, seconds in ((7, 1.0), (8, 3.0)):
        Store(tmp_path).save(cells.Cell(seed), {}, attempt=1, seconds=seconds)
    found = planned()
    assert (found.basis["store"], found.measured) == (4, 2)
    assert (found.seconds, found.low, found.high) == (8.0, 4.0, 12.0)


def test_a_resumed_cell_is_no_measurement(
    planned: Callable[[], Plan], tmp_path: Path, cells: ModuleType
) -> None:
    Store(tmp_path).save(cells.Cell(0), {}, attempt=2, seconds=0.1)
    found = planned()
    assert (found.states["done"], found.left, found.seconds) == (1, 3, None)


def test_all_done(planned: Callable[[], Plan], tmp_path: Path, cells: ModuleType) -> None:
    for seed in (0, 1):
        for scale in (1.0, 10.0):
            Store(tmp_path).save(cells.Cell(seed, scale), {}, attempt=1, seconds=1.0)
    found = planned()
    assert (found.left, found.seconds) == (0, 0)
