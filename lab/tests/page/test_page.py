"""The report as text: complete, self-contained, small, escaped; a browser tests the rest."""

import csv
import json
import os
import re

import pytest

from fasterqk.attention.scores import SCORES
from fasterqk.attention.statistics import Interval
from fasterqk.errors import InputError
from fasterqk_lab.compare import Effect, correct
from fasterqk_lab.figures import PARAMETERIZATION_COLORS, effect_record
from fasterqk_lab.figures._documents import save_examples, save_table
from fasterqk_lab.page._page import (
    PAGE_BYTES,
    TERMS,
    _save_overview,
    answer,
    chapter_of,
    in_chapters,
    mark,
    terms_in,
    write_page,
)

PICTURE = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 10 10"><g id="same"/></svg>'


def add_figure(out, name, title="A title", picture=PICTURE):
    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.svg").write_bytes(picture)
    (folder / f"{name}.json").write_text(json.dumps({"name": name, "title": title, "caption": "A caption."}))


def add_table(out, name="table1", rows=1):
    columns = [{"key": "a", "label": "a"}]
    save_table(out, name, title="T", caption="C", columns=columns, rows=[{"a": 0.5}] * rows)


def test_every_figure_is_there_once_in_the_papers_order(tmp_path):
    for name in ["extra", "fig10", "fig4", "fig2-seeds", "fig2", "table2"]:
        add_figure(tmp_path, name)
    text = write_page(tmp_path).read_text()
    assert re.findall(r'<figure id="figure-([^"]*)"', text) == [
        "fig2", "fig2-seeds", "fig4", "fig10", "table2", "extra",
    ]  # fmt: skip
    assert text.count('src="data:image/svg+xml,') == 6
    assert 'id="same"' not in text  # pictures keep their ids to themselves


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("fig3", "Figure 3"),
        ("figure-12-x", "Figure 12"),
        ("table2", "Tables"),
        ("table-hatexplain-paper-end", "HateXplain"),
        ("sva-released", "Subject-verb agreement"),
        ("table1-mine", "Mine"),
        ("tableau", "Tableau"),
    ],
)
def test_a_name_finds_its_chapter(name, title):
    assert chapter_of(name).title == title


def test_within_a_chapter_numbers_sort_by_value():
    names = ["fig2-r100", "fig2-r10", "fig2-r9"]
    [(chapter, documents)] = in_chapters({"figures": [{"name": name} for name in names]})
    assert chapter.title == "Figure 2"
    assert [document["name"] for _, document in documents] == ["fig2-r9", "fig2-r10", "fig2-r100"]


def test_links_lead_from_the_page_to_the_numbers(tmp_path):
    out = tmp_path / "my results"
    add_figure(out, "fig4")
    add_table(out)
    page = tmp_path / "pages" / "deep" / "report.html"
    write_page(out, page)
    links = re.findall(r'<a href="(\.\.[^"]*)"', page.read_text())
    assert links == ["../../my%20results/figures/fig4.csv", "../../my%20results/tables/table1.csv"]
    write_page(out)
    assert '<a href="tables/table1.csv">' in (out / "report.html").read_text()


def test_nothing_on_the_page_asks_the_network(tmp_path):
    add_figure(tmp_path, "fig4", title='<script src="https://example.org/x.js"></script>')
    text = write_page(tmp_path).read_text()
    assert re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=\"(?!data:)", text) == []
    assert "default-src 'none'" in text
    assert "&lt;script src=" in text


def test_the_page_stays_under_three_megabytes(tmp_path):
    """Large pictures become PNG, then links; examples and tables are cut, and say so."""
    large = PICTURE + b"<!--" + os.urandom(350_000).hex().encode() + b"-->"
    for k in range(6):
        add_figure(tmp_path, f"fig{k}", picture=large)
        (tmp_path / "figures" / f"fig{k}.png").write_bytes(os.urandom(390_000))
    layer = {"layer 1": [0.12345] * 400}
    example = {"tokens": ["wörd"] * 400, "relevance": [0] * 400, "label": "x"}
    example["arms"] = {"a": {"prediction": "x", "probability": 1.0, "layers": layer}}
    save_examples(tmp_path, "many", title="T", arms=["a"], examples=[example] * 80, sensitive=False)
    add_table(tmp_path, rows=9000)
    path = write_page(tmp_path)
    assert path.stat().st_size < PAGE_BYTES
    text = path.read_text()
    assert text.count("data:image/png;base64,") == 3
    assert text.count("Too large for this page") == 3
    assert '"total":80' in text
    assert "The first 5000 of 9000 rows; the file has all of them." in text


