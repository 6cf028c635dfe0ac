import json

from fasterqk.cli.main import main
from fasterqk.lab.experiments import table_main, table_sva
from fasterqk.lab.experiments._arms import BASELINE, FASTER, Experiment
from fasterqk.lab.training import TrainConfig


def little(path):
    lines = [
        {"id": str(i), "tokens": ["it", "is", "x" if i % 2 else "y"], "relevance": [0, 0, 1], "label": i % 2}
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    base = TrainConfig("jsonl", file=str(path), epochs=1, rationale_k=(5,), width=8, head_width=4)
    arms = {BASELINE: base, FASTER: base.replace(qk_ratio=9)}
    printed = {"paper": {arm: {"test_accuracy": 0.5} for arm in arms}}
    return Experiment("table-little", "Little", "paper", arms, (0,), printed)


def test_joins_its_parts_and_trains_nothing_twice(monkeypatch, capsys, tmp_path):
    experiment = little(tmp_path / "little.jsonl")
    monkeypatch.setattr(table_main, "PARTS", {"One": lambda _: experiment, "Two": lambda _: experiment})
    words = ["reproduce", "table-main", "--workers", "1", "--out", str(tmp_path / "out")]
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert {row["dataset"] for row in document["rows"]} == {"One", "Two"}
    assert set(document["parts"]) == {"One", "Two"}
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 2  # one cell an arm, for both parts
    table_main.show(document)
    text = capsys.readouterr().out
    assert "the paper, faster QK" in text
    assert "table-main-paper-differences.png" in text


def test_missing_data_is_one_line_before_any_work(capsys, tmp_path):
    out = tmp_path / "out"
    for words in (["table-sva"], ["table-sva", "--protocol", "released"], ["table-main"]):
        assert main(["reproduce", *words, "--data-dir", str(tmp_path), "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert "agr_50_mostcommon_10K.tsv" in error
        assert error.count("\n") == 1
    assert not out.exists()


def test_a_form_the_protocol_does_not_have_is_one_line(capsys, tmp_path):
    words = ["reproduce", "table-sva", "--protocol", "released", "--form", "prefix", "--out", str(tmp_path)]
    assert main(words) == 2
    assert "protocol 'released' has no form 'prefix'" in capsys.readouterr().err


def test_table_sva_says_how_its_rate_was_chosen(monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(table_sva, "show_arms", shown.append)
    chosen = {"lr": 1e-3, "validation_accuracy": {"0.001": 0.9123, "0.01": None}}
    table_sva.show({"forms": {"whole": {"chosen_rate": chosen}, "prefix": {"chosen_rate": None}}})
    assert len(shown) == 2
    assert "base rate 0.001" in capsys.readouterr().out


def test_squad_joins_when_asked_in_a_size_that_has_the_protocol(monkeypatch, capsys, tmp_path):
    experiment = little(tmp_path / "little.jsonl")
    monkeypatch.setattr(table_main, "PARTS", {"One": lambda _: experiment})
    asked = []

    def squad(size, seeds, epochs):
        asked.append((size, seeds, epochs))
        return {"paper": experiment}

    monkeypatch.setattr("fasterqk.lab.experiments.table_squad.table_squad", squad)
    words = ["reproduce", "table-main", "--workers", "1", "--out", str(tmp_path / "out"), "--json"]
    assert main([*words, "--squad", "small", "--squad-seeds", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["parts"]) == ["One", "SQuAD, small"]
    assert asked == [("small", 2, None)]
    assert main([*words, "--squad", "small", "--protocol", "released"]) == 2
    assert "--squad small has no protocol 'released'" in capsys.readouterr().err
