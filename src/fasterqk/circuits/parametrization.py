"""A fused weight made of separate parameters that are joined at every forward pass (only on request).

The parts are real parameters of the module, which any optimizer and any tool sees; the price is one copy
of the weight at every forward pass and other keys in the state dict. ``torch.nn.utils.parametrize``
does the bookkeeping, and ``remove_parametrizations`` undoes it.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils import parametrize

from fasterqk.circuits.assign import Assigned, Run
from fasterqk.errors import InputError


class Joined(nn.Module):
    """Joins parts into the fused weight: run ``i`` along ``axis`` comes from part ``sources[i]``.

    A part may have several runs (the queries of all heads in an interleaved layout); they lie in it one
    after the other, as they would in a separate projection.
    """

    def __init__(self, axis: int, lengths: Sequence[int], sources: Sequence[int]) -> None:
        super().__init__()
        self.axis = axis
        self.lengths = list(lengths)
        self.sources = list(sources)

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        done = [0] * len(parts)
        pieces = []
        for length, source in zip(self.lengths, self.sources, strict=True):
            pieces.append(parts[source].narrow(self.axis, done[source], length))
            done[source] += length
        return torch.cat(pieces, self.axis)

    def right_inverse(self, fused: torch.Tensor) -> list[torch.Tensor]:
        parts: list[list[torch.Tensor]] = [[] for _ in set(self.sources)]
        for run, source in zip(fused.split(self.lengths, self.axis), self.sources, strict=True):
            parts[source].append(run)
        return [torch.cat(part, self.axis) for part in parts]


def parametrize_split(model: nn.Module, assigned: Assigned) -> list[tuple[Run, nn.Parameter, str]]:
    """Replace one fused parameter by its parts; returns (run, part, name of the part) of each."""
    homes = [
        (prefix, module, attribute)
        for prefix, module in model.named_modules()
        for attribute, parameter in module._parameters.items()
        if parameter is assigned.parameter
    ]
    if len(homes) != 1 or isinstance(homes[0][1], parametrize.ParametrizationList):
        raise InputError(
            f"{assigned.name} is tied or parametrized already: use mechanism='auto', which leaves it as it is"
        )
    prefix, module, attribute = homes[0]
    units = assigned.units()
    sources = [next(i for i, unit in enumerate(units) if run in unit) for run in assigned.runs]
    axis = assigned.runs[0].axis or 0
    joined = Joined(axis, [run.stop - run.start for run in assigned.runs], sources)
    parametrize.register_parametrization(module, attribute, joined)
    parts = module.parametrizations[attribute]
    base = f"{prefix}." if prefix else ""
    return [
        (unit[0], getattr(parts, f"original{i}"), f"{base}parametrizations.{attribute}.original{i}")
        for i, unit in enumerate(units)
    ]
