"""The one form of a result: rows of a tidy table, written, read, and read at the right moments."""

from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.attention.statistics import matched_loss
from fasterqk.errors import InputError
from fasterqk_lab.compare import BEST, END, LEVEL, LOSS, Measured, Value, measured, read_values, write_values
from fasterqk_lab.compare._results import deciding_level


def result(mrta, diverged=False):
    history = [
        {"step": 0, "loss": 1.0, "mrta": 0.1, "test_accuracy": 0.5},
        {"step": 9, "loss": 0.1, "mrta": mrta, "test_accuracy": 0.9},
    ]
    test = {"loss": 0.2, "accuracy": 0.9, "mrta": mrta, "null": {"mrta": 0.2}, "dtap": [[100.0]]}
    test["majority_accuracy"] = 0.6
    groups = {"0": {"n": 5, "accuracy": 1.0, "majority_accuracy": 0.7}}
    test["groups"] = {"attractors": groups | {"3": {"n": 2, "accuracy": 0.5, "majority_accuracy": 0.6}}}
    parts = {"loss": 0.1, "train": {"accuracy": 0.95}, "validation": {"accuracy": 0.8}, "test": test}
    return {**parts, "best": history[1], "history": history, "diverged": diverged}


def test_values_are_those_that_tables_summarise():
    cells = {("a", 0): result(0.3), ("a", 1): result(0.4), ("b", 0): result(0.6), ("b", 1): result(0.0, True)}
    values = measured("t", cells)
    assert values.of("a", "mrta", END) == {0: 0.3, 1: 0.4}
    assert values.of("a", "null_mrta", END)[1] == 0.2
    assert values.of("a", "train_accuracy", END)[0] == 0.95
    assert values.of("b", "test_accuracy", BEST) == {0: 0.9}
    # Groups and the whole test split stand beside the most frequent class.
    assert values.of("a", "accuracy, attractors 3", END)[0] == 0.5
    assert values.null("a", "accuracy, attractors 3", END, None) == 0.6
    assert values.null("a", "test_accuracy", LOSS, 0.1) == 0.6
    # At equal loss they are those of `matched_loss`.
    histories = {cell: [] if entry["diverged"] else entry["history"] for cell, entry in cells.items()}
    for level in matched_loss(histories, ["mrta"]):
        read = values.of("a", "mrta", LOSS, level["loss"])
        assert sum(read.values()) / 2 == pytest.approx(level["arms"]["a"]["mrta"].mean)
    # A diverged cell has no values, and decides nothing.
    assert not [value for value in values.values if (value.arm, value.seed) == ("b", 1)]
    assert values.histories["b", 1] == ()


def test_cells_of_the_toy_language_have_values_too():
    cell = {"loss": 0.001, "mrta": 0.4, "reached": True, "diverged": False, "null": {"mrta": 0.35}}
    values = measured("toy", {("FAFO", 0): cell}).values
    assert {value.score: value.value for value in values} == {"loss": 0.001, "mrta": 0.4, "null_mrta": 0.35}


def falling(validation, end=4):
    """Training loss exp(-step); validation loss as given, one value per step."""
    return [
        {"step": step, "loss": exp(-step), "mrta": step / end, "validation_loss": value}
        for step, value in enumerate(validation[: end + 1])
    ]


def test_the_level_is_where_the_baseline_has_its_best_validation_loss():
    early, late = falling([3, 1, 2, 2, 2]), falling([3, 2, 2, 1, 2])
    assert deciding_level([early]) == pytest.approx(exp(-1))
    assert deciding_level([early, late]) == pytest.approx((exp(-1) + exp(-3)) / 2)
    # Where the last is the best, and without a validation split, it is the mean final loss.
    assert deciding_level([falling([5, 4, 3, 2, 1])]) == pytest.approx(exp(-4))
    assert deciding_level([[{"loss": 1.0}, {"loss": 0.25}]]) == 0.25
    assert deciding_level([[], []]) is None


def test_the_other_arm_has_no_say_in_the_level():
    base, best_last = falling([3, 1, 2, 2, 2]), falling([5, 4, 3, 2, 1])
    for other in (base, best_last):
        values = measured("t", {("base", 0): {"history": base}, ("other", 0): {"history": other}})
        assert values.losses(LEVEL, "other", "mrta") == [pytest.approx(exp(-1), rel=1e-5)]


def test_an_arm_is_read_at_the_level_of_its_own_baseline():
    early, late = falling([3, 1, 2, 2, 2]), falling([3, 2, 2, 1, 2])
    histories = {"slow": early, "slow x3": late, "fast": late, "fast x3": early}
    cells = {(arm, 0): {"history": history} for arm, history in histories.items()}
    values = measured("t", cells, baselines={"slow x3": "slow", "fast x3": "fast"})
    levels = {arm: values.losses(LEVEL, arm, "mrta") for arm in histories}
    assert levels["slow"] == levels["slow x3"] == [pytest.approx(exp(-1), rel=1e-5)]
    assert levels["fast"] == levels["fast x3"] == [pytest.approx(exp(-3), rel=1e-5)]
    assert [values.baseline_of(arm) for arm in histories] == ["slow", "slow", "fast", "fast"]


def test_scores_may_be_derived_from_records_and_added():
    more = [Value("t", "a", 0, "equal entropy", None, "mrta", 0.25)]
    derived = measured(
        "t", {("a", 0): result(0.3)}, derive=lambda r: {**r, "twice": 2 * r["mrta"]}, more=more
    )
    lowest = derived.losses(LOSS, "a", "twice")[0]
    assert derived.of("a", "twice", LOSS, lowest) == {0: pytest.approx(0.6)}
    assert derived.of("a", "mrta", "equal entropy") == {0: 0.25}


NAMES = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=8)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.builds(Value, NAMES, NAMES, st.integers(0, 9), NAMES, st.none() | NUMBERS, NAMES, NUMBERS)


@settings(deadline=None)  # it writes files
@given(values=st.lists(VALUES, min_size=1, unique_by=lambda value: value[:4] + value[5:6]))
def test_a_table_is_read_as_it_was_written(values, tmp_path_factory):
    path = write_values(tmp_path_factory.mktemp("t") / "values.csv", values)
    again = list(read_values(path))
    assert [value[:4] + value[5:6] for value in again] == [value[:4] + value[5:6] for value in values]
    for before, after in zip(values, again, strict=True):
        assert after.value == pytest.approx(before.value, rel=1e-5)  # six digits
        assert (after.loss is None) == (before.loss is None)
    # What was read is written the same.
    assert write_values(path.with_name("again.csv"), again).read_bytes() == path.read_bytes()


def test_a_value_that_two_rules_read_at_one_moment_is_written_once(tmp_path):
    value = Value("t", "a", 0, LOSS, 0.123456789, "mrta", 0.5)
    path = write_values(tmp_path / "t.csv", [value, value._replace(loss=0.123457)])
    assert list(read_values(path)) == [value._replace(loss=0.123457)]
    assert Measured("t", list(read_values(path))).of("a", "mrta", LOSS, 0.123456789) == {0: 0.5}


def test_a_file_that_is_no_tidy_table_is_one_line(tmp_path):
    with pytest.raises(InputError, match="is missing; name a folder of results"):
        list(read_values(tmp_path / "none.csv"))
    (tmp_path / "other.csv").write_text("arm,seed\na,1\n")
    with pytest.raises(InputError, match="has other columns than experiment, arm, seed"):
        list(read_values(tmp_path / "other.csv"))
