"""The sweep that crash tests disturb: how it is started, and how its store is judged afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fasterqk.errors import InputError
from fasterqk_lab.runs._execute import JOURNAL_NAME, read_journal
from fasterqk_lab.runs._store import Store, read_result, read_sealed

SPEC = """\
config = "lab.tests.crash.cells:{kind}"
function = "lab.tests.crash.cells:{cell}"
seeds = {seeds}
"""
# Files of a cell that must come out the same however often it was interrupted.
COMPARED = ("history.jsonl", "checkpoint.json", "checkpoint.safetensors")


@dataclass(frozen=True)
class SweepUnderTest:
    """A sweep, its undisturbed results, and how long these took."""

    spec: Path
    reference: Path
    seconds: float
    folder: Path

    def start(
        self,
        out: Path,
        *,
        prepare: Callable[[], None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> "subprocess.Popen[str]":
        """Start the sweep on ``out`` as a process group of its own."""
        return _start(self.spec, out, prepare, environment)

    def cells(self) -> list[Path]:
        """The folders of the undisturbed cells."""
        return list(Store(self.reference).cells())

    def problems(self, out: Path) -> list[str]:
        """What is wrong with a finished store: cells missing, done twice, different, or unreadable."""
        found = unreadable(out)
        for reference in self.cells():
            folder = out / "runs" / reference.name
            try:
                document, wanted = read_result(folder), read_result(reference)
            except InputError:
                continue  # told by `unreadable`
            if document is None or wanted is None:
                found.append(f"cell {folder.name} has no result")
                continue
            if document["result"] != wanted["result"]:
                found.append(f"cell {folder.name} has another result than undisturbed")
            found += [
                f"{folder / name} differs from the undisturbed one"
                for name in COMPARED
                if (reference / name).exists()
                and (folder / name).read_bytes() != (reference / name).read_bytes()
            ]
            found += done_once(folder, document["attempt"])
        return found


def write_spec(cell: str, count: int, folder: Path) -> Path:
    """The spec of ``count`` small cells, ``"learn"`` or ``"walk"``, written into ``folder``."""
    spec = folder / f"{cell}.toml"
    spec.write_text(SPEC.format(kind=cell.capitalize(), cell=cell, seeds=list(range(count))))
    return spec


def run_undisturbed(spec: Path, folder: Path) -> SweepUnderTest:
    """The sweep of ``spec``, run once without any disturbance; all its stores are made in ``folder``."""
    reference = folder / "undisturbed"
    start = time.perf_counter()
    process = _start(spec, reference)
    _, told = process.communicate()
    if process.returncode != 0:
        raise InputError(f"{spec} does not even run undisturbed: {told.strip()}")
    return SweepUnderTest(spec, reference, time.perf_counter() - start, folder)


def kill(process: "subprocess.Popen[str]", *, group: bool = True) -> None:
    """SIGKILL for a sweep and its workers, or for the sweep alone; its workers then have to notice."""
    if group:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.communicate()


def done_once(folder: Path, attempt: int) -> list[str]:
    """What the journal says against this cell having been done exactly once, by ``attempt``."""
    lines = read_journal(folder)
    started = [line["attempt"] for line in lines if line["event"] == "started"]
    saved = [line["attempt"] for line in lines if line["event"] == "saved"]
    # Killed between the result and its line, a cell has no such line; it never has two.
    if started != list(range(1, attempt + 1)) or saved not in ([attempt], []):
        return [f"cell {folder.name}, result of attempt {attempt}: started {started}, saved {saved}"]
    return []


def unreadable(out: Path) -> list[str]:
    """One line for each file of the store that cannot be read; half-written ones have other names."""
    found = []
    for folder in Store(out).cells():
        for path in folder.iterdir():
            if path.name.startswith("."):
                continue
            try:
                _read(path)
            except (InputError, ValueError) as error:
                found.append(f"{path}: {error}")
    return found


def _read(path: Path) -> None:
    if path.suffix == ".json":
        read_sealed(path)
    elif path.suffix == ".safetensors":
        from fasterqk_lab.training import _loop as checkpoint

        checkpoint.parse_checkpoint(path, path.read_bytes())
    elif path.suffix == ".jsonl" and path.name != JOURNAL_NAME:
        for line in path.read_text().splitlines():
            json.loads(line)


def _start(
    spec: Path,
    out: Path,
    prepare: Callable[[], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "fasterqk_lab", "sweep", str(spec), "--out", str(out), "--workers", "2"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=prepare,
        env={**os.environ, **(environment or {})},
    )
