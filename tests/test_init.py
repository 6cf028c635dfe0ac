"""The public names at the top of the package."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fasterqk

NAMES = ["find_circuits", "make_optimizer", "param_groups", "check_circuits", "scale_circuits"]
NAMES += ["normalize_gradients", "describe", "Ramp", "PartnerNorm", "LogitMonitor", "qk_clip"]
NAMES += ["measure", "matched_loss", "InputError"]
NAMES += ["capture"]
PACKAGES = ["labels", "optim", "stability", "trace", "attention", "theory", "huggingface", "pages"]
PACKAGES += ["errors", "files", "console", "processor"]


@pytest.mark.parametrize("name", [*NAMES, *PACKAGES])
def test_public_names(name: str) -> None:
    assert name in dir(fasterqk)
    assert getattr(fasterqk, name).__name__ in (name, f"fasterqk.{name}")


def test_nothing_else_is_public() -> None:
    assert sorted(fasterqk.__all__) == dir(fasterqk) == sorted(["__version__", *NAMES, *PACKAGES])
    with pytest.raises(AttributeError, match="module 'fasterqk' has no attribute 'optimizer'"):
        fasterqk.optimizer  # noqa: B018


def test_importing_it_imports_nothing_heavy() -> None:
    code = "import sys, fasterqk; dir(fasterqk); print([n for n in ('torch', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_importing_it_imports_nothing_at_all() -> None:
    """So that Ctrl-C meets the package's own code, which answers it in one line, as early as can be."""
    code = """
import sys
before = set(sys.modules)
import fasterqk.__main__
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['fasterqk', 'fasterqk.__main__']\n"


LAZY = ["fasterqk", "fasterqk.attention", "fasterqk.huggingface", "fasterqk_lab"]


@pytest.mark.parametrize("package", LAZY)
def test_completion_shows_every_public_name_and_nothing_else(package: str) -> None:
    """In a fresh process, where nothing has been imported by others: `dir` is what completion shows."""
    code = f"""
import importlib, json
module = importlib.import_module("{package}")
shown = [name for name in dir(module) if not name.startswith("_")]
print(json.dumps([shown, sorted(set(module.__all__) - {{"__version__"}})]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown, public = json.loads(done.stdout)
    assert shown == public


def test_every_name_that_completion_shows_is_there() -> None:
    """In a fresh process, one for all packages: importing torch and transformers takes most of the time."""
    code = f"""
import importlib
for package in {LAZY}:
    module = importlib.import_module(package)
    for name in dir(module):
        getattr(module, name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_editors_and_type_checkers_are_told_the_public_names() -> None:
    """They read the source: a name that is only made on first use is one they do not know."""
    tree = ast.parse(Path(fasterqk.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    told = {alias.name for node in imports for alias in node.names} - {"Any"}
    assert told == set(fasterqk.__all__) - {"__version__"}
