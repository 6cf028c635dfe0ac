"""Bootstrap intervals over instances: what they cover, and pairs of models on the same draws."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import bootstrap

from fasterqk.attention import Nulls, Removal, measure, paired_scores, score_intervals
from fasterqk.errors import InputError


@pytest.fixture
def found(small_model, some_instances):
    return measure(
        small_model(), some_instances(30), removal=Removal(percents=[20, 50]), nulls=Nulls(draws=3)
    )


def test_every_score_of_the_summary_lies_in_its_interval(found):
    summary = found.summary()
    bounds = score_intervals(found, np.random.default_rng(0))
    scores = {name for name, value in summary.scores.items() if value is not None}
    assert set(bounds) == scores
    for name, own in bounds.items():
        assert own.value == pytest.approx(summary[name], abs=1e-12), name
        assert own.low <= own.value <= own.high, name
    assert bounds["mrta"].low < bounds["mrta"].high


def test_intervals_are_those_of_scipy(found):
    values = found.instance_scores()["aopc_comprehensiveness"]
    theirs = bootstrap(
        (values,), np.mean, method="percentile", n_resamples=20000, rng=np.random.default_rng(1)
    ).confidence_interval
    ours = score_intervals(found, np.random.default_rng(0), resamples=20000)["aopc_comprehensiveness"]
    width = theirs.high - theirs.low
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.03 * width)


def test_a_model_does_not_differ_from_itself(found):
    for own in paired_scores(found, found, np.random.default_rng(0), resamples=50).values():
        assert (own.value, own.low, own.high) == (0, 0, 0)


def test_a_constant_shift_has_no_width_when_paired(found):
    shifted = replace(found, columns={**found.columns, "entropy": found.columns["entropy"] + 0.25})
    own = paired_scores(found, shifted, np.random.default_rng(0))["entropy"]
    assert (own.value, own.low, own.high) == pytest.approx((0.25, 0.25, 0.25))
    alone = score_intervals(found, np.random.default_rng(0))["entropy"]
    assert alone.high - alone.low > 0.05


@pytest.mark.parametrize(("shift", "apart"), [(1e-7, False), (9e-5, False), (2e-4, True)])
def test_rounding_is_no_difference(found, shift, apart):
    """Two passes of one model may differ by as much, on every text in the same direction."""
    for name in ("mass", "entropy"):
        shifted = replace(found, columns={**found.columns, name: found.columns[name] + shift})
        differences = paired_scores(found, shifted, np.random.default_rng(0))
        score = "mrta" if name == "mass" else name
        assert differences[score].value == pytest.approx(shift)
        assert [name for name, bounds in differences.items() if bounds.apart] == [score] * apart


def test_other_instances_cannot_be_compared(found):
    other = replace(found, instances=tuple(replace(x, id=f"x{x.id}") for x in found.instances))
    with pytest.raises(InputError, match="measure both models on the same data"):
        paired_scores(found, other, np.random.default_rng(0))
    with pytest.raises(InputError, match="resamples is 0"):
        score_intervals(found, np.random.default_rng(0), resamples=0)


def test_the_null_of_several_draws_is_their_mean_with_its_standard_error(found):
    summary = found.summary()
    draws = [found.ranking_scores(ranking) for ranking in found.random]
    assert len(draws) == 3
    for name in ("sufficiency_20", "aopc_comprehensiveness", "auprc", "iou_f1"):
        values = [one[name] for one in draws]
        assert summary.null[name] == pytest.approx(np.mean(values))
        assert summary.null_error[name] == pytest.approx(np.std(values, ddof=1) / np.sqrt(3))
    document = summary.to_json()
    assert document["random_error"]["sufficiency"]["20"] == summary.null_error["sufficiency_20"]
    assert document["measured"]["draws"] == 3
    assert all("null error" in row for row in found.scores_table())


def test_models_that_number_the_same_classes_differently(found):
    turned = replace(found, classes=("b", "a", "c"))
    with pytest.raises(
        InputError, match="number their classes differently: a, b, c and b, a, c; give labels by"
    ):
        paired_scores(found, turned, np.random.default_rng(0))
    swapped = {0: 1, 1: 0, 2: 2}  # the same classes by name
    turned = replace(turned, instances=tuple(replace(x, label=swapped[x.label]) for x in found.instances))
    assert paired_scores(found, turned, np.random.default_rng(0))["mrta"].value == 0


def test_a_single_draw_has_no_standard_error(small_model, some_instances):
    summary = measure(small_model(), some_instances()).summary()
    assert summary.null_error == {}
    with pytest.raises(InputError, match="draws is -1"):
        measure(small_model(), some_instances(), nulls=Nulls(draws=-1))
