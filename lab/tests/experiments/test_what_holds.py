"""The picture of all comparisons: read from published tables, coloured by corrected intervals."""

import csv
import re
from pathlib import Path

import pytest

from fasterqk.attention import Interval, paired_difference
from fasterqk_lab.experiments import reproduce
from fasterqk_lab.experiments._evidence import Results
from fasterqk_lab.experiments._what_holds import LINES, Line, Shown, comparisons, outcomes
from fasterqk_lab.experiments.carried_kvqa import carried_kvqa
from fasterqk_lab.experiments.depth_hatexplain import depth_hatexplain
from fasterqk_lab.experiments.finetune_hatexplain import finetune_hatexplain
from fasterqk_lab.experiments.table_agreement import table_agreement
from fasterqk_lab.experiments.table_hatexplain import table_hatexplain
from fasterqk_lab.experiments.table_layers import table_layers
from fasterqk_lab.experiments.table_squad import table_squad
from fasterqk_lab.experiments.table_sva import table_sva

DOCS = Path(__file__).parents[3] / "docs"


def write(path, rows):
    with path.open("w", encoding="utf-8", newline="") as stream:
        table = csv.DictWriter(stream, rows[0].keys())
        table.writeheader()
        table.writerows(rows)


def value(arm, seed, loss, score):
    """Made up so that no two places have the same number."""
    if "null" in score:
        return round(0.05 + loss / 100 + len(score) / 1000, 6)
    return round(len(arm) / 50 + seed / 500 * len(arm) + loss / 10 + len(score) / 1000, 6)


@pytest.fixture
def published(tmp_path):
    """Made-up values of single seeds of two tables."""
    for name, arms in {
        "tuned-hatexplain-paper": ("faster_qk", "baseline"),
        "finetune-hatexplain-paper": ("QK ×20", "equal rates", "QK ×5"),
    }.items():
        scores = ("mrta", "null_mrta", "words_mrta", "words_null_mrta")
        places = [
            (a, s, loss, x) for a in arms for s in (3, 1, 2) for loss in (0.9, 0.3, 0.5) for x in scores
        ]
        rows = [
            {"arm": arm, "seed": seed, "at": f"training loss {loss}", "score": score}
            | {"value": value(arm, seed, loss, score)}
            for arm, seed, loss, score in places
        ]
        write(tmp_path / f"{name}-per-seed.csv", rows)
    return tmp_path


def test_arms_and_nulls_are_those_of_the_lowest_loss_and_of_the_line_s_own_score(published):
    tuned, words = comparisons(Results(published))
    for each, score, null in ((tuned, "mrta", "null_mrta"), (words, "words_mrta", "words_null_mrta")):
        one, other = ([value(arm, seed, 0.3, score) for seed in (1, 2, 3)] for arm in each.line.arms)
        assert each.faster == pytest.approx(sum(one) / 3)
        assert each.baseline == pytest.approx(sum(other) / 3)
        assert each.difference.mean == pytest.approx(paired_difference(one, other).mean)
        assert each.difference.half_width == pytest.approx(paired_difference(one, other).half_width)
        assert each.null == pytest.approx(value("", 0, 0.3, null))
    assert words.line.arms == ("QK ×20", "equal rates")


def test_without_any_of_the_tables_there_is_a_page_and_no_picture(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    found = reproduce("questions", tmp_path / "out", results=str(empty))
    assert "figure" not in found
    assert "0 of 9 are answered" in found["document"]


def shown(*values):
    return [Shown(Line("group", "label", "table"), 0.1, 0.2, value, 0.1) for value in values]


def test_what_is_clear_only_alone_is_not_coloured():
    weak, strong, falls = Interval(0.032, 0.0199, 5), Interval(0.3, 0.02, 5), Interval(-0.3, 0.02, 5)
    assert outcomes(shown(weak)) == ["rises"]
    assert outcomes(shown(weak, *[Interval(0.0, 0.1, 5)] * 9)) == ["not told apart"] * 10
    assert outcomes(shown(strong, falls)) == ["rises", "falls"]
    assert outcomes(shown(Interval(0.3, float("nan"), 1))) == ["not told apart"]


CONFIGURED = {
    "table-hatexplain-paper": table_hatexplain,
    "table-sva-whole-paper": lambda: table_sva("paper", "whole"),
    "table-sva-prefix-paper": lambda: table_sva("paper", "prefix"),
    "table-agreement-paper": table_agreement,
    "table-layers-2-paper": lambda: table_layers(2),
    "table-layers-4-paper": lambda: table_layers(4),
    "depth-hatexplain-2-paper": lambda: depth_hatexplain(2),
    "depth-hatexplain-4-paper": lambda: depth_hatexplain(4),
    "table-squad-small-paper": lambda: table_squad("small")["paper"],
    "carried-kvqa-paper": carried_kvqa,
    "finetune-hatexplain-paper": finetune_hatexplain,
}


@pytest.mark.parametrize("line", [line for line in LINES if "tuned" not in line.label])
def test_a_label_names_the_ratio_and_the_layers_of_its_experiment(line):
    arms = CONFIGURED[line.table]().arms
    faster, baseline = (arms[arm] for arm in line.arms)
    assert (faster.optimisation.qk_ratio, baseline.optimisation.qk_ratio) == (
        float(line.label.split()[-1]),
        1,
    )
    layers = re.search(r"(\d) layers", line.label)
    if not faster.model.pretrained:
        assert faster.model.layers == (int(layers[1]) if layers else 1)


def test_the_picture_of_the_documentation_is_that_of_the_results(tmp_path):
    found = reproduce("questions", tmp_path)
    with Path(found["figure"]["csv"]).open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["comparison"] for row in rows] == [line.label for line in LINES]

    def words(path):  # in their order, with their colours: positions depend on the version of matplotlib
        text = Path(path).read_text(encoding="utf-8")
        return [(re.findall("fill: (#[0-9a-f]+)", style), word) for style, word in _WORDS.findall(text)]

    stored = words(DOCS / "images" / "questions.svg")
    assert len(stored) > 2 * len(LINES)
    assert words(found["figure"]["svg"]) == stored, "run: python tools/rebuild_results.py questions"


_WORDS = re.compile(r"<text([^>]*)>([^<]*)</text>")
