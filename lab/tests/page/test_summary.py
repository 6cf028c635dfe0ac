"""The summary says what the numbers say: sharper, not sharper, unknown; against the null; at which cost."""

from dataclasses import dataclass

import pytest

from fasterqk_lab.page._summary import (
    Effect,
    answer,
    clarity,
    comparison_sentences,
    effects,
    forest,
    see_at_equal_loss,
    see_in_dtap,
    what_was_run,
)
from fasterqk_lab.runs import Store


def interval(mean, half_width=0.01, n=5):
    return {"mean": mean, "half_width": half_width, "n": n}


def comparison(mrta=0.4, null=0.1, difference=None, missing=(), **more):
    baseline = {"arm": "baseline", "qk_ratio": 1, "metrics": {"mrta": interval(0.2), "accuracy": 0.9}}
    faster = {"arm": "faster", "qk_ratio": 10, "metrics": {"mrta": interval(mrta), "accuracy": 0.88}, **more}
    level = {"loss": 0.05, "difference": {"faster": {"mrta": difference}}, "missing": list(missing)}
    return {
        "name": "demo",
        "arms": [baseline, {**faster, "null": {"mrta": null}}],
        "matched": [level] if difference else None,
    }


def test_it_tells_the_means_the_null_and_the_cost():
    [sentence] = comparison_sentences(comparison())
    assert sentence == (
        "With faster (query-key ratio 10), mean attention on relevant tokens is 0.400 ± 0.010 against"
        " 0.200 ± 0.010 with baseline (query-key ratio 1); uniform attention would give 0.100."
        " What it costs: test accuracy 0.880 instead of 0.900."
    )


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [
        (interval(0.2, 0.05), "sharper, beyond the noise"),
        (interval(-0.2, 0.05), "less sharp, beyond the noise"),
        (interval(0.2, 0.25), "no difference beyond the noise"),
        (interval(0.2, None, 1), "one seed, so nothing is known"),
    ],
)
def test_the_verdict_at_matched_loss_is_that_of_the_interval(difference, verdict):
    [sentence] = comparison_sentences(comparison(difference=difference))
    assert "At the same training loss (0.05)" in sentence
    assert verdict in sentence


def test_cells_that_never_got_there_are_counted():
    missing = [["faster", 3], ["baseline", 1], ["another", 2]]
    [sentence] = comparison_sentences(comparison(difference=interval(0.2), missing=missing))
    assert "2 cells never got there" in sentence


def test_attention_below_the_null_is_said():
    [sentence] = comparison_sentences(comparison(mrta=0.05))
    assert "no sharper than that" in sentence


def test_a_diverged_arm_has_no_number():
    [sentence] = comparison_sentences(comparison(mrta=None))
    assert sentence.startswith("With faster (query-key ratio 10) there is no number for")


@dataclass(frozen=True)
class Training:
    seed: int = 0


def test_what_was_run_is_counted_from_the_store(tmp_path):
    assert what_was_run(tmp_path) == ("", "")
    store = Store(tmp_path)
    for seed in range(3):
        store.save(Training(seed), {"loss": 0.5})
    assert "3 cells in the store (3 Training), 3 finished" in what_was_run(tmp_path)[0]
    assert what_was_run(tmp_path)[1] == ""
    store.begin(Training(9))
    assert what_was_run(tmp_path)[1] == "Of 4 cells, 3 are done; not on this page: 1 stopped."


def test_a_gain_is_no_cost():
    found = comparison()
    found["arms"][1]["metrics"]["accuracy"] = 1.0
    [sentence] = comparison_sentences(found)
    assert "What it gains: test accuracy 1.000 instead of 0.900." in sentence
    assert "costs" not in sentence


def test_what_the_intervals_do_not_tell_apart_is_neither_gain_nor_cost():
    found = comparison()
    found["arms"][0]["metrics"]["accuracy"] = interval(0.988, 0.015)
    found["arms"][1]["metrics"]["accuracy"] = interval(1.0, 0.0)
    [sentence] = comparison_sentences(found)
    assert "Within the noise: test accuracy 1.000 ± 0.000 instead of 0.988 ± 0.015." in sentence


def test_one_seed_is_called_one_seed():
    found = comparison()
    for arm, value in zip(found["arms"], (0.5, 0.9), strict=True):
        arm["metrics"]["accuracy"] = interval(value, None, 1)
    assert "From one seed: test accuracy 0.900 instead of 0.500." in comparison_sentences(found)[0]


def test_small_losses_are_multiples_of_powers_of_ten():
    found = comparison()
    found["arms"][0]["metrics"] |= {"loss": interval(0.013, 0.02)}
    found["arms"][1]["metrics"] |= {"loss": interval(2e-5, 1.9e-7)}
    assert "training loss (2.00 ± 0.02) × 10⁻⁵ instead of 0.013 ± 0.020" in comparison_sentences(found)[0]


