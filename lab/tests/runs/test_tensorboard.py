"""Curves from histories: nothing twice, nothing left out, also after a sweep was interrupted."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from lab.tests.crash.cells import Walk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.full_disk import file_size_limit

from fasterqk.errors import InputError
from fasterqk.files import write_text
from fasterqk_lab.configs import content_hash
from fasterqk_lab.runs import SpecCell, Store
from fasterqk_lab.runs._execute import Event
from fasterqk_lab.runs._table import FOLDER_NAME, TensorBoard

CELLS = {content_hash(Walk(seed)): SpecCell("an arm/..", Walk(seed)) for seed in (0, 1)}
FIRST = next(iter(CELLS))


def written(out: Path) -> list[tuple[int, float]]:
    """The steps and losses of the one curve in ``out``, read by TensorBoard's own reader."""
    (folder,) = (out / FOLDER_NAME).glob("*/*")
    reader = EventAccumulator(str(folder), purge_orphaned_data=False)
    reader.Reload()
    return [(scalar.step, scalar.value) for scalar in reader.Scalars("loss")]


def history(out: Path, count: int, rest: str = "") -> None:
    lines = [json.dumps({"step": 10 * number, "loss": 1.0 / (1 + number)}) for number in range(count)]
    write_text(Store(out).root / FIRST / "history.jsonl", "\n".join([*lines, rest]))


def test_each_record_is_written_once(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path, CELLS)
    tracker(Event("started", FIRST))
    assert not (tmp_path / FOLDER_NAME).exists()
    history(tmp_path, 2, rest='{"step": 20, "lo')
    tracker(Event("progress", FIRST))
    tracker(Event("progress", FIRST))
    assert written(tmp_path) == [(0, 1.0), (10, 0.5)]
    history(tmp_path, 3)
    tracker(Event("saved", FIRST))
    third = float(np.float32(1 / 3))
    assert written(tmp_path) == [(0, 1.0), (10, 0.5), (20, third)]
    # Another sweep goes on with the cell: it writes the curve from the start, in a file of its own.
    TensorBoard(tmp_path, CELLS)(Event("progress", FIRST))
    assert written(tmp_path) == [(0, 1.0), (10, 0.5), (20, third)]
    (arm,) = (tmp_path / FOLDER_NAME).iterdir()
    assert arm.name == "an_arm_.."
    (run,) = arm.iterdir()
    assert run.name == f"seed=0-{FIRST[:8]}"
    (file,) = run.iterdir()
    assert "tfevents" in file.name


def test_an_attempt_that_goes_on_continues_its_curve(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path, CELLS)
    history(tmp_path, 1)
    tracker(Event("progress", FIRST))
    tracker(Event("retried", FIRST))
    history(tmp_path, 2)
    tracker(Event("progress", FIRST))
    assert written(tmp_path) == [(0, 1.0), (10, 0.5)]


def test_a_history_that_begins_again_is_written_again(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path, CELLS)
    history(tmp_path, 3)
    tracker(Event("progress", FIRST))
    history(tmp_path, 1)
    tracker(Event("progress", FIRST))
    assert written(tmp_path) == [(0, 1.0)]


def test_done_cells_are_written_when_they_are_missing(tmp_path: Path) -> None:
    history(tmp_path, 2)
    TensorBoard(tmp_path, CELLS)(Event("skipped", FIRST))
    assert written(tmp_path) == [(0, 1.0), (10, 0.5)]
    history(tmp_path, 3)
    TensorBoard(tmp_path, CELLS)(Event("skipped", FIRST))
    assert written(tmp_path) == [(0, 1.0), (10, 0.5)]


def test_curves_that_do_not_fit_are_named_and_written_again(tmp_path: Path) -> None:
    history(tmp_path, 20)
    with file_size_limit(100), pytest.raises(OSError, match="File too large") as caught:
        TensorBoard(tmp_path, CELLS)(Event("skipped", FIRST))
    assert "events.out.tfevents" in str(caught.value.filename)
    TensorBoard(tmp_path, CELLS)(Event("skipped", FIRST))
    assert len(written(tmp_path)) == 20


def test_without_the_package_a_line_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'fasterqk-lab\[tensorboard\]'"):
        TensorBoard(tmp_path, CELLS)


@pytest.mark.parametrize(
    "odd", ["NaN", "Infinity", "-Infinity", "1e400", "1" + "0" * 400, '"x"', "null", "[1]"]
)
def test_a_history_with_odd_values_is_written_without_them(tmp_path: Path, odd: str) -> None:
    lines = [f'{{"step": {odd}, "epoch": 1, "loss": 0.5}}', f'{{"step": 7, "epoch": {odd}, "loss": {odd}}}']
    write_text(
        Store(tmp_path).root / FIRST / "history.jsonl", "\n".join([*lines, '{"step": 9, "loss": 0.25}'])
    )
    TensorBoard(tmp_path, CELLS)(Event("saved", FIRST))
    assert written(tmp_path) == [(0, 0.5), (9, 0.25)]


def test_a_loss_too_large_for_a_curve_is_infinite(tmp_path: Path) -> None:
    write_text(Store(tmp_path).root / FIRST / "history.jsonl", '{"step": 1, "loss": 1e300}')
    TensorBoard(tmp_path, CELLS)(Event("saved", FIRST))
    assert written(tmp_path) == [(1, float("inf"))]
