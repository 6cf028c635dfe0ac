"""The example scripts run as they stand, and show what they say they show."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel, BertTokenizerFast

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def printed(monkeypatch, capsys):
    """Run a script as `python SCRIPT WORDS` does, in this process; returns what it prints."""

    def run(script: str, *words: str) -> str:
        path = str(EXAMPLES / script)
        monkeypatch.setattr(sys, "argv", [path, *words])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "attention"),
    [("finetune.py", r"layer 0: ([\d.]+) of the"), ("measure_your_own.py", r"mrta ([\d.]+),")],
)
def test_a_faster_query_key_circuit_attends_more_sharply(printed, script, attention):
    mass = {}
    for ratio in ("1", "10"):
        text = printed(script, "--qk-ratio", ratio)
        assert "accuracy 1.000" in text
        mass[ratio] = float(re.search(attention, text)[1])
    assert mass["10"] > mass["1"] + 0.05


@pytest.mark.slow
def test_a_pretrained_folder_is_fine_tuned_with_the_trainer(printed, tmp_path):
    words = [f"word{number}" for number in range(20)]
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", *words])
    )
    tokenizer = BertTokenizerFast(str(tmp_path / "vocab.txt"))
    tokenizer.save_pretrained(tmp_path / "model")
    config = BertConfig(
        vocab_size=26, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertModel(config).save_pretrained(tmp_path / "model")
    lines = []
    for number in range(120):
        telling = ("good", "bad")[number % 2]
        tokens = [words[number * 7 % 20], telling, words[number * 3 % 20]]
        lines.append({"tokens": tokens, "relevance": [0, 1, 0], "label": telling})
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = str(tmp_path / "model")
    options = ("--qk-ratio", "5", "--lr", "5e-3", "--epochs", "15")
    text = printed("finetune_pretrained.py", "--model", model, "--data", str(data), *options)
    assert "attention/mass" in text
    assert "lr/qk" in text
    assert "accuracy 1.000 on 12 held out examples" in text
    assert re.search(r"attention on relevant tokens 0\.\d+, uniform 0\.100", text)


def test_every_example_is_run_by_this_file():
    tested = Path(__file__).read_text(encoding="utf-8")
    assert all(path.name in tested for path in EXAMPLES.glob("*.py"))
