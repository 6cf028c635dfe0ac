import json

import pytest

from fasterqk.cli.main import main
from fasterqk.lab.experiments import table_agreement as experiment
from fasterqk.lab.experiments._arm_command import show_arms
from fasterqk.lab.training import TrainConfig


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The table's two arms on a little task of our own, with models of a second."""
    path = tmp_path / "little.jsonl"
    lines = [
        {"id": str(i), "tokens": ["it", "is", "x" if i % 2 else "y"], "relevance": [0, 0, 1], "label": i % 2}
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def little(task, **fields):
        return TrainConfig("jsonl", file=str(path), rationale_k=(50,), width=8, head_width=4, **fields)

    monkeypatch.setattr(experiment, "TrainConfig", little)


@pytest.mark.usefixtures("small")
def test_table_agreement_prints_both_arms(capsys, tmp_path):
    words = ["reproduce", "table-agreement", "--seeds", "1", "--epochs", "1"]
    words += ["--out", str(tmp_path / "out")]
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert set(document["arms"]) == {"baseline", "faster_qk"}
    for arm in document["arms"].values():
        assert {"train_accuracy", "validation_accuracy", "test_accuracy", "ac", "acmc", "mrta"} <= set(arm)
        assert {"sufficiency", "comprehensiveness", "plausibility", "null", "dtap"} <= set(arm)
    assert document["matched"]
    assert document["difference"]
    show_arms(document)
    text = capsys.readouterr().out
    assert "at equal training loss" in text
    assert "faster QK" in text


def test_missing_data_is_one_line_before_any_work(capsys, tmp_path):
    out = tmp_path / "out"
    words = ["reproduce", "table-hatexplain", "--data-dir", str(tmp_path), "--out", str(out)]
    assert main(words) == 2
    assert "dataset.json" in capsys.readouterr().err
    assert not out.exists()
