"""Sequences of the toy language, token by token and as counts."""

import numpy as np
import pytest
from lab.tests.synthetic.matrices import count_tokens, draw_sequences

from fasterqk.errors import InputError
from fasterqk_lab.synthetic import Language, draw_counts


def test_the_paper_language_has_fifty_tokens():
    language = Language()
    assert language.vocabulary == 50
    assert language.support.shape == (4, 20)
    assert language.distinct_tokens[2].tolist() == list(range(30, 40))
    assert language.probabilities.sum() == pytest.approx(1)
    assert language.probabilities[language.common :].sum() == pytest.approx(0.355)


def test_tilted_weights_are_those_of_the_notebooks():
    language = Language(gamma=5.5 / 15.5, tilted=True)
    weights = np.concatenate([np.ones(10), np.arange(1, 11) / 10])
    np.testing.assert_allclose(language.probabilities, weights / 15.5)


@pytest.mark.parametrize("attend_query", [False, True])
def test_counting_tokens_loses_nothing(attend_query):
    language = Language(context=9, attend_query=attend_query)
    sequences = draw_sequences(language, 40, np.random.default_rng(0))
    counts = count_tokens(language, sequences)
    order = np.argsort(sequences.classes, kind="stable")
    for row, place in enumerate(order):
        tokens = sequences.tokens[place] if attend_query else sequences.tokens[place, :-1]
        full = np.zeros(language.vocabulary)
        full[language.support[sequences.classes[place]]] = counts.counts[row]
        np.testing.assert_array_equal(full, np.bincount(tokens, minlength=language.vocabulary))
    assert counts.starts.tolist() == [int((sequences.classes < c).sum()) for c in range(5)]


def test_drawn_counts_have_the_expected_shares():
    language = Language(attend_query=True)
    counts = draw_counts(language, 20_000, np.random.default_rng(1))
    counted = counts.counts.copy()
    for c, slot in enumerate(language.query_slots):
        counted[counts.starts[c] : counts.starts[c + 1], slot] -= 1
    assert (counted.sum(1) == language.context).all()
    np.testing.assert_allclose(counted.mean(0) / language.context, language.probabilities, atol=1e-3)


def test_balanced_counts_have_equal_classes():
    assert draw_counts(Language(), 40, np.random.default_rng(0), balanced=True).starts.tolist() == [
        0,
        10,
        20,
        30,
        40,
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gamma": 1.5}, "gamma 1.5"),
        ({"context": 0}, "context"),
        ({"queries": (5, 6, 7)}, "(5, 6, 7)"),
        ({"next_tokens": (1, 2, 3, 30)}, "(1, 2, 3, 30)"),
    ],
)
def test_a_wrong_language_is_an_error_that_quotes_it(settings, words):
    with pytest.raises(InputError) as error:
        Language(**settings)
    assert words in str(error.value)
