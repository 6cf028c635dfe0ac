"""The picture of all comparisons: read from published tables, coloured by corrected intervals."""

import csv
from pathlib import Path

import pytest

from fasterqk.attention import Interval
from fasterqk.lab.experiments import reproduce
from fasterqk.lab.experiments._evidence import Results
from fasterqk.lab.experiments._what_holds import Shown, comparisons, difference_text, outcomes

DOCS = Path(__file__).parents[3] / "docs"


def write(path, rows):
    with path.open("w", encoding="utf-8", newline="") as stream:
        table = csv.DictWriter(stream, list(dict.fromkeys(key for row in rows for key in row)))
        table.writeheader()
        table.writerows(rows)


def interval_row(name, mean, half_width, n):
    return {name: mean, f"{name}_half_width": half_width, f"{name}_n": n}


@pytest.fixture
def published(tmp_path):
    """Made-up tables: one of two arms, one of several."""
    matched = [
        {"metric": "MRTA", "at loss": loss, "baseline": 0.2, "faster_qk": 0.2 + gain}
        | interval_row("difference", gain, 0.02, 5)
        for loss, gain in ((0.5, 0.1), (0.3, 0.4))
    ]
    write(tmp_path / "tuned-hatexplain-paper-matched.csv", matched)
    write(tmp_path / "tuned-hatexplain-paper-end.csv", [{"metric": "MRTA", "null, baseline": 0.15}])
    rows = [
        {"score": score, "loss": loss, "arm": arm, "value": value, "null": 0.1}
        | interval_row("difference", value - 0.3, 0.2, 5)
        for score in ("rollout, no residual", "layer 1")
        for loss in (0.9, 0.6)
        for arm, value in (("equal rates", 0.3), ("QK ×3", 0.3 + loss / 10))
    ]
    write(tmp_path / "depth-hatexplain-2.csv", rows)
    return tmp_path


def test_both_arms_are_read_at_the_lowest_common_loss(published):
    pair, arms = comparisons(Results(published))
    assert (pair.baseline, pair.faster, pair.null) == (0.2, pytest.approx(0.6), 0.15)
    assert pair.difference == Interval(0.4, 0.02, 5)
    assert (arms.baseline, arms.faster, arms.null) == (0.3, pytest.approx(0.36), 0.1)
    assert arms.difference.mean == pytest.approx(0.06)
    assert outcomes([pair, arms]) == ["rises", "not told apart"]


def test_what_is_clear_only_alone_is_not_coloured():
    weak, strong = Interval(0.032, 0.0199, 5), Interval(0.3, 0.02, 5)
    falls = Interval(-0.3, 0.02, 5)

    def shown(*values):
        return [Shown("group", "label", 0.1, 0.2, value, 0.1) for value in values]

    assert outcomes(shown(weak)) == ["rises"]
    assert outcomes(shown(weak, *[Interval(0.0, 0.1, 5)] * 9)) == ["not told apart"] * 10
    assert outcomes(shown(strong, falls)) == ["rises", "falls"]


def test_the_picture_of_the_documentation_is_that_of_the_results(tmp_path):
    found = reproduce("questions", tmp_path)
    shown = comparisons(Results(DOCS / "results"))
    drawn = (DOCS / "images" / "questions.svg").read_text(encoding="utf-8")
    for each in shown:
        assert difference_text(each).split("   ")[0] in drawn, (
            "run: python tools/rebuild_results.py questions"
        )
        assert each.label in drawn
    with Path(found["figure"]["csv"]).open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["difference"]) for row in rows] == [each.difference.mean for each in shown]
    assert {row["outcome"] for row in rows} <= {"rises", "falls", "not told apart"}
