"""Figures with the layout that users see."""

import pytest

from fasterqk_lab.figures._documents import STYLE


@pytest.fixture(autouse=True)
def layout(monkeypatch):
    monkeypatch.setitem(STYLE, "figure.constrained_layout.use", True)
