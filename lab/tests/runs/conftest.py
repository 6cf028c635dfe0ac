"""Cells for the tests: a module that workers can import, written into the test's own folder."""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

CELLS = '''
import os
import signal
from dataclasses import dataclass

from fasterqk.errors import InputError


@dataclass(frozen=True)
class Cell:
    seed: int = 0
    scale: float = 1.0
    word: str = ""


def double(config, *, folder, progress):
    progress(1, 2, "half")
    return {"doubled": 2 * config.seed * config.scale}


def odd_ones_fail(config, *, folder, progress):
    print("looking at", config.seed)
    if config.seed % 2:
        raise ArithmeticError(f"{config.seed} is odd\\nvery odd")
    return {"seed": config.seed}


def inputs_are_bad(config, *, folder, progress):
    raise InputError(f"seed {config.seed} is bad")


def bad_input_or_no_memory(config, *, folder, progress):
    raise InputError("bad") if config.seed == 1 else MemoryError


def die_once(config, *, folder, progress):
    """Dies in the middle of its first attempt, and goes on from there in its second."""
    marker = folder / "history.jsonl"
    if not marker.exists():
        marker.write_text("{}\\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return {"lines": len(marker.read_text().splitlines())}


def die_always(config, *, folder, progress):
    if config.seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


def leave(config, *, folder, progress):
    raise SystemExit(3)


def number(config, *, folder, progress):
    return 7


def threads(config, *, folder, progress):
    return {"threads": os.environ["OMP_NUM_THREADS"]}


def hold(config, *, folder, progress):
    """Says that it runs, and then runs until it is stopped."""
    if config.seed == 0:
        return {}
    with open(config.word, "w") as pipe:
        pipe.write(f"{os.getpid()}\\n")
    signal.pause()


not_a_function = 3
'''


@pytest.fixture
def cells(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module ``cells_of_tests``: its functions are found as ``"cells_of_tests:double"``."""
    folder = tmp_path_factory.mktemp("cells")
    (folder / "cells_of_tests.py").write_text(CELLS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(importlib.sys.modules, "cells_of_tests", raising=False)
    return importlib.import_module("cells_of_tests")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A configuration for tests that need no worker."""

    seed: int = 0
    lr: float = 0.1
    task: str = "agreement"


@pytest.fixture
def setting() -> Callable[..., Setting]:
    return Setting


@pytest.fixture
def flip() -> Callable[[Path, int], None]:
    """Changes one byte of a file."""

    def change(path: Path, place: int) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)

    return change
