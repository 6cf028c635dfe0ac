"""The registry: its table against the modules, options checked, what the documentation says."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fasterqk.lab
from fasterqk.errors import InputError
from fasterqk.lab.experiments import EXPERIMENTS, Option, find_experiment, reproduce
from fasterqk.lab.report._page import chapter_of

ROOT = Path(__file__).parents[3]
OTHERS = {"tuning"}  # `fasterqk tune`, which is no figure or table of the paper


def test_the_table_lists_every_module_of_the_folder():
    folder = ROOT / "src" / "fasterqk" / "lab" / "experiments"
    modules = {path.stem for path in folder.glob("[a-z]*.py")} - OTHERS
    assert modules == {name.replace("-", "_") for name in EXPERIMENTS}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_what_the_table_says(name):
    experiment = find_experiment(name)
    assert experiment.name == name
    assert experiment.summary == EXPERIMENTS[name]
    # Every option is a parameter of its function, and the other way round.
    runner, *parameters = inspect.signature(experiment.run).parameters
    assert runner == "runner"
    assert sorted(parameters) == sorted(option.name for option in experiment.options)
    assert all(example.startswith(f"fasterqk reproduce {name}") for example in experiment.examples)
    for option in experiment.all_options.values():
        assert option.check(option.default) == (
            list(option.default) if option.many and option.default is not None else option.default
        )


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "all"])
def test_its_chapter_is_where_the_page_puts_its_documents(name):
    assert chapter_of(name).title == find_experiment(name).chapter


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "all"])
def test_the_documentation_has_a_row_for_it(name):
    experiment = find_experiment(name)
    protocol = experiment.all_options.get("protocol")
    choices = ", ".join(f"`{choice}`" for choice in protocol.choices) if protocol else ""
    text = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    row = f"| {experiment.chapter} | {experiment.summary} | `fasterqk reproduce {name}` | {choices} |"
    assert row.replace("  ", " ") in text.splitlines(), row


def test_the_documentation_names_no_experiment_that_is_not_there():
    text = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    assert set(re.findall(r"fasterqk reproduce ([a-z0-9-]+)", text)) <= set(EXPERIMENTS)


def test_listing_experiments_imports_nothing_heavy():
    code = (
        "import sys; from fasterqk.lab import EXPERIMENTS, reproduce; "
        "print([name for name in ('numpy', 'torch', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_asking_for_one_experiment_imports_that_one_alone():
    code = (
        "import sys; from fasterqk.lab.experiments import find_experiment; "
        "find_experiment('table-agreement'); "
        "print([name for name in ('fig2', 'phase', 'table_squad', 'table_hatexplain') "
        "if f'fasterqk.lab.experiments.{name}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_lab_exports_what_its_users_need():
    assert fasterqk.lab.reproduce is reproduce
    assert fasterqk.lab.EXPERIMENTS is EXPERIMENTS
    with pytest.raises(AttributeError, match="no attribute 'reproduced'"):
        fasterqk.lab.reproduced  # noqa: B018


def test_unknown_names_and_options_are_one_line_with_the_choices(tmp_path):
    with pytest.raises(InputError, match="unknown experiment 'fig5'; choose from fig2, fig2-init"):
        reproduce("fig5", tmp_path)
    with pytest.raises(InputError, match=r"fig4 has no option 'seed'; choose from out, M$"):
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
        (Option("ratios", float, "", many=True), 5.0, "ratios 5.0 is no list; give"),
        (Option("ratios", float, "", many=True), [5, -1], "ratios -1 is not a finite number above 0"),
    ],
)
def test_a_value_that_does_not_fit_is_quoted(option, value, message):
    with pytest.raises(InputError, match=re.escape(message)):
        option.check(value)


def test_values_from_python_are_those_of_the_command_line():
    assert Option("ratios", float, "", many=True).check((5, 30)) == [5.0, 30.0]
    assert Option("epochs", int, "").check(None) is None
    assert Option("data_dir", str, "").check(Path("data")) == "data"
