"""The rule of what an effect is, case by case: level, standing, margins, Holm, verdicts, share of levels."""

from dataclasses import replace
from math import exp, isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasterqk.attention.statistics import Interval, interval
from fasterqk.errors import InputError
from fasterqk_lab.compare import (
    END,
    LEVEL,
    LOSS,
    Effect,
    Measured,
    above,
    compare,
    compare_arms,
    correct,
    margin_of,
    measured,
    verdict,
)


def effect(mean, half, n=5, claimed="more", margin=0.02, **options):
    value = Interval(mean, half, n)
    return Effect("a", "mrta", claimed, value, value, value, END, margin=margin, **options)


# --- The level ---


def cell(slope, end=4, best=2, step=100):
    """Training loss exp(-t) at t = 0 ... ``end``, mass ``slope * t``; validation is best at ``best``."""
    history = [
        {"step": step * t, "loss": exp(-t), "mrta": slope * t, "validation_loss": abs(t - best)}
        for t in range(end + 1)
    ]
    return {
        "history": history,
        "loss": exp(-end),
        "diverged": False,
        "test": {},
        "train": {},
        "validation": {},
    }


def arms(**ends):
    """A baseline of slope .1 and another arm of slope .2 with seeds 0 to 2; how long some cells train."""
    return measured(
        "t",
        {
            (arm, seed): cell(slope + 0.01 * seed, end=ends.get(f"{arm}{seed}", 4))
            for arm, slope in (("base", 0.1), ("other", 0.2))
            for seed in range(3)
        },
    )


def test_arms_are_read_where_the_baseline_has_its_best_validation_loss():
    at_level = compare(arms(), ("other", "base"), "mrta")
    assert (at_level.at, at_level.lowest, at_level.missing) == (LEVEL, False, ())
    assert at_level.loss == pytest.approx(exp(-2), rel=1e-5)
    assert at_level.second.mean == pytest.approx(2 * 0.11, rel=1e-4)
    assert at_level.value.mean == pytest.approx(2 * 0.1, rel=1e-4)  # seeds shift both arms alike
    assert at_level.value.half_width == pytest.approx(0, abs=1e-9)
    assert at_level.progress == pytest.approx((0.5, 0.5), rel=1e-4)


def test_if_a_cell_never_reaches_the_level_the_lowest_common_loss_decides_and_says_so():
    late = compare(arms(other1=1), ("other", "base"), "mrta")
    assert (late.at, late.lowest, late.missing) == (LOSS, True, ("other, seed 1",))
    assert late.loss == pytest.approx(exp(-1), rel=1e-5)
    assert (late.value.n, late.value.mean) == (3, pytest.approx(0.1, rel=1e-4))
    # Of an arm against its null the same holds: no seed is dropped.
    alone = above(arms(other1=1), "other", "mrta", 0.0)
    assert (alone.at, alone.value.n, alone.missing) == (LOSS, 3, ("other, seed 1",))
    # A diverged cell counts as one that never reaches it, and has no say in the lowest loss.
    cells = {("base", 0): cell(0.1), ("base", 1): cell(0.1), ("other", 0): cell(0.2)}
    lost = {"history": [{"loss": None}], "diverged": True}
    diverged = compare(measured("t", {**cells, ("other", 1): lost}), ("other", "base"), "mrta")
    assert (diverged.missing, diverged.value.n) == (("other, seed 1",), 1)
    assert diverged.loss == pytest.approx(exp(-4), rel=1e-5)


def test_values_without_histories_are_compared_the_same():
    for values in (arms(), arms(other1=1)):
        known = compare(values, ("other", "base"), "mrta")
        read = compare(Measured("t", values.values), ("other", "base"), "mrta")
        assert (read.at, read.loss, read.missing) == (known.at, known.loss, known.missing)
        assert (read.value, read.curve) == (known.value, ())


def test_other_moments_and_the_lowest_loss_can_be_asked_for():
    assert compare(arms(), ("other", "base"), "mrta", at=LOSS).loss == pytest.approx(exp(-4), rel=1e-5)
    assert compare(arms(), ("other", "base"), "loss", at=END).loss is None
    with pytest.raises(InputError, match="t has no 'ac' of 'other' and 'base'"):
        compare(arms(), ("other", "base"), "ac")


