"""Fresh batches from the compiled sampler."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.lab.synthetic import Language
from fasterqk.lab.synthetic._language import _alias_table, draw_batch, make_stream


def draw(language, seed, batches, size=32, balanced=False):
    stream = make_stream(language, seed, balanced)
    counts, starts = np.zeros((size, language.support.shape[1])), np.zeros(language.classes + 1, np.int64)
    for _ in range(batches):
        draw_batch(stream, counts, starts)
        yield counts.copy(), starts.copy()


@settings(deadline=None)  # the first call may compile
@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=32).map(np.array))
def test_the_alias_table_holds_the_probabilities(weights):
    probabilities = weights / weights.sum()
    threshold, choices = _alias_table(probabilities, 5)
    kept = threshold / 2.0**27 - np.arange(32)
    held = np.zeros(32)
    np.add.at(held, choices[::2], kept / 32)
    np.add.at(held, choices[1::2], (1 - kept) / 32)
    np.testing.assert_allclose(held[: probabilities.size], probabilities, atol=1e-8)
    assert not held[probabilities.size :].any()


@pytest.mark.parametrize("language", [Language(), Language(context=62, tilted=True, attend_query=True)])
def test_tokens_and_classes_have_the_right_frequencies(language):
    tokens, classes, drawn = np.zeros(language.support.shape[1]), np.zeros(language.classes), 0
    for counts, starts in draw(language, seed=3, batches=1000):
        assert (counts.sum(1) == language.positions).all()
        for c, slot in enumerate(language.query_slots):
            if slot >= 0:
                counts[starts[c] : starts[c + 1], slot] -= 1
        tokens += counts.sum(0)
        classes += np.diff(starts)
        drawn += len(counts)
    total = drawn * language.context
    spread = np.sqrt(total * language.probabilities * (1 - language.probabilities))
    assert (np.abs(tokens - total * language.probabilities) < 4.5 * spread).all()
    assert (np.abs(classes - drawn / 4) < 4.5 * np.sqrt(drawn * 3 / 16)).all()


def test_token_counts_of_a_sequence_vary_as_a_multinomial():
    language = Language()
    counts = np.concatenate([counts for counts, _ in draw(language, seed=1, batches=1000)])
    covariance = np.cov(counts.T)
    p = language.probabilities
    expected = language.context * (np.diag(p) - np.outer(p, p))
    np.testing.assert_allclose(covariance, expected, atol=0.1)


def test_the_same_seed_draws_the_same_and_another_does_not():
    first, again, other = ([counts for counts, _ in draw(Language(), seed, batches=3)] for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert (np.array(first) != np.array(other)).any()


def test_balanced_batches():
    for _, starts in draw(Language(), seed=0, batches=2, size=128, balanced=True):
        assert starts.tolist() == [0, 32, 64, 96, 128]
