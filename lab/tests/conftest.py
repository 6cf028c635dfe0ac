"""Figures of tests are drawn as all are, with fewer pixels: most of their time is PNG."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def few_pixels():
    from fasterqk_lab.figures._documents import STYLE

    STYLE["savefig.dpi"] = 40