def test_seeds_that_were_added_later_decide_nothing():
    assert compare(arms(), ("other", "base"), "mrta", seeds=2).value.n == 2
    assert above(arms(), "other", "mrta", 0.0, seeds=2).value.n == 2
    # One of them that never reaches the level does not change where the planned ones are read.
    late = arms(other2=1)
    assert compare(late, ("other", "base"), "mrta").missing == ("other, seed 2",)
    assert compare(late, ("other", "base"), "mrta", seeds=2).at == LEVEL
    assert above(late, "other", "mrta", 0.0, seeds=2).at == LEVEL
    # Nor does one take the place of a planned seed that diverged.
    cells = {(arm, seed): cell(0.1) for arm in ("base", "other") for seed in range(3)}
    cells["other", 1] = {"history": [], "diverged": True}
    assert compare(measured("t", cells), ("other", "base"), "loss", at=END, seeds=2).value.n == 1


def test_the_curve_covers_all_losses_that_both_arms_pass():
    curve = compare(arms(), ("other", "base"), "mrta").curve
    assert len(curve) == 25
    assert curve[0][0] == pytest.approx(exp(-4))
    assert curve[-1][0] == pytest.approx(1.0)
    assert curve[-1][1].mean == pytest.approx(0, abs=1e-9)


# --- Standing: supports, against, small, open ---


@pytest.mark.parametrize(
    ("claimed", "mean", "half", "standing"),
    [
        ("more", 0.3, 0.1, "supports"),
        ("more", -0.3, 0.1, "against"),
        ("more", 0.01, 0.005, "small"),  # above zero, within the margin
        ("more", 0.0, 0.02, "small"),
        ("more", 0.015, 0.01, "open"),  # above zero, mean within the margin, interval beyond
        ("more", 0.3, 0.4, "open"),
        ("less", -0.3, 0.1, "supports"),
        ("less", 0.3, 0.1, "against"),
        ("less", -0.01, 0.005, "small"),
        ("equal", 0.005, 0.01, "supports"),
        ("equal", -0.05, 0.02, "against"),
        ("equal", 0.03, 0.02, "open"),
        ("not less", -0.01, 0.005, "supports"),
        ("not less", 0.5, 0.1, "supports"),
        ("not less", -0.05, 0.02, "against"),
        ("not less", -0.03, 0.02, "open"),
    ],
)
def test_standing(claimed, mean, half, standing):
    assert effect(mean, half, claimed=claimed).standing == standing


@pytest.mark.parametrize("claimed", ["more", "less", "equal", "not less"])
def test_one_seed_and_missing_values_leave_everything_open(claimed):
    assert effect(0.5, nan, n=1, claimed=claimed).standing == "open"
    assert effect(nan, nan, n=5, claimed=claimed).standing == "open"
    assert verdict(correct([effect(0.5, nan, n=1, claimed=claimed)])) == "inconclusive"


def test_a_number_that_is_computed_needs_no_interval():
    exact = effect(0.5, nan, n=1, exact=True)
    assert (exact.standing, exact.corrected) == ("supports", "supports")
    assert verdict(correct([exact])) == "confirmed"


MEANS, HALVES = st.floats(-1, 1), st.floats(0, 1)


@given(mean=MEANS, half=HALVES, margin=st.floats(0, 0.5))
def test_less_is_the_mirror_image_of_more(mean, half, margin):
    more, less = effect(mean, half, margin=margin), effect(-mean, half, claimed="less", margin=margin)
    assert more.standing == less.standing
    mirrored = effect(-mean, half, margin=margin).standing
    assert {"supports": "against", "against": "supports"}.get(more.standing, more.standing) == mirrored


@given(mean=MEANS, half=HALVES)
def test_what_is_small_is_equal_and_not_less(mean, half):
    if effect(mean, half).standing == "small":
        assert effect(mean, half, claimed="equal").standing == "supports"
        assert effect(mean, half * 0.999, claimed="not less").standing in ("supports", "open")
    if effect(mean, half).standing in ("supports", "against"):
        assert abs(mean) > max(half, 0.02)


@given(values=st.lists(st.floats(-1, 1).map(lambda value: round(value, 3)), min_size=2, max_size=8))
def test_an_interval_that_supports_passes_its_own_test_without_correction(values):
    """Standing and p-value are of the same t-test, for every kind of claim."""
    for claimed in ("more", "less", "equal", "not less"):
        value = interval(values)
        own = Effect("a", "mrta", claimed, value, value, value, END, margin=0.25)
        if own.standing in ("supports", "against") and isfinite(own.p_value):
            assert own.p_value < 0.05 + 1e-6


# --- Margins ---


