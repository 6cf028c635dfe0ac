"""Sufficiency and comprehensiveness against ERASER's definitions, written out here one instance at a time."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.attention import Instance, Removal, collate, faithfulness
from fasterqk.errors import InputError

CLASSES = 3
# Weight of each token id for each class, and a bonus by position: order and gaps matter.
WEIGHTS = np.random.default_rng(0).normal(size=(20, CLASSES))


def probabilities_of(tokens):
    """A model on one list of token ids, in plain arithmetic."""
    scores = [
        sum(WEIGHTS[token, c] / (1 + place) for place, token in enumerate(tokens)) for c in range(CLASSES)
    ]
    total = sum(math.exp(score) for score in scores)
    return [math.exp(score) / total for score in scores]


def predict(batch):
    return np.array(
        [probabilities_of(row[seen]) for row, seen in zip(batch.tokens, batch.visible, strict=True)]
    )


def by_definition(tokens, special, importance, percent):
    """f(x) - f(r) and f(x) - f(x without r) for the predicted class (DeYoung et al. 2020, section 4)."""
    whole = probabilities_of(tokens)
    predicted = whole.index(max(whole))
    places = [i for i in range(len(tokens)) if not special[i]]
    count = math.ceil(Fraction(percent, 100) * len(places))
    top = sorted(places, key=lambda i: -importance[i])[:count]
    alone = [token for i, token in enumerate(tokens) if special[i] or i in top]
    rest = [token for i, token in enumerate(tokens) if special[i] or i not in top]
    return (
        whole[predicted] - probabilities_of(alone)[predicted],
        whole[predicted] - probabilities_of(rest)[predicted],
    )


def make(seed, count=6):
    generator = np.random.default_rng(seed)
    instances, rankings = [], []
    for _ in range(count):
        length = int(generator.integers(2, 15))
        special = np.arange(length) == 0
        instances.append(Instance(generator.integers(0, 20, length), ~special, np.zeros(length)))
        rankings.append(generator.random(length))
    return instances, rankings


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["right", "left"]))
def test_equal_to_erasers_definitions(seed, side):
    instances, rankings = make(seed)
    batch = collate(instances, side)
    importance = np.zeros(batch.real.shape)
    importance[batch.real] = np.concatenate(rankings)
    percents = (5, 10, 20, 50, 100)
    found = faithfulness(predict, batch, importance, percents)
    for row, (instance, ranking) in enumerate(zip(instances, rankings, strict=True)):
        for column, percent in enumerate(percents):
            expected = by_definition(instance.tokens.tolist(), ~instance.rankable, ranking, percent)
            assert found.sufficiency[row, column] == pytest.approx(expected[0], abs=1e-12)
            assert found.comprehensiveness[row, column] == pytest.approx(expected[1], abs=1e-12)


def test_worked_by_hand():
    # p of class 0 is the share of sevens among the tokens; 50% of three tokens is two.
    def share(batch):
        sevens = np.array(
            [(row[seen] == 7).mean() for row, seen in zip(batch.tokens, batch.visible, strict=True)]
        )
        return np.stack([sevens, 1 - sevens], 1)

    batch = collate([Instance(np.array([7, 7, 1]), np.ones(3, bool), np.zeros(3))])
    found = faithfulness(share, batch, np.array([[0.5, 0.1, 0.4]]), [50])
    assert found.sufficiency[0] == pytest.approx([2 / 3 - 1 / 2], abs=1e-12)
    assert found.comprehensiveness[0] == pytest.approx([2 / 3 - 1], abs=1e-12)


def test_all_of_everything_suffices():
    instances, rankings = make(3)
    batch = collate(instances)
    importance = np.zeros(batch.real.shape)
    importance[batch.real] = np.concatenate(rankings)
    found = faithfulness(predict, batch, importance, [100])
    assert found.sufficiency == pytest.approx(0, abs=1e-12)


def test_an_input_is_never_emptied():
    batch = collate([Instance(np.array([3, 4]), np.ones(2, bool), np.zeros(2))])
    seen = []

    def watch(asked):
        seen.append(asked.tokens[asked.visible].tolist())
        return np.array([[0.5, 0.5]])

    faithfulness(watch, batch, np.array([[0.9, 0.1]]), [100])
    assert seen == [[3, 4], [3, 4], [4]]
    seen.clear()
    faithfulness(watch, batch, np.array([[0.9, 0.1]]), [100], Removal("attention"))
    assert seen == [[3, 4], [3, 4], [4]]


def test_known_probabilities_are_not_asked_for_again():
    batch = collate([Instance(np.array([3, 4]), np.ones(2, bool), np.zeros(2))])
    whole = np.array([[0.2, 0.8]])
    asked = []

    def watch(some):
        asked.append(some)
        return np.array([[0.5, 0.5]])

    found = faithfulness(watch, batch, np.array([[0.9, 0.1]]), [50], whole=whole)
    assert len(asked) == 2
    assert found.predicted.tolist() == [1]
    assert found.sufficiency[0] == pytest.approx([0.3], abs=1e-12)


def test_a_model_that_breaks_its_word_is_named():
    batch = collate([Instance(np.array([3]), np.ones(1, bool), np.zeros(1))])
    with pytest.raises(InputError, match=r"shape \(1,\) for 1 instances"):
        faithfulness(lambda b: np.array([0.5]), batch, np.ones((1, 1)), [5])
    with pytest.raises(InputError, match="not finite"):
        faithfulness(lambda b: np.array([[np.nan, 1.0]]), batch, np.ones((1, 1)), [5])
