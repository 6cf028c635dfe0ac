"""Every example in a docstring runs."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "src" / "fasterqk", ROOT / "lab" / "fasterqk_lab")
PATHS = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts).removesuffix(".__init__")


MODULES = [name_of(path) for path in PATHS if ">>>" in path.read_text()]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = import_module(name)
    failed, tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert tried and not failed


def test_no_example_is_skipped() -> None:
    skipped = [str(path) for path in PATHS if "doctest: +SKIP" in path.read_text()]
    assert skipped == []
