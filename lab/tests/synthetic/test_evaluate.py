"""The covert channel: none in a blind or untrained model, all bits in one that is built to have it."""

import doctest
from dataclasses import replace

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk_lab.synthetic import Language, SyntheticCell, draw_counts
from fasterqk_lab.synthetic import _train as module
from fasterqk_lab.synthetic._cell import zeros_like
from fasterqk_lab.synthetic._train import Trainer, covert_channel, mutual_bits

BLIND = Language(queries=(5, 5, 5, 5))


def test_examples_in_docstrings():
    assert doctest.testmod(module).failed == 0


def test_a_model_that_names_the_class_by_a_common_token():
    """Class c looks at common token c, whose value votes for c: all bits, right without class tokens."""
    cell = SyntheticCell("CACO", closed=True)
    weights = zeros_like(Trainer(cell).weights)
    for c in range(4):
        weights.scores[c, c] = 30.0
        weights.table[c, cell.labels[c]] = 5.0
    sample = draw_counts(replace(cell.language, context=200), 400, np.random.default_rng(0))
    found = covert_channel(cell, weights, sample, np.random.default_rng(1))
    assert found["bits"] == pytest.approx(2.0, abs=0.02)  # the classes of a sample are not quite balanced
    assert 0 < found["null_bits"] < 0.1
    assert found["common_accuracy"] == 1.0
    assert found["distinct_accuracy"] < 0.5


def test_uniform_attention_says_no_more_than_its_null():
    cell = SyntheticCell("CACO")
    weights = zeros_like(Trainer(cell).weights)
    sample = draw_counts(cell.language, 1600, np.random.default_rng(0))
    found = covert_channel(cell, weights, sample, np.random.default_rng(1))
    assert found["bits"] < 3 * found["null_bits"] < 0.003


def test_the_estimate_is_biased_upward_and_the_null_shows_it():
    """Few sequences, many tokens, no relation: the plain estimate is far above zero."""
    random = np.random.default_rng(0)
    share = np.eye(10)[random.integers(10, size=60)]
    label = random.integers(4, size=60)
    shuffled = np.mean([mutual_bits(share, random.permutation(label)) for _ in range(50)])
    assert mutual_bits(share, label) > 0.1
    assert mutual_bits(share, label) == pytest.approx(shuffled, rel=0.5)


@pytest.mark.parametrize("parameterization", ["CACO", "FAFO"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_blind_query_scores_alike_for_all_classes(parameterization, optimizer):
    cell = SyntheticCell(parameterization, language=BLIND, optimizer=optimizer, lr=0.01, max_steps=400)
    trainer = Trainer(cell)
    trainer.run()
    rows = trainer.weights.queries if parameterization == "FAFO" else trainer.weights.scores
    assert np.ptp(rows, axis=0).max() == 0
    assert np.abs(rows).max() > 1e-3


def test_the_gradient_of_a_blind_query_is_the_sum_over_classes():
    """One step of SGD from equal rows: every row moves by the sum of what four own rows would."""
    start = {"lr": 0.5, "batches": 1, "max_steps": 1}
    blind = Trainer(SyntheticCell("CACO", language=BLIND, **start))
    named = Trainer(SyntheticCell("CACO", **start))
    named.weights.scores[:] = blind.weights.scores
    before = blind.weights.scores.copy()
    for trainer in (blind, named):
        trainer.epoch()
    moved = (named.weights.scores - before).sum(axis=0)
    np.testing.assert_allclose(blind.weights.scores - before, np.tile(moved, (4, 1)), atol=1e-15)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_role_ratios_multiply_the_step_of_their_own_factor(optimizer):
    """One step: each factor moves by its ratio times what it moves without."""
    cell = SyntheticCell("FAFO", optimizer=optimizer, lr=0.1, qk_ratio=3.0, batches=1, max_steps=1)
    ratios = {"queries": 2.0, "keys": 5.0, "table": 0.5, "output": 7.0}
    plain, faster = Trainer(cell), Trainer(replace(cell, role_ratios=tuple(ratios.values())))
    start = {name: getattr(plain.weights, name).copy() for name in ratios}
    for trainer in (plain, faster):
        trainer.epoch()
    for name, ratio in ratios.items():
        moved = getattr(plain.weights, name) - start[name]
        assert np.abs(moved).max() > 0
        np.testing.assert_allclose(
            getattr(faster.weights, name) - start[name], ratio * moved, rtol=1e-9, atol=1e-15
        )


@pytest.mark.parametrize(
    ("name", "ratios", "quoted"),
    [
        ("CACO", (2, 1, 1, 1), "collapsed query-key"),
        ("FACO", (2, 1, 2, 1), "collapsed output-value"),
        ("FAFO", (1, 1, 1), "four"),
        ("FAFO", (1, 0, 1, 1), "0.0"),
    ],
)
def test_bad_role_ratios(name, ratios, quoted):
    with pytest.raises(InputError, match=quoted):
        SyntheticCell(name, role_ratios=ratios)
