"""The public names, and what importing them costs."""

import subprocess
import sys

import fasterqk.attention


def test_every_public_name_is_there():
    for name in fasterqk.attention.__all__:
        assert getattr(fasterqk.attention, name) is not None


def test_scoring_does_not_wait_for_torch():
    code = "import sys, fasterqk.attention; print({'torch', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
