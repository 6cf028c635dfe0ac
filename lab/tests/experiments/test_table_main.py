import csv
import json
from pathlib import Path

import pytest

from fasterqk_lab.experiments.table_main import AT_END, METRICS, difference_rows, main_rows, save_main


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


def test_the_stronger_nulls_are_rows_of_their_own(summary):
    for shift, arm in enumerate(summary["arms"].values()):
        arm |= {"sharp": {"ac": cell(40)}, "permuted": {"ac": cell(35 + shift), "mrta": cell(0.3)}}
    summary["matched"][0]["arms"]["baseline"]["permuted_ac"] = cell(33)
    rows = {(row["at"], row["setting"]): row for row in main_rows({"A": summary})}
    assert rows[AT_END, "sharp null, baseline"]["ac"]["mean"] == 40
    assert rows[AT_END, "permuted null, faster_qk"]["ac"]["mean"] == 36
    assert rows[AT_END, "permuted null, faster_qk"]["mrta"]["mean"] == 0.3
    assert rows["training loss 0.123", "permuted null, baseline"]["ac"]["mean"] == 33
    assert ("training loss 0.123", "permuted null, faster_qk") not in rows


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


BARE = {"mean": 0.25, "half_width": 0.05, "n": 3}


def row(setting, at="end of training", dataset="A", **values):
    return {"dataset": dataset, "at": at, "setting": setting, **values}


ROWS = [
    row("baseline", test_accuracy=BARE, ac=BARE, mrta=BARE),
    row("difference", test_accuracy=BARE, ac={"mean": 40.0, "half_width": 5.0, "n": 3}),
    row("null, baseline", mrta=0.1),
    row("paper, baseline", ac=1.0, test_accuracy=0.5),
    row("paper, faster_qk", ac=44.0, mrta=0.3, test_accuracy=0.6),
    row("difference", at="training loss 0.1", mrta={"mean": 0.2, "half_width": None, "n": 1}),
]


def test_differences_are_in_units_of_one_with_the_papers_beside():
    found = {(r["metric"], r["measured"]): (r["difference"], r["half_width"]) for r in difference_rows(ROWS)}
    assert found[("ac", "end of training")] == pytest.approx((0.4, 0.05))
    assert found[("ac", "the paper")] == (pytest.approx(0.43), None)
    assert found[("test_accuracy", "the paper")] == (pytest.approx(0.1), None)
    assert found[("mrta", "equal training loss")] == (0.2, None)
    # The paper has one arm's number only: no difference.
    assert ("mrta", "the paper") not in found


def test_table_and_figure_are_written(tmp_path):
    files = save_main(ROWS, tmp_path, "table-main-paper", caption="Two arms.")
    document = json.loads(Path(files["table"]["json"]).read_text())
    assert [column["label"] for column in document["columns"]][:4] == [
        "dataset",
        "at",
        "setting",
        "test accuracy",
    ]
    assert [r["setting"] for r in document["rows"]][2] == "null, baseline"
    with Path(files["figure"]["csv"]).open() as stream:
        assert len(list(csv.DictReader(stream))) == len(difference_rows(ROWS))
    assert Path(files["figure"]["png"]).stat().st_size > 1000
