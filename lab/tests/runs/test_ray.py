"""The Ray backend's own part (room, retries, what is lost), on a cluster that is played by this process.

The real one is in lab/tests/cluster: `make test-cluster`.
"""

import importlib.machinery
import os
import pickle
import socket
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from lab.tests.crash.sweeps import done_once

import fasterqk
from fasterqk.errors import InputError
from fasterqk_lab.configs import content_hash
from fasterqk_lab.runs import Store, SweepError, sweep
from fasterqk_lab.runs import _ray as ray_backend
from fasterqk_lab.runs._execute import CellTask, Event, read_journal
from fasterqk_lab.runs._ray import RayCluster, do_cell, join
from fasterqk_lab.runs._store import claim, is_claimed, read_sealed, state


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class Submitted:
    """A task of the played cluster: a call that is made when somebody asks for its result."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = lambda: function(*arguments)


class PlayedRay(ModuleType):
    """What the backend uses of Ray."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.__spec__ = importlib.machinery.ModuleSpec("ray", None)
        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
        self.processors: list[float] = [2]
        self.calls: list[str] = []
        self.options: dict[str, Any] = {}
        # Errors that come instead of the next results, first come first served.
        self.trouble: list[RayError] = []

    def is_initialized(self) -> bool:
        return False

    def init(self, address: str, **options: Any) -> None:
        self.calls.append(f"init {address}")

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def cancel(self, submitted: Submitted, force: bool) -> None:
        self.calls.append("cancel")

    def nodes(self) -> list[dict[str, Any]]:
        dead = {"Alive": False, "Resources": {"CPU": 64, "GPU": 8}}
        return [dead, *({"Alive": True, "Resources": {"CPU": count}} for count in self.processors)]

    def remote(self, **options: Any) -> Any:
        self.options = options
        return lambda function: SimpleNamespace(remote=lambda *arguments: Submitted(function, *arguments))

    def wait(self, submitted: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return submitted[:num_returns], submitted[num_returns:]

    def get(self, submitted: Submitted) -> Any:
        if self.trouble:
            raise self.trouble.pop(0)
        return submitted.call()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> PlayedRay:
    played = PlayedRay()
    monkeypatch.setitem(sys.modules, "ray", played)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return played


def events_of(store: Store, config: Any) -> list[tuple[str, int]]:
    return [(line["event"], line["attempt"]) for line in read_journal(store.folder(config))]


def test_results_as_local_workers_have_them(tmp_path: Path, cells: ModuleType, ray: PlayedRay) -> None:
    configs = [cells.Cell(seed) for seed in range(5)]
    events: list[Event] = []
    backend = RayCluster(cpus=0.5)
    results = sweep(
        configs, "cells_of_tests:double", tmp_path / "ray", backend=backend, observe=events.append
    )
    assert results == sweep(configs, "cells_of_tests:double", tmp_path / "local", workers=0)
    assert Counter(event.kind for event in events)["saved"] == 5
    assert (ray.options["num_cpus"], ray.options["max_retries"]) == (0.5, 0)
    assert ray.calls == ["init local", "shutdown"]
    store = Store(tmp_path / "ray")
    for config in configs:
        assert events_of(store, config) == [("started", 1), ("saved", 1)]
        assert done_once(store.folder(config), 1) == []
        assert not is_claimed(store.folder(config))


def test_nothing_left_to_do_needs_no_cluster(tmp_path: Path, cells: ModuleType, ray: PlayedRay) -> None:
    sweep([cells.Cell()], "cells_of_tests:double", tmp_path, workers=0)
    assert sweep([cells.Cell()], "cells_of_tests:double", tmp_path, backend=RayCluster("nowhere")) == [
        {"doubled": 0.0}
    ]
    assert ray.calls == []


def test_a_machine_that_dies_costs_an_attempt(tmp_path: Path, cells: ModuleType, ray: PlayedRay) -> None:
    ray.trouble = [RayError("The node died. More in the log.")]
    events: list[Event] = []
    sweep([cells.Cell(1)], "cells_of_tests:double", tmp_path, backend=RayCluster(), observe=events.append)
    assert [event.note for event in events if event.kind == "retried"] == ["its worker died (The node died)"]
    # It died before it was heard of: for the store there was one attempt.
    assert events_of(Store(tmp_path), cells.Cell(1)) == [("started", 1), ("saved", 1)]


def test_a_cell_is_given_up_after_its_retries(tmp_path: Path, cells: ModuleType, ray: PlayedRay) -> None:
    ray.trouble = [RayError("gone")] * 2
    with pytest.raises(SweepError, match=r"1 of 1 cells failed.*its worker died \(gone\)"):
        sweep([cells.Cell(1)], "cells_of_tests:double", tmp_path, backend=RayCluster(), retries=1)
    assert state(Store(tmp_path).folder(cells.Cell(1))) == "failed"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("No module named 'fasterqk'", "pip install 'fasterqk-lab\\[cluster\\]'"),
        ("something\nelse", "a worker of the Ray cluster: RayTaskError: something else"),
    ],
)
def test_what_no_worker_can_do_is_one_line(
    tmp_path: Path, cells: ModuleType, ray: PlayedRay, error: str, told: str
) -> None:
    ray.trouble = [RayTaskError(error)]
    with pytest.raises(InputError, match=told):
        sweep([cells.Cell()], "cells_of_tests:double", tmp_path, backend=RayCluster())
    assert ray.calls[-1] == "shutdown"


