"""Sweeps: every cell once, whatever happens to workers, cells and other sweeps."""

import os
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.errors import InputError, WorkError
from fasterqk_lab.configs import content_hash
from fasterqk_lab.runs import Store, SweepError, sweep
from fasterqk_lab.runs._execute import Event, Notify, ThisProcess, read_journal
from fasterqk_lab.runs._store import claim, is_claimed, read_sealed, state
from fasterqk_lab.runs._sweep import take_shard


def started(store: Store) -> list[int]:
    """How often each cell was begun."""
    return [sum(line["event"] == "started" for line in read_journal(folder)) for folder in store.cells()]


@pytest.mark.parametrize("workers", [0, 2])
def test_results_in_order_and_nothing_twice(tmp_path: Path, cells: ModuleType, workers: int) -> None:
    configs = [cells.Cell(3), cells.Cell(1), cells.Cell(3), cells.Cell(2, scale=0.5)]
    events: list[Event] = []
    results = sweep(configs, "cells_of_tests:double", tmp_path, workers=workers, observe=events.append)
    assert results == [{"doubled": 6.0}, {"doubled": 2.0}, {"doubled": 6.0}, {"doubled": 2.0}]
    assert Counter(event.kind for event in events)["saved"] == 3
    assert started(Store(tmp_path)) == [1, 1, 1]

    events.clear()
    again = sweep(
        [*configs, cells.Cell(5)], "cells_of_tests:double", tmp_path, workers=workers, observe=events.append
    )
    assert again == [*results, {"doubled": 10.0}]
    assert Counter(event.kind for event in events)["skipped"] == 3
    assert started(Store(tmp_path)) == [1, 1, 1, 1]


def test_cells_of_one_sweep_may_have_functions_of_their_own(tmp_path: Path, cells: ModuleType) -> None:
    functions = ["cells_of_tests:double", "cells_of_tests:no_such", "cells_of_tests:double"]
    with pytest.raises(InputError, match="no function 'cells_of_tests:no_such'"):
        sweep([cells.Cell(1), cells.Cell(2), cells.Cell(3)], functions, tmp_path, workers=0)
    assert sweep([cells.Cell(1)], functions[:1], tmp_path, workers=0) == [{"doubled": 2.0}]
    # A shard takes the functions of its cells.
    rest = sweep([cells.Cell(2), cells.Cell(3)], functions[1:], tmp_path, workers=0, shard=(2, 2))
    assert rest == [{"doubled": 6.0}]
    with pytest.raises(ValueError, match="zip"):
        sweep([cells.Cell(1)], functions, tmp_path, workers=0)


def test_a_finished_cell_says_how_it_came_about(tmp_path: Path, cells: ModuleType) -> None:
    sweep([cells.Cell(1)], "cells_of_tests:double", tmp_path, workers=0)
    folder = Store(tmp_path).folder(cells.Cell(1))
    about = read_sealed(folder / "environment.json") or {}
    assert about["function"] == "cells_of_tests:double"
    assert about["attempt"] == 1
    assert 0 <= about["seconds"] < 60
    assert [line["event"] for line in read_journal(folder)] == ["started", "saved"]
    assert not is_claimed(folder)


def test_force_does_finished_cells_again_from_the_start(tmp_path: Path, cells: ModuleType) -> None:
    configs = [cells.Cell(1), cells.Cell(2)]
    sweep(configs, "cells_of_tests:double", tmp_path, workers=0)
    stale = Store(tmp_path).folder(configs[0]) / "checkpoint.safetensors"
    stale.write_text("old")
    results = sweep(configs[:1], "cells_of_tests:double", tmp_path, workers=0, force=True)
    assert results == [{"doubled": 2.0}]
    assert not stale.exists()
    assert started(Store(tmp_path)) == [1, 1]  # the journal begins again with the cell


def test_force_outlives_a_worker_that_died_before_it_began(tmp_path: Path, cells: ModuleType) -> None:
    class FirstWorkerDies(ThisProcess):
        died = False

        def wait(self, notify: Notify) -> None:
            if not self.died:
                self.died, task, self._task = True, self._task, None
                assert task is not None
                return notify(Event("lost", task.cell))
            return super().wait(notify)

    (config,) = configs = [cells.Cell(1)]
    sweep(configs, "cells_of_tests:double", tmp_path, workers=0)
    (Store(tmp_path).folder(config) / "old.txt").write_text("")
    sweep(configs, "cells_of_tests:double", tmp_path, force=True, backend=FirstWorkerDies())
    assert not (Store(tmp_path).folder(config) / "old.txt").exists()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failed_cell_keeps_its_traceback_and_stops_nobody(
    tmp_path: Path, cells: ModuleType, workers: int
) -> None:
    configs = [cells.Cell(seed) for seed in range(4)]
    with pytest.raises(SweepError, match="2 of 4 cells failed") as caught:
        sweep(configs, "cells_of_tests:odd_ones_fail", tmp_path, workers=workers)
    failures = {failure.cell: failure.line for failure in caught.value.failures}
    assert failures == {
        content_hash(cells.Cell(seed)): f"ArithmeticError: {seed} is odd very odd" for seed in (1, 3)
    }
    store = Store(tmp_path)
    assert [state(store.folder(config)) for config in configs] == ["done", "failed", "done", "failed"]
    error = read_sealed(store.folder(configs[1]) / "error.json") or {}
    assert "raise ArithmeticError" in error["traceback"]
    # Mended, it runs again and the error goes away.
    sweep(configs, "cells_of_tests:double", tmp_path, workers=0)
    assert [state(store.folder(config)) for config in configs] == ["done"] * 4


