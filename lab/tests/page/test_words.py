"""The summary repeats what effects show: the answer by chapter, at most two sentences, charts with room."""

from dataclasses import replace

import pytest

from fasterqk.attention.scores import SCORES
from fasterqk.attention.statistics import Interval
from fasterqk_lab.compare import LEVEL, STANDS, Effect, compare_arms, correct, measured
from fasterqk_lab.figures import PARAMETERIZATION_COLORS, effect_record
from fasterqk_lab.page._words import (
    TERMS,
    Definitions,
    Row,
    answer,
    effects_table,
    forests,
    null_change,
    read_rows,
    sentences,
    terms_in,
)

ROW = Row(
    title="Demo",
    chapter="A",
    arm="faster QK",
    score="mrta",
    at="level",
    loss=0.05,
    before=Interval(0.2, 0.01, 5),
    after=Interval(0.5, 0.01, 5),
    difference=Interval(0.3, 0.02, 5),
    null=0.1,
    stands="more",
    levels=0.92,
    progress=(0.25, 0.5),
    missing=0,
    ratio=10.0,
)


def row(chapter="A", stands="more", mean=0.3, half_width=0.02, **more):
    return replace(ROW, chapter=chapter, stands=stands, difference=Interval(mean, half_width, 5), **more)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row()], "puts more attention on the relevant words in A."),
        (
            [row(), row("B"), row("C", "open")],
            "puts more attention on the relevant words in A, B; open in C.",
        ),
        (
            [row(), row(stands="open"), row("B", "less")],
            "puts more attention on the relevant words in A (1 of 2); less in B; open in A (1 of 2).",
        ),
        ([row(stands="less")], "puts less attention on the relevant words in A."),
        (
            [row(), row("B", "too small to matter")],
            "puts more attention on the relevant words in A; a change too small to matter in B.",
        ),
        ([row(stands="open")], "leaves open whether attention on the relevant words changes in A."),
    ],
)
def test_the_answer_is_what_the_effects_show_by_chapter(rows, said):
    assert answer(rows) == f"At equal training loss, faster query-key learning {said}"


@pytest.mark.parametrize(
    "change", [{"ratio": 0.1}, {"ratio": 1.0}, {"at": "end"}, {"score": "validation_loss"}]
)
def test_other_arms_moments_and_scores_do_not_answer_the_question(change):
    assert answer([row(**change)]) == ""


def test_one_effect_has_its_values_null_level_progress_and_share_of_levels():
    assert sentences([ROW]) == [
        "At training loss 0.050, MRTA is 0.500 with faster QK and 0.200 with the baseline (null: 0.100):"
        " +0.300 ± 0.020 over 5 seeds, more.",
        "Faster QK is there after 25% of its training, the baseline after 50%; the interval excludes zero on"
        " this side at 92% of the losses that both pass.",
    ]
    assert "as 2 cells never reach the level" in sentences([replace(ROW, missing=2)])[1]
    [end] = sentences([replace(ROW, at="end", loss=None, progress=None, levels=None)])
    assert end.startswith("At the end of training")


def test_many_effects_are_counted():
    rows = [row(), row(stands="open", mean=-0.01), row(score="ac", mean=20.0), row(score="loss")]
    assert (
        sentences(rows)[0]
        == "MRTA, 2 arms against the baseline: 1 more, 1 open; differences from −0.010 to +0.300."
    )
    assert len(sentences(rows)) == 2
    assert sentences([]) == []


def test_rows_are_those_of_attention_else_of_the_first_score():
    value = Interval(0.3, 0.1, 5)
    effects = [
        Effect(arm, score, "more", value, value, value, "level", 0.1)
        for arm in ("a", "b")
        for score in ("loss", "mrta")
    ]
    document = {"title": "Demo", "effects": [effect_record(effect) for effect in correct(effects)]}
    rows = read_rows(document, "A")
    assert [(one.title, one.score, one.stands) for one in rows] == [
        ("Demo: a", "mrta", "more"),
        ("Demo: b", "mrta", "more"),
    ]
    document["effects"] = document["effects"][:1]
    assert [(one.title, one.score) for one in read_rows(document, "A")] == [("Demo", "loss")]
    table = effects_table(document)
    assert table["rows"][0]["score"] == "training loss"


def test_the_charts_have_room_for_everything_but_intervals_that_dwarf_the_effects():
    chart, other = forests([row(score="ac", mean=20.0), row(half_width=0.1), row(mean=-0.2, half_width=9.0)])
    assert (chart.score, other.score) == ("mrta", "ac")
    for value in (0.0, 0.2, 0.4, -0.2, null_change(ROW)):
        assert 0 <= chart.across(value) <= 100
    assert chart.ends(chart.rows[1]) == (chart.low, chart.high)
    assert chart.ends(row(half_width=float("nan"))) is None
    for one in (chart, other):
        assert 0 in one.ticks
        assert 3 <= len(one.ticks) <= 8
        assert len({f"{tick:.{one.digits}f}" for tick in one.ticks}) == len(one.ticks)
        assert all(one.low <= tick <= one.high for tick in one.ticks)
    assert forests([]) == []


@pytest.mark.parametrize("claimed", ["more", "less", "equal", "not less"])
@pytest.mark.parametrize(
    ("mean", "stands"), [(0.3, STANDS[0]), (-0.3, STANDS[1]), (0.0, STANDS[2]), (0.05, STANDS[3])]
)
def test_what_an_effect_shows_does_not_depend_on_the_claim(claimed, mean, stands):
    value = Interval(mean, 0.1 if stands == "open" else 0.01, 5)
    [effect] = correct([Effect("a", "mrta", claimed, value, value, value, "end")])
    assert effect.stands == stands


def test_arms_are_compared_with_their_baselines_in_scores_that_both_have():
    cells = {
        (arm, seed): {"history": [{"loss": 1 / (k + 1), "mrta": k * slope + seed / 100} for k in range(4)]}
        for arm, slope in (("base", 0.1), ("fast", 0.2))
        for seed in range(3)
    }
    [effect] = compare_arms(measured("demo", cells), {"mrta": LEVEL, "ac": LEVEL})
    assert (effect.label, effect.score, effect.at) == ("fast", "mrta", "level")
    assert effect.value.mean == pytest.approx(0.3)


# --- Definitions: each where it occurs first, marked without touching what stands around it ---


def test_whole_words_are_found():
    assert terms_in(["MRTA, top 5%", "ACME and ACMC", None, "AC, %"]) == ["MRTA", "AC", "ACMC"]


def test_a_term_is_defined_once():
    words = Definitions()
    assert [term for term, _ in words.first("AC of FAFO", "DTAP")] == ["AC", "DTAP", "FAFO"]
    assert words.first("AC") == []


def test_marking_escapes_and_keeps_the_text():
    marked = str(Definitions.mark("<b>MRTA & AC</b>"))
    assert marked.startswith("&lt;b&gt;<abbr title=")
    assert "<b>" not in marked
    assert ">MRTA</abbr> &amp; <abbr" in marked


def test_every_abbreviation_of_a_score_and_every_parameterization_is_defined():
    titles = " ".join(score.title for score in SCORES.values()).replace(",", " ").split()
    short = {word for word in titles if word.isupper() and len(word) > 1} - {"F1"}
    assert short <= {word.strip("()") for word in TERMS} | {f"({word})" for word in TERMS}
    assert set(PARAMETERIZATION_COLORS) <= set(TERMS)
