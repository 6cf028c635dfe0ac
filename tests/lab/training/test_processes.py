"""`fasterqk train` in two real processes gives the numbers of one."""

import json
import subprocess
import sys

import pytest
import torch

from fasterqk.errors import InputError
from fasterqk.lab.training import TrainConfig
from fasterqk.lab.training._processes import Processes
from fasterqk.lab.training._steps import Steps


@pytest.fixture
def data(tmp_path):
    lines = [
        {"tokens": ["it", "is"] + ["very"] * (n % 4) + ["x" if n % 2 else "y"], "label": n % 2}
        | {"relevance": [0] * (2 + n % 4) + [1]}
        for n in range(90)
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def load_trained(data, processes, *options):
    launch = [sys.executable, "-m"]
    if processes > 1:
        launch += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command = ["fasterqk", "train", "jsonl", "--data", str(data), "--epochs", "2", "--batch-size", "7"]
    done = subprocess.run(
        [*launch, *command, "--qk-ratio", "10", "--json", *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_two_processes_train_as_one_and_share_its_store(data, tmp_path):
    alone = load_trained(data, 1)
    both = load_trained(data, 2, "--out", str(tmp_path / "out"))
    assert both["steps"] == alone["steps"]
    for one, other in zip(alone["history"], both["history"], strict=True):
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    again = load_trained(data, 2, "--out", str(tmp_path / "out"))  # nobody waits for a run that is done
    assert again["history"] == both["history"]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_make_up_the_batch(count):
    batch = torch.arange(5)
    shares = [Processes(rank, count).share(batch) for rank in range(count)]
    assert sum(weight for _, weight in shares) == pytest.approx(1)
    seen = torch.cat([mine for mine, weight in shares if weight])
    assert sorted(seen.tolist()) == batch.tolist()
    assert all(len(mine) for mine, _ in shares)


def test_gradients_that_are_never_cleared_need_one_process():
    config = TrainConfig("agreement", frozen=("*.mlp.*",), stale_gradients=True)
    with pytest.raises(InputError, match="never cleared"):
        Steps(config, None, Processes(0, 2))
