"""Model folders: what is opened, and what is refused in one line."""

import json

import pytest
import transformers

from fasterqk.attention import read_example
from fasterqk.attention._models import (
    HuggingFaceCausal,
    HuggingFaceClassifier,
    load_model,
    longest_input,
)
from fasterqk.errors import InputError


@pytest.fixture
def saved(tmp_path, make_model, word_pieces):
    def save(head, config, **changes):
        make_model(head, config, **changes).save_pretrained(tmp_path / "model")
        word_pieces.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save


def test_architecture_decides(saved):
    loaded = load_model(saved("BertForSequenceClassification", "BertConfig", id2label={0: "no", 1: "yes"}))
    assert isinstance(loaded.model, HuggingFaceClassifier)
    assert loaded.model.classes == ("no", "yes")
    assert loaded.limit == 64
    loaded = load_model(saved("GPT2LMHeadModel", "GPT2Config", n_positions=32))
    assert isinstance(loaded.model, HuggingFaceCausal)
    assert loaded.model.classes == ()


def test_positions_that_count_from_behind_the_padding_id(make_model, word_pieces):
    model = make_model("RobertaForSequenceClassification", "RobertaConfig")
    assert longest_input(model, word_pieces) == 62


@pytest.mark.parametrize(
    ("head", "config", "changes"),
    [
        ("BertForTokenClassification", "BertConfig", {}),
        ("BertModel", "BertConfig", {}),
        ("BertForMaskedLM", "BertConfig", {}),
    ],
)
def test_other_heads_are_refused(saved, head, config, changes):
    folder = saved(head, config, **changes)
    with pytest.raises(InputError, match=f"holds {head}; only sequence classifiers and causal"):
        load_model(folder)


def test_encoder_decoders_are_refused(tmp_path):
    transformers.BartConfig(architectures=["BartForSequenceClassification"]).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="without an encoder-decoder"):
        load_model(tmp_path)


def test_weights_that_are_missing_are_not_made_up(saved):
    folder = saved("BertModel", "BertConfig")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"lacks 2 weights of BertForSequenceClassification, such as 'class"):
        load_model(folder)


def test_a_tokenizer_of_another_model(saved):
    loaded = load_model(saved("BertForSequenceClassification", "BertConfig", vocab_size=10))
    example = read_example({"tokens": ["not"], "relevance": [1], "label": 0}, "'data.jsonl' line 1")
    with pytest.raises(InputError, match="line 1: the tokenizer gives token 18, but the model knows 10"):
        loaded.encode([example])


def test_damaged_folders_are_one_line(saved, tmp_path):
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_model(tmp_path / "nothing")
    folder = saved("BertForSequenceClassification", "BertConfig")
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(InputError, match="cannot open AutoModelForSequenceClassification") as raised:
        load_model(folder)
    assert "\n" not in str(raised.value)
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot open AutoConfig"):
        load_model(folder)
