"""The environment: honest about what it knows, null about what it does not."""

import subprocess
from pathlib import Path

import torch

from fasterqk.lab.runs._store import _git_state, environment


def test_versions_are_those_that_are_imported() -> None:
    found = environment()
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"].keys() >= {"numpy", "scipy"}


def test_no_commit_outside_a_checkout(tmp_path: Path) -> None:
    assert _git_state(tmp_path) == (None, None)


def test_the_commit_is_that_of_the_package_and_changes_are_told(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
        answer = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True, text=True
        )
        return answer.stdout.strip()

    git("init", "--quiet")
    (tmp_path / "__init__.py").write_text("")
    assert _git_state(tmp_path) == (None, None)  # somebody else's checkout: the file is not tracked
    git("add", "__init__.py")
    git("commit", "--quiet", "--message", "first")
    assert _git_state(tmp_path) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "__init__.py").write_text("changed")
    assert _git_state(tmp_path) == (git("rev-parse", "HEAD"), True)
