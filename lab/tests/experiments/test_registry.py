"""The registry: its table against the modules, options checked, what the documentation says."""

import gzip
import inspect
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import fasterqk_lab
from fasterqk.errors import InputError
from fasterqk_lab.cli.reproduce import experiment_parser
from fasterqk_lab.experiments import EXPERIMENTS, Option, find_experiment, reproduce
from fasterqk_lab.experiments._registry import CellRunner, read_cells, rounded, write_cells
from fasterqk_lab.page import chapter_of

ROOT = Path(__file__).parents[3]


def test_the_table_lists_every_module_of_the_folder():
    folder = ROOT / "lab" / "fasterqk_lab" / "experiments"
    modules = {path.stem for path in folder.glob("[a-z]*.py")}
    assert modules == {find_experiment(name).run.__module__.split(".")[-1] for name in EXPERIMENTS}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_what_the_table_says(name):
    experiment = find_experiment(name)
    assert experiment.name == name
    assert experiment.summary == EXPERIMENTS[name]
    # Every option is a parameter of its function, and the other way round.
    parameters = [name for name in inspect.signature(experiment.run).parameters if name != "runner"]
    assert sorted(parameters) == sorted(option.name for option in experiment.options)
    for example in experiment.examples:
        assert experiment_parser(experiment).parse_args(example.split("#")[0].split())
    for option in experiment.all_options.values():
        assert option.check(option.default) == (
            list(option.default) if option.many and option.default is not None else option.default
        )


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "all"])
def test_the_documentation_has_a_row_for_it(name):
    experiment = find_experiment(name)
    protocol = experiment.all_options.get("protocol")
    choices = ", ".join(f"`{choice}`" for choice in protocol.choices) if protocol else ""
    text = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    row = f"| {chapter_of(name).title} | {experiment.summary} | `fasterqk-lab reproduce {name}` | {choices} |"
    assert row.replace("  ", " ") in text.splitlines(), row


def test_the_documentation_names_no_experiment_that_is_not_there():
    text = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    assert set(re.findall(r"fasterqk-lab reproduce ([a-z0-9-]+)", text)) <= set(EXPERIMENTS)


def test_listing_experiments_imports_nothing_heavy():
    code = (
        "import sys; from fasterqk_lab import EXPERIMENTS, reproduce; "
        "print([name for name in ('numpy', 'torch', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_asking_for_one_experiment_imports_that_one_alone():
    code = (
        "import sys; from fasterqk_lab.experiments import find_experiment; "
        "find_experiment('table-agreement'); "
        "print([name for name in ('fig2', 'phase', 'table_main', 'table_hatexplain') "
        "if f'fasterqk_lab.experiments.{name}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_lab_exports_what_its_users_need():
    assert fasterqk_lab.reproduce is reproduce
    assert fasterqk_lab.EXPERIMENTS is EXPERIMENTS
    with pytest.raises(AttributeError, match="no attribute 'reproduced'"):
        fasterqk_lab.reproduced  # noqa: B018


def test_unknown_names_and_options_are_one_line_with_the_choices(tmp_path):
    with pytest.raises(InputError, match="unknown experiment 'fig5'; did you mean 'fig4'"):
        reproduce("fig5", tmp_path)
    with pytest.raises(InputError, match=r"fig4 has no option 'seed'; choose from out, M, optimizer$"):
        reproduce("fig4", tmp_path, seed=1)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (Option("seeds", int, ""), 0, "seeds 0 is not at least 1"),
        (Option("seeds", int, ""), 1.5, "seeds 1.5 is not a whole number"),
        (Option("seeds", int, ""), "3", "seeds '3' is not a whole number"),
        (Option("lr", float, ""), float("nan"), "lr nan is not a finite number above 0"),
        (Option("force", bool, ""), 1, "force 1 is not of type bool"),
        (Option("protocol", str, "", choices=("paper",)), "papers", "protocol 'papers' is not one of paper"),
        (Option("ratios", float, "", many=True), 5.0, "ratios 5.0 is not a list; give"),
        (Option("ratios", float, "", many=True), [5, -1], "ratios -1 is not a finite number above 0"),
        (Option("layers", int, "", choices=(2, 4), many=True), [2, 3], "layers 3 is not one of 2, 4"),
    ],
)
def test_a_value_that_does_not_fit_is_quoted(option, value, message):
    with pytest.raises(InputError, match=re.escape(message)):
        option.check(value)


def test_values_from_python_are_those_of_the_command_line():
    assert Option("ratios", float, "", many=True).check((5, 30)) == [5.0, 30.0]
    assert Option("epochs", int, "").check(None) is None
    assert Option("data_dir", str, "").check(Path("data")) == "data"


RESULTS = Path(__file__).parents[3] / "lab" / "paper" / "cells"
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
        "fasterqk_lab.experiments._registry.sweep",
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
    assert [line.get("result") for line in copy] == [line.get("result") for line in read_cells(file)]


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
        ("a.jsonl", b"{", "not a file of cells"),
        ("a.jsonl.xz", b"{}", "not a file of cells"),
        ("a.jsonl.gz", b"{}", "not a file of cells"),
        ("a.jsonl.gz", gzip.compress(b"{}\n", mtime=0)[:-4], "not a file of cells"),
        ("a.jsonl", b'{"arm": "one"}\n', "line 1 is not a cell"),
        ("a.jsonl", b"\xff\n", "not a file of cells"),
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
    names = ("table", "protocol", "arm", "seed")
    cells = [tuple(line.get(name) for name in names) for line in lines if "result" in line]
    assert len(set(cells)) == len(cells) > 0
