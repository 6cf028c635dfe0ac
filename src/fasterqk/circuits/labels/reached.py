"""What the gradients of queries, keys, contexts, probabilities and outputs reach, number by number."""

import torch
from torch import Tensor, nn

from fasterqk.circuits.labels.reading import CONTEXT, KEY, OUTPUT, QUERY, SCORE
from fasterqk.circuits.labels.signals import Signals


def reached(
    parameters: dict[str, nn.Parameter], blocks: list[list[Signals]], outputs: list[Tensor]
) -> dict[str, Tensor]:
    """What reached every number of every parameter.

    Where a block forms several softmaxes one after the other (all layers of a model in one module), the
    first that reaches a number decides: what reaches it from later ones came through the earlier.
    """
    generator = torch.Generator().manual_seed(1)
    codes = {name: torch.zeros(value.shape, dtype=torch.int8) for name, value in parameters.items()}
    projections: set[int] = set()
    for turn in range(max(map(len, blocks), default=0)):
        found = [signals[turn] for signals in blocks if turn < len(signals)]
        for name, code in _now(_sources(found), parameters, generator).items():
            if id(parameters[name]) not in projections:
                codes[name] = torch.where(codes[name] == 0, code, codes[name])
        projections |= {number for signals in found for number in signals.output_parameters}
    for name, code in _now({OUTPUT: outputs}, parameters, generator).items():
        codes[name] |= code
    return codes


def _sources(found: list[Signals]) -> dict[int, list[Tensor]]:
    return {
        QUERY: [tensor for signals in found for tensor in signals.queries],
        KEY: [tensor for signals in found for tensor in signals.keys],
        # Without known queries the probabilities were not cut out of the context.
        CONTEXT: [tensor for signals in found if signals.queries for tensor in signals.contexts],
        SCORE: [tensor for signals in found for tensor in (signals.probabilities, *signals.weights)],
    }


def _now(
    sources: dict[int, list[Tensor]], parameters: dict[str, nn.Parameter], generator: torch.Generator
) -> dict[str, Tensor]:
    codes: dict[str, Tensor] = {}
    for bit, tensors in sources.items():
        for name, gradient in _gradients(tensors, parameters, generator).items():
            own = (torch.nan_to_num(gradient) != 0).to("cpu", torch.int8) * bit
            codes[name] = codes[name] | own if name in codes else own
    return codes


def _gradients(
    tensors: list[Tensor], parameters: dict[str, nn.Parameter], generator: torch.Generator
) -> dict[str, Tensor]:
    total = None
    for tensor in tensors:
        if tensor.requires_grad:
            weights = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
            # Masked scores are -inf somewhere upstream; 0 * inf must not poison the sum.
            part = (torch.nan_to_num(tensor) * weights).sum()
            total = part if total is None else total + part
    if total is None or not parameters:
        return {}
    gradients = torch.autograd.grad(total, list(parameters.values()), retain_graph=True, allow_unused=True)
    return {
        name: gradient for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None
    }
