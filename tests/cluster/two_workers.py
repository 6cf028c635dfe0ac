"""A real Ray cluster on this machine, really damaged. `make test-cluster` runs this; `make test` does not,
because starting Ray takes long on a busy machine.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from tests.crash.sweeps import SweepUnderTest

from fasterqk.lab.runs import Store, sweep
from fasterqk.lab.runs._execute import Event, read_journal
from fasterqk.lab.runs._ray import RayCluster
from fasterqk.lab.runs._store import read_result, state
from fasterqk.lab.training import TrainConfig

OBJECT_STORE = 80 * 1024**2  # about the smallest that Ray starts with
WORDS = ["apple", "bread", "chair", "door", "early", "field", "green", "house"]
TRAIN = "fasterqk.lab.training:train"


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Cluster, list[Any]]]:
    """A head without processors, where the sweep runs, and two workers with one each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster, nodes = start_cluster()
    yield cluster, nodes
    cluster.shutdown()


def start_cluster(tries: int = 3) -> tuple[Cluster, list[Any]]:
    """Ray gives a node thirty seconds to start, which a busy machine may not manage at once."""
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=0, include_dashboard=False, object_store_memory=OBJECT_STORE)
        return cluster, [cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE) for _ in range(2)]
    except Exception:
        cluster.shutdown()
        if tries == 1:
            raise
    return start_cluster(tries - 1)


@pytest.fixture
def configs(tmp_path: Path) -> list[TrainConfig]:
    """Twelve trainings of some seconds: two arms, six seeds."""
    path = tmp_path / "little.jsonl"
    lines = []
    for number in range(240):
        tokens = [WORDS[(number * 5 + place * 3) % len(WORDS)] for place in range(2 + number * 7 % 9)]
        label = "right" if number % 2 else "left"
        tokens[number * 11 % len(tokens)] = label
        relevance = [int(word == label) for word in tokens]
        lines.append({"id": str(number), "tokens": tokens, "relevance": relevance, "label": label})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    small = {"width": 16, "heads": 2, "head_width": 8, "mlp_width": 16, "context": 16, "train_subset": 64}
    return [
        TrainConfig("jsonl", file=str(path), epochs=30, qk_ratio=qk_ratio, seed=seed, lr=3e-3, **small)
        for seed in range(6)
        for qk_ratio in (1, 30)
    ]


def ray_worker(raylet: int) -> int | None:
    """The process on that node which does a cell now."""
    for process in Path("/proc").iterdir():
        try:
            status = (process / "status").read_text()
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if f"PPid:\t{raylet}\n" in status and command.startswith(b"ray::do_cell"):
            return int(process.name)
    return None


def test_ctrl_c_keeps_results_and_checkpoints(tmp_path: Path, cluster: tuple[Cluster, list[Any]]) -> None:
    ray, _ = cluster
    os.mkfifo(tmp_path / "pipe")
    spec = tmp_path / "spec.toml"
    spec.write_text(
        'config = "tests.crash.cells:Held"\nfunction = "tests.crash.cells:hold"\nseeds = [0, 1]\n'
        f"[base]\npipe = '{tmp_path / 'pipe'}'\n"
    )
    words = ["sweep", str(spec), "--out", str(tmp_path), "--backend", "ray", "--address", ray.address]
    process = subprocess.Popen(
        [sys.executable, "-m", "fasterqk", *words, "--workers", "1", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert (tmp_path / "pipe").read_text() == "running"
    # The checkpoint was written before the pipe; it has arrived when it is in the store.
    (folder,) = (folder for folder in Store(tmp_path).cells() if state(folder) == "running")
    while not (folder / "checkpoint.json").exists():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    output, told = process.communicate()
    assert (process.returncode, output) == (130, "")
    assert told == "fasterqk sweep: stopped; what was finished is kept\n"
    assert sorted(state(folder) for folder in Store(tmp_path).cells()) == ["done", "stopped"]
    assert [line["event"] for line in read_journal(folder)] == ["started", "stopped"]
    assert (folder / "checkpoint.json").read_text() == "half of it"


def test_a_killed_worker_and_a_killed_machine_change_no_bit(
    tmp_path: Path, cluster: tuple[Cluster, list[Any]], configs: list[TrainConfig]
) -> None:
    """The first worker process is killed when a cell has come half way, and the second machine later.

    It comes last: one machine is not there any more afterwards.
    """
    ray, (first, second) = cluster
    reference, out = tmp_path / "local", tmp_path / "ray"
    expected = sweep(configs, TRAIN, reference, workers=2)
    events: list[Event] = []
    killed: list[str] = []

    def observe(event: Event) -> None:
        events.append(event)
        half_way = event.kind == "progress" and event.done > event.total / 2
        saved = sum(one.kind == "saved" for one in events)
        if not half_way or not (out / "runs" / event.cell / "checkpoint.safetensors").exists():
            return
        if not killed:
            pid = ray_worker(first.all_processes["raylet"][0].process.pid)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                killed.append("worker")
        elif len(killed) == 1 and saved >= 4:
            ray.remove_node(second, allow_graceful=False)  # SIGKILL for all of its processes
            killed.append("machine")

    backend = RayCluster(ray.address)
    assert sweep(configs, TRAIN, out, backend=backend, observe=observe) == expected
    assert killed == ["worker", "machine"]

    # Histories and checkpoints too, every file readable, and every cell done once.
    assert SweepUnderTest(Path(), reference, 0.0, tmp_path).problems(out) == []
    retried = [event.cell for event in events if event.kind == "retried"]
    assert len(retried) >= 2
    attempts = {folder.name: (read_result(folder) or {})["attempt"] for folder in Store(out).cells()}
    assert all(attempts[cell] >= 2 for cell in retried)
    assert max(attempts.values()) <= 3
    # Nobody who had come half way began again from the start.
    for cell in retried:
        place = next(i for i, event in enumerate(events) if event.kind == "retried" and event.cell == cell)
        before = [e.done for e in events[:place] if e.cell == cell and e.kind == "progress"]
        after = [e.done for e in events[place:] if e.cell == cell and e.kind == "progress"]
        if before and before[-1] > 0:
            assert after[0] > 0
