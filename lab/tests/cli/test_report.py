"""`fasterqk-lab report`: from a results folder to one page."""

import json
import re

import pytest

from fasterqk_lab.cli.main import main
from fasterqk_lab.figures import save_table
from fasterqk_lab.runs import SweepError, sweep
from fasterqk_lab.training import TrainConfig


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


def test_a_finished_sweep_is_a_page_with_a_title(tmp_path, capsys):
    """A real sweep in this process, a cell that fails among its cells."""
    data = tmp_path / "mine.jsonl"
    lines = [
        {"id": str(k), "tokens": ["it", "is", "x" if k % 2 else "y"], "relevance": [0, 0, 1], "label": k % 2}
        for k in range(40)
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    base = TrainConfig("jsonl", file=str(data), epochs=2, rationale_k=(50,), width=8, head_width=4)
    cells = [base.replace(qk_ratio=ratio, seed=seed) for ratio in (1, 30) for seed in (0, 1)]
    out = str(tmp_path / "out")
    with pytest.raises(SweepError):
        sweep([*cells, base.replace(file="nowhere.jsonl")], "fasterqk_lab.training:train", out, workers=0)
    assert main(["report", out, "--title", "Is <x> found?"]) == 0
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<h1>Is &lt;x&gt; found?</h1>" in text
    assert re.search(r"5 cells: 4 done, 1 failed, .* of computing\. This page shows only finished", text)
    assert "cannot read &#39;nowhere.jsonl&#39;" in text
    assert 'id="figure-jsonl-cells"' in text  # every arm at equal loss
    assert not (tmp_path / "out" / "explorer.html").exists()
