"""Quick pictures, and cells computed in this process."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def quick_pictures():
    """Figures are drawn as all are, with fewer pixels and without the search for a layout, most of the time.

    The layout itself is tested in ``figures``.
    """
    from fasterqk_lab.figures._documents import STYLE

    STYLE["savefig.dpi"] = 40
    STYLE["figure.constrained_layout.use"] = False


@pytest.fixture
def in_process(monkeypatch):
    """Cells are computed in this process: a worker takes seconds to start."""
    from fasterqk_lab.experiments import _registry

    sweep = _registry.sweep

    def here(cells, function, out, **options):
        return sweep(cells, function, out, **options | {"workers": 0})

    monkeypatch.setattr(_registry, "sweep", here)
