"""A check of labels that shares nothing with the library's probe: the attention a model returns itself.

A Hugging Face model run with ``output_attentions=True`` returns its probabilities, layer after layer. What
shapes the probabilities of a layer is in its QK circuit or before it; what is in its OV circuit shows no
earlier than in the next layer. So in every attention block the rows labelled q and k are reached from the
first probabilities that reach the block at all, and the rows labelled v and o are not.
"""

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.circuits import Circuits, Slice

_NEVER = 10**6


def contradictions(model: nn.Module, circuits: Circuits, inputs: dict[str, Any]) -> list[str] | None:
    """What of ``circuits`` the returned attention contradicts; None where the model returns none."""
    with torch.enable_grad():
        outputs = model(**inputs, output_attentions=True)
    first: dict[str, Tensor] = {}
    parameters = {
        name: value.requires_grad_() for name, value in model.named_parameters() if value.is_floating_point()
    }
    returned = _in_order(outputs)
    if not returned or not all(probabilities.requires_grad for probabilities in returned):
        return None
    for number, probabilities in enumerate(returned):
        for name, gradient in _reached(probabilities, parameters).items():
            own = first.setdefault(name, torch.full(gradient.shape, _NEVER))
            first[name] = torch.where((own == _NEVER) & (gradient != 0), number, own)
    blocks: dict[str, list[tuple[Slice, Tensor]]] = {}
    for piece in circuits:
        if piece.circuit != "rest" and piece.parameter in first:
            seen = first[piece.parameter]
            if piece.axis is not None:
                seen = seen.narrow(piece.axis, piece.start or 0, (piece.stop or 0) - (piece.start or 0))
            blocks.setdefault(_block(piece.parameter), []).append((piece, seen))
    return [line for pieces in blocks.values() for line in _contradicted(pieces)]


def _contradicted(pieces: list[tuple[Slice, Tensor]]) -> list[str]:
    # What serves the whole model, and biases of keys (the softmax forgets them), say nothing.
    telling = [(piece, seen) for piece, seen in pieces if seen.dim() > 1]
    start = min((int(seen.min()) for piece, seen in telling if piece.circuit in ("qk", "shared")), default=_NEVER)
    if start == _NEVER:
        return []
    lines = []
    for piece, seen in telling:
        place = f"{piece.parameter}[{piece.start}:{piece.stop}]"
        share = float((seen == start).float().mean())
        if piece.circuit == "ov" and share > 0:
            lines.append(f"{place} is labelled {piece.role}, and {share:.0%} of it shapes the probabilities")
        if piece.circuit == "qk" and share == 0:
            lines.append(f"{place} is labelled {piece.role}, and does not shape the probabilities")
    return lines


def _reached(probabilities: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    weights = torch.randn(probabilities.shape, generator=torch.Generator().manual_seed(2))
    total = (torch.nan_to_num(probabilities) * weights).sum()
    found = torch.autograd.grad(total, list(parameters.values()), retain_graph=True, allow_unused=True)
    return {
        name: torch.nan_to_num(gradient)
        for name, gradient in zip(parameters, found, strict=True)
        if gradient is not None
    }


def _block(name: str) -> str:
    """Everything up to the part that is called attention: ``layers.0.self_attn``."""
    parts = name.split(".")
    called = [i for i, part in enumerate(parts) if "att" in part.lower()]
    return ".".join(parts[: called[0] + 1] if called else parts[:-2])


def _in_order(outputs: Any) -> list[Tensor]:
    """All probabilities in the order they were formed: in a decoder layer self-attention comes first."""
    encoder, alone, decoder, cross = (
        _tensors(getattr(outputs, field, None))
        for field in ("encoder_attentions", "attentions", "decoder_attentions", "cross_attentions")
    )
    turns = zip_longest(decoder or alone, cross)
    return encoder + [tensor for turn in turns for tensor in turn if tensor is not None]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, tuple | list) else []
