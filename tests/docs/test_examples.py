"""The example scripts run as they stand, and show what they say they show."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tools.notebooks import run_notebook

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
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_holds_outputs_of_the_same_kind(path):
    notebook, names = run_notebook(path)
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert _kinds(notebook) == _kinds(stored) and len(json.dumps(stored)) < 100_000
    if path.stem == "sharpen":
        assert names["mass"][10] > names["mass"][1] + 0.05
    if path.stem == "measure":
        mass = {ratio: measured.summary()["mrta"] for ratio, measured in names["measurements"].items()}
        assert mass[10] > mass[1] + 0.05
    if path.stem == "hold_logits":
        assert names["bounded"] < 40 and names["small"] < 60 < 100 < names["runaway"]


def _kinds(notebook):
    """By code cell what is shown: text, HTML or a picture."""
    cells = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [[sorted(output.get("data", {"printed": ""})) for output in outputs] for outputs in cells]


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


def test_every_example_is_run_here_or_where_its_package_is_installed():
    peers = Path(__file__).parents[1] / "peers" / "test_trainers.py"
    tested = Path(__file__).read_text(encoding="utf-8") + peers.read_text(encoding="utf-8")
    assert all(path.stem in tested for path in EXAMPLES.glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--full",)], ids=["LoRA", "full"])
def test_a_decoder_is_fine_tuned_and_measured(printed, tmp_path, words):
    vocabulary = ["<pad>", "<eos>", "<unk>", "film", "good", "bad", "Label:", "yes", "no"]
    spelled = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="<unk>"))
    spelled.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=spelled, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    LlamaForCausalLM(LlamaConfig(vocab_size=9, num_key_value_heads=1, **sizes)).save_pretrained(
        tmp_path / "model"
    )
    lines = [
        {
            "text": f"film {word} film",
            "spans": [[5, 5 + len(word)]],
            "label": "yes" if word == "good" else "no",
        }
        for word, label in (("good", "yes"), ("bad", "no")) * 20
    ]
    data = tmp_path / "posts.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--model", str(tmp_path / "model"), "--data", str(data), "--steps", "4", "--held", "8"]
    text = printed("finetune_decoder.py", *options, *words)
    assert "before: accuracy" in text and "after: accuracy" in text and "  mrta " in text
    assert "4 steps in" in text
