"""Claims: one process a cell, and none left behind by a process that died."""

import shutil
import subprocess
import sys
from pathlib import Path

from fasterqk.lab.runs._store import claim, is_claimed

HOLD = """
import sys
from pathlib import Path
from fasterqk.lab.runs._store import claim, is_claimed
print("ready", flush=True)
with claim(Path(sys.argv[1]), wait=True) as claimed:
    print(claimed and is_claimed(Path(sys.argv[1])), flush=True)
    sys.stdin.readline()
"""


def other_process(folder: Path) -> "subprocess.Popen[str]":
    """A process that claims ``folder`` when it can, says so, and holds it until told otherwise."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_claim_is_exclusive_and_given_back(tmp_path: Path) -> None:
    folder = tmp_path / "cell"
    assert not is_claimed(folder)
    with claim(folder) as first:
        assert first
        assert is_claimed(folder)
        with claim(folder) as second:
            assert not second
        assert is_claimed(folder)
    assert not is_claimed(folder)
    with claim(folder) as again:
        assert again


def test_the_claim_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with other_process(tmp_path) as other:
        assert [line(other), line(other)] == ["ready", "True"]
        assert is_claimed(tmp_path)
        with claim(tmp_path) as claimed:
            assert not claimed
        other.kill()
        # Waiting on the lock itself, not on the process: the kernel hands it over.
        with claim(tmp_path, wait=True) as claimed:
            assert claimed


def test_a_folder_that_is_removed_can_be_claimed_anew(tmp_path: Path) -> None:
    folder = tmp_path / "cell"
    with claim(folder):
        other = other_process(folder)
        # Most likely it now waits for the lock that is removed here; either way it must end with a
        # claim on the folder that is there then.
        assert line(other) == "ready"
        shutil.rmtree(folder)
    with other:
        assert line(other) == "True"
        with claim(folder) as claimed:
            assert not claimed
        other.communicate("\n")
    assert other.returncode == 0
