import csv
import math

import pytest

from fasterqk.files import config_values
from fasterqk_lab.experiments.ablation_hatexplain import (
    EQUAL,
    METRICS,
    ablation_hatexplain,
    ablation_rows,
    kind_of,
    save_ablation,
    summarize_ablation,
)
from fasterqk_lab.training import TrainResult

# What may differ from the arm with equal rates.
SPEEDS = {"qk_ratio", "ov_ratio", "lr", "faster", "frozen", "decay", "weight_decay"}
SPEEDS |= {"qk_imbalance", "gradient_norm", "epochs"}


def changes(experiment, arm):
    one, other = (dict(config_values(experiment.arms[name])) for name in (EQUAL, arm))
    return {name: other[name] for name in one if one[name] != other[name]}


def test_every_arm_changes_speeds_and_nothing_else():
    experiment = ablation_hatexplain()
    assert len(experiment.seeds) == 3
    for arm in experiment.arms:
        assert changes(experiment, arm).keys() <= SPEEDS
        assert bool(changes(experiment, arm)) == (arm != EQUAL)


def test_query_key_alone_has_all_multipliers_and_changes_nothing_else():
    experiment = ablation_hatexplain()
    for ratio in (3, 10, 30, 100):
        assert changes(experiment, f"QK ×{ratio}") == {"qk_ratio": float(ratio)}


def test_another_multiplier_is_used_by_all_arms_that_have_one():
    experiment = ablation_hatexplain(ratio=7)
    assert changes(experiment, "QK ×7") == {"qk_ratio": 7.0}
    assert changes(experiment, "OV ÷7") == {"ov_ratio": 1 / 7, "epochs": 24}
    assert changes(experiment, "everything ×7") == {"lr": pytest.approx(7 * 5e-5)}
    assert not any("30" in arm for arm in experiment.arms if "," in arm)


def history(mass, seed):
    values = dict.fromkeys(METRICS, 0.1)
    return [
        {"loss": math.exp(-epoch), "train_accuracy": 0.5, **values, "mrta": mass * epoch / 3 + 0.01 * seed}
        | {"test_accuracy": 0.6, "null_mrta": 0.3, "null_ac": 20.0}
        for epoch in range(4)
    ]


def result(seed, mass):
    """A cell whose test split at the end has more attention than what was looked at along training."""
    along = history(mass, seed - 1234)
    fit = {"loss": 0.1, "accuracy": 0.5}
    test = fit | {"mrta": along[-1]["mrta"] + 0.001}
    return TrainResult(
        "hatexplain", seed, 1.0, False, 3, 0.05, train=fit, validation=fit, test=test, history=along
    )


@pytest.fixture
def summary():
    experiment = ablation_hatexplain(seeds=2)
    results = {
        (arm, seed): result(seed, 0.02 * place)
        for place, arm in enumerate(experiment.arms)
        for seed in experiment.seeds
    }
    lost = [{"loss": None, "diverged": True}]
    results["OV ÷30", 1235] = TrainResult("hatexplain", 1235, 1.0, True, 3, None, history=lost)
    return summarize_ablation(experiment, results)


def test_arms_are_compared_at_equal_loss_and_at_the_end(summary):
    lowest = summary["matched"][0]
    assert lowest["loss"] == pytest.approx(math.exp(-3))
    assert lowest["arms"]["QK ×10"]["mrta"]["mean"] == pytest.approx(0.04 + 0.005)
    assert lowest["difference"]["QK ×10"]["mrta"]["mean"] == pytest.approx(0.04)
    assert summary["arms"]["QK ×10"]["end"]["mrta"]["mean"] == pytest.approx(0.04 + 0.005 + 0.001)
    assert (summary["null"]["mrta"], summary["null"]["acmc"]) == (0.3, None)


def test_a_diverged_cell_is_listed(summary):
    assert summary["arms"]["OV ÷30"]["diverged"] == [1235]
    assert summary["arms"]["OV ÷30"]["end"]["mrta"]["mean"] is None
    assert ["OV ÷30", 1235] in summary["matched"][0]["missing"]


def test_the_figure_has_one_point_an_arm(summary, tmp_path):
    files = save_ablation(summary, tmp_path, title="T")
    with open(files["figure"]["csv"], encoding="utf-8") as file:
        points = list(csv.DictReader(file))
    assert [point["arm"] for point in points] == list(summary["arms"])
    assert (tmp_path / "tables" / "ablation-hatexplain.csv").exists()
    rows = ablation_rows(summary)
    assert len(rows) == len(summary["arms"]) * (len(summary["matched"]) + 1)


@pytest.mark.parametrize(
    ("arm", "kind"),
    [(EQUAL, "QK alone"), ("QK ×100", "QK alone"), ("QK and embedding ×30", "QK, and more")],
)
def test_arms_are_drawn_by_what_they_change(arm, kind):
    assert kind_of(arm) == kind
