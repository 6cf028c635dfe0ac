"""Real architectures: labels found, weights saved and loaded, compiled and checkpointed."""

import pytest
import torch
from torch import nn, optim
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from fasterqk.optim import check_circuits, make_optimizer, param_groups

IDS = torch.arange(16).view(2, 8) % 13
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SMALL = {"vocab_size": 13, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, **TOKENS}
WIDE = {"intermediate_size": 24, "max_position_embeddings": 16}
STILL = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}

FUSED = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=13, n_layer=2, n_head=4, n_embd=16, n_positions=16, **TOKENS, **STILL)
    ),
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL, **WIDE)),
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=13, n_layer=2, n_head=4, hidden_size=16, **TOKENS)
    ),
    "falcon": lambda: FalconForCausalLM(FalconConfig(**SMALL, new_decoder_architecture=True, num_kv_heads=2)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SMALL, **WIDE, num_key_value_heads=2)),
}
SEPARATE = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, **WIDE, num_key_value_heads=2)),
    "bert": lambda: BertForSequenceClassification(BertConfig(**SMALL, **WIDE)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=13,
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=2,
            **TOKENS,
        )
    ),
}


def build(name):
    torch.manual_seed(0)
    return (FUSED | SEPARATE)[name]()


def batch_of(name):
    return {"input_ids": IDS, "labels": IDS[:, 0] % 2 if name == "bert" else IDS}


def train(model, optimizer, steps=4, **more):
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch_of("gpt2"), **more).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("name", FUSED | SEPARATE)
def test_every_circuit_moves_at_its_rate(name):
    model = build(name)
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-4, qk_ratio=30, weight_decay=0.01, fused=True)
    result = check_circuits(model, optimizer, batch_of(name))
    assert result.ok and {row.circuit for row in result.rows} >= {"qk", "ov", "rest"}


@pytest.mark.parametrize("name", FUSED | SEPARATE)
def test_decay_groups_are_the_trainers(name):
    """At ratio 1 the groups are those of the Hugging Face Trainer, in its order."""
    model = build(name)
    decayed = Trainer.get_decay_parameter_names(None, model)
    groups = param_groups(model, lr=1e-3, weight_decay=0.1)
    names = [name for name, _ in model.named_parameters()]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert groups[0]["param_names"] == [name for name in names if name in decayed]
    assert groups[1]["param_names"] == [name for name in names if name not in decayed]


@pytest.mark.parametrize("name", ["gpt2", "neox", "phi3"])
def test_saved_models_are_plain_models(name, tmp_path):
    model, untouched = build(name), build(name)
    untouched.save_pretrained(tmp_path / "before")
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=10)
    train(model, optimizer)
    assert list(model.state_dict()) == list(untouched.state_dict())
    model.save_pretrained(tmp_path / "after")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    assert list(loaded.state_dict()) == list(untouched.state_dict())
    for key, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key])
    assert sorted(p.name for p in (tmp_path / "before").iterdir()) == sorted(
        p.name for p in (tmp_path / "after").iterdir()
    )


def test_gradient_checkpointing_changes_nothing():
    plain, checkpointed = build("gpt2"), build("gpt2")
    checkpointed.gradient_checkpointing_enable()
    for model in (plain, checkpointed):
        model.train()
        train(model, make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=10, fused=True), use_cache=False)
    for mine, theirs in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("made_from", ["plain", "compiled"])
def test_compiled_models_train_the_same(made_from, net, label):
    """The graph compiler without its C++ back end, which takes minutes for nothing we could break."""
    torch._dynamo.reset()
    for layout in ("rows", "columns"):
        plain, model = net(layout, layers=1), net(layout, layers=1)
        compiled = torch.compile(model, backend="aot_eager")
        source = compiled if made_from == "compiled" else model
        options = {"lr": 1e-2, "qk_ratio": 5, "fused": True}
        pairs = [
            (plain, make_optimizer(plain, optim.SGD, circuits=label(plain), **options)),
            (compiled, make_optimizer(source, optim.SGD, circuits=label(model), **options)),
        ]
        for forward, optimizer in pairs:
            for _ in range(3):
                optimizer.zero_grad()
                (forward(plain.inputs) - plain.targets).square().mean().backward()
                optimizer.step()
        assert torch.allclose(plain.qkv(), model.qkv(), atol=1e-6)
        assert list(plain.state_dict()) == list(model.state_dict())


def test_torch_attention_is_split_too():
    """in_proj_weight of nn.MultiheadAttention."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(16, 3))
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-4, qk_ratio=7)
    result = check_circuits(model, optimizer, torch.randn(2, 5, 16), lambda outputs: outputs.square().mean())
    assert result.ok and result.rows[0].promised == 7


def test_ratios_by_head_of_a_real_model():
    model = build("llama")
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-4, qk_ratio=[[1, 1, 5, 5], 1])
    rows = {row.circuit: row for row in check_circuits(model, optimizer, batch_of("llama")).rows}
    assert rows["qk x5"].ok and rows["qk x5"].parameters == (2 + 1) * 4 * 16
