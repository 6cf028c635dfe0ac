"""TransformerLens' bridge: labels are verified under the bridge's own parameter names, and training works.

It is built from small configurations; nothing is downloaded.
"""

from typing import Any

import pytest
import torch
from torch import nn

from fasterqk.labels import find_circuits
from fasterqk.optim import make_optimizer

pytest.importorskip("transformer_lens")

TOKENS = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(0))


def bridge(kind: str) -> nn.Module:
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any
    if kind == "GPT2LMHeadModel":
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=40, n_positions=16))
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=40))
    model.config.architectures = [kind]
    built: nn.Module = build_bridge_from_module(model, kind, hf_config=model.config)
    return built


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_the_bridge_is_labelled_under_its_own_names(kind: str) -> None:
    model = bridge(kind)
    circuits = find_circuits(model, verify=True)
    assert list(dict.fromkeys(piece.parameter for piece in circuits)) == [
        n for n, _ in model.named_parameters()
    ]
    found = {piece.parameter: piece.role for piece in circuits if piece.role != "rest"}
    letters = {name: name.rpartition("._original")[0].rpartition(".")[2][0] for name in found}
    assert found == letters and len(found) == (16 if kind == "GPT2LMHeadModel" else 8)
    assert {piece.layer for piece in circuits if piece.role == "q"} == {0, 1}


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_a_step_moves_queries_and_keys_faster(kind: str) -> None:
    model = bridge(kind)
    circuits = find_circuits(model)
    optimizer = make_optimizer(model, torch.optim.AdamW, lr=1e-3, qk_ratio=10, weight_decay=0.0)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    model(TOKENS).logsumexp(-1).mean().backward()
    optimizer.step()
    after = {name: value.detach() for name, value in model.named_parameters()}
    for piece in circuits:
        if piece.role != "rest" and after[piece.parameter].dim() > 1:
            moved = float((after[piece.parameter] - before[piece.parameter]).abs().max())
            assert moved == pytest.approx(1e-2 if piece.circuit == "qk" else 1e-3, rel=0.01)
