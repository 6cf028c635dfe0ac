from pathlib import Path

import pytest
import torch

from fasterqk_lab.experiments import reproduce
from fasterqk_lab.experiments._registry import settings_of, write_cells
from fasterqk_lab.experiments.temperature_hatexplain import (
    FAITHFUL,
    MASS,
    sharpened_as_read,
    sharpened_in_the_model,
    summarize_temperature,
    temperature_hatexplain,
)
from fasterqk_lab.training import TrainConfig, TrainResult
from fasterqk_lab.training._classification import Classification
from fasterqk_lab.training._loop import build_trainable


@pytest.fixture(scope="module")
def workload():
    config = TrainConfig(
        "agreement", heads=1, train_limit=64, train_subset=64, init_scale=1.0, random_along=True
    )
    found = build_trainable(config)
    assert isinstance(found, Classification)
    return found


def test_with_one_head_a_power_of_the_rows_is_a_factor_of_the_scores(workload):
    before = {name: weight.clone() for name, weight in workload.model.state_dict().items()}
    read, model = (sharpen(workload, [1.0, 3.0]) for sharpen in (sharpened_as_read, sharpened_in_the_model))
    for one, other in zip(read, model, strict=True):
        for name in (MASS, "ac", "entropy"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
    assert read[1]["entropy"] < read[0]["entropy"]
    assert all(torch.equal(weight, before[name]) for name, weight in workload.model.state_dict().items())


def curve(entropies, masses):
    shared = {"loss": 0.6, "ac": 10.0, "acmc": 5.0, "test_accuracy": 0.6, "test_loss": 0.9, FAITHFUL: 0.1}
    return [
        {"factor": 2.0**place, "entropy": entropy, MASS: mass, **shared}
        for place, (entropy, mass) in enumerate(zip(entropies, masses, strict=True))
    ]


def test_the_baseline_is_compared_at_the_entropy_of_the_faster_arm():
    comparison = temperature_hatexplain(seeds=2)
    baseline = {
        "read": curve([3.0, 2.0, 1.0], [0.4, 0.5, 0.6]),
        "model": curve([3.0, 2.0, 1.0], [0.4, 0.5, 0.6]),
    }
    faster = {"read": curve([1.5], [0.7]), "model": curve([1.5], [0.7])}
    curves = {
        f"{arm} {seed}": each
        for seed in comparison.seeds
        for arm, each in (("baseline", baseline), ("faster_qk", faster))
    }
    summary = summarize_temperature(comparison, curves)
    assert summary["readings"]["as_read"][MASS]["mean"] == pytest.approx(0.55)
    assert summary["difference"]["as_read"][MASS]["mean"] == pytest.approx(0.15)
    assert summary["difference"]["baseline"][MASS]["mean"] == pytest.approx(0.3)


def test_an_entropy_that_is_never_reached_has_no_number():
    comparison = temperature_hatexplain(seeds=1)
    flat = {"read": curve([3.0, 2.9], [0.4, 0.4]), "model": curve([3.0, 2.9], [0.4, 0.4])}
    sharp = {"read": curve([1.0], [0.7]), "model": curve([1.0], [0.7])}
    seed = comparison.seeds[0]
    summary = summarize_temperature(comparison, {f"baseline {seed}": flat, f"faster_qk {seed}": sharp})
    assert MASS not in summary["difference"]["as_read"]


def test_tables_are_rebuilt_from_cells_with_the_readings_of_every_seed(tmp_path):
    comparison = temperature_hatexplain(seeds=2)
    lines = []
    for (arm, seed), config in comparison.cells().items():
        result = TrainResult("hatexplain", seed, 1.0, False, 3, 0.6, history=[{"loss": 0.6, MASS: 0.4}])
        about = {"experiment": "temperature-hatexplain", "protocol": "paper"}
        splits = {"train": {}, "validation": {}, "test": {}}
        cell = {
            "arm": arm,
            "seed": seed,
            "settings": settings_of(config),
            "result": result.to_json() | splits,
        }
        points = ([3.0, 2.0, 1.0], [0.4, 0.5, 0.6]) if arm == "baseline" else ([1.5], [0.7])
        both = {"read": curve(*points), "model": curve(*points)}
        lines += [about | cell, about | {"fact": f"{arm} {seed}", "value": both}]
    file = write_cells(tmp_path / "cells.jsonl", lines)
    summary = reproduce("temperature-hatexplain", tmp_path / "out", seeds=2, cells=[str(file)])
    [path] = summary["per_seed"]
    rows = [line for line in Path(path).read_text().splitlines() if f"equal entropy,{MASS}," in line]
    assert len(rows) == 8  # four readings of two seeds
    assert rows[-1] == f"faster QK,1235,equal entropy,{MASS},0.7"
