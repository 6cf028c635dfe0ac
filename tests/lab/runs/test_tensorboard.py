"""Curves from histories: nothing twice, nothing left out, also after a sweep was interrupted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.crash.cells import Walk

from fasterqk.files import content_hash, write_text
from fasterqk.lab.runs import SpecCell, Store
from fasterqk.lab.runs._execute import Event
from fasterqk.lab.runs._tensorboard import FOLDER_NAME, EventFile, TensorBoard, scalars
from fasterqk.lab.training import TrainConfig
from fasterqk.lab.training._steps import factor, set_rates

CELLS = {content_hash(Walk(seed)): SpecCell("an arm/..", Walk(seed)) for seed in (0, 1)}
FIRST = next(iter(CELLS))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What goes into event files."""
    steps: list[Any] = []
    monkeypatch.setattr(EventFile, "add", lambda self, time, scalars: steps.extend(scalars))
    return steps


def history(out: Path, count: int, rest: str = "") -> None:
    lines = [json.dumps({"step": 10 * number, "loss": 1.0 / (1 + number)}) for number in range(count)]
    write_text(Store(out).root / FIRST / "history.jsonl", "\n".join([*lines, rest]))


def test_each_record_is_written_once(tmp_path: Path, written: list[Any]) -> None:
    tracker = TensorBoard(tmp_path, CELLS)
    tracker(Event("started", FIRST))
    assert written == []
    history(tmp_path, 2, rest='{"step": 20, "lo')
    tracker(Event("progress", FIRST))
    tracker(Event("progress", FIRST))
    history(tmp_path, 3)
    tracker(Event("saved", FIRST))
    assert written == [(0, {"loss": 1.0}), (10, {"loss": 0.5}), (20, {"loss": 1 / 3})]
    # Another sweep goes on with the cell: it writes the curve from the start, in a file of its own.
    TensorBoard(tmp_path, CELLS)(Event("progress", FIRST))
    assert len(written) == 6
    (arm,) = (tmp_path / FOLDER_NAME).iterdir()
    assert arm.name == "an_arm_.."
    (run,) = arm.iterdir()
    assert run.name == f"seed=0-{FIRST[:8]}"
    assert len(list(run.iterdir())) == 1


def test_a_history_that_begins_again_is_written_again(tmp_path: Path, written: list[Any]) -> None:
    tracker = TensorBoard(tmp_path, CELLS)
    history(tmp_path, 3)
    tracker(Event("progress", FIRST))
    history(tmp_path, 1)
    tracker(Event("progress", FIRST))
    assert [step for step, _ in written] == [0, 10, 20, 0]


def test_done_cells_are_written_when_they_are_missing(tmp_path: Path, written: list[Any]) -> None:
    history(tmp_path, 2)
    TensorBoard(tmp_path, CELLS)(Event("skipped", FIRST))
    TensorBoard(tmp_path, CELLS)(Event("skipped", FIRST))
    assert len(written) == 2


def test_learning_rates_of_the_circuits() -> None:
    config = TrainConfig("agreement", lr=1e-3, qk_ratio=30, epochs=2, warmup=0.0)
    records = [{"step": 0, "epoch": 0.0}, {"step": 50, "epoch": 1.0}, {"step": 100, "epoch": 2.0}]
    rates = [numbers for _, numbers in scalars(records, config)]
    assert [numbers["learning_rate/ov"] for numbers in rates] == pytest.approx([1e-3, 5e-4, 0])
    assert [numbers["learning_rate/qk"] for numbers in rates] == pytest.approx([3e-2, 1.5e-2, 0])
    named = scalars(records, config.replace(faster=("*mlp*",)))[0][1]
    assert named.keys() == {"epoch", "learning_rate/chosen", "learning_rate/others"}


def test_the_rates_are_those_of_the_optimizer() -> None:
    """The curve is computed from the schedule; the loop sets an optimizer's rates to the same numbers."""
    config = TrainConfig("agreement", lr=1e-3, qk_ratio=30, epochs=1)
    groups = [
        {"params": [torch.zeros(1)], "lr": rate}
        for rate in (config.optimisation.lr * config.optimisation.qk_ratio, config.optimisation.lr)
    ]
    optimizer = torch.optim.SGD(groups)
    set_rates(optimizer, factor(config, 30, 100))
    ((_, told),) = scalars([{"step": 30, "epoch": 0.3}], config)
    assert [told["learning_rate/qk"], told["learning_rate/ov"]] == [
        group["lr"] for group in optimizer.param_groups
    ]


def test_only_numbers_are_curves() -> None:
    records = [{"loss": None, "note": "x", "diverged": True, "dtap": [1], "ac": 50}]
    assert scalars(records, Walk()) == [(0, {"ac": 50.0})]
