"""Shared by the tests of experiments."""

import pytest

from fasterqk_lab.experiments import _registry


@pytest.fixture
def in_process(monkeypatch):
    """Cells are computed in this process: a worker takes seconds to start."""
    sweep = _registry.sweep

    def here(cells, function, out, **options):
        return sweep(cells, function, out, **options | {"workers": 0})

    monkeypatch.setattr(_registry, "sweep", here)
