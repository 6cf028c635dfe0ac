"""The lab's front door: help is light, errors are one line, and SIGTERM ends like Ctrl-C."""

import os
import subprocess
import sys

import pytest
from tests.cli.lines import command_lines

from fasterqk_lab.cli.main import PROGRAM, main
from fasterqk_lab.experiments import EXPERIMENTS
from fasterqk_lab.runs import Store
from fasterqk_lab.runs._store import state

HEAVY = ["numpy", "scipy", "torch", "numba", "matplotlib", "transformers", "rich"]
LINES = command_lines(PROGRAM)


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_every_command_shows_help_with_examples(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert stop.value.code == 0
    assert "examples:\n  fasterqk-lab " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "heavy"),
    # Experiments count with numpy before they run.
    [([*LINES, []], HEAVY), ([["reproduce", name] for name in EXPERIMENTS], HEAVY[1:])],
    ids=["commands", "experiments"],
)
def test_help_of_every_command_imports_nothing_heavy(lines, heavy):
    code = f"""
import sys
from fasterqk_lab.cli.main import main
for words in {lines!r}:
    try:
        main([*words, "--help"])
    except SystemExit:
        pass
print("heavy:", [name for name in {heavy!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_a_wrong_command_line_ends_in_one_line(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*words, "--no-such-option"])
    printed = capsys.readouterr()
    assert (stop.value.code, printed.out, len(printed.err.splitlines())) == (2, "", 1)


def test_sigterm_ends_like_ctrl_c_and_takes_the_workers_along(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    spec = tmp_path / "spec.toml"
    spec.write_text(
        'config = "lab.tests.crash.cells:Held"\nfunction = "lab.tests.crash.cells:hold"\nseeds = [0, 1]\n'
        f"[base]\npipe = '{tmp_path / 'pipe'}'\n"
    )
    words = ["sweep", str(spec), "--out", str(tmp_path), "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fasterqk_lab", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert (tmp_path / "pipe").read_text() == "running"
    process.terminate()  # the sweep alone, as a scheduler does
    output, told = process.communicate()
    assert (process.returncode, output) == (143, "")
    assert told == "fasterqk-lab sweep: stopped; what was finished is kept\n"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody is left
    assert sorted(state(folder) for folder in Store(tmp_path).cells()) == ["done", "stopped"]