def test_margins_are_those_of_the_kind_of_score():
    for score in ("mrta", "test_accuracy", "test_f1", "auprc", "sufficiency_5", "accuracy, attractors 3"):
        assert margin_of(score) == 0.02
    assert {margin_of(score) for score in ("ac", "acmc", "permuted_ac", "layer_2_acmc")} == {2.0}
    assert {margin_of(score) for score in ("loss", "validation_loss", "test_loss")} == {0.01}
    assert margin_of("steps until learnt", 2000) == 100


# --- Holm and verdicts ---


def test_p_values_are_corrected_for_the_number_of_effects():
    weak = effect(0.2, 0.19)
    [alone] = correct([weak])
    assert (alone.corrected, alone.p) == ("supports", pytest.approx(weak.p_value))
    strong, *others = correct([effect(0.5, 0.1), weak, weak])
    assert strong.corrected == "supports"
    assert {(other.standing, other.corrected) for other in others} == {("supports", "open")}
    # Small and open need no p-value; one seed counts as one of the number.
    assert correct([effect(0.01, 0.005), effect(0.2, 0.19)])[0].corrected == "small"
    assert correct([effect(0.5, nan, n=1), weak])[1].p == pytest.approx(2 * weak.p_value)


MORE, LESS, SMALL, OPEN = effect(0.3, 0.05), effect(-0.3, 0.05), effect(0.0, 0.01), effect(0.1, 0.3)


@pytest.mark.parametrize(
    ("effects", "large", "expected"),
    [
        ([MORE, MORE], False, "confirmed"),
        ([MORE, LESS], False, "depends on the setting"),
        ([MORE, SMALL], False, "depends on the setting"),
        ([MORE, OPEN], False, "depends on the setting"),
        ([LESS, LESS], False, "contradicted"),
        ([LESS, OPEN], False, "inconclusive"),
        ([SMALL, OPEN], False, "inconclusive"),
        ([OPEN], False, "inconclusive"),
        ([SMALL], False, "depends on the setting"),
        ([SMALL], True, "contradicted"),
        ([SMALL, LESS], True, "contradicted"),
        ([], False, "not run"),
    ],
)
def test_verdicts(effects, large, expected):
    assert verdict(correct(effects), large=large) == expected


def test_fewer_than_half_of_the_levels_make_it_depend_on_the_setting():
    yes, no, other_side = Interval(0.3, 0.1, 5), Interval(0.3, 0.4, 5), Interval(-0.3, 0.1, 5)
    for levels, share, expected in (
        ([yes, yes, no, no], 0.5, "confirmed"),
        ([yes, no, no], 1 / 3, "depends on the setting"),
        ([yes, other_side, other_side], 1 / 3, "depends on the setting"),
    ):
        read = replace(MORE, curve=tuple((0.1 * place, value) for place, value in enumerate(levels)))
        assert read.agreement == pytest.approx(share)
        assert verdict(correct([read])) == expected
    # Levels say nothing about a claim of equality, and an effect without a curve has none.
    equal = replace(effect(0.0, 0.01, claimed="equal"), curve=((0.1, no), (0.2, no)))
    assert verdict(correct([equal])) == "confirmed"
    assert MORE.agreement is None


@pytest.mark.parametrize("claimed", ["more", "less", "equal", "not less"])
@pytest.mark.parametrize(
    ("mean", "half", "stands"),
    [
        (0.3, 0.01, "more"),
        (-0.3, 0.01, "less"),
        (0.0, 0.01, "too small to matter"),
        (0.05, 0.1, "open"),
        (0.03, 0.02, "more"),  # surely above zero, not surely above the margin
        (-0.03, 0.02, "less"),
        (0.03, 0.029, "open"),  # not after correction, however surely it is above minus the margin
    ],
)
def test_what_an_effect_shows_does_not_depend_on_the_claim(claimed, mean, half, stands):
    value = Interval(mean, half, 5)
    [shown, _] = correct([Effect("a", "mrta", claimed, value, value, value, "end")] * 2)
    assert shown.stands == stands


def test_arms_are_compared_with_their_baselines_in_scores_that_both_have():
    cells = {
        (arm, seed): {"history": [{"loss": 1 / (k + 1), "mrta": k * slope + seed / 100} for k in range(4)]}
        for arm, slope in (("base", 0.1), ("fast", 0.2))
        for seed in range(3)
    }
    [compared] = compare_arms(measured("demo", cells), {"mrta": LEVEL, "ac": LEVEL})
    assert (compared.label, compared.score, compared.at) == ("fast", "mrta", "level")
    assert compared.value.mean == pytest.approx(0.3)
