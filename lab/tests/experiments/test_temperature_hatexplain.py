from pathlib import Path

import pytest
import torch

from fasterqk_lab.cli.reproduce import show_summary
from fasterqk_lab.compare import read_values
from fasterqk_lab.experiments import find_experiment
from fasterqk_lab.experiments._examples import sharpened_as_read, sharpened_in_the_model
from fasterqk_lab.experiments.faithfulness import AT, FAITHFUL, MASS, READINGS, temperature_hatexplain
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._classification import Classification
from fasterqk_lab.training._loop import build_trainable


@pytest.fixture(scope="module")
def workload():
    config = TrainConfig(
        "agreement", heads=1, train_limit=64, train_subset=64, init_scale=1.0, random_along=True
    )
    trainable = build_trainable(config)
    assert isinstance(trainable, Classification)
    return trainable


def test_with_one_head_a_power_of_the_rows_is_a_factor_of_the_scores(workload):
    before = {name: weight.clone() for name, weight in workload.model.state_dict().items()}
    read, model = (sharpen(workload, [1.0, 3.0]) for sharpen in (sharpened_as_read, sharpened_in_the_model))
    for as_read, in_the_model in zip(read, model, strict=True):
        for name in (MASS, "ac", "entropy"):
            assert as_read[name] == pytest.approx(in_the_model[name], rel=1e-4), name
    assert read[1]["entropy"] < read[0]["entropy"]
    assert all(torch.equal(weight, before[name]) for name, weight in workload.model.state_dict().items())


def curve(entropies, masses):
    shared = {"loss": 0.6, "ac": 10.0, "acmc": 5.0, "test_accuracy": 0.6, "test_loss": 0.9, FAITHFUL: 0.1}
    return [
        {"factor": 2.0**place, "entropy": entropy, MASS: mass, **shared}
        for place, (entropy, mass) in enumerate(zip(entropies, masses, strict=True))
    ]


def test_the_baseline_is_read_at_the_entropy_of_the_faster_arm_if_it_gets_there(rebuilt, capsys):
    comparison = temperature_hatexplain(seeds=3)
    baseline, faster = curve([3.0, 2.0, 1.0], [0.4, 0.5, 0.6]), curve([1.5], [0.7])
    curves = {
        f"{arm} {seed}": {"read": points, "model": points}
        for seed in comparison.seeds
        for arm, points in (("baseline", baseline), ("faster_qk", faster))
    }
    flat = curve([3.0, 2.9], [0.4, 0.4])
    curves[f"baseline {comparison.seeds[-1]}"] = {"read": flat, "model": flat}  # never as sharp
    summary = rebuilt(
        "temperature-hatexplain",
        [comparison],
        lambda arm, config, seed: [{"loss": 0.6, MASS: 0.4}],
        curves,
        seeds=3,
    )
    decide = {effect["score"]: effect["difference"] for effect in summary["at_equal_entropy"]}
    assert decide.keys() == {MASS, FAITHFUL}
    assert decide[MASS]["mean"] == pytest.approx(0.15)
    assert decide[MASS]["n"] == 2
    values = {
        (value.arm, value.seed): value.value
        for value in read_values(Path(summary["results"]))
        if (value.at, value.score) == (AT, MASS)
    }
    assert len(values) == 4 * 3 - 2  # four readings of three seeds, two of them without a number
    assert values[READINGS["as_read"], 1234] == pytest.approx(0.55)
    assert values[READINGS["faster_qk"], 1236] == 0.7
    show_summary(find_experiment("temperature-hatexplain").shown(summary))
    assert "at equal entropy" in capsys.readouterr().out