def test_a_failed_cell_keeps_its_traceback(tmp_path: Path, cells: ModuleType, ray: PlayedRay) -> None:
    with pytest.raises(SweepError, match="1 of 2 cells failed"):
        sweep([cells.Cell(1), cells.Cell(2)], "cells_of_tests:odd_ones_fail", tmp_path, backend=RayCluster())
    folder = Store(tmp_path).folder(cells.Cell(1))
    assert "raise ArithmeticError" in (read_sealed(folder / "error.json") or {})["traceback"]
    assert events_of(Store(tmp_path), cells.Cell(1)) == [("started", 1), ("failed", 1)]


def test_a_cell_that_another_sweep_has_is_left_to_it(
    tmp_path: Path, cells: ModuleType, ray: PlayedRay
) -> None:
    store, busy = Store(tmp_path), cells.Cell(1)
    other = ExitStack()
    other.enter_context(claim(store.folder(busy)))
    seen: list[tuple[str, str]] = []

    def observe(event: Event) -> None:
        seen.append((event.kind, event.cell))
        if event.kind == "saved":  # the cell of our own; the other sweep ends its cell only now
            store.save(busy, {"doubled": -1.0})
            other.close()

    results = sweep(
        [busy, cells.Cell(2)], "cells_of_tests:double", tmp_path, backend=RayCluster(), observe=observe
    )
    assert results == [{"doubled": -1.0}, {"doubled": 4.0}]
    assert [kind for kind, cell in seen if cell == content_hash(busy)] == ["busy", "found"]


def test_force_begins_again(tmp_path: Path, cells: ModuleType, ray: PlayedRay) -> None:
    sweep([cells.Cell(1)], "cells_of_tests:double", tmp_path, workers=0)
    stale = Store(tmp_path).folder(cells.Cell(1)) / "checkpoint.safetensors"
    stale.write_text("old")
    sweep([cells.Cell(1)], "cells_of_tests:double", tmp_path, backend=RayCluster(), force=True)
    assert not stale.exists()
    assert events_of(Store(tmp_path), cells.Cell(1)) == [("started", 1), ("saved", 1)]


def test_an_interrupt_stops_what_was_handed_out(tmp_path: Path, cells: ModuleType, ray: PlayedRay) -> None:
    def observe(event: Event) -> None:
        raise KeyboardInterrupt

    configs = [cells.Cell(1), cells.Cell(2)]
    with pytest.raises(KeyboardInterrupt):
        sweep(configs, "cells_of_tests:double", tmp_path, backend=RayCluster(), observe=observe)
    assert ray.calls == ["init local", "cancel", "shutdown"]
    assert [state(Store(tmp_path).folder(config)) for config in configs] == ["done", "stopped"]
    assert not any(is_claimed(folder) for folder in Store(tmp_path).cells())


