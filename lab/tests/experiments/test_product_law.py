"""The product law: ways to make one R, a cell of the population, what is summarized."""

import doctest
import json
import math

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk.theory import pattern_share, product_law
from fasterqk_lab.cli.main import main
from fasterqk_lab.experiments import product_law as module
from fasterqk_lab.experiments.product_law import (
    SPLITS,
    PopulationCell,
    Reading,
    descend_population,
    hatexplain_arms,
    role_ratios,
    summarize,
)


def test_examples_in_docstrings():
    assert doctest.testmod(module).failed == 0


def test_every_split_makes_its_product():
    for split in SPLITS:
        q, k, v, o = role_ratios(split, 7.0)
        assert q * k / (v * o) == pytest.approx(7.0)
        assert product_law(q, k, v, o, optimizer="gradient_flow") == pytest.approx(math.sqrt(7))


def test_the_share_of_patterns_is_that_of_gaussian_starts():
    draws = np.random.default_rng(0).normal(size=(200_000, 5))
    signs = draws > draws.mean(axis=1, keepdims=True)
    assert pattern_share(5) == pytest.approx((signs[:, 0] != signs[:, 1]).mean(), abs=5e-3)
    with pytest.raises(InputError, match="classes = 1"):
        pattern_share(1)
    with pytest.raises(InputError, match="'adam'"):
        product_law(1, 1, optimizer="adam")
    with pytest.raises(InputError, match=r"k = 0"):
        product_law(1, 0, optimizer="sign")


def test_sign_descent_of_the_splits_agrees():
    """Coarse steps: all six ways to make R = 1 within .1 of each other, and R = 1/9 far below."""
    found = descend_population(PopulationCell(step=2e-3, scale=2e-2, products=(1 / 9, 1.0), steps=1500))
    by_product = {
        product: [arm["attention"][1] for arm in found["arms"] if arm["product"] == product]
        for product in (1 / 9, 1.0)
    }
    assert all(value is not None for values in by_product.values() for value in values)
    assert np.ptp(by_product[1.0]) < 0.1 and np.ptp(by_product[1 / 9]) < 0.1
    assert min(by_product[1.0]) > max(by_product[1 / 9]) + 0.15


def test_the_summary_tells_spread_from_reach():
    readings = [
        Reading("toy", "x", seed, split, product, 0.01, product / 10 + shift, product / 10)
        for seed in (0, 1)
        for split, shift in (("Q", 0.01), ("K", -0.01))
        for product in (1.0, 5.0)
    ]
    [row] = summarize(readings)
    assert row["spread"] == pytest.approx(0.01)
    assert row["reach"] == pytest.approx(0.2)
    assert row["law"] == pytest.approx(0.01)
    assert row["seed_spread"] == pytest.approx(0)
    assert row["explained"] == pytest.approx(1 - 1e-4 / (1e-4 + 0.04))


def test_the_arms_of_hatexplain():
    """Every arm but the baseline has R = 30, by role or by patterns that match all but W_Q and W_K."""
    from fnmatch import fnmatch

    import torch

    from fasterqk_lab.models import Classifier, ClassifierConfig

    for name, config in hatexplain_arms().arms.items():
        roles = dict.fromkeys("qkvo", 1.0) | config.optimisation.by_role()
        product = roles["q"] * roles["k"] / (roles["v"] * roles["o"])
        if config.optimisation.faster:
            product = config.optimisation.qk_ratio**-2
        assert product == pytest.approx(1.0 if name == "equal rates" else 30.0)
    model = Classifier(ClassifierConfig(vocabulary_size=9, classes=2, mlp_width=7), torch.Generator())
    names = [name for name, _ in model.named_parameters()]
    left = [name for name in names if not any(fnmatch(name, each) for each in module.NOT_QUERY_KEY)]
    assert {name.rsplit(".")[-1] for name in left} == {"W_Q", "b_Q", "W_K", "b_K"}
    assert all(any(fnmatch(name, each) for name in names) for each in module.NOT_QUERY_KEY)


def test_the_command(tmp_path, monkeypatch, capsys, in_process):
    cell = PopulationCell(step=2e-3, scale=2e-2, products=(1.0,), steps=300)
    monkeypatch.setattr(module, "CONDITIONS", (cell,))
    words = ["reproduce", "product-law", "--parts", "population", "--seeds", "1", "--out", str(tmp_path)]
    assert main([*words, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    values = (tmp_path / "results" / "product-law.csv").read_text()
    assert "product-law-population" in values and all(f" by {split}" in values for split in SPLITS)
    monkeypatch.setattr(module, "save", lambda *_: summary["files"])  # drawn once
    assert main(words) == 0
    assert "splits of one R" in capsys.readouterr().out
    assert main([*words[:3], "wide", *words[4:]]) == 2
    assert "'wide'" in capsys.readouterr().err
