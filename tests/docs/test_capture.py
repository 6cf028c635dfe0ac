"""The page on capture: its blocks run in order, and print what stands below them."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "capture.md"


def test_blocks_print_what_stands_below_them(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = re.findall(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(pairs) == PAGE.read_text(encoding="utf-8").count("```python") == 5
    names: dict[str, Any] = {"__name__": "capture_page"}
    for code, printed in pairs:
        exec(code, names)
        assert capsys.readouterr().out == printed
