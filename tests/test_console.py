"""What commands print: cells as people write them, aligned tables, durations."""

import numpy as np
import pytest

from fasterqk import console
from fasterqk.console import cell_text, duration_text, print_table


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (None, None, "–"),
        (float("nan"), 2, "–"),
        (True, None, "yes"),
        (3, None, "3"),
        (-0.5, 2, "−0.50"),
        ({"mean": 0.12345, "half_width": 0.0123, "n": 5}, None, "0.123 ± 0.012"),
        ({"mean": 1.0, "half_width": None, "n": 1}, 1, "1.0"),
        ({"mean": -0.001, "half_width": 0.31, "n": 3}, None, "0.00 ± 0.31"),
        ({"mean": 1.44e-5, "half_width": 2.24e-5, "n": 3}, None, "1.4e-05 ± 2.2e-05"),
        ({"mean": None, "half_width": None, "n": 1}, 1, "–"),
        ("<b>", None, "<b>"),
    ],
)
def test_cells_read_as_people_write_them(value, digits, text):
    assert cell_text(value, digits) == text


def test_a_printed_table_is_aligned_and_its_signs_can_be_pasted(capsys):
    rows = [{"arm": "r = 1", "loss": np.float32(-0.5)}, {"arm": "a–b", "found": True, "places": [1, 2]}]
    print_table([*rows, {"loss": {"mean": 0.5, "half_width": 0.01, "n": 3}}], title="two arms")
    assert capsys.readouterr().out.splitlines() == [
        "two arms",
        "  arm           loss  found  places",
        "r = 1           -0.5      -       -",
        "  a–b              -    yes  [1, 2]",
        "    -  0.500 ± 0.010      -       -",
    ]


def test_an_empty_table_is_its_title(capsys):
    print_table([], title="nothing")
    assert capsys.readouterr().out == "nothing\n\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.5, "0.5 s"), (89.4, "89 s"), (90, "2 min"), (5025, "84 min"), (5430, "1 h 30 min")],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_a_log_has_a_line_of_progress_now_and_then(capsys, monkeypatch):
    """Standard error is no terminal here."""
    clock = iter(range(0, 1000, 25))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.progress_bar("fig2") as progress:
        progress(0, 0)
        for done in range(8):
            progress(done, 8, "note")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fig2: 25% note" and 2 <= len(lines) <= 4
