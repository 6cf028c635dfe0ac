"""Training curves on disk, and how they are thinned for the page."""

import json

import pytest

from fasterqk.errors import InputError
from fasterqk.lab.report._html import fit_curves
from fasterqk.lab.report._records import load_curves, save_curves


def save(out, cells, metrics=({"key": "loss", "label": "loss"},)):
    return save_curves(
        out, "demo", title="T", caption="", x={"key": "step", "label": "step"}, metrics=metrics, cells=cells
    )


def test_points_keep_only_what_is_drawn(tmp_path):
    points = [{"step": 0, "loss": 1.5, "gradient": 7}, {"step": 1, "loss": float("nan")}]
    save(tmp_path, [{"arm": "r = 1", "points": points}])
    [found] = load_curves(tmp_path)
    assert found["cells"] == [
        {"arm": "r = 1", "seed": None, "points": [{"step": 0, "loss": 1.5}, {"step": 1, "loss": None}]}
    ]


def test_a_metric_without_a_label_is_refused(tmp_path):
    with pytest.raises(InputError, match="no 'key' and 'label'"):
        save(tmp_path, [], metrics=[{"key": "loss"}])


@pytest.mark.parametrize(("cells", "length"), [(1, 10_000), (3, 150), (300, 400)])
def test_thinned_curves_fit_and_keep_their_ends(cells, length):
    points = [{"step": k, "loss": 1 / 3} for k in range(length)]
    [found] = fit_curves([{"cells": [{"arm": "r = 1", "points": points}] * cells}])
    for cell in found["cells"]:
        steps = [point["step"] for point in cell["points"]]
        assert (steps[0], steps[-1]) == (0, length - 1)
        assert steps == sorted(set(steps))
    assert len(json.dumps(found)) < 400_000
