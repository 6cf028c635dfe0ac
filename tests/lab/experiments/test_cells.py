"""Compact files of cells: what is written, what is found again, and what is refused."""

import gzip
from dataclasses import dataclass
from pathlib import Path

import pytest

from fasterqk.errors import InputError
from fasterqk.lab.experiments import EXPERIMENTS
from fasterqk.lab.experiments._cells import CellRunner, read_cells, rounded, write_cells

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "cells"
FUNCTION = f"{__name__}:square"


@dataclass(frozen=True)
class Config:
    side: float = 1.0
    seed: int = 0


def square(config, *, folder=None, progress=None):
    return {"area": config.side**2 / 3, "history": [{"step": 1234567, "loss": 1 / 3}], "diverged": False}


@pytest.fixture
def computed(monkeypatch):
    """Cells computed in this process, by a function that needs no import."""
    monkeypatch.setattr(
        "fasterqk.lab.experiments._cells.sweep",
        lambda configs, function, out, **options: [square(config) for config in configs],
    )


CELLS = {("one", 0): Config(), ("one", 1): Config(seed=1), ("two", 0): Config(side=2.0)}


@pytest.mark.usefixtures("computed")
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.xz"])
def test_cells_are_found_again_in_the_file(tmp_path, suffix):
    runner = CellRunner(tmp_path, experiment="squares")
    first = runner.run(CELLS, FUNCTION, title="", protocol="paper")
    assert runner.fact("sides", lambda: 4) == 4
    file = runner.export(tmp_path / f"squares.{suffix}")
    line, *_, last = read_cells(file)
    assert line == {
        "experiment": "squares",
        "protocol": "paper",
        "arm": "one",
        "seed": 0,
        "settings": {},
        "result": {"area": 0.333333, "history": [{"step": 1234567, "loss": 0.333333}], "diverged": False},
    }
    assert last == {"experiment": "squares", "fact": "sides", "value": 4}
    again = CellRunner(tmp_path / "empty", files=[str(file)])
    assert again.rebuilds
    assert again.run(CELLS, "no.such:function", title="") == rounded(first)
    assert again.fact("sides", lambda: pytest.fail("not computed again")) == 4
    # What was read can be written again, the same.
    copy = read_cells(again.export(tmp_path / "copy.jsonl"))
    assert [each.get("result") for each in copy] == [each.get("result") for each in read_cells(file)]


@pytest.mark.usefixtures("computed")
def test_a_cell_or_a_fact_that_is_not_there_is_one_line(tmp_path):
    runner = CellRunner(tmp_path)
    runner.run({("one", 0): Config()}, FUNCTION, title="")
    file = str(runner.export(tmp_path / "squares.jsonl"))
    again = CellRunner(tmp_path, files=[file])
    with pytest.raises(InputError, match="has no cell of arm 'two' with seed 0 and these settings"):
        again.run({("two", 0): Config(side=3.0)}, FUNCTION, title="")
    with pytest.raises(InputError, match="has no fact 'sides'"):
        again.fact("sides", lambda: 4)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b"{", "no file of cells"),
        ("a.jsonl.xz", b"{}", "no file of cells"),
        ("a.jsonl.gz", b"{}", "no file of cells"),
        ("a.jsonl.gz", gzip.compress(b"{}\n")[:-4], "no file of cells"),
        ("a.jsonl", b'{"arm": "one"}\n', "line 1 is no cell"),
        ("a.jsonl", b"\xff\n", "no file of cells"),
    ],
)
def test_a_file_that_holds_no_cells_is_one_line(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_cells(tmp_path / name)


def test_the_same_cells_make_the_same_bytes(tmp_path):
    line = {"experiment": "e", "arm": "a", "seed": 0, "settings": {}, "result": {"loss": 0.5}}
    for suffix in ("gz", "xz"):
        one, two = (write_cells(tmp_path / f"{n}.jsonl.{suffix}", [line]) for n in (1, 2))
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.jsonl*")), ids=lambda file: file.name)
def test_published_cells_belong_to_an_experiment(file):
    lines = read_cells(file)
    assert {line["experiment"] for line in lines} <= EXPERIMENTS.keys()
    cells = [(line["arm"], line.get("protocol"), line["seed"]) for line in lines if "result" in line]
    assert len(set(cells)) == len(cells) > 0
