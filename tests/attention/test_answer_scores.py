import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.attention._scores import exact_match, normalized, token_f1

PARTS = ["a", "an", "the", "A", "The", " ", " ", ".", "'", "x", "é", "—", "7"]
ANY_TEXT = st.lists(st.sampled_from(PARTS)).map("".join)


@pytest.mark.parametrize(
    ("answer", "compared"),
    [
        ("The  Broncos ", "broncos"),
        ("an apple, a day", "apple day"),
        # Punctuation goes first: "a.m." is one word, and "A." becomes an article, which then goes too.
        ("8:30 a.m.", "830 am"),
        ("Vitamin A.", "vitamin"),
        ("t-h-e end", "end"),
        ("anthem", "anthem"),
        ("rock'n'roll", "rocknroll"),
        # Only ASCII punctuation is removed; accents and other scripts stay.
        ("“Café” — the Ñandú", "“café” — ñandú"),
        ("§ 5", "§ 5"),
        ("a\tb\nc", "b c"),
        ("the a an", ""),
        (string.punctuation, ""),
    ],
)
def test_normal_form_by_hand(answer, compared):
    assert normalized(answer) == compared


@pytest.mark.parametrize(
    ("prediction", "golds", "matches", "f1"),
    [
        ("Denver Broncos", ["the Denver Broncos!"], 1, 1),
        # One common word of one and two: precision 1, recall 1/2.
        ("Denver", ["Denver Broncos"], 0, 2 / 3),
        # The best gold counts, not the first and not the mean.
        ("in 1066", ["William", "1066", "the year 1066"], 0, 2 / 3),
        # Repeated words count as often as both have them: 2 of 3 and 2 of 2.
        ("very very very", ["very very"], 0, 0.8),
        ("Paris", ["London"], 0, 0),
        ("", ["Paris"], 0, 0),
        ("the", ["Paris"], 0, 0),
        ("", [""], 1, 1),
        ("", [], 1, 1),
        ("a", ["the"], 1, 1),
        # An accepted answer without words does not count beside one with words.
        ("", ["the", "Paris"], 0, 0),
    ],
)
def test_scores_by_hand(prediction, golds, matches, f1):
    assert exact_match(prediction, golds) == matches
    assert token_f1(prediction, golds) == pytest.approx(f1)


@settings(deadline=None)
@given(ANY_TEXT, st.lists(ANY_TEXT, min_size=1, max_size=3))
def test_f1_is_at_least_the_match_and_symmetric(prediction, golds):
    assert exact_match(prediction, golds) <= token_f1(prediction, golds) <= 1
    assert exact_match(golds[0], golds) == 1 or not normalized(golds[0])
    first = golds[:1]
    assert token_f1(prediction, first) == token_f1(first[0], [prediction])
    assert token_f1(prediction, golds + golds[::-1]) == token_f1(prediction, golds)
