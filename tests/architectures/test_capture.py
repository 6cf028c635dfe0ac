"""Attention probabilities of every architecture, against what the models themselves return."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from fasterqk.trace import capture

from .other_models import OTHERS
from .text_models import TEXT
from .zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_every_layer_is_captured_and_the_model_left_alone(name: str) -> None:
    architecture = ZOO[name]
    model = architecture.build().train()
    before = state(model)
    captured = capture(model, architecture.inputs())
    assert Counter(captured.kinds) == architecture.kinds
    assert len(captured) == len(captured.names) == sum(architecture.kinds.values())
    for probabilities in captured:
        assert probabilities.dim() == 4 and not probabilities.requires_grad
        total = probabilities.sum(-1)
        # Sinks take a share that goes to no position.
        assert (total <= 1 + 1e-5).all()
        if name != "gpt_oss":
            torch.testing.assert_close(total, torch.ones_like(total))
    assert state(model) == before


@pytest.mark.parametrize("name", [one.name for one in [*TEXT, *OTHERS] if one.eager])
def test_captured_equals_eager(name: str) -> None:
    architecture = ZOO[name]
    model = architecture.build()
    captured = capture(model, architecture.inputs())
    # Not every model can change its implementation afterwards, so the reference is built anew.
    reference = type(model)._from_config(model.config, attn_implementation="eager").eval()
    reference.load_state_dict(model.state_dict())
    with torch.no_grad():
        outputs = reference(**architecture.inputs(), output_attentions=True)
    for kind, expected in eager_attentions(outputs).items():
        found = captured.select(kind)  # type: ignore[arg-type]
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "name", ["gpt2", "bloom", "t5", "encoder", "timm", "transformer-lens", "unregistered"]
)
def test_differentiable_probabilities_lead_to_the_outputs(name: str) -> None:
    architecture = ZOO[name]
    captured = capture(architecture.build(), architecture.inputs(), differentiable=True)
    loss = next(tensor for tensor in tensors(captured.outputs) if tensor.requires_grad).square().sum()
    gradients = torch.autograd.grad(loss, list(captured))
    assert all(bool((gradient != 0).any()) for gradient in gradients)


def eager_attentions(outputs: Any) -> dict[str, list[torch.Tensor]]:
    """The attentions a Hugging Face model returns, by kind."""
    if "text_model_output" in outputs:
        towers = (outputs.vision_model_output, outputs.text_model_output)
        return {"self": [tensor for tower in towers for tensor in tower.attentions]}
    if "cross_attentions" in outputs and outputs.cross_attentions:
        return {
            "encoder": list(outputs.encoder_attentions),
            "decoder": list(outputs.decoder_attentions),
            "cross": list(outputs.cross_attentions),
        }
    return {"self": list(outputs.attentions)}


def state(model: nn.Module) -> list[Any]:
    """Everything about a model that a capture could disturb."""
    found: list[Any] = []
    for module in model.modules():
        config = getattr(module, "config", None)
        found.append(
            (
                module.training,
                len(module._forward_hooks),
                len(module._forward_pre_hooks),
                sorted(module.__dict__),
                getattr(config, "_attn_implementation", None),
            )
        )
    return [*found, torch.backends.mha.get_fastpath_enabled()]


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in tensors(item)]
