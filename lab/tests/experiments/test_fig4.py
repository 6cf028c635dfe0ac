"""Figure 4: its numbers, its files, its command."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from fasterqk.theory import PARAMETERIZATIONS, solve
from fasterqk_lab.cli.main import main
from fasterqk_lab.cli.reproduce import show_summary
from fasterqk_lab.experiments import reproduce
from fasterqk_lab.experiments.fig4 import EXPERIMENT, RATIOS, STOP, compute, normalised_time, save


@pytest.fixture(scope="module")
def figure():
    return compute(5)


def test_curves_end_where_the_runs_stop(figure):
    np.testing.assert_allclose(figure.curves.loss[:, -1], STOP, rtol=1e-9)
    np.testing.assert_allclose(figure.curves.time[:, -1], figure.final.time, rtol=1e-12)
    assert (np.diff(figure.curves.loss, axis=1) < 0).all()


def test_normalised_time_reverses_the_order_of_slow_runs(figure):
    """In the paper's time small ratios look fastest; in time itself they are the slowest."""
    assert np.argmin(normalised_time(figure.final)) == 0
    assert np.argmax(figure.final.time) == 0


def test_integrated_points_lie_on_the_lines(figure):
    assert set(figure.integrated) == set(PARAMETERIZATIONS)
    assert 0 < figure.integration_error < 1e-9


def test_the_map_is_the_inverse_of_the_solver(figure):
    inside = figure.map_ratio[::9, ::9]
    alpha = solve(figure.setting, inside, loss=figure.map_loss[::9, None]).alpha
    np.testing.assert_allclose(alpha, np.broadcast_to(figure.map_alpha[::9], alpha.shape), rtol=1e-10)


def test_the_figure_stands_on_its_csv(figure, tmp_path):
    save(figure, tmp_path)
    with (tmp_path / "figures" / "fig4.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len({row["panel"] for row in rows}) == 5
    last = [row for row in rows if row["panel"] == "matched loss" and float(row["loss"]) <= STOP * 1.0001]
    assert [float(row["alpha"]) for row in last] == pytest.approx(figure.final.alpha.tolist(), rel=1e-13)


def test_its_values_are_where_the_runs_stop(figure):
    values = {(value.arm, value.score): value.value for value in figure.values()}
    for ratio, alpha in zip(RATIOS, figure.final.alpha, strict=True):
        assert values[f"CACO, r = {ratio:g}", "alpha"] == pytest.approx(float(alpha))
    assert {value.loss for value in figure.values()} == {STOP}
    assert values["integrated", "integration_error"] < 1e-9


def test_the_command_for_the_notebooks_setting(tmp_path, capsys):
    assert main(["reproduce", "fig4", "--M", "20", "--out", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    result = json.loads(printed.out)
    assert [row["qk_ratio"] for row in result["final"]] == RATIOS.tolist()
    assert [round(row["alpha"], 4) for row in result["final"]] == [0.1488, 0.2875, 0.5911, 0.9221, 0.9927]
    for suffix in ("svg", "png", "csv", "json"):
        assert Path(result["files"][suffix]) == tmp_path / "figures" / f"fig4-M20.{suffix}"


def test_the_same_figure_of_sign_descent(tmp_path, capsys):
    """Its values stand beside those of another run in the same file."""
    results = tmp_path / "results" / "fig4.csv"
    results.parent.mkdir()
    results.write_text("experiment,arm,seed,at,loss,score,value\nfig4,x,0,end,,alpha,1.0\n")
    result = reproduce("fig4", tmp_path, optimizer="sign")
    assert result["integration_error"] is None
    assert [round(row["alpha"], 4) for row in result["final"]] == [0.1305, 0.3312, 0.9612, 1.0, 1.0]
    with Path(result["files"]["csv"]).open(encoding="utf-8") as stream:
        kinds = {(row["panel"], row["optimizer"], row["parameterization"]) for row in csv.DictReader(stream)}
    assert ("attention by ratio", "gradient_flow", "CACO") in kinds
    assert ("ratio needed", "sign", "CACO") in kinds
    names = [line.split(",")[0] for line in results.read_text().splitlines()]
    assert set(names) == {"experiment", "fig4", "fig4-sign"}
    show_summary(EXPERIMENT.shown(result))
    assert "0.9612" in (printed := capsys.readouterr().out) and "fig4-sign.png" in printed


def test_one_class_is_refused(tmp_path, capsys):
    assert main(["reproduce", "fig4", "--M", "1", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "fasterqk-lab reproduce: M = 1 is not between 2 and 1000000\n"
    assert list(tmp_path.iterdir()) == []
