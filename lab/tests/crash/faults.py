"""Faults other than kills: each must end in one clear line, lose nothing, and be over once it is mended."""

import ctypes
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lab.tests.crash.sweeps import SweepUnderTest, kill

from fasterqk_lab.runs._execute import read_journal
from fasterqk_lab.runs._store import Store

# Larger than a configuration, smaller than the last checkpoint of a small cell.
FILE_SIZE_LIMIT = 700
_BACKWARDS = """\
import time
_real, _start = time.time, time.time()
time.time = lambda: 2 * _start - _real()
"""
_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE = 24, 1


def two_sweeps(sweep: SweepUnderTest, generator: random.Random) -> dict[str, Any]:
    """Two sweeps on one store at the same time."""
    out = sweep.folder / "two-sweeps"
    processes = [sweep.start(out), sweep.start(out)]
    problems = [_refusal(process, 0) for process in processes]
    started = [
        sum(line["event"] == "started" for line in read_journal(folder)) for folder in Store(out).cells()
    ]
    if started != [1] * len(sweep.cells()):
        problems.append(f"cells were started {started} times")
    told = f"{len(started)} cells, each started once"
    return _verdict("two sweeps at once", told, problems + sweep.problems(out))


def two_sweeps_one_killed(sweep: SweepUnderTest, generator: random.Random) -> dict[str, Any]:
    """Two sweeps on one store; one is killed and the other has to finish its cells too."""
    out = sweep.folder / "one-killed"
    doomed, survivor = sweep.start(out), sweep.start(out)
    try:
        doomed.wait(generator.uniform(0.3, 0.7) * sweep.seconds)
    except subprocess.TimeoutExpired:
        kill(doomed)
    problems = [_refusal(survivor, 0)]
    return _verdict(
        "two sweeps at once, one killed", "the other finished all", problems + sweep.problems(out)
    )


def disk_full(sweep: SweepUnderTest, generator: random.Random) -> dict[str, Any]:
    """A write that fails in the middle of the sweep, as on a full disk."""
    out = sweep.folder / "disk-full"
    process = sweep.start(out, prepare=_limit_file_size)
    told, problems = _one_line(process, 1, "File too large")
    return _verdict("disk full", told, problems + _mended(sweep, out))


def read_only_folder(sweep: SweepUnderTest, generator: random.Random) -> dict[str, Any]:
    """A results folder that this user may not write to; a finished one needs no writing."""
    name = "read-only folder"
    out = sweep.folder / "read-only"
    out.mkdir()
    out.chmod(0o555)
    process = sweep.start(out, prepare=respect_permissions)
    told, problems = _one_line(process, 2, "Permission denied")
    if process.returncode == 0 and os.geteuid() == 0:
        return {"fault": name, "passed": None, "told": "this user may write everywhere", "problems": []}
    out.chmod(0o755)
    problems += _mended(sweep, out)
    folders = [out, out / "runs", *Store(out).cells()]
    for folder in folders:
        folder.chmod(0o555)
    problems.append(_refusal(sweep.start(out, prepare=respect_permissions), 0))
    for folder in folders:
        folder.chmod(0o755)
    return _verdict(name, told, problems)


def clock_backwards(sweep: SweepUnderTest, generator: random.Random) -> dict[str, Any]:
    """A clock that runs backwards, on a store whose files come from tomorrow."""
    out = sweep.folder / "clock"
    site = sweep.folder / "backwards"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_BACKWARDS)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    process = sweep.start(out, environment={"PYTHONPATH": path})
    try:
        process.wait(sweep.seconds / 2)
    except subprocess.TimeoutExpired:
        kill(process)
    tomorrow = time.time() + 86_400
    for folder in Store(out).cells():
        for file in folder.iterdir():
            os.utime(file, (tomorrow, tomorrow))
    problems = [_refusal(sweep.start(out, environment={"PYTHONPATH": path}), 0)]
    return _verdict("clock going backwards", "nothing depends on it", problems + sweep.problems(out))


def damaged_result(sweep: SweepUnderTest, generator: random.Random) -> dict[str, Any]:
    """One changed byte in the result of a finished cell."""
    out = sweep.folder / "damaged-result"
    shutil.copytree(sweep.reference, out)
    path = generator.choice(list(Store(out).cells())) / "result.json"
    return _damaged("a damaged result in the store", sweep, out, path, generator)


def damaged_checkpoint(sweep: SweepUnderTest, generator: random.Random) -> dict[str, Any]:
    """One changed byte in the checkpoint of an unfinished cell."""
    out = sweep.folder / "damaged-checkpoint"
    shutil.copytree(sweep.reference, out)
    folder = generator.choice(list(Store(out).cells()))
    (folder / "result.json").unlink()
    (folder / "journal.jsonl").unlink()
    return _damaged("a damaged checkpoint", sweep, out, next(folder.glob("checkpoint.*")), generator)


def _damaged(
    fault: str, sweep: SweepUnderTest, out: Path, path: Path, generator: random.Random
) -> dict[str, Any]:
    data = bytearray(path.read_bytes())
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(7)
    path.write_bytes(data)
    told, problems = _one_line(sweep.start(out), 1, str(path))
    remove = [sys.executable, "-m", "fasterqk_lab", "runs", "rm", path.parent.name, "--out", str(out)]
    subprocess.run(remove, check=True, stdout=subprocess.DEVNULL)
    return _verdict(fault, told, problems + _mended(sweep, out))


FAULTS = (
    two_sweeps,
    two_sweeps_one_killed,
    disk_full,
    read_only_folder,
    clock_backwards,
    damaged_result,
    damaged_checkpoint,
)


def _mended(sweep: SweepUnderTest, out: Path) -> list[str]:
    """What is wrong after the sweep was started again without the fault."""
    return [_refusal(sweep.start(out), 0), *sweep.problems(out)]


def _refusal(process: "subprocess.Popen[str]", code: int) -> str:
    _, told = process.communicate()
    if process.returncode == code and not told:
        return ""
    return f"a sweep ended with {process.returncode} and said {told.strip()!r}"


def _one_line(process: "subprocess.Popen[str]", code: int, words: str) -> tuple[str, list[str]]:
    """The line with which a sweep ended, and what is wrong with it."""
    _, told = process.communicate()
    lines = told.splitlines()
    if process.returncode == code and len(lines) == 1 and words in lines[0]:
        return lines[0], []
    return told, [
        f"expected one line with {words!r} and exit code {code}, not {process.returncode}: {told!r}"
    ]


def _verdict(fault: str, told: str, problems: list[str]) -> dict[str, Any]:
    problems = [problem for problem in problems if problem]
    return {"fault": fault, "passed": not problems, "told": told, "problems": problems}


def _limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE_LIMIT, FILE_SIZE_LIMIT))


def respect_permissions() -> None:
    """Root may write everywhere; without this capability it may not. A no-op for everybody else."""
    if os.geteuid() == 0 and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, 0, 0, 0)
