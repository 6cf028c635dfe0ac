"""`fasterqk report`: from a results folder to one page."""

import json

import pytest

from fasterqk.cli.main import main
from fasterqk.lab.report import save_table


@pytest.fixture
def results(tmp_path):
    out = tmp_path / "out"
    columns = [{"key": "a", "label": "a"}]
    save_table(out, "table1", title="T", caption="C", columns=columns, rows=[{"a": 0.5}])
    return out


def test_the_page_lies_in_the_results_folder(results, monkeypatch, capsys):
    monkeypatch.chdir(results.parent)
    assert main(["report"]) == 0
    assert capsys.readouterr().out == "open out/report.html\n"
    assert "<h3>T</h3>" in (results / "report.html").read_text()


def test_the_page_can_lie_elsewhere(results, tmp_path, capsys):
    path = tmp_path / "page.html"
    assert main(["report", str(results), "-o", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"report": str(path), "bytes": path.stat().st_size, "opened": False}
    assert not (results / "report.html").exists()


@pytest.mark.parametrize("make", [False, True])
def test_a_folder_that_is_not_there_or_empty_is_quoted(tmp_path, capsys, make):
    out = tmp_path / "nothing"
    if make:
        out.mkdir()
    assert main(["report", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and repr(str(out)) in printed.err


def test_a_damaged_file_is_one_line(results, capsys):
    (results / "tables" / "table1.json").write_text("{")
    assert main(["report", str(results)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "table1.json" in error
