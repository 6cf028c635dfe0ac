"""AUPRC, token F1 and IOU F1 against ERASER's definitions, written out here."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.attention import agreement, auprc, plausibility
from fasterqk.attention._faithfulness import spans, top_tokens
from fasterqk.errors import InputError

rationales = st.lists(
    st.tuples(st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.5]), st.booleans()), min_size=1, max_size=12
).filter(lambda tokens: any(true for _, true in tokens))


def area_by_definition(scores, truth):
    """Precision and recall at every threshold, from the strictest on, joined by straight lines."""
    points = [(0.0, 1.0)]
    for threshold in sorted(set(scores), reverse=True):
        chosen = [score >= threshold for score in scores]
        hits = sum(a and b for a, b in zip(chosen, truth, strict=True))
        points.append((hits / sum(truth), hits / sum(chosen)))
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))


def spans_by_definition(chosen):
    found, start = [], None
    for place, inside in enumerate([*chosen, False]):
        if inside and start is None:
            start = place
        if not inside and start is not None:
            found.append(set(range(start, place)))
            start = None
    return found


@settings(deadline=None)
@given(rationales)
def test_auprc_by_definition(tokens):
    scores, truth = zip(*tokens, strict=True)
    assert auprc(scores, truth) == pytest.approx(area_by_definition(scores, truth), abs=1e-12)


@settings(deadline=None)
@given(st.lists(rationales, min_size=1, max_size=5))
def test_f1_by_definition(data):
    token_scores, precisions, recalls = [], [], []
    for tokens in data:
        scores, truth = zip(*tokens, strict=True)
        order = sorted(range(len(scores)), key=lambda i, s=scores: -s[i])
        chosen = [i in order[: sum(truth)] for i in range(len(scores))]
        hits = sum(a and b for a, b in zip(chosen, truth, strict=True))
        precision, recall = hits / sum(chosen), hits / sum(truth)
        token_scores.append(2 * precision * recall / (precision + recall) if hits else 0.0)
        predicted, true = spans_by_definition(chosen), spans_by_definition(truth)
        good = sum(any(len(p & t) / len(p | t) >= 0.5 for t in true) for p in predicted)
        precisions.append(good / len(predicted))
        recalls.append(good / len(true))
    precision, recall = np.mean(precisions), np.mean(recalls)
    expected = 2 * precision * recall / (precision + recall) if precision and recall else 0.0
    found = plausibility([agreement(*zip(*tokens, strict=True)) for tokens in data])
    assert found["token_f1"] == pytest.approx(np.mean(token_scores), abs=1e-12)
    assert found["iou_f1"] == pytest.approx(expected, abs=1e-12)


def test_worked_by_hand():
    # Ranked 0.9, 0.8 | 0.7, 0.1 with truth 1, 0, 1, 0: recall .5 at precision 1, then 1/2, then 1 at 2/3.
    expected = 0.5 * 1 + 0 + 0.5 * (1 / 2 + 2 / 3) / 2
    assert auprc([0.9, 0.8, 0.7, 0.1], [1, 0, 1, 0]) == pytest.approx(expected, abs=1e-12)
    # Chosen 0..1, true 0 and 2: the span [0, 2) shares one of two tokens with [0, 1).
    one = agreement([0.9, 0.8, 0.7, 0.1], [1, 0, 1, 0])
    assert (one.token_f1, one.span_precision, one.span_recall) == (0.5, 1.0, 0.5)


def test_all_scores_equal_give_the_base_rate_as_precision():
    assert auprc([1, 1, 1, 1], [1, 0, 0, 0]) == pytest.approx((1 + 0.25) / 2, abs=1e-12)


def test_spans_and_top_tokens():
    assert spans(np.array([False, True, True, False, True])) == [(1, 3), (4, 5)]
    assert top_tokens(np.array([0.1, 0.5, 0.5]), 1).tolist() == [False, True, False]


def test_nothing_to_agree_with():
    assert plausibility([]) == {"auprc": None, "token_f1": None, "iou_f1": None}
    with pytest.raises(InputError, match="rationale of 0 among 2 tokens"):
        auprc([0.1, 0.2], [0, 0])