@pytest.mark.parametrize(
    ("function", "kind"),
    [("inputs_are_bad", InputError), ("odd_ones_fail", WorkError), ("bad_input_or_no_memory", WorkError)],
)
def test_only_failures_by_input_are_told_as_such(
    tmp_path: Path, cells: ModuleType, function: str, kind: type[Exception]
) -> None:
    with pytest.raises(SweepError) as caught:
        sweep([cells.Cell(1), cells.Cell(2)], f"cells_of_tests:{function}", tmp_path, workers=0)
    told = caught.value.as_cli_error()
    assert type(told) is kind
    assert "traceback is in error.json" in str(told)


def test_what_a_cell_prints_is_kept_with_it(
    tmp_path: Path, cells: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep([cells.Cell(2)], "cells_of_tests:odd_ones_fail", tmp_path, workers=1)
    sweep([cells.Cell(4)], "cells_of_tests:double", tmp_path, workers=1)
    store = Store(tmp_path)
    assert (store.folder(cells.Cell(2)) / "output.txt").read_text() == "looking at 2\n"
    assert not (store.folder(cells.Cell(4)) / "output.txt").exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("function", "line"), [("leave", "SystemExit: 3"), ("number", "returned a int, not a dict")]
)
def test_cells_that_misbehave_are_failures(
    tmp_path: Path, cells: ModuleType, function: str, line: str
) -> None:
    with pytest.raises(SweepError, match=line):
        sweep([cells.Cell()], f"cells_of_tests:{function}", tmp_path, workers=0)


def test_a_cell_whose_worker_dies_goes_on_in_another(tmp_path: Path, cells: ModuleType) -> None:
    events: list[Event] = []
    configs = [cells.Cell(seed) for seed in range(3)]
    results = sweep(configs, "cells_of_tests:die_once", tmp_path, workers=2, observe=events.append)
    assert results == [{"lines": 1}] * 3
    assert started(Store(tmp_path)) == [2, 2, 2]
    assert Counter(event.kind for event in events)["retried"] == 3


def test_a_cell_whose_workers_always_die_is_given_up(tmp_path: Path, cells: ModuleType) -> None:
    configs = [cells.Cell(seed) for seed in range(3)]
    with pytest.raises(SweepError, match=r"1 of 3 cells failed.*its worker died \(SIGKILL"):
        sweep(configs, "cells_of_tests:die_always", tmp_path, workers=1, retries=1)
    store = Store(tmp_path)
    assert [state(store.folder(config)) for config in configs] == ["done", "failed", "done"]
    assert [line["attempt"] for line in read_journal(store.folder(configs[1]))] == [1, 2, 2]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "name", ["cells_of_tests:nothing", "no_such_module:f", "nonsense", "cells_of_tests:not_a_function"]
)
def test_a_function_that_is_none_is_one_line(
    tmp_path: Path, cells: ModuleType, name: str, workers: int
) -> None:
    with pytest.raises(InputError, match=f"'{name}'"):
        sweep([cells.Cell()], name, tmp_path, workers=workers)


