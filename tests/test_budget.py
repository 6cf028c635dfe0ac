"""The budget: both packages keep below the limits that CONTRIBUTING.md gives them."""

import re
from pathlib import Path

import pytest

from tools.journeys import package_sizes

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ((?:wheel|lab): \w+) \| ([\d,]+)", TEXT, flags=re.MULTILINE)
LIMITS = {name: int(limit.replace(",", "")) for name, limit in ROWS}
SIZES = package_sizes()


def test_every_size_has_a_limit() -> None:
    assert LIMITS.keys() == SIZES.keys()


@pytest.mark.parametrize("name", SIZES)
def test_a_package_keeps_below_its_limit(name: str) -> None:
    assert SIZES[name] <= LIMITS[name], "make it smaller, or raise its limit in CONTRIBUTING.md and say why"