def effect(task, mean, half_width=0.01, n=5, accuracy=None, ratio=10.0):
    difference = interval(mean, half_width, n)
    return Effect(task, task, "faster", 0.1, 0.2, 0.2 + mean, difference, 0.1, accuracy, n, ratio)


@pytest.mark.parametrize(
    ("difference", "kind"),
    [
        (interval(0.2, 0.1), "more"),
        (interval(-0.2, 0.1), "less"),
        (interval(0.1, 0.1), "unclear"),
        (interval(0.1, 0.2, 2), "few"),
        (interval(0.1, 0.05, 2), "more"),
        (interval(5.0, None, 1), "few"),
        (0.3, "few"),
    ],
)
def test_a_difference_is_as_clear_as_its_interval(difference, kind):
    assert clarity(difference) == kind


@pytest.mark.parametrize(
    ("found", "begins", "holds"),
    [
        (
            [effect("A", 0.3)],
            "Yes, on the one task measured here",
            ["more attention on the relevant words in A."],
        ),
        ([effect("A", 0.3), effect("B", 0.1)], "Yes, on both tasks", ["in A and B."]),
        ([effect("A", 0.3), effect("B", -0.3)], "Yes, on 1 of 2 tasks", ["in A; it puts less there in B."]),
        (
            [effect("A", 0.3), effect("B", 0.1, 0.2)],
            "Yes, on 1 of 2 tasks",
            ["it makes no clear difference in B"],
        ),
        ([effect("A", -0.3)], "Not here", ["puts less attention on the relevant words in A"]),
        ([effect("A", 0.01, 0.2)], "Not here", ["makes no clear difference in A"]),
        ([effect("A", 0.9, None, 1)], "Not known yet", ["in A a single seed points to more"]),
        ([effect("A", -0.9, 1.5, 2)], "Not known yet", ["in A the mean of two seeds points to less"]),
        ([effect("A", 0.3, accuracy=interval(-0.1))], "Yes", ["test accuracy is lower in A."]),
        ([effect("A", 0.3, accuracy=interval(0.001))], "Yes", ["test accuracy does not change clearly."]),
        ([effect(name, 0.3) for name in "ABCDEF"], "Yes, on all 6 tasks", ["in 6 settings."]),
    ],
)
def test_the_answer_is_one_sentence_as_strong_as_its_evidence(found, begins, holds):
    said = answer(found)
    assert said.startswith(begins)
    assert said.count(". ") == 0
    assert all(part in said for part in holds), said


def test_slower_arms_do_not_answer_the_question():
    assert answer([effect("A", 0.3, ratio=0.1)]) == ""
    assert answer([]) == ""


def matched_comparison(difference):
    found = comparison(difference=difference)
    found["title"] = "Demo"
    found["matched"][0]["arms"] = {"baseline": {"mrta": interval(0.2)}, "faster": {"mrta": interval(0.4)}}
    return found


def test_effects_are_those_at_the_lowest_common_loss():
    [one] = effects(matched_comparison(interval(0.2)), "a task")
    assert (one.task, one.title, one.loss, one.null, one.seeds, one.ratio) == (
        "a task",
        "Demo",
        0.05,
        0.1,
        5,
        10,
    )
    assert effects(comparison()) == []  # nothing was compared at equal loss


def test_the_chart_has_room_for_everything_but_intervals_that_dwarf_the_effects():
    chart = forest([effect("A", 0.3, 0.1), effect("B", -0.2, 9.0, 2)])
    assert chart is not None
    for value in (0.0, 0.2, 0.4, -0.2):
        assert 0 <= chart.across(value) <= 100
    low, high = chart.ends(chart.rows[1])
    assert (low, high) == (chart.low, chart.high)
    assert all(chart.low <= tick <= chart.high for tick in chart.ticks)
    assert 0 in chart.ticks
    assert forest([]) is None


def test_the_chart_has_room_for_an_interval_that_is_narrower_than_the_largest_effect():
    chart = forest([effect("A", 0.57, 0.26, 2), effect("B", 0.24, 0.06, 2)])
    assert chart.ends(chart.rows[0]) == pytest.approx((0.31, 0.83))
    assert chart.high > 0.83


def test_what_to_see_is_computed():
    found = matched_comparison(interval(0.2))
    assert "at 0.050, attention on the relevant words is faster 0.400 against 0.200" in see_at_equal_loss(
        found
    )
    for arm, value in zip(found["arms"], (30.9, 70.9), strict=True):
        arm["metrics"]["ac"] = interval(value)
    assert "30.9% with baseline and 70.9% with faster" in see_in_dtap(found)