def test_a_class_that_workers_cannot_import_is_one_line(
    tmp_path: Path, cells: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("made_up_on_the_spot")
    module.Cell = cells.Cell
    monkeypatch.setitem(sys.modules, "made_up_on_the_spot", module)
    monkeypatch.setattr(cells.Cell, "__module__", "made_up_on_the_spot")
    with pytest.raises(InputError, match=r"cannot import .* 'made_up_on_the_spot'"):
        sweep([cells.Cell()], "cells_of_tests:double", tmp_path, workers=1)


def test_workers_have_the_threads_they_are_given(tmp_path: Path, cells: ModuleType) -> None:
    assert sweep([cells.Cell()], "cells_of_tests:threads", tmp_path, workers=1, threads=3) == [
        {"threads": "3"}
    ]


def test_a_cell_that_another_process_has_is_left_to_it(tmp_path: Path, cells: ModuleType) -> None:
    """The other process is played by this one: it finishes the cell when the sweep comes upon it."""
    store, busy = Store(tmp_path), cells.Cell(1)
    other = ExitStack()
    other.enter_context(claim(store.folder(busy)))
    events: list[Event] = []

    def observe(event: Event) -> None:
        events.append(event)
        if event.kind == "busy":
            store.save(busy, {"doubled": -1.0})
            other.close()

    results = sweep([busy, cells.Cell(2)], "cells_of_tests:double", tmp_path, workers=0, observe=observe)
    assert results == [{"doubled": -1.0}, {"doubled": 4.0}]
    assert [event.kind for event in events if event.cell == content_hash(busy)] == ["busy", "found"]


def test_a_cell_that_another_process_left_is_taken_over(tmp_path: Path, cells: ModuleType) -> None:
    busy = cells.Cell(1)
    other = ExitStack()
    other.enter_context(claim(Store(tmp_path).folder(busy)))

    def observe(event: Event) -> None:
        if event.kind == "busy":
            other.close()

    assert sweep([busy], "cells_of_tests:double", tmp_path, workers=0, observe=observe) == [{"doubled": 2.0}]


def test_two_sweeps_at_once_do_each_cell_once(tmp_path: Path, cells: ModuleType) -> None:
    configs = [cells.Cell(seed) for seed in range(25)]
    results: dict[int, list[dict[str, float]]] = {}

    def run(number: int) -> None:
        mine = configs if number else configs[::-1]
        results[number] = sweep(mine, "cells_of_tests:double", tmp_path, workers=0)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[1] == results[0][::-1]
    assert started(Store(tmp_path)) == [1] * 25


def test_an_unreadable_result_fails_its_cell_only(tmp_path: Path, cells: ModuleType) -> None:
    configs = [cells.Cell(1), cells.Cell(2)]
    sweep(configs[:1], "cells_of_tests:double", tmp_path, workers=0)
    path = Store(tmp_path).folder(configs[0]) / "result.json"
    path.write_text("{}")
    with pytest.raises(SweepError, match="1 of 2 cells failed") as caught:
        sweep(configs, "cells_of_tests:double", tmp_path, workers=0)
    assert str(path) in caught.value.failures[0].line
    assert Store(tmp_path).result(configs[1]) == {"doubled": 4.0}


def test_no_place_to_write_stops_the_sweep_and_names_the_file(tmp_path: Path, cells: ModuleType) -> None:
    (tmp_path / "runs").write_text("a file in the way")
    with pytest.raises(OSError) as caught:
        sweep([cells.Cell(1)], "cells_of_tests:double", tmp_path, workers=1)
    assert str(tmp_path / "runs") in str(caught.value)


def test_progress_ends_at_the_number_of_cells(tmp_path: Path, cells: ModuleType) -> None:
    seen: list[tuple[float, float]] = []
    sweep(
        [cells.Cell(seed) for seed in range(3)],
        "cells_of_tests:double",
        tmp_path,
        workers=0,
        progress=lambda done, total, note="": seen.append((done, total)),
    )
    assert seen[0] == (0, 3)
    assert seen[-1] == (3, 3)
    assert 0.5 in [done for done, _ in seen]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_interrupt_passes_through_and_keeps_what_is_done(
    tmp_path: Path, cells: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(config: object, *, folder: Path, progress: object) -> None:
        raise KeyboardInterrupt

    sweep([cells.Cell(1)], "cells_of_tests:double", tmp_path, workers=0)
    monkeypatch.setattr(cells, "double", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep([cells.Cell(1), cells.Cell(2)], "cells_of_tests:double", tmp_path, workers=0)
    store = Store(tmp_path)
    assert store.result(cells.Cell(1)) == {"doubled": 2.0}
    assert state(store.folder(cells.Cell(2))) == "stopped"
    assert [line["event"] for line in read_journal(store.folder(cells.Cell(2)))] == ["started", "stopped"]


def test_no_worker_outlives_its_sweep(tmp_path: Path, cells: ModuleType) -> None:
    os.mkfifo(tmp_path / "pipe")
    workers: list[int] = []

    def observe(event: Event) -> None:
        if event.kind == "started" and event.cell == content_hash(held):
            with open(tmp_path / "pipe") as pipe:
                workers.append(int(pipe.readline()))
            raise KeyboardInterrupt

    held = cells.Cell(1, word=str(tmp_path / "pipe"))
    with pytest.raises(KeyboardInterrupt):
        sweep([cells.Cell(0), held], "cells_of_tests:hold", tmp_path, workers=2, observe=observe)
    with pytest.raises(ProcessLookupError):
        os.kill(workers[0], 0)
    assert state(Store(tmp_path).folder(held)) == "stopped"


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 9))
def test_shards_are_a_partition(count: int, parts: int) -> None:
    items = list(range(count))
    shards = [take_shard(items, (part, parts)) for part in range(1, parts + 1)]
    assert sorted(item for shard in shards for item in shard) == items
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize("shard", [(0, 3), (4, 3), (1, 0)])
def test_a_shard_that_is_none(tmp_path: Path, shard: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=f"shard {shard[0]}/{shard[1]}"):
        sweep([], "a:b", tmp_path, shard=shard)


def test_a_sweep_of_a_shard(tmp_path: Path, cells: ModuleType) -> None:
    configs = [cells.Cell(seed) for seed in range(5)]
    parts = [sweep(configs, "cells_of_tests:double", tmp_path, workers=0, shard=(part, 2)) for part in (1, 2)]
    assert parts == [
        [{"doubled": 2.0 * seed} for seed in (0, 2, 4)],
        [{"doubled": 2.0 * seed} for seed in (1, 3)],
    ]
