import csv
import json
from pathlib import Path

import pytest

from fasterqk.lab.experiments.table_main import difference_rows, save_main

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
