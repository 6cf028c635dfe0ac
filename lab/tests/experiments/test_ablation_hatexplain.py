import csv
import math
from pathlib import Path

import pytest

from fasterqk.files import config_values
from fasterqk_lab.cli.reproduce import show_summary
from fasterqk_lab.compare import read_values
from fasterqk_lab.experiments import find_experiment
from fasterqk_lab.experiments.ablation_hatexplain import (
    EQUAL,
    QK_ALONE,
    QK_AND_MORE,
    SHARPENED,
    SHOWN,
    WITHOUT,
    ablation_hatexplain,
    constant_rate,
    kind_of,
    rivals,
)

# What may differ from the arm with equal rates.
SPEEDS = {"qk_ratio", "ov_ratio", "lr", "faster", "frozen", "decay", "weight_decay"}
SPEEDS |= {"qk_imbalance", "gradient_norm", "epochs"}


ARMS = ablation_hatexplain().arms


def changes(arm):
    base, changed = (dict(config_values(ARMS[name])) for name in (EQUAL, arm))
    return {name: changed[name] for name in base if base[name] != changed[name]}


def test_every_arm_changes_speeds_and_nothing_else():
    for arm in ARMS:
        assert changes(arm).keys() <= SPEEDS
        assert bool(changes(arm)) == (arm != EQUAL)
    assert changes("QK ×100") == {"qk_ratio": 100.0}
    assert changes("OV ÷30") == {"ov_ratio": 1 / 30, "epochs": 24}
    assert changes("everything ×30") == {"lr": pytest.approx(30 * 5e-5)}


def test_the_kind_of_an_arm_is_what_it_changes():
    kinds = {arm: kind_of(config, ARMS[EQUAL]) for arm, config in ARMS.items()}
    alone = [EQUAL, *(f"QK ×{ratio}" for ratio in (3, 5, 10, 20, 30, 100))]
    assert [arm for arm, kind in kinds.items() if kind == QK_ALONE] == alone
    with_more = [arm for arm in ARMS if arm.startswith("QK ") and arm not in alone]
    assert [arm for arm, kind in kinds.items() if kind == QK_AND_MORE] == with_more
    assert {kinds["Q only ×30"], kinds["embedding ×30"], kinds["everything ×30"]} == {WITHOUT}
    others = rivals("rivals-hatexplain", "HateXplain", constant_rate(), (10,), seeds=1).arms
    kinds = [kind_of(config, others[EQUAL]) for config in others.values()]
    assert kinds == [QK_ALONE] * 2 + [SHOWN] * 3 + [SHARPENED] * 5


def test_arms_are_compared_at_equal_loss_drawn_and_listed_if_they_diverged(rebuilt, capsys):
    comparison = ablation_hatexplain(seeds=2)
    places = {arm: place for place, arm in enumerate(comparison.arms)}

    def history(arm, config, seed):
        if (arm, seed) == ("OV ÷30", 1235):
            return None
        return [
            {"loss": math.exp(-n), "mrta": 0.02 * places[arm] * n / 3 + 0.01 * (seed - 1234), "step": n}
            | {"test_accuracy": 0.6, "null_mrta": 0.3}
            for n in range(4)
        ]

    summary = rebuilt("ablation-hatexplain", [comparison], history, seeds=2)
    effect = next(effect for effect in summary["effects"] if effect["arm"] == "QK ×5")
    assert effect["loss"] == pytest.approx(math.exp(-3), rel=1e-5)
    assert effect["after"]["mean"] == pytest.approx(0.04 + 0.005)
    assert effect["difference"]["mean"] == pytest.approx(0.04)
    assert summary["arms"]["OV ÷30"]["diverged"] == [1235]
    ends = [v.value for v in read_values(Path(summary["results"])) if v.at == "end" and v.score == "mrta"]
    assert len(ends) == 2 * len(places) - 1
    with open(summary["files"]["figure"]["csv"], encoding="utf-8") as file:
        assert [point["label"] for point in csv.DictReader(file)] == list(places)
    show_summary(find_experiment("ablation-hatexplain").shown(summary))
    assert "diverged: {'OV ÷30': [1235]}" in capsys.readouterr().out
