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
    WITHOUT,
    ablation_arms,
    ablation_hatexplain,
)

# What may differ from the arm with equal rates.
SPEEDS = {"qk_ratio", "ov_ratio", "lr", "faster", "frozen", "decay", "weight_decay"}
SPEEDS |= {"qk_imbalance", "gradient_norm", "epochs"}


def changes(arms, arm):
    base, changed = (dict(config_values(arms[name].config)) for name in (EQUAL, arm))
    return {name: changed[name] for name in base if base[name] != changed[name]}


def test_every_arm_changes_speeds_and_nothing_else():
    arms = ablation_arms()
    for arm in arms:
        assert changes(arms, arm).keys() <= SPEEDS
        assert bool(changes(arms, arm)) == (arm != EQUAL)


def test_the_kind_of_an_arm_is_what_it_changes():
    arms = ablation_arms()
    for name, arm in arms.items():
        changed = changes(arms, name)
        patterns = changed.get("faster", ("*.W_Q", "*.W_K"))
        faster_qk = "qk_ratio" in changed and {"*.W_Q", "*.W_K"} <= set(patterns)
        alone = changed.keys() <= {"qk_ratio"}
        assert arm.kind == (QK_ALONE if alone else QK_AND_MORE if faster_qk else WITHOUT), name


def test_another_multiplier_is_used_by_all_arms_that_have_one():
    arms = ablation_arms(ratio=7)
    assert changes(arms, "QK ×7") == {"qk_ratio": 7.0}
    assert changes(arms, "QK ×100") == {"qk_ratio": 100.0}
    assert changes(arms, "OV ÷7") == {"ov_ratio": 1 / 7, "epochs": 24}
    assert changes(arms, "everything ×7") == {"lr": pytest.approx(7 * 5e-5)}
    assert not any("30" in arm for arm in arms if "," in arm)


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
    effect = next(effect for effect in summary["effects"] if effect["arm"] == "QK ×10")
    assert effect["loss"] == pytest.approx(math.exp(-3), rel=1e-5)
    assert effect["after"]["mean"] == pytest.approx(0.04 + 0.005)
    assert effect["difference"]["mean"] == pytest.approx(0.04)
    assert summary["arms"]["OV ÷30"]["diverged"] == [1235]
    ends = [v.value for v in read_values(Path(summary["results"])) if v.at == "end" and v.score == "mrta"]
    assert len(ends) == 2 * len(places) - 1
    with open(summary["files"]["scatter"]["csv"], encoding="utf-8") as file:
        assert [point["label"] for point in csv.DictReader(file)] == list(places)
    show_summary(find_experiment("ablation-hatexplain").shown(summary))
    assert "diverged: {'OV ÷30': [1235]}" in capsys.readouterr().out
