"""The open questions: answered from published results, and plainly not run where there are none."""

import csv
from pathlib import Path

import pytest

from fasterqk.attention import Interval
from fasterqk_lab.experiments import find_experiment
from fasterqk_lab.experiments._answers import says
from fasterqk_lab.experiments._evidence import Effect, Results
from fasterqk_lab.experiments.future_work import DECAY_OF_OV, NORMALISED
from fasterqk_lab.experiments.questions import QUESTIONS, document
from fasterqk_lab.experiments.ratio_or_rate import MAP, RATIOS, SLOWED_ARM, arm_name, per_decade_at

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_is_what_the_command_prints(capsys):
    find_experiment("questions").show({"document": document(Results(DOCS / "results"))})
    assert capsys.readouterr().out == (DOCS / "questions.md").read_text(encoding="utf-8"), (
        "run: fasterqk-lab reproduce questions > docs/questions.md"
    )


def write(folder, name, rows):
    with (folder / name).open("w", encoding="utf-8", newline="") as stream:
        table = csv.DictWriter(stream, rows[0].keys())
        table.writeheader()
        table.writerows(rows)


def the_map(ratio_slope, rate_slope):
    """Made-up per-seed values of the map."""
    arms = {arm_name(5e-5, 1): 0.4, arm_name(5e-5, 30): 0.6, arm_name(1.5e-3, 1): 0.5, SLOWED_ARM: 0.55}
    rows = [(arm, "mrta", value) for arm, value in arms.items()]
    rows += [(MAP, "per_decade_of_ratio", ratio_slope), (MAP, "per_decade_of_base_rate", rate_slope)]
    rows += [(MAP, per_decade_at(ratio), rate_slope) for ratio in RATIOS]
    for arm in arms:
        rows += [(arm, score, 70.0) for score in ("ac", "acmc")]
        rows += [(arm, f"{null}_{score}", 40.0) for null in ("sharp", "permuted") for score in ("ac", "acmc")]
    return [
        {"arm": arm, "seed": seed, "at": at, "score": score, "value": value + (0.001 + place / 1e4) * seed}
        for place, (arm, score, value) in enumerate(rows)
        for seed in (1, 2, 3)
        for at in ("training loss 0.7", "training loss 0.9")
    ]


@pytest.mark.parametrize(
    ("slopes", "sentence"),
    [
        ((0.1, 0.0), "The ratio decides"),
        ((0.1, 0.1), "Not the ratio alone"),
        ((-0.1, 0.1), "not beyond the noise"),
    ],
)
def test_a_question_is_answered_once_its_values_are_published(slopes, sentence, tmp_path):
    nothing = document(Results(tmp_path))
    assert "0 of 9 are answered" in nothing
    assert nothing.count("Not run to the end yet") == len(QUESTIONS)
    write(tmp_path, "ratio-or-rate-paper-per-seed.csv", the_map(*slopes))
    page = document(Results(tmp_path))
    assert "2 of 9 are answered" in page  # with the stronger nulls
    first = page.split("## 2.")[0].split("## 1.")[1]
    assert sentence in first and "n = 3, at training loss 0.7" in first
    assert "minus one random token" in page


def test_seeds_that_were_added_after_looking_do_not_decide(tmp_path):
    gains = {"1234": 0.05, "1235": 0.07, "1236": 0.06}  # open with two, beyond chance with three
    rows = [
        {"arm": arm, "seed": seed, "at": at, "score": score, "value": 0.1 + (arm == "faster_qk") * gain}
        for arm in ("baseline", "faster_qk")
        for seed, gain in gains.items()
        for at, score in (("best validation epoch", "mrta"), ("end", "test_f1"))
    ]
    write(tmp_path, "tuned-squad-paper-per-seed.csv", rows)
    page = document(Results(tmp_path))
    decides, _, explored = page.split("## 2.")[1].split("## 3.")[0].partition("**Exploratory.**")
    assert "+0.060 ± 0.127 (n = 2, at best validation epoch): open" in decides
    assert "+0.060 ± 0.025 (n = 3, at best validation epoch): supports" in explored


def test_tables_that_name_what_decides_are_read_at_their_lowest_loss(tmp_path):
    row = {"score": "comprehensiveness", "kind": "decides", "loss": 0.5, "arm": "faster QK", "null": 0.1}
    row |= {"difference": 0.2, "difference_half_width": 0.1, "difference_n": 5, "p": 0.01}
    others = [row | {"kind": "exploratory"}, row | {"loss": 0.9, "difference": 0.7}]
    write(
        tmp_path,
        "faithfulness-hatexplain.csv",
        [row | {"arm": "equal rates", "difference": ""}, row, *others],
    )
    page = document(Results(tmp_path))
    assert "+0.200 ± 0.100 (n = 5, at training loss 0.5, null 0.100): supports" in page
    assert "0.700" not in page
    # One of the two experiments of this question.
    assert "0 of 9 are answered by published cells. In part: faithfulness against its own chance." in page
    assert "**Not run to the end yet.** `fasterqk-lab reproduce faithfulness --data sva-whole`." in page


def effects(*values, claimed="more"):
    return [Effect(f"effect {n}", Interval(*value), claimed) for n, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        # Each leaves zero out by a little: where all support, none needs a correction.
        ([(0.05, 0.04, 5)] * 4, "yes"),
        # One of twelve just leaves zero out on the wrong side: not beyond chance.
        ([(-0.05, 0.0495, 5)] + [(0.0, 0.05, 5)] * 11, "unclear"),
        ([(-0.05, 0.005, 5)] + [(0.0, 0.05, 5)] * 11, "no"),
        ([(0.05, 0.005, 5), (0.0, 0.05, 5)], "part Supported: effect 0. Open: effect 1. "),
    ],
)
def test_a_sentence_is_as_strong_as_its_effects(values, sentence):
    assert says("yes", "no", "part", "unclear")(effects(*values)) == sentence


def test_an_arm_without_a_value_is_named(tmp_path):
    empty = {"score": "MRTA", "kind": "decides", "loss": 0.5, "null": "", "missing": 0}
    empty |= dict.fromkeys(("difference", "difference_half_width", "difference_n"), "")
    rows = [empty | {"arm": arm} for arm in ("equal rates", DECAY_OF_OV, NORMALISED)]
    rows[1] |= {"difference": 0.2, "difference_half_width": 0.01, "difference_n": 2, "missing": 1}
    rows[2] |= {"missing": 3}
    write(tmp_path, "future-work-hatexplain-adamw.csv", rows)
    page = document(Results(tmp_path))
    assert "decay of OV +0.200 ± 0.010 (n = 2, at training loss 0.5, cells missing: 1): supports" in page
    assert "gradients normalised: no value (at training loss 0.5, cells missing: 3): open" in page
    assert "Some raise attention" in page
