"""A check of labels that shares nothing with the library's probe: the attention a model returns itself.

A Hugging Face model run with ``output_attentions=True`` returns the probabilities of its layers. What is in
the QK circuit of a layer shapes the probabilities of that layer and of later ones; what is in its OV circuit
shapes those of later layers only. So in every attention block the rows labelled q and k reach the same
probabilities, and the rows labelled v and o reach fewer.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.labels import Circuits, Slice

_FIELDS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
_BITS = 60
_NOTHING = torch.zeros(0, dtype=torch.long)


def contradictions(model: nn.Module, circuits: Circuits, inputs: dict[str, Any]) -> list[str] | None:
    """What of ``circuits`` the returned attention contradicts; None where the model returns none."""
    with torch.enable_grad():
        outputs = model(**inputs, output_attentions=True)
    returned = [tensor for field in _FIELDS for tensor in _probabilities(getattr(outputs, field, None))]
    parameters = {
        name: value.requires_grad_() for name, value in model.named_parameters() if value.is_floating_point()
    }
    if not returned:
        return None
    shaped = {name: torch.zeros(value.shape, dtype=torch.long) for name, value in parameters.items()}
    for number, probabilities in enumerate(returned[:_BITS]):
        for name, gradient in _reached(probabilities, parameters).items():
            shaped[name] |= (gradient != 0).long() << number
    blocks: dict[str, list[tuple[Slice, Tensor]]] = {}
    for piece in circuits:
        whole = shaped.get(piece.parameter)
        if piece.circuit != "rest" and whole is not None and whole.dim() > 1:
            # One dimension: biases, of which the softmax forgets those of the keys.
            blocks.setdefault(_block(piece.parameter), []).append((piece, _rows(whole, piece)))
    return [line for pieces in blocks.values() for line in _contradicted(pieces)]


def _contradicted(pieces: list[tuple[Slice, Tensor]]) -> list[str]:
    looking = torch.cat([rows for piece, rows in pieces if piece.circuit in ("qk", "shared")] or [_NOTHING])
    saying = torch.cat([rows for piece, rows in pieces if piece.circuit == "ov"] or [_NOTHING])
    most = int(_union(looking[None])) if len(looking) else 0
    if bool(((looking == most) | (looking == 0)).all()) and bool((saying == most).all()):
        return []  # the probabilities of this block are not among those returned
    lines = []
    for piece, rows in pieces:
        # Rows that shape nothing were not used: an embedding of segments, say.
        wrong = (rows != most) & (rows != 0) if piece.circuit == "qk" else rows == most
        if piece.circuit in ("qk", "ov") and bool(wrong.any()):
            place = f"{piece.parameter}[{piece.start}:{piece.stop}]"
            lines.append(f"{int(wrong.sum())} rows of {place}, labelled {piece.role}, speak against it")
    return lines


def _rows(shaped: Tensor, piece: Slice) -> Tensor:
    """Of every row of a slice (of a whole parameter: all of it), which probabilities it shapes."""
    if piece.axis is None:
        return _union(shaped.reshape(1, -1))
    part = shaped.narrow(piece.axis, piece.start or 0, (piece.stop or 0) - (piece.start or 0))
    return _union(part.movedim(piece.axis, 0).flatten(1))


def _union(numbers: Tensor) -> Tensor:
    """Of every row the bits that any of its numbers has."""
    found = torch.zeros(len(numbers), dtype=torch.long)
    for bit in range(int(numbers.max()).bit_length()):
        found |= ((numbers >> bit) & 1).amax(1) << bit
    return found


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
    """Everything up to the part of a layer that is called attention: ``layers.0.self_attn``."""
    parts = name.split(".")
    layer = max((i for i, part in enumerate(parts) if part.isdigit() or part == "*"), default=-1)
    called = [i for i, part in enumerate(parts) if i > layer and "att" in part.lower()]
    return ".".join(parts[: called[0] + 1] if called else parts[:-2])


def _probabilities(value: Any) -> list[Tensor]:
    """Distributions over the last axis; some models return something else under this name."""
    if isinstance(value, Tensor):
        sums = value.sum(-1) if value.is_floating_point() and value.requires_grad else torch.zeros(1)
        return [value] if bool(((sums - 1).abs() < 1e-3).any()) else []
    items = value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in _probabilities(item)]
