"""Definitions: each where it occurs first, marked without touching what stands around it."""

from fasterqk.attention.scores import SCORES
from fasterqk_lab.figures._style import PARAMETERIZATION_COLORS
from fasterqk_lab.page._terms import TERMS, Definitions, terms_in


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