def test_a_machine_without_the_results_folder_is_one_line(tmp_path: Path, cells: ModuleType) -> None:
    task = CellTask("0123456789abcdef", cells.Cell(), "cells_of_tests:double", str(tmp_path / "elsewhere"))
    with pytest.raises(InputError, match=r"does not see .*elsewhere'; put --out on a disk that all machines"):
        do_cell(pickle.dumps(task), fasterqk.__version__, [], {})
    assert list(tmp_path.iterdir()) == []


def test_another_version_is_refused() -> None:
    with pytest.raises(InputError, match=r"and the sweep 0\.0\.0; install one version"):
        do_cell(b"", "0.0.0", [], {})


def test_cells_compute_on_the_device_of_their_sweep(
    tmp_path: Path, cells: ModuleType, ray: PlayedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def device(config: object, *, folder: Path, progress: object) -> dict[str, Any]:
        return {"device": os.environ.get("FASTERQK_DEVICE")}

    monkeypatch.setattr(cells, "double", device)
    monkeypatch.setenv("FASTERQK_DEVICE", "cuda:1")
    backend = RayCluster()
    backend.submit(CellTask(content_hash(cells.Cell()), cells.Cell(), "cells_of_tests:double", str(tmp_path)))
    monkeypatch.delenv("FASTERQK_DEVICE")  # the machine of the worker has its own environment
    backend.wait(lambda event: None)
    assert Store(tmp_path).result(cells.Cell()) == {"device": "cuda:1"}


@pytest.mark.parametrize(
    ("processors", "needs", "cells_at_a_time"),
    [([2], {}, 2), ([4, 3], {"cpus": 2}, 3), ([1], {"cpus": 0.25}, 4), ([0, 1], {}, 1)],
)
def test_room(ray: PlayedRay, processors: list[float], needs: dict[str, float], cells_at_a_time: int) -> None:
    ray.processors = processors
    backend = RayCluster(**needs)
    assert backend.free()
    assert backend._limit() == cells_at_a_time + ray_backend.WAITING_THERE


def test_no_room_is_told_unless_the_cluster_will_grow(ray: PlayedRay) -> None:
    with pytest.raises(InputError, match=r"needs 1 CPU and 1 GPU, and no machine of the Ray cluster has"):
        RayCluster(gpus=1).free()
    assert RayCluster(gpus=1, workers=3).free()


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"^ray is not installed; `pip install 'fasterqk-lab\[cluster\]'`"):
        RayCluster().free()


def test_addresses_that_are_none(ray: PlayedRay) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert RayCluster(f"127.0.0.1:{port}").free()
    for address, told in [
        (f"127.0.0.1:{port}", f"nothing answers at '127.0.0.1:{port}'.*Connection refused"),
        ("127.0.0.1:99999", "nothing answers at '127.0.0.1:99999'"),
        ("here", "'here' is not the address of a Ray cluster; give HOST:PORT, or auto"),
        ("ray://head:10001", "'ray://head:10001' is not the address of a Ray cluster"),
    ]:
        with pytest.raises(InputError, match=told):
            RayCluster(address).free()
    assert ray.calls == [f"init 127.0.0.1:{port}"]


@pytest.mark.parametrize(
    ("address", "told"), [("auto", "join the Ray cluster at 'auto'"), ("local", "start")]
)
def test_what_ray_says_is_said_in_one_line(
    ray: PlayedRay, monkeypatch: pytest.MonkeyPatch, address: str, told: str
) -> None:
    def init(address: str, **options: Any) -> None:
        raise ConnectionError("Could not find\n  any cluster")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(InputError, match=f"cannot {told}.*: ConnectionError: Could not find any cluster"):
        join(ray, address, None)
