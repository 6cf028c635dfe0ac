"""`fasterqk circuits`: where configurations come from, what is printed, what is refused."""

import json
from pathlib import Path

import pytest
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from fasterqk.cli.main import main

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def test_a_model_type_prints_a_verified_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["circuits", "gpt2"]) == 0
    printed = capsys.readouterr()
    assert "default configuration of model type 'gpt2'" in printed.err
    rows = [line.split() for line in printed.out.splitlines()]
    assert ["h.*.attn.c_attn.weight", "0:768", "of", "axis", "1", "q", "qk", "0-11"] in [
        row[:8] for row in rows
    ]
    assert printed.out.splitlines()[-1].startswith("qk 14.2M parameters (24 tensors, 24 split) - ov 14.2M")
    assert "registry+probe" in printed.out


def test_a_config_file_as_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["circuits", "--config", str(config), "--json", "--heads"]) == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert data["model"] == "LlamaForCausalLM" and str(config) in data["source"]
    # Queries 32 x 32, keys 16 x 32; values 16 x 32, output 32 x 32; three layers.
    assert data["parameters"]["qk"] == data["parameters"]["ov"] == 3 * (32 + 16) * 32
    keys = [
        piece for piece in data["slices"] if piece["parameter"] == "model.layers.1.self_attn.k_proj.weight"
    ]
    assert [(piece["start"], piece["stop"], piece["head"], piece["layer"]) for piece in keys] == [
        (0, 8, 0, 1),
        (8, 16, 1, 1),
    ]


def test_a_directory(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["circuits", str(config.parent), "--all"]) == 0
    printed = capsys.readouterr()
    assert f"directory {str(config.parent)!r}" in printed.err
    assert "model.layers.2.self_attn.q_proj.weight" in printed.out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a model configuration"),
        ("[1]", "is not a model configuration"),
        ("{}", "model_type None"),
        ('{"model_type": "nonesuch"}', "model_type 'nonesuch'"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "is not a configuration of 'llama'"),
    ],
)
def test_bad_configurations_are_one_line(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["circuits", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_what_cannot_be_found_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fasterqk.labels._from_config._hub_answers", lambda: False)
    for words, message in (
        (["nonesuch/model"], "'nonesuch/model' is not a directory, not a model type"),
        ([str(tmp_path)], "there is no"),
        ([], "name a model type"),
        (["gpt2", "--config", "x.json"], "not both"),
        (["mamba"], "(MambaMixer) forms no softmax"),
    ):
        assert main(["circuits", *words]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fasterqk")]
        assert len(lines) == 1 and message in lines[0]


def test_labels_for_what_has_no_softmax(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["circuits", "jamba"]) == 0
    note = "note: no softmax over queries and keys in layers.*.mamba (JambaMambaMixer): at the base rate"
    assert note in capsys.readouterr().out.splitlines()
    assert main(["circuits", "jamba", "--label", "JambaMambaMixer=rest", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["parameters"]["qk"] > 0 and data["notes"] == []
    assert main(["circuits", "jamba", "--label", "JambaMambaMixer"]) == 2
    assert "--label 'JambaMambaMixer' is not PATTERN=ROLE" in capsys.readouterr().err


def test_a_type_without_a_default_configuration_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["circuits", "gemma4_assistant"]) == 2
    told = capsys.readouterr().err
    assert "no default configuration of 'gemma4_assistant'" in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 100_000, "nested deeper than 100 levels"),
        ('{"a": ' * 500 + "1" + "}" * 500, "nested deeper than 100 levels"),
        ('{"model_type": "gpt2", "x": "\\ud800"}', "lone surrogate"),
        ('{"model_type": "gpt2", "n_layer": 1000000000}', "has n_layer 1000000000; at most 2000"),
        ('{"model_type": "qwen2", "num_hidden_layers": 1e9}', "has num_hidden_layers 1000000000.0; at most"),
        ('{"model_type": "swin", "depths": [2, 100000000]}', "has depths 100000000; at most 2000"),
        (
            '{"model_type": "llava", "text_config": {"num_hidden_layers": 5000000}}',
            "num_hidden_layers 5000000",
        ),
        ("[1]", "is not a model configuration"),
        ("", "is not a model configuration"),
    ],
)
def test_a_hostile_configuration_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    for words in (["circuits", "--config", str(path)], ["circuits", str(tmp_path)]):
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line


def test_a_byte_order_mark_is_read(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("\ufeff" + config.read_text(), encoding="utf-8")
    assert main(["circuits", "--config", str(config)]) == 0


def test_audit_of_a_saved_model(tmp_path, capsys):
    """A folder and an optimizer class: what moves at which rate, by role."""
    size = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 1}
    GPT2LMHeadModel(GPT2Config(vocab_size=10, **size)).save_pretrained(tmp_path)
    assert main(["circuits", str(tmp_path), "--optimizer", "torch.optim.AdamW", "--lr", "1e-3"]) == 0
    printed = capsys.readouterr().out
    assert "GPT2LMHeadModel, AdamW, base lr 1e-3" in printed and "\nq " in printed
    assert main(["circuits", str(tmp_path), "--optimizer", "SGD", "--json"]) == 0
    assert {row["circuit"] for row in json.loads(capsys.readouterr().out)["rows"]} >= {"q", "k", "v", "o"}
    assert main(["circuits", str(tmp_path), "--optimizer", "AdamX"]) == 2
    assert "there is no optimizer 'AdamX'" in capsys.readouterr().err
    assert main(["circuits", "gpt2", "--optimizer", "AdamW"]) == 2
    assert "needs the folder of a saved model" in capsys.readouterr().err


def test_an_encoder_decoder_is_audited_and_a_vision_model_is_refused(tmp_path, capsys):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    assert main(["circuits", str(tmp_path / "t5"), "--optimizer", "AdamW"]) == 0
    assert "\nq " in capsys.readouterr().out
    assert main(["circuits", str(tmp_path / "t5"), "--optimizer", "AdamW", "--heads"]) == 2
    assert "leave --heads and --all out" in capsys.readouterr().err
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTModel(ViTConfig(image_size=8, patch_size=4, **sizes)).save_pretrained(tmp_path / "vit")
    assert main(["circuits", str(tmp_path / "vit"), "--optimizer", "AdamW"]) == 2
    assert "reads no tokens" in capsys.readouterr().err
