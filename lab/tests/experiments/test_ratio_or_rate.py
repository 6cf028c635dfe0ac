import math
from math import log10
from pathlib import Path

import pytest

from fasterqk.files import config_values
from fasterqk_lab.experiments import reproduce
from fasterqk_lab.experiments._registry import CellRunner, settings_of, write_cells
from fasterqk_lab.experiments.ablation_hatexplain import METRICS
from fasterqk_lab.experiments.ratio_or_rate import (
    MAP,
    RATES,
    RATIOS,
    SLOWED_ARM,
    arm_name,
    per_decade_at,
    ratio_or_rate,
    save_map,
    summarize_map,
)
from fasterqk_lab.training import TrainResult


def test_the_slowed_arm_has_the_qk_rate_of_the_baseline_and_the_ratio_of_the_faster_arm():
    arms = ratio_or_rate().arms
    slowed, baseline = (dict(config_values(arms[name])) for name in (SLOWED_ARM, arm_name(RATES[0], 1)))
    assert slowed["lr"] * slowed["qk_ratio"] == pytest.approx(baseline["lr"])
    assert slowed["epochs"] * slowed["lr"] == pytest.approx(baseline["epochs"] * baseline["lr"])
    changed = {name for name in slowed if slowed[name] != baseline[name]}
    assert changed == {"lr", "qk_ratio", "epochs", "weight_decay", "evaluations"}


def results_of(comparison, mass):
    """Made-up results in which attention at the end is ``mass(base rate, ratio)``."""

    def history(config, seed):
        end = mass(config.optimisation.lr, config.optimisation.qk_ratio) + 0.001 * (seed - 1234)
        values = dict.fromkeys(METRICS, 0.1)
        return [
            {"loss": math.exp(-epoch), **values, "mrta": end * epoch / 3, "null_mrta": 0.3}
            | {"validation_accuracy": 0.5, "test_accuracy": 0.6}
            for epoch in range(4)
        ]

    return {
        (arm, seed): TrainResult(
            "hatexplain", seed, 1.0, False, 3, math.exp(-3), history=history(config, seed)
        )
        for (arm, seed), config in comparison.cells().items()
    }


@pytest.mark.parametrize(
    ("mass", "ratio_slope", "rate_slope"),
    [
        (lambda rate, ratio: 0.4 + 0.1 * log10(ratio), 0.1, 0.0),
        (lambda rate, ratio: 0.8 + 0.1 * log10(rate * ratio), 0.1, 0.1),
    ],
    ids=["the ratio decides", "the QK rate decides"],
)
def test_the_slopes_tell_ratio_and_rate_apart(mass, ratio_slope, rate_slope, tmp_path):
    comparison = ratio_or_rate(seeds=2)
    summary = summarize_map(comparison, results_of(comparison, mass))
    slopes = summary["slopes"]
    assert slopes["per_decade_of_ratio"]["mean"] == pytest.approx(ratio_slope)
    assert slopes["per_decade_of_base_rate"]["mean"] == pytest.approx(rate_slope, abs=1e-9)
    for of_seed in summary["slopes_per_seed"].values():
        assert of_seed[per_decade_at(30)] == pytest.approx(rate_slope, abs=1e-9)
    same_rate, slowed = (found["mean"] for found in summary["same_qk_rate"].values())
    same_ratio, _ = (found["mean"] for found in summary["same_ratio"].values())
    expected = ratio_slope - rate_slope
    assert same_rate == pytest.approx(expected * log10(30), abs=1e-9)
    assert slowed == pytest.approx(expected * log10(30), abs=1e-9)
    assert same_ratio == pytest.approx(rate_slope * log10(30), abs=1e-9)
    files = save_map(summary, CellRunner(tmp_path), title="A title")
    assert all((tmp_path / "figures" / f"ratio-or-rate.{kind}").exists() for kind in ("svg", "png", "csv"))
    assert len(Path(files["figure"]["csv"]).read_text().splitlines()) == 1 + len(RATES) * len(RATIOS)


def test_tables_are_rebuilt_from_cells_with_the_slopes_of_every_seed(tmp_path):
    comparison = ratio_or_rate(seeds=2)
    results = results_of(comparison, lambda rate, ratio: 0.4 + 0.1 * log10(ratio))
    cells = comparison.cells()
    lines = [
        {"experiment": "ratio-or-rate", "arm": arm, "seed": seed, "settings": settings_of(cells[arm, seed])}
        | {"result": result.to_json() | {"train": {}, "validation": {}, "test": {}}}
        for (arm, seed), result in results.items()
    ]
    file = write_cells(tmp_path / "cells.jsonl", lines)
    summary = reproduce("ratio-or-rate", tmp_path / "out", seeds=2, cells=[str(file)])
    table = Path(summary["files"]["table"]["csv"]).read_text().splitlines()
    assert {"difference", "difference_half_width", "p"} <= set(table[0].split(","))
    [per_seed] = summary["per_seed"]
    slopes = [line for line in Path(per_seed).read_text().splitlines() if "per_decade_of_ratio" in line]
    assert [line.split(",")[:2] for line in slopes] == [[MAP, "1234"], [MAP, "1235"]]
    assert all(float(line.split(",")[-1]) == pytest.approx(0.1) for line in slopes)
