"""Prediction beside practice: the languages, the theories, the needed ratio, the command."""

import doctest
import json
from pathlib import Path

import pytest

from fasterqk.theory import Setting
from fasterqk_lab.cli.main import main
from fasterqk_lab.compare import read_values
from fasterqk_lab.experiments import phase as module
from fasterqk_lab.experiments._synthetic import theory_setting
from fasterqk_lab.experiments.phase import (
    VARIED,
    crossing,
    predicted,
    predicted_ratio,
    prediction_arms,
    varied_language,
)


def test_examples_in_docstrings():
    assert doctest.testmod(module).failed == 0


def test_only_what_varies_varies():
    base = theory_setting(varied_language("b", 10))
    for name, values in VARIED.items():
        settings = [theory_setting(varied_language(name, value)) for value in values]
        if name == "context":
            assert max(s.rho for s in settings) / min(s.rho for s in settings) < 1.15  # whole positions
        else:
            assert [getattr(s, name) for s in settings] == list(values)
        for other in {"b", "M"} - {name}:
            assert {getattr(s, other) for s in settings} == {getattr(base, other)}
    assert (
        len({arm.name for arm in prediction_arms()})
        == len({(arm.about["family"], arm.cell) for arm in prediction_arms()})
        == len(prediction_arms())
    )


@pytest.mark.parametrize("name", ["CACO", "FAFO"])
def test_the_predicted_ratio_inverts_the_predicted_attention(name):
    setting = Setting(4, 10, 20, 40, "fixed")
    for law, ratio in predicted_ratio(setting, name).items():
        assert predicted(setting, name, ratio, module.SHOWN)[law] == pytest.approx(module.WANTED)


def test_the_needed_ratio_lies_between_its_neighbours():
    points = [(0.1, 0.5), (0.4, 0.85), (1.6, 0.95)]
    assert 0.4 < crossing(points, 0.9) < 1.6
    assert crossing(points, 0.99) is None and crossing(points, 0.4) is None


def test_the_command(tmp_path, monkeypatch, capsys, in_process):
    """Both parts with the smallest languages: values of every seed, distances and the needed ratio."""
    monkeypatch.setattr(module, "RATIOS", (0.3, 3.0))
    monkeypatch.setattr(module, "NEEDED_RATIOS", (0.3, 3.0))
    monkeypatch.setattr(module, "LEVELS", (0.5, 0.01))
    monkeypatch.setattr(module, "NAMES", ("FAFO",))
    monkeypatch.setattr(module, "VARIED", {"b": (2,), "n": (20,), "M": (2,), "context": (16,)})
    words = ["reproduce", "prediction", "--seeds", "1", "--out", str(tmp_path)]
    assert main([*words, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert {row["loss"] for row in summary["distance_of_the_theories"]} == {0.5, 0.01}
    values = {
        (value.arm, value.at, value.score): value.value for value in read_values(Path(summary["results"]))
    }
    assert 0 < values["FAFO, QK x3", "loss 0.5", "attention"] < 1
    [row] = [row for row in summary["needed"] if row["varied"] == "M"]
    if not row["missing"]:
        assert values["FAFO, M = 2", "needed ratio", "needed"] == pytest.approx(
            row["needed"]["mean"], rel=1e-5
        )
    assert values["FAFO, M = 2", "needed ratio", "sign"] == pytest.approx(row["sign"]["mean"], rel=1e-5)
    monkeypatch.setattr(module, "save_prediction", lambda *_: summary["files"])  # drawn once
    assert main(words) == 0
    assert "distance of the theories" in capsys.readouterr().out
