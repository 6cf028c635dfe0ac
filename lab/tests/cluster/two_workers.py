"""A real Ray cluster on this machine, really damaged. `make test-cluster` runs this; `make test` does not,
because starting Ray takes long on a busy machine.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from lab.tests.crash.cells import Gated, step_of_checkpoint
from lab.tests.crash.sweeps import SweepUnderTest
from ray.cluster_utils import Cluster

from fasterqk_lab.runs import Store, sweep
from fasterqk_lab.runs._execute import Event, read_journal
from fasterqk_lab.runs._ray import RayCluster
from fasterqk_lab.runs._store import read_result, state

OBJECT_STORE = 80 * 1024**2  # about the smallest that Ray starts with
WORDS = ["apple", "bread", "chair", "door", "early", "field", "green", "house"]
TRAIN = "lab.tests.crash.cells:train_gated"


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
def configs(tmp_path: Path) -> list[Gated]:
    """Six trainings of two arms and three seeds; those of the first seed of each arm are held."""
    path = tmp_path / "little.jsonl"
    lines = []
    for number in range(240):
        tokens = [WORDS[(number * 5 + place * 3) % len(WORDS)] for place in range(2 + number * 7 % 9)]
        label = "right" if number % 2 else "left"
        tokens[number * 11 % len(tokens)] = label
        relevance = [int(word == label) for word in tokens]
        lines.append({"id": str(number), "tokens": tokens, "relevance": relevance, "label": label})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    gate = str(tmp_path / "gate")
    return [
        Gated(str(path), gate, held=seed < 2, qk_ratio=(1.0, 30.0)[seed % 2], seed=seed) for seed in range(6)
    ]


def test_ctrl_c_keeps_results_and_checkpoints(tmp_path: Path, cluster: tuple[Cluster, list[Any]]) -> None:
    ray, _ = cluster
    os.mkfifo(tmp_path / "pipe")
    spec = tmp_path / "spec.toml"
    spec.write_text(
        'config = "lab.tests.crash.cells:Held"\nfunction = "lab.tests.crash.cells:hold"\nseeds = [0, 1]\n'
        f"[base]\npipe = '{tmp_path / 'pipe'}'\n"
    )
    words = ["sweep", str(spec), "--out", str(tmp_path), "--backend", "ray", "--address", ray.address]
    process = subprocess.Popen(
        [sys.executable, "-m", "fasterqk_lab", *words, "--workers", "1", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # What is started in the background ignores Ctrl-C, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (tmp_path / "pipe").read_text() == "running"
    (folder,) = (folder for folder in Store(tmp_path).cells() if state(folder) == "running")
    os.killpg(process.pid, signal.SIGINT)
    output, told = process.communicate()
    assert (process.returncode, output) == (130, "")
    assert told == "fasterqk-lab sweep: stopped; what was finished is kept\n"
    assert sorted(state(folder) for folder in Store(tmp_path).cells()) == ["done", "stopped"]
    assert [line["event"] for line in read_journal(folder)] == ["started"]
    assert (folder / "checkpoint.json").read_text() == "half of it"


def test_a_killed_worker_and_a_killed_machine_change_no_bit(
    tmp_path: Path, cluster: tuple[Cluster, list[Any]], configs: list[Gated]
) -> None:
    """The first two cells wait half way, one on each machine. One loses its worker, the other its machine.

    Nothing depends on who is faster: the cells wait until they are killed, and are killed when their
    checkpoints have arrived. It comes last: one machine is not there any more afterwards.
    """
    ray, (first, second) = cluster
    reference, out = tmp_path / "local", tmp_path / "ray"
    expected = sweep(configs, TRAIN, reference, workers=2)
    events: list[Event] = []
    held = configs[:2]
    folders = [Store(out).folder(config) for config in held]
    for config in held:
        Path(config.gate).mkdir(exist_ok=True)
        os.mkfifo(Path(config.gate) / str(config.seed))

    def kill() -> list[int]:
        """Wait for both cells and their checkpoints, and kill; returns the steps of the checkpoints."""
        told = [(Path(config.gate) / str(config.seed)).read_text().split() for config in held]
        workers, steps = [int(worker) for worker, _ in told], [int(step) for _, step in told]
        while [step_of_checkpoint(folder) for folder in folders] != steps:
            pass
        on_first = [_parent(worker) == first.all_processes["raylet"][0].process.pid for worker in workers]
        assert sorted(on_first) == [False, True]
        os.kill(workers[on_first.index(True)], signal.SIGKILL)
        ray.remove_node(second, allow_graceful=False)  # SIGKILL for all of its processes
        return steps

    backend = RayCluster(ray.address)
    steps: list[int] = []
    killer = Thread(target=lambda: steps.extend(kill()), daemon=True)
    killer.start()
    assert sweep(configs, TRAIN, out, backend=backend, observe=events.append) == expected
    killer.join()

    # Histories and checkpoints too, every file readable, and every cell done once.
    assert SweepUnderTest(Path(), reference, 0.0, tmp_path).problems(out) == []
    retried = [event.cell for event in events if event.kind == "retried"]
    assert {folder.name for folder in folders} <= set(retried)
    attempts = {folder.name: (read_result(folder) or {})["attempt"] for folder in Store(out).cells()}
    assert all(attempts[folder.name] >= 2 for folder in folders)
    assert max(attempts.values()) <= 3
    # Nobody who had come half way began again from the start: each went on from the checkpoint that arrived.
    assert len(steps) == 2 and min(steps) > 0
    assert [int((folder / "began.txt").read_text()) for folder in folders] == steps


def _parent(process: int) -> int:
    """The process that started ``process``: of a Ray worker, the raylet of its machine."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.findall(r"^PPid:\s*(\d+)$", status, re.MULTILINE)[0])
