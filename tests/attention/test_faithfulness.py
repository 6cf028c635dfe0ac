"""Removal, faithfulness and plausibility against ERASER's definitions, one instance at a time."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.attention import Instance, Nulls, Removal, measure
from fasterqk.attention.faithfulness import (
    CONVENTIONS,
    agreement,
    auprc,
    faithfulness,
    percent_count,
    remove,
    spans,
    top_percent,
    top_tokens,
)
from fasterqk.attention.instances import collate
from fasterqk.attention.statistics import with_iou_f1
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
@given(st.integers(0, 10**6))
def test_equal_to_erasers_definitions(seed):
    instances, rankings = make(seed)
    batch = collate(instances)
    importance = np.zeros(batch.real.shape)
    importance[batch.real] = np.concatenate(rankings)
    percents = (5, 10, 20, 50, 100)
    found = faithfulness(predict, batch, importance, Removal(percents=percents))
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
    found = faithfulness(share, batch, np.array([[0.5, 0.1, 0.4]]), Removal(percents=[50]))
    assert found.sufficiency[0] == pytest.approx([2 / 3 - 1 / 2], abs=1e-12)
    assert found.comprehensiveness[0] == pytest.approx([2 / 3 - 1], abs=1e-12)


def test_all_of_everything_suffices():
    instances, rankings = make(3)
    batch = collate(instances)
    importance = np.zeros(batch.real.shape)
    importance[batch.real] = np.concatenate(rankings)
    found = faithfulness(predict, batch, importance, Removal(percents=[100]))
    assert found.sufficiency == pytest.approx(0, abs=1e-12)


def test_an_input_is_never_emptied():
    batch = collate([Instance(np.array([3, 4]), np.ones(2, bool), np.zeros(2))])
    seen = []

    def watch(asked):
        seen.append(asked.tokens[asked.visible].tolist())
        return np.array([[0.5, 0.5]])

    faithfulness(watch, batch, np.array([[0.9, 0.1]]), Removal(percents=[100]))
    assert seen == [[3, 4], [3, 4], [4]]
    seen.clear()
    faithfulness(watch, batch, np.array([[0.9, 0.1]]), Removal("attention", percents=[100]))
    assert seen == [[3, 4], [3, 4], [4]]


def test_known_probabilities_are_not_asked_for_again():
    batch = collate([Instance(np.array([3, 4]), np.ones(2, bool), np.zeros(2))])
    whole = np.array([[0.2, 0.8]])
    asked = []

    def watch(some):
        asked.append(some)
        return np.array([[0.5, 0.5]])

    found = faithfulness(watch, batch, np.array([[0.9, 0.1]]), Removal(percents=[50]), whole=whole)
    assert len(asked) == 2
    assert found.predicted.tolist() == [1]
    assert found.sufficiency[0] == pytest.approx([0.3], abs=1e-12)


def test_a_model_that_breaks_its_word_is_named():
    batch = collate([Instance(np.array([3]), np.ones(1, bool), np.zeros(1))])
    with pytest.raises(InputError, match=r"shape \(1,\) for 1 instances"):
        faithfulness(lambda b: np.array([0.5]), batch, np.ones((1, 1)), Removal(percents=[5]))
    with pytest.raises(InputError, match="not finite"):
        faithfulness(lambda b: np.array([[np.nan, 1.0]]), batch, np.ones((1, 1)), Removal(percents=[5]))


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(0, 5000))
def test_percentages_are_whole_and_rounded_up(percent, count):
    tokens = percent_count(percent, count)
    assert isinstance(tokens, int)
    assert percent * count <= 100 * tokens < percent * count + 100


def test_no_floating_point_in_the_count():
    # In floating point 0.07 * 100 is 7.000000000000001, whose ceiling is 8.
    assert percent_count(7, 100) == 7
    assert percent_count(29, 100) == 29


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 100))
def test_top_tokens_are_the_highest_of_the_rankable(seed, percent):
    generator = np.random.default_rng(seed)
    importance, rankable = generator.random((3, 9)), generator.random((3, 9)) < 0.7
    top = top_percent(importance, rankable, percent)
    assert not (top & ~rankable).any()
    assert top.sum(1).tolist() == [percent_count(percent, int(n)) for n in rankable.sum(1)]
    for row in range(3):
        kept, rest = importance[row][top[row]], importance[row][rankable[row] & ~top[row]]
        assert not kept.size or not rest.size or kept.min() > rest.max()


def test_of_equals_the_earlier_comes_first():
    top = top_percent(np.ones((1, 4)), np.array([[False, True, True, True]]), 34)
    assert top.tolist() == [[False, True, True, False]]


BATCH = collate([Instance(np.array([9, 5, 6, 7]), np.array([False, True, True, True]), np.zeros(4))])
GONE = np.array([[False, True, False, True]])


def test_deletion_keeps_the_order():
    assert remove(BATCH, GONE, Removal()).tokens.tolist() == [[9, 6]]


def test_mask_token_takes_the_place():
    changed = remove(BATCH, GONE, Removal("mask", mask_token=0))
    assert changed.tokens.tolist() == [[9, 0, 6, 0]]
    assert changed.visible.all()


def test_attention_mask_hides():
    changed = remove(BATCH, GONE, Removal("attention"))
    assert changed.tokens.tolist() == [[9, 5, 6, 7]]
    assert changed.visible.tolist() == [[True, False, True, False]]
    assert changed.real.all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Removal("erase"), "unknown removal 'erase'"),
        (lambda: Removal("mask"), "needs one"),
        (lambda: Removal("delete", 4), "mask token 4 has no use"),
        (lambda: Removal(percents=(0,)), "k is 0"),
        (lambda: Removal(percents=(101,)), "k is 101"),
        (lambda: Removal(percents=(0.5,)), "k is 0.5"),
        (lambda: top_percent(np.full((1, 2), np.nan), np.ones((1, 2), bool), 5), "not a finite number"),
    ],
)
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(InputError) as raised:
        call()
    assert message in str(raised.value)


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
    agreements = [agreement(*zip(*tokens, strict=True)) for tokens in data]
    names = ("token_f1", "span_precision", "span_recall")
    means = with_iou_f1({name: np.mean([getattr(x, name) for x in agreements]) for name in names})
    assert means["token_f1"] == pytest.approx(np.mean(token_scores), abs=1e-12)
    assert means["iou_f1"] == pytest.approx(expected, abs=1e-12)


def test_worked_by_hand_of_plausibility():
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
    with pytest.raises(InputError, match="rationale of 0 among 2 tokens"):
        auprc([0.1, 0.2], [0, 0])


# --- Others' conventions ---


def test_rounded_down_repeated_and_empty_sets_do_not_count(small_model, some_instances):
    """As ferret averages: over the sets of top tokens that differ and have a token."""
    model, instances = small_model(), some_instances()
    percents, rounding = CONVENTIONS["ferret"]
    assert (percents[0], percents[-1], len(percents), rounding) == (10, 100, 10, "down")
    found = measure(
        model, instances, removal=Removal(percents=percents, rounding=rounding), nulls=Nulls(draws=0)
    )
    scores = found.instance_scores()
    for number, instance in enumerate(instances):
        ranked = np.flatnonzero(instance.rankable)
        order = ranked[np.argsort(-found.importance[number][ranked], kind="stable")]
        batch = collate([instance])
        whole = model.predict(batch)[0]
        lost, before = [], 0
        for percent in percents:
            count = percent * len(ranked) // 100
            if count in (0, before):
                continue
            before = count
            gone = np.isin(np.arange(len(instance.tokens)), order[:count])[None]
            lost.append(whole.max() - model.predict(remove(batch, gone, Removal()))[0][whole.argmax()])
        assert scores["aopc_comprehensiveness"][number] == pytest.approx(np.mean(lost), abs=1e-9)
    summary = found.summary()
    assert summary["aopc_comprehensiveness"] == pytest.approx(scores["aopc_comprehensiveness"].mean())
    assert summary.measured["rounding"] == "down"


def test_rounded_up_everything_counts(small_model, some_instances):
    found = measure(
        small_model(),
        some_instances(),
        removal=Removal(percents=CONVENTIONS["eraser"][0]),
        nulls=Nulls(draws=0),
    )
    assert not np.isnan(found.faithfulness.sufficiency).any()
    with pytest.raises(InputError, match="unknown rounding 'nearest'; choose from up, down"):
        measure(small_model(), some_instances(), removal=Removal(rounding="nearest"), nulls=Nulls(draws=0))


@given(st.integers(1, 20), st.integers(0, 20))
def test_token_iou_is_that_of_sets(count, seed):
    generator = np.random.default_rng(seed)
    importance, truth = generator.random(count), generator.random(count) < 0.5
    truth[0] = True
    chosen = set(np.argsort(-importance)[: truth.sum()].tolist())
    rationale = set(np.flatnonzero(truth).tolist())
    expected = len(chosen & rationale) / len(chosen | rationale)
    assert agreement(importance, truth).token_iou == pytest.approx(expected)


# --- Input that cannot be scored is one line ---


@pytest.mark.parametrize(
    ("importance", "rationale", "message"),
    [
        ([0.1, float("nan"), 0.3, 0.2], [1, 0, 0, 0], "the importance of token 1 is nan"),
        ([0.1, 0.2, 0.3], [1, 0], r"importance has shape \(3,\) and the rationale \(2,\)"),
        ([[0.1, 0.2]], [[1, 0]], r"importance has shape \(1, 2\)"),
        ([0.1, 0.2], [0, 0], "a rationale of 0 among 2 tokens"),
        ([0.1, 0.2], [0, 0.4], "the rationale has 0.4; give 0 or 1 per token"),
        ([], [], "a rationale of 0 among 0 tokens"),
    ],
)
@pytest.mark.parametrize("score", [agreement, auprc])
def test_rankings_and_rationales_that_do_not_fit(score, importance, rationale, message):
    with pytest.raises(InputError, match=message):
        score(importance, rationale)


def test_importance_and_probabilities_have_the_shape_of_the_batch(some_instances):
    batch = collate(some_instances(3))
    count, width = batch.tokens.shape

    def predict(some):
        return np.full((len(some), 2), 0.5)

    with pytest.raises(InputError, match="importance has shape"):
        faithfulness(predict, batch, np.ones((count, width + 1)))
    with pytest.raises(InputError, match="importance has shape"):
        faithfulness(predict, batch, np.ones(width))
    with pytest.raises(InputError, match="shape"):
        faithfulness(predict, batch, np.ones((count, width)), whole=np.ones(count))
    nothing = faithfulness(predict, batch, np.ones((count, width)), Removal(percents=()))
    assert nothing.sufficiency.shape == nothing.comprehensiveness.shape == (count, 0)
