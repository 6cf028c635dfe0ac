"""The public names at the top of the package."""

import subprocess
import sys

import pytest

import fasterqk

NAMES = ["find_circuits", "make_optimizer", "param_groups", "check_circuits", "scale_circuits"]
NAMES += ["normalize_gradients", "describe", "Ramp", "measure", "matched_loss", "InputError"]
PACKAGES = ["circuits", "capture", "attention", "theory", "integrations", "lab"]


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