def test_an_empty_folder_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(InputError, match="fasterqk-lab reproduce all --out") as error:
        write_page(tmp_path)
    assert repr(str(tmp_path)) in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_figure_without_its_picture_is_named(tmp_path):
    add_figure(tmp_path, "fig4")
    (tmp_path / "figures" / "fig4.svg").unlink()
    with pytest.raises(InputError, match=r"fig4\.svg"):
        write_page(tmp_path)


def test_the_same_folder_gives_the_same_page(tmp_path):
    add_figure(tmp_path, "fig4")
    first = write_page(tmp_path).read_bytes()
    assert write_page(tmp_path).read_bytes() == first


# --- What it says: what effects show, by chapter ---


def effect(chapter="A", stands="more", **more):
    record = {"arm": "faster QK", "score": "mrta", "at": "level", "loss": 0.05, "ratio": 10.0}
    return chapter, record | {"stands": stands} | more


@pytest.mark.parametrize(
    ("effects", "said"),
    [
        ([effect()], "puts more attention on the relevant words in A."),
        (
            [effect(), effect("B"), effect("C", "open")],
            "puts more attention on the relevant words in A, B; open in C.",
        ),
        (
            [effect(), effect(stands="open"), effect("B", "less")],
            "puts more attention on the relevant words in A (1 of 2); less in B; open in A (1 of 2).",
        ),
        ([effect(stands="less")], "puts less attention on the relevant words in A."),
        (
            [effect(), effect("B", "too small to matter")],
            "puts more attention on the relevant words in A; a change too small to matter in B.",
        ),
        ([effect(stands="open")], "leaves open whether attention on the relevant words changes in A."),
    ],
)
def test_the_answer_is_what_the_effects_show_by_chapter(effects, said):
    assert answer(effects) == f"At equal training loss, faster query-key learning {said}"


@pytest.mark.parametrize(
    "change", [{"ratio": 0.1}, {"ratio": 1.0}, {"at": "end"}, {"loss": None}, {"score": "validation_loss"}]
)
def test_other_arms_moments_and_scores_do_not_answer_the_question(change):
    assert answer([effect(**change)]) == ""


def test_every_effect_has_a_row_of_its_own_in_the_first_chart(tmp_path):
    value = Interval(0.3, 0.1, 5)
    effects = [Effect(arm, "mrta", "more", value, value, value, "end") for arm in ("QK ×3", "QK ×30")]
    records = [effect_record(effect) for effect in correct(effects)]
    documents = [
        {
            "name": f"table-hatexplain-{n}",
            "title": "A title that is much too long for one line",
            "effects": chosen,
        }
        for n, chosen in enumerate([records, records, records[:1], records[:1]])
    ]
    _save_overview(documents, tmp_path)
    rows = list(csv.DictReader((tmp_path / "figures" / "overview.csv").open()))
    assert len({row["arm"] for row in rows}) == len(rows) == 6


# --- Definitions: marked without touching what stands around them ---


def test_whole_words_are_found():
    assert terms_in(["MRTA, top 5%", "ACME and ACMC", None, "AC, %"]) == ["MRTA", "AC", "ACMC"]


def test_marking_escapes_and_keeps_the_text():
    marked = str(mark("<b>MRTA & AC</b>"))
    assert marked.startswith("&lt;b&gt;<abbr title=")
    assert "<b>" not in marked
    assert ">MRTA</abbr> &amp; <abbr" in marked


def test_every_abbreviation_of_a_score_and_every_parameterization_is_defined():
    titles = " ".join(score.title for score in SCORES.values()).replace(",", " ").split()
    short = {word for word in titles if word.isupper() and len(word) > 1} - {"F1"}
    assert short <= {word.strip("()") for word in TERMS} | {f"({word})" for word in TERMS}
    assert set(PARAMETERIZATION_COLORS) <= set(TERMS)
