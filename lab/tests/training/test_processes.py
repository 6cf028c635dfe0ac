"""`fasterqk-lab train` in two real processes gives the numbers of one."""

import json
import os
import subprocess
import sys

import pytest
import torch

from fasterqk.errors import InputError
from fasterqk_lab.cli.main import main
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._steps import ForkedCall, Processes, Steps, one_thread


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


@pytest.mark.slow
def test_two_processes_train_as_one_and_share_its_store(data, tmp_path, capsys):
    words = ["train", "jsonl", "--data", str(data), "--epochs", "2", "--batch-size", "7"]
    words += ["--qk-ratio", "10", "--json"]

    def train_in_two():
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launcher, "-m", "fasterqk_lab", *words, "--out", str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    assert main(words) == 0
    alone = json.loads(capsys.readouterr().out)
    both = train_in_two()
    assert both["steps"] == alone["steps"]
    for entry, entry_of_both in zip(alone["history"], both["history"], strict=True):
        for name, value in entry.items():
            assert entry_of_both[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    again = train_in_two()  # nobody waits for a run that is done
    assert again["history"] == both["history"]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_make_up_the_batch(count):
    batch = torch.arange(5)
    shares = [Processes(rank, count).share(batch) for rank in range(count)]
    assert sum(weight for _, weight in shares) == pytest.approx(1)
    instances = torch.cat([mine for mine, weight in shares if weight])
    assert sorted(instances.tolist()) == batch.tolist()
    assert all(len(mine) for mine, _ in shares)


def test_gradients_that_are_never_cleared_need_one_process():
    config = TrainConfig("agreement", frozen=("*.mlp.*",), stale_gradients=True)
    with pytest.raises(InputError, match="never cleared"):
        Steps(config, None, Processes(0, 2))


def test_the_copy_sees_what_was_and_the_process_goes_on():
    numbers = [1, 2]
    aside = ForkedCall(lambda: (sum(numbers), os.getpid()))
    numbers.append(3)
    total, process = aside.result()
    assert total == 3
    assert process != os.getpid()


def test_what_the_copy_raises_is_raised_here():
    def fail():
        raise InputError("no such split")

    with pytest.raises(InputError, match="no such split"):
        ForkedCall(fail).result()


def test_a_copy_that_dies_is_an_error():
    with pytest.raises(RuntimeError, match="exit code 7"):
        ForkedCall(lambda: os._exit(7)).result()


def test_one_thread_inside_and_as_before_after():
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="stopped"), one_thread():
        inside = torch.get_num_threads()
        raise ValueError("stopped")
    assert inside == 1
    assert torch.get_num_threads() == before
