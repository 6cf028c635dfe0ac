"""Attention layer by layer: both arms, their difference, its null, and what is written."""

import pytest
from fasterqk_lab.experiments._arms import BASELINE, FASTER
from fasterqk_lab.experiments._layers import rows_of_score, save_layers, summarize_layers

from fasterqk_lab.experiments.table_layers import table_layers
from fasterqk_lab.training import TrainResult


def history(mass, seed):
    shift = 0.01 * (seed - 1235)
    return [
        {
            "loss": loss,
            "mrta": mass / 2 + shift,
            "null_mrta": 0.3,
            "layer_1_mrta": 0.4 + shift,
            "layer_1_null_mrta": 0.4,
            "layer_2_mrta": mass * (2 - loss) + shift,
            "layer_2_null_mrta": 0.4,
        }
        for loss in (1.0, 0.5)
    ]


def result(mass, seed):
    along = history(mass, seed)
    last = along[-1]
    layers = {n: {"mrta": last[f"layer_{n}_mrta"], "null": {"mrta": 0.4}} for n in (1, 2)}
    # At the end more is measured than along training, here with a little more mass in layer 2.
    layers[2]["mrta"] += 0.05
    test = {"mrta": last["mrta"], "null": {"mrta": 0.3}, "layer": layers}
    return TrainResult("hatexplain", seed, 1.0, False, 2, 0.5, history=along, test=test)


@pytest.fixture
def rows():
    experiment = table_layers(2, seeds=3)
    results = {(arm, seed): result(0.8 if arm == FASTER else 0.4, seed) for arm, seed in experiment.cells()}
    return summarize_layers(experiment, results)


def test_every_layer_has_both_arms_their_difference_and_its_null(rows):
    found = {(row["attention"], row["at"]): row for row in rows}
    assert set(found) == {(a, at) for a in ("rollout", "layer 1", "layer 2") for at in ("equal loss", "end")}
    last = found["layer 2", "end"]
    assert last[FASTER]["mean"] == pytest.approx(1.25)
    assert found["layer 2", "equal loss"][FASTER]["mean"] == pytest.approx(1.2)
    assert last["difference"]["mean"] == pytest.approx(0.6)
    # Seeds shift both arms alike, so the paired difference has no spread.
    assert last["difference"]["half_width"] == pytest.approx(0, abs=1e-12)
    assert (found["rollout", "end"]["null"], last["null"]) == pytest.approx((0.3, 0.4))
    assert found["layer 1", "end"]["difference"]["mean"] == pytest.approx(0)
    assert found["layer 2", "equal loss"]["loss"] == 0.5


def test_the_stronger_nulls_of_every_layer_are_rows_of_their_own():
    experiment = table_layers(2, seeds=3)
    results = {(arm, seed): result(0.8 if arm == FASTER else 0.4, seed) for arm, seed in experiment.cells()}
    for (arm, _), found in results.items():
        permuted = 0.35 if arm == FASTER else 0.25
        for point in found.history:
            point |= {"permuted_mrta": 0.3, "layer_2_permuted_mrta": permuted}
        found.test["permuted"] = {"mrta": 0.3}
        found.test["layer"][2]["permuted"] = {"mrta": permuted}
    rows = summarize_layers(experiment, results)
    found = {(row["attention"], row["at"]): row for row in rows if row["metric"] == "permuted_mrta"}
    assert set(found) == {(a, at) for a in ("rollout", "layer 2") for at in ("equal loss", "end")}
    for row in (found["layer 2", "equal loss"], found["layer 2", "end"]):
        assert (row[FASTER]["mean"], row[BASELINE]["mean"], row["null"]) == pytest.approx((0.35, 0.25, None))


def test_a_diverged_cell_leaves_no_mean_and_no_crash(tmp_path):
    experiment = table_layers(2, seeds=2)
    results = {cell: result(0.4, cell[1]) for cell in experiment.cells()}
    history = [{"loss": None, "diverged": True}]
    results[FASTER, 1234] = TrainResult("hatexplain", 1234, 30.0, True, 2, None, history=history)
    end = next(row for row in summarize_layers(experiment, results) if row["at"] == "end")
    assert end[FASTER]["mean"] is None
    assert end[BASELINE]["mean"] == pytest.approx(0.2 - 0.005)


def test_table_and_figure_are_written(rows, tmp_path):
    speeds = {"lr": 1e-4, "epochs": 2}
    arms = {BASELINE: {"qk_ratio": 1.0, **speeds}, FASTER: {"qk_ratio": 30.0, **speeds}}
    summary = {"experiment": "t", "protocol": "paper", "seeds": [1, 2, 3], "epochs": 2, "arms": arms}
    save_layers(rows, tmp_path, "t", title="T", summary=summary)
    for name in ("tables/t-by-layer.csv", "figures/t-by-layer.png", "figures/t-by-layer.svg"):
        assert (tmp_path / name).exists()
    assert [row["attention"] for row in rows_of_score(rows, "mrta")][::2] == ["rollout", "layer 1", "layer 2"]
