import math
from math import log10
from pathlib import Path

import pytest

from fasterqk.files import config_values
from fasterqk.lab.experiments._registry import CellRunner
from fasterqk.lab.experiments.ablation_hatexplain import METRICS
from fasterqk.lab.experiments.ratio_or_rate import (
    RATES,
    RATIOS,
    SLOWED_ARM,
    arm_name,
    ratio_or_rate,
    save_map,
    summarize_map,
)
from fasterqk.lab.training import TrainResult


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
    same_rate, slowed = (found["mean"] for found in summary["same_qk_rate"].values())
    same_ratio, _ = (found["mean"] for found in summary["same_ratio"].values())
    expected = ratio_slope - rate_slope
    assert same_rate == pytest.approx(expected * log10(30), abs=1e-9)
    assert slowed == pytest.approx(expected * log10(30), abs=1e-9)
    assert same_ratio == pytest.approx(rate_slope * log10(30), abs=1e-9)
    files = save_map(summary, CellRunner(tmp_path), title="A title")
    assert all((tmp_path / "figures" / f"ratio-or-rate.{kind}").exists() for kind in ("svg", "png", "csv"))
    assert len(Path(files["figure"]["csv"]).read_text().splitlines()) == 1 + len(RATES) * len(RATIOS)
