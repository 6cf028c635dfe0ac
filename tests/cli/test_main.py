"""The front door: help is light, errors are one line, nothing is printed where it does not belong."""

import errno
import os
import subprocess
import sys

import pytest
from tests.cli.lines import command_lines, parsers

from fasterqk import __version__
from fasterqk.cli.main import PROGRAM, main
from fasterqk.errors import WorkError

HEAVY = ["numpy", "scipy", "torch", "numba", "matplotlib", "transformers", "rich"]


ALL_COMMAND_LINES = command_lines(PROGRAM)


def test_every_count_has_a_ceiling_that_its_help_names():
    for words, parser in parsers(PROGRAM).items():
        for action in parser._actions:
            assert action.type is not int, f"{words} {action.dest}: give it a ceiling, Whole(most)"
            if getattr(action.type, "most", None) and action.dest != "seed":
                assert f"at most {action.type.most}" in " ".join(parser.format_help().split())


@pytest.mark.parametrize("words", ALL_COMMAND_LINES, ids=" ".join)
def test_every_command_shows_help_with_examples(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert stop.value.code == 0
    assert "examples:\n  fasterqk " in capsys.readouterr().out


def test_help_of_every_command_imports_nothing_heavy():
    code = f"""
import sys
from fasterqk.cli.main import main
for words in {ALL_COMMAND_LINES!r} + [[]]:
    try:
        main([*words, "--help"])
    except SystemExit:
        pass
print("heavy:", [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_the_list_of_commands_imports_next_to_nothing():
    code = """
import sys
before = set(sys.modules)
from fasterqk.cli.main import main
try:
    main(["--help"])
except SystemExit:
    pass
new = set(sys.modules) - before
print(sorted(name for name in new if name.startswith("fasterqk")), len(new) <= 50)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = ["fasterqk", "fasterqk.cli", "fasterqk.cli.common", "fasterqk.cli.main"]
    modules += ["fasterqk.errors"]
    assert done.stdout.splitlines()[-1] == f"{modules} True"


@pytest.mark.parametrize("words", ALL_COMMAND_LINES, ids=" ".join)
def test_a_wrong_command_line_ends_in_one_line(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*words, "--no-such-option"])
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"fasterqk {__version__}\n"


def test_alone_it_says_what_to_try_first(capsys):
    assert main([]) == 0
    assert "Try first:" in capsys.readouterr().out


def test_an_unknown_command_is_quoted(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["sharpen"])
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert "'sharpen'" in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("mesure", "; did you mean 'measure'?"),
        ("theory solve --qk-ration 10 --loss 1", "--qk-ration; did you mean '--qk-ratio'?"),
        ("measure --modle=a --data b", "--modle; did you mean '--model'"),
        ("explore --xyz", "--xyz; choose from -h"),
    ],
)
def test_an_unknown_word_names_the_one_that_was_meant(line, near, capsys):
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == 2
    assert near in capsys.readouterr().err


@pytest.mark.parametrize("number", ["-1", "-.5", "-1e-3", "-inf", "-nan", "-5 %"])
def test_a_negative_number_is_read_as_a_value_and_quoted(number, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["theory", "solve", "--qk-ratio", number, "--loss", "1e-4"])
    assert stop.value.code == 2
    assert repr(number) in capsys.readouterr().err


def test_a_list_that_begins_with_a_negative_number_is_a_value(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["theory", "table", "--qk-ratio", "-1,2"])
    assert stop.value.code == 2
    assert "'-1' is not a finite number above 0" in capsys.readouterr().err


def run_alone(words: list[str], stdout: int) -> subprocess.CompletedProcess[str]:
    """One command line in a process of its own that buffers its output, as it does for users."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "fasterqk", *words]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("words", [["--help"], ["theory", "table", "--csv"]], ids=" ".join)
def test_a_reader_that_left_is_no_error(words):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        done = run_alone(words, stream.fileno())
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "line",
    ["theory ratio --alpha .9 --loss 1e-3", "theory table --qk-ratio 1,2,3,4,5,6,7,8,9 --json"],
    ids=["little", "much"],
)
def test_output_that_cannot_be_written_is_one_line_and_no_success(line):
    with open("/dev/full", "w") as stream:
        done = run_alone(line.split(), stream.fileno())
    told = "fasterqk theory: No space left on device: 'standard output'\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_a_file_where_a_folder_should_be_is_bad_input(tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    assert main(["explore", "-o", str(taken / "page.html")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and str(taken) in printed.err
    assert taken.read_text() == "mine"


@pytest.mark.parametrize("caught", ["", "except KeyboardInterrupt: raise ImportError('broken installation')"])
def test_ctrl_c_while_the_command_line_is_imported_is_one_line(caught):
    """Where numpy is imported, the interrupt comes out as an ImportError."""
    code = f"""
import signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "fasterqk.cli.main":
            try: signal.raise_signal(signal.SIGINT)
            {caught or "finally: pass"}
sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.default_int_handler)
from fasterqk.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fasterqk: stopped\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), 1),
        (WorkError("1 of 2 cells failed"), 1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), 1),
        (OSError(errno.ENOSPC, "No space left on device", "a"), 1),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a"), 2),
        (OSError(errno.ENOTEMPTY, "Directory not empty", "a"), 2),  # another process was faster
        (PermissionError(errno.EACCES, "Permission denied", "a"), 2),
        (KeyboardInterrupt(), 130),
    ],
    ids=repr,
)
def test_how_a_command_ends_is_its_exit_code(monkeypatch, capsys, error, code):
    def fail(arguments):
        raise error

    monkeypatch.setattr("fasterqk.cli.theory.run", fail)
    assert main(["theory", "ratio", "--alpha", ".9", "--loss", "1e-3"]) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_names_that_are_no_text_are_printed(tmp_path):
    name = os.fsencode(tmp_path) + b"/page-\xff.html"
    done = subprocess.run(
        [sys.executable, "-m", "fasterqk", "explore", "-o", name], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("page-\\udcff.html\n")


@pytest.mark.parametrize("closed", [1, 2])
def test_a_stream_that_is_closed_is_no_error(closed):
    command = f"{sys.executable} -m fasterqk theory ratio --alpha .9 --loss 1e-3 {closed}>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
