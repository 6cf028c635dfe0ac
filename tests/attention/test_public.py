"""The public names, and what importing them costs."""

import ast
import subprocess
import sys
from pathlib import Path

import fasterqk.attention


def test_every_public_name_is_there():
    for name in fasterqk.attention.__all__:
        assert getattr(fasterqk.attention, name) is not None


def test_editors_and_type_checkers_find_every_public_name():
    """They read the imports for types, which name the same modules as the table of lazy imports."""
    tree = ast.parse(Path(fasterqk.attention.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    homes = {}
    for node in block.body:
        (alias,) = node.names
        assert alias.asname == alias.name
        homes[alias.name] = node.module.rpartition(".")[2]
    assert homes == fasterqk.attention._MODULES


def test_scoring_does_not_wait_for_torch():
    code = "import sys, fasterqk.attention; print({'torch', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
