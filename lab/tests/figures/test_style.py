"""Shared charts: heat maps, panels and grids, their numbers and files."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from fasterqk.attention.scores import dtap_lines
from fasterqk.attention.statistics import Interval
from fasterqk.errors import InputError
from fasterqk_lab.figures import Grid, Line, Panel, save_dtaps, save_grids, save_panels
from fasterqk_lab.figures._documents import (
    COLORS,
    INK,
    describe_axes,
    draw_dtap,
    dtap_rows,
    plotting,
    save_figure,
    themed,
)

EDGES = (0, 0.5, 1.001)
TABLE = [[1.0, 2.0], [0.0, 97.0]]


@pytest.fixture
def axes():
    with plotting():
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots()
        yield axes
        plt.close(figure)


def test_mass_runs_right_and_probability_upwards(axes):
    draw_dtap(axes, TABLE, EDGES, title="r = 1")
    places = {text.get_text(): text.get_position() for text in axes.texts}
    assert places == {"1.0": (0, 0), "2.0": (1, 0), "0": (0, 1), "97.0": (1, 1)}
    low, high = axes.get_ylim()
    assert low < high
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "0.5", "1"]
    assert axes.get_title() == "r = 1"
    assert "attention" in axes.get_xlabel()
    assert "probability" in axes.get_ylabel()


def test_deviations_stand_below_the_means(axes):
    draw_dtap(axes, TABLE, EDGES, deviation=[[0.5, np.nan], [0.0, 1.25]])
    assert {text.get_text() for text in axes.texts} == {"1.0\n±0.5", "2.0", "0", "97.0\n±1.2"}


def test_colours_are_comparable_between_heat_maps(axes):
    image = draw_dtap(axes, TABLE, EDGES)
    assert (image.norm.vmin, image.norm.vmax) == (0, 100)


def test_a_table_that_does_not_fit_its_edges(axes):
    with pytest.raises(InputError, match=r"shape \(2, 2\) does not fit 4 edges"):
        draw_dtap(axes, TABLE, (0, 0.1, 0.5, 1))


def test_tidy_rows_and_text_lines():
    rows = dtap_rows(TABLE, EDGES)
    assert rows[1] == {
        "probability_from": 0,
        "probability_to": 0.5,
        "mass_from": 0.5,
        "mass_to": 1.001,
        "percent": 2.0,
    }
    lines = dtap_lines(TABLE, EDGES)
    assert lines[0] == {"p \\ mass": "0.5-1", "0-0.5": 0.0, "0.5-1": 97.0}
    assert lines[1]["p \\ mass"] == "0-0.5"


def test_heat_maps_are_saved_with_their_numbers_and_say_that_their_scale_is_not_linear(tmp_path):
    table = {"mean": TABLE, "standard_deviation": None, "edges": EDGES}
    lost = dict.fromkeys(table)
    paths = save_dtaps({"one": table, "two": lost}, tmp_path, "mine", title="Mine", caption="Two arms.")
    with open(paths["csv"], newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["percent"]) for row in rows] == [1.0, 2.0, 0.0, 97.0]
    assert (tmp_path / "figures" / "mine.png").stat().st_size > 1000
    picture = Path(paths["svg"]).read_text()
    assert "square-root scale" in picture and "diverged" in picture


def test_panels_draw_numbers_and_intervals_and_leave_out_what_is_missing(tmp_path):
    lines = [
        Line("theory", [1, 10, 100], [0.2, 0.5, None]),
        Line(
            "trained", [1, 10, 100], [Interval(0.3, 0.1, 3), Interval(np.nan, np.nan, 0), 0.7], {"band": True}
        ),
    ]
    panels = [Panel(title, ("ratio", "attention"), lines, null=0.1, legend={}) for title in "abc"]
    paths = save_panels(panels, tmp_path, "mine", title="Mine", caption="", columns=2, share=True)
    with open(paths["csv"], newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["panel"] == "a"]
    assert [(row["line"], row["ratio"], row["attention"]) for row in rows] == [
        ("theory", "1", "0.2"),
        ("theory", "10", "0.5"),
        ("trained", "1", "0.3"),
        ("trained", "100", "0.7"),
    ]
    assert "attention against ratio for theory, trained" in Path(paths["json"]).read_text()


def test_grids_have_their_numbers_and_a_dash_where_there_is_none(tmp_path):
    grids = [Grid("MRTA", ["slow", "fast"], ["1", "10"], [[0.25, np.nan], [0.5, 0.75]])]
    paths = save_grids(grids, ("ratio", "rate"), tmp_path, "mine", title="Mine", caption="")
    picture = Path(paths["svg"]).read_text()
    assert "0.750" in picture and "–" in picture
    with open(paths["csv"], newline="") as stream:
        assert [row["value"] for row in csv.DictReader(stream)] == ["0.25", "", "0.5", "0.75"]


def test_a_figure_says_what_to_see_and_describes_its_axes(tmp_path):
    with plotting() as plt:
        figure, (left, right) = plt.subplots(1, 2)
        left.plot([1, 2], [3, 4], label="baseline")
        left.set(xlabel="loss", ylabel="attention", title="(a)")
        figure.colorbar(draw_dtap(right, TABLE, EDGES, "(b)"), ax=right, label="%")
        paths = save_figure(figure, tmp_path, "fig", title="T", caption="C", rows=[{"x": 1}], see="It rises.")
    document = json.loads(Path(paths["json"]).read_text())
    assert document["see"] == "It rises."
    assert "(a): attention against loss for baseline" in document["alt"]
    assert (
        "(b): heat map of probability of the answer against attention on relevant tokens" in document["alt"]
    )
    assert "%" not in document["alt"]  # the colour bar is no panel


def test_panels_that_show_the_same_are_counted():
    with plotting() as plt:
        figure, axes = plt.subplots(1, 3)
        for letter, axis in zip("abc", axes, strict=True):
            axis.plot([1, 2])
            axis.set(xlabel="x", ylabel="y", title=letter)
        assert describe_axes(figure) == "3 panels (a, b, c): y against x."
        plt.close(figure)


def test_the_picture_on_the_page_has_no_background_and_two_schemes(tmp_path):
    with plotting() as plt:
        figure, axes = plt.subplots()
        axes.plot([1, 2], [3, 4], color=COLORS[0])
        axes.set(xlabel="loss")
        paths = save_figure(figure, tmp_path, "fig", title="T", caption="C", rows=[{"x": 1}])
    plain = Path(paths["svg"]).read_text()
    page = themed(plain)
    assert INK in plain and COLORS[0].lower() in plain
    body = page.split("</style>", 1)[1]
    assert INK not in body
    assert COLORS[0].lower() not in body
    assert f"stroke: var(--c{COLORS[0][1:].lower()})" in body
    assert "prefers-color-scheme:dark" in page
    assert "fill: #ffffff" not in body
