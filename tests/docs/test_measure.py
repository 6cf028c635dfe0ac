"""The commands and the Python of the pages on measuring run as they stand."""

import json
import re
import shlex
from pathlib import Path

import peft
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fasterqk.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"
WORDS = ["the", "film", "was", "good", "bad", "very", "not", "plot"]
NEEDS = {"ferret", "inseq", "interpreto"}


def blocks(page, language):
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classifiers, data and somebody's importances, under the names of the pages."""
    root = tmp_path_factory.mktemp("pages")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]")
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(names), max_position_embeddings=32, **sizes)
    for seed, name in enumerate(("my-classifier", "baseline", "faster-qk")):
        torch.manual_seed(seed)
        transformers.BertForSequenceClassification(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    base = transformers.BertForSequenceClassification.from_pretrained(root / "my-classifier")
    lora = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"])
    peft.get_peft_model(base, lora).save_pretrained(root / "my-adapter")
    tokenizer.chat_template = (
        "{% for message in messages %}[CLS] {{ message.content }} [SEP] {% endfor %}"
        "{% if add_generation_prompt %}the plot was {% endif %}"
    )
    tokenizer.save_pretrained(root / "my-chat-model")
    sizes |= {"num_key_value_heads": 1, "vocab_size": len(names)}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(root / "my-chat-model")
    texts = [["the", "film", "was", "very", "good"], ["not", "the", "plot"], ["bad", "film"]]
    lines = [{"tokens": text, "relevance": [0, *[1] * (len(text) - 1)], "label": 1} for text in texts]
    (root / "test.jsonl").write_text("\n".join(map(json.dumps, lines)))
    scores = [{"id": str(n), "scores": [-1] * len(text)} for n, text in enumerate(texts, 1)]
    (root / "lime.jsonl").write_text("\n".join(map(json.dumps, scores)))
    return root


@pytest.mark.parametrize("page", ["measure.md", "importances.md"])
def test_commands(page, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    lines = [line for block in blocks(page, "bash") for line in block.splitlines() if line.strip()]
    assert lines
    for line in lines:
        assert main(shlex.split(line, comments=True)[1:]) == 0, line
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("page", ["measure.md", "measure-python.md", "importances.md"])
def test_python(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = {}
    for block in blocks(page, "python"):
        imported = set(re.findall(r"^(?:from|import) (\w+)", block, flags=re.MULTILINE))
        if not imported & NEEDS:  # recipes for other packages run in tests/peers
            exec(block, names)
    assert names["measurement"].summary().n == 3
