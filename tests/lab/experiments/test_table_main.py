import pytest

from fasterqk.lab.experiments.table_main import AT_END, METRICS, main_rows


def cell(mean, **others):
    return {"mean": mean, "half_width": 0.1, "n": 3, "null": None, **others}


@pytest.fixture
def summary():
    def arm(shift):
        return {
            "train_accuracy": cell(0.9, paper=0.88),
            "test_accuracy": cell(0.6),
            "mrta": cell(0.4 + shift, null=0.3),
            "ac": cell(30 + shift, null=20.0, paper=1.0),
            "sufficiency": {"5": cell(0.2, null=0.5), "10": cell(0.1)},
            "qk_ratio": 30.0,
        }

    bare = {"mean": 0.2, "half_width": 0.1, "n": 3}
    levels = [
        {
            "loss": level,
            "arms": {"baseline": {"mrta": bare, "entropy": bare}, "faster_qk": {"mrta": bare}},
            "difference": {"faster_qk": {"mrta": bare, "entropy": bare}},
        }
        for level in (0.12345, 0.5)
    ]
    difference = {"mrta": bare, "sufficiency": {"5": bare, "10": bare}, "entropy": bare}
    arms = {"baseline": arm(0), "faster_qk": arm(0.3)}
    return {"arms": arms, "difference": difference, "matched": levels}


def test_every_data_set_has_arms_difference_nulls_paper_and_equal_loss(summary):
    rows = main_rows({"A": summary, "B": summary})
    assert [row["dataset"] for row in rows] == ["A"] * 10 + ["B"] * 10
    assert [row["setting"] for row in rows[:10]] == [
        "baseline",
        "faster_qk",
        "difference",
        "null, baseline",
        "null, faster_qk",
        "paper, baseline",
        "paper, faster_qk",
        "baseline",
        "faster_qk",
        "difference",
    ]
    assert [row["at"] for row in rows[:10]] == [AT_END] * 7 + ["training loss 0.123"] * 3


def test_values_stand_under_the_names_of_the_columns(summary):
    rows = main_rows({"A": summary})
    assert rows[1]["mrta"] == {"mean": 0.7, "half_width": 0.1, "n": 3}
    assert rows[1]["sufficiency_5"]["mean"] == 0.2
    assert rows[3] == {
        "dataset": "A",
        "at": AT_END,
        "setting": "null, baseline",
        "ac": 20.0,
        "mrta": 0.3,
        "sufficiency_5": 0.5,
    }
    assert rows[5] == {
        "dataset": "A",
        "at": AT_END,
        "setting": "paper, baseline",
        "train_accuracy": 0.88,
        "ac": 1.0,
    }
    known = {"dataset", "at", "setting", *METRICS}
    assert all(set(row) <= known for row in rows)


def test_without_a_common_loss_there_are_no_rows_at_equal_loss(summary):
    rows = main_rows({"A": {**summary, "matched": []}})
    assert {row["at"] for row in rows} == {AT_END}
