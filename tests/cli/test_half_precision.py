"""Commands that compute in half precision on a processor whose AMX does not work (simulated)."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from fasterqk.cli.main import main
from fasterqk.processor import SIMULATE_FAULT

LINE = "fasterqk: this processor announces AMX but cannot run it; bfloat16 runs without it\n"


@pytest.fixture(autouse=True)
def faulty_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv(SIMULATE_FAULT, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("saved", "options", "line"),
    [
        ("float32", [], ""),
        ("float32", ["--precision", "bfloat16"], LINE),
        ("float32", ["--precision", "float64"], ""),
        ("bfloat16", [], LINE),
        ("bfloat16", ["--precision", "float32"], ""),
    ],
)
def test_measure_says_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saved: str, options: list[str], line: str
) -> None:
    size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.BertConfig(vocab_size=5, max_position_embeddings=8, **size)
    model = transformers.BertForSequenceClassification(config)
    model.to(getattr(torch, saved)).save_pretrained(tmp_path / "model")
    vocabulary = {"a": 0, "b": 1, "c": 2, "[UNK]": 3, "[PAD]": 4}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"tokens": ["a", "b", "c"], "relevance": [0, 1, 0], "label": 0}))
    capsys.readouterr()
    words = ["measure", "--model", str(tmp_path / "model"), "--data", str(data), "--resamples", "0", "--json"]
    assert main([*words, *options]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["n"] == 1
    assert output.err == line
