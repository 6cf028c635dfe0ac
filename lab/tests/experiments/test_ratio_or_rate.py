import csv
import math
from math import log10
from pathlib import Path

import pytest

from fasterqk.files import config_values
from fasterqk_lab.cli.reproduce import show_summary
from fasterqk_lab.compare import read_values
from fasterqk_lab.experiments import find_experiment
from fasterqk_lab.experiments.ratio_or_rate import (
    MAP,
    PER_RATE,
    PER_RATIO,
    RATES,
    RATIOS,
    SLOWED_ARM,
    arm_name,
    per_decade_at,
    ratio_or_rate,
)


def test_the_slowed_arm_has_the_qk_rate_of_the_baseline_and_the_ratio_of_the_faster_arm():
    arms = ratio_or_rate().arms
    slowed, baseline = (dict(config_values(arms[name])) for name in (SLOWED_ARM, arm_name(RATES[0], 1)))
    assert slowed["lr"] * slowed["qk_ratio"] == pytest.approx(baseline["lr"])
    assert slowed["epochs"] * slowed["lr"] == pytest.approx(baseline["epochs"] * baseline["lr"])
    changed = {name for name in slowed if slowed[name] != baseline[name]}
    assert changed == {"lr", "qk_ratio", "epochs", "weight_decay", "evaluations"}


def test_the_baseline_of_an_arm_has_ratio_1_and_its_rate():
    comparison = ratio_or_rate()
    for arm, config in comparison.arms.items():
        baseline = comparison.arms[comparison.baseline_of(arm)].optimisation
        assert baseline.qk_ratio == 1
        assert baseline.lr == (RATES[0] if arm == SLOWED_ARM else config.optimisation.lr)


@pytest.mark.parametrize(
    ("mass", "ratio_slope", "rate_slope"),
    [
        (lambda rate, ratio: 0.4 + 0.1 * log10(ratio), 0.1, 0.0),
        (lambda rate, ratio: 0.8 + 0.1 * log10(rate * ratio), 0.1, 0.1),
    ],
    ids=["the ratio decides", "the QK rate decides"],
)
def test_slopes_and_pairs_tell_ratio_and_rate_apart(mass, ratio_slope, rate_slope, rebuilt, capsys):
    def history(arm, config, seed):
        end = mass(config.optimisation.lr, config.optimisation.qk_ratio) + 0.001 * (seed - 1234)
        return [
            {"loss": math.exp(-n), "mrta": end * n / 3, "null_mrta": 0.3, "test_accuracy": 0.6}
            for n in range(4)
        ]

    summary = rebuilt("ratio-or-rate", [ratio_or_rate(seeds=2)], history, seeds=2)
    differences = [effect["difference"]["mean"] for effect in summary["ratio_or_rate"]]
    decade = log10(30)
    same_rate, same_ratio = (ratio_slope - rate_slope) * decade, rate_slope * decade
    slowed = ratio_slope * decade - same_rate
    assert differences == pytest.approx(
        [ratio_slope, rate_slope, same_rate, same_rate, same_ratio, slowed], abs=1e-5
    )
    slopes = {(v.score, v.seed): v.value for v in read_values(Path(summary["results"])) if v.arm == MAP}
    for seed in (1234, 1235):
        assert slopes[PER_RATIO, seed] == pytest.approx(ratio_slope, abs=1e-5)
        for name in (PER_RATE, *map(per_decade_at, RATIOS)):
            assert slopes[name, seed] == pytest.approx(rate_slope, abs=1e-5)
    faster = {effect["arm"] for effect in summary["effects"]}
    assert len(faster) == len(RATES) * (len(RATIOS) - 1) + 1
    with Path(summary["files"]["figure"]["csv"]).open() as file:
        assert len(list(csv.DictReader(file))) == 2 * len(RATES) * len(RATIOS)  # attention and accuracy
    show_summary(find_experiment("ratio-or-rate").shown(summary))
    assert "growth per decade of the ratio" in capsys.readouterr().out
