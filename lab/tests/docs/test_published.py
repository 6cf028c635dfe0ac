"""What is published is what its cells give, without training; every page is what the tool writes."""

import re
from functools import cache
from pathlib import Path

import pytest

from fasterqk_lab.compare import read_values, write_values
from fasterqk_lab.experiments import EXPERIMENTS, reproduce
from fasterqk_lab.paper import Published, read_claims, read_lines, read_questions, save_picture
from tools.publish import answers, claims_page, experiments_of, index_page, questions_page, ratio_table

ROOT = Path(__file__).parents[3]
PAPER, PAGES = ROOT / "lab" / "paper", ROOT / "docs" / "results"
CELLS = sorted((PAPER / "cells").glob("*.jsonl*"))
ADVICE = "run: python tools/publish.py"


@cache
def values_by_place(name):
    """The values of a published table; several files of cells may stand behind one table."""
    return {value[:-1]: value for value in read_values(PAPER / "results" / name)}


@pytest.mark.slow
@pytest.mark.parametrize("file", CELLS, ids=lambda path: path.name)
def test_tables_are_rebuilt_from_cells_as_they_are_published(file, tmp_path):
    values, published = {}, {}
    for name in experiments_of(file):
        path = Path(reproduce(name, tmp_path, cells=[str(file)])["results"])
        values |= {value[:-1]: value for value in read_values(path)}
        published |= values_by_place(path.name)
    assert values
    assert [place for place, value in values.items() if published.get(place) != value] == [], ADVICE
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def published():
    return Published(PAPER)


def test_the_pages_of_claims_and_questions_are_those_that_the_results_give(published):
    claims, questions = read_claims(published), read_questions(published)
    experiments = {name: text for name, text in EXPERIMENTS.items() if (PAGES / f"{name}.md").is_file()}
    pages = {
        "index.md": index_page(claims, experiments),
        "claims.md": claims_page(claims),
        "questions.md": questions_page(questions),
    }
    for name, text in pages.items():
        assert (PAGES / name).read_text(encoding="utf-8") == text, ADVICE
    for name in experiments.keys() - {"claims", "questions"}:
        assert answers(name, claims, questions) in (PAGES / f"{name}.md").read_text(encoding="utf-8"), ADVICE
    lines = read_lines(published)
    for page, shown in (("docs/ratio.md", lines), ("README.md", [line for line in lines if line.headline])):
        assert ratio_table(shown) in (ROOT / page).read_text(encoding="utf-8"), ADVICE


def test_the_picture_shows_what_the_results_give(published, tmp_path):
    pictures = save_picture(read_lines(published), tmp_path), PAGES / "images" / "questions.svg"
    drawn, shown = (path.read_text(encoding="utf-8") for path in pictures)
    # Its words and numbers, and where its marks are; other versions of matplotlib may style them otherwise.
    for part in (r"<text[^>]*>(.*?)</text>", r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)"'):
        assert re.findall(part, drawn) == re.findall(part, shown) != [], ADVICE


def test_a_table_that_is_read_and_written_is_the_same(tmp_path):
    for path in sorted((PAPER / "results").glob("*.csv")):
        written = write_values(tmp_path / path.name, read_values(path))
        assert written.read_bytes() == path.read_bytes(), path.name
