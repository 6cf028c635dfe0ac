"""What a result was computed with: versions, platform and commit."""

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import fasterqk

PACKAGES = ("torch", "numpy", "scipy", "transformers", "tokenizers", "safetensors")


@functools.cache
def environment() -> dict[str, Any]:
    """Versions of Python, fasterqk and the packages that decide numbers, platform, and the git commit.

    Nothing is imported for it; a package that is not installed is null. ``commit`` is null unless this
    fasterqk runs from a git checkout; ``changed`` says whether its files differ from that commit.
    """
    commit, changed = _git_state(Path(fasterqk.__file__).parent)
    return {
        "fasterqk": fasterqk.__version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "commit": commit,
        "changed": changed,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git_state(package: Path) -> tuple[str | None, bool | None]:
    # Only when git tracks this very file: a virtual environment may lie inside somebody else's checkout.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    changes = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
    return _git(package, "rev-parse", "HEAD"), changes != ""


def _git(package: Path, *words: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(package), *words], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
