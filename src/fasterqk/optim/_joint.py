"""Two optimizers as one: Muon on the matrices, AdamW on the rest, with one step, one state and one schedule.

``make_optimizer(..., others=(AdamW, {"lr": 3e-4}))`` trains hidden matrices with its own optimizer class and
all other parameters with the one in ``others``. Frameworks expect a single optimizer, so ``JointOptimizer``
holds both: its parameter groups and states *are* theirs.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fasterqk.errors import InputError
from fasterqk.optim._groups import tables
from fasterqk.optim._request import OwnGroup


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers that step, save and resume as one.

    >>> matrix, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    >>> joint = JointOptimizer([torch.optim.SGD([matrix], lr=1.0), torch.optim.AdamW([bias], lr=0.1)])
    >>> (matrix.sum() + bias.sum()).backward()
    >>> joint.step()
    >>> matrix[0, 0].item(), round(bias[0].item(), 3), [group["lr"] for group in joint.param_groups]
    (0.0, 0.899, [1.0, 0.1])
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self._sizes = [len(optimizer.param_groups) for optimizer in self.optimizers]
        self._closed = False
        # Torch keeps the dictionaries it is given, so these groups are the optimizers' own.
        super().__init__([group for optimizer in self.optimizers for group in optimizer.param_groups], {})
        self._closed = True
        self.defaults = {
            key: value for optimizer in self.optimizers for key, value in optimizer.defaults.items()
        }
        self._share()

    def _share(self) -> None:
        """Let the optimizers use the groups and states of this one."""
        first = 0
        for optimizer, size in zip(self.optimizers, self._sizes, strict=True):
            optimizer.param_groups = self.param_groups[first : first + size]
            optimizer.state = self.state
            first += size

    def step(self, closure: Any = None) -> Any:
        """Step every optimizer; a closure is evaluated once, before the first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state that ``state_dict()`` returned."""
        super().load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse the group, because it is not clear which optimizer it belongs to."""
        if self._closed:
            raise InputError(
                "a group cannot be added to two optimizers in one: make it while every parameter is "
                "trainable, and freeze afterwards"
            )
        super().add_param_group(param_group)


# Output heads, which like embeddings are usually not trained with Muon.
_HEAD = re.compile(r"(^|\.)(lm_head|head|heads|classifier|score|unembed|embed_out|output_projection)(\.|$)")


def hidden_matrices(model: nn.Module) -> set[int]:
    """The ids of the weights that Muon trains: matrices except embedding tables and the output head."""
    kept_out = tables(model)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    if isinstance(head, nn.Module):
        head_ids = {id(parameter) for parameter in head.parameters()}
        kept_out |= {name for name, parameter in model.named_parameters() if id(parameter) in head_ids}
    return {
        id(parameter)
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and name not in kept_out and not _HEAD.search(name)
    }


def two_groups(model: nn.Module, chosen: set[int], others: Any) -> list[OwnGroup]:
    """The groups of both optimizers: the ``chosen`` parameters, and the rest with the rate in ``others``."""
    form = "others= looks like (torch.optim.AdamW, {'lr': 3e-4, 'weight_decay': 0.01})"
    if not isinstance(others, tuple) or len(others) != 2 or not callable(others[0]):
        raise InputError(f"{form}, not {others!r}")
    if not isinstance(others[1], dict) or "lr" not in others[1]:
        raise InputError(f"{form}; give it a rate of its own, not {others[1]!r}")
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    mine, theirs = trained & chosen, trained - chosen
    if not mine or not theirs:
        which = "matrices for the first" if not mine else "parameters for the other"
        raise InputError(
            f"others= needs two kinds of parameters, but there are no {which}; choose with only="
        )
    return [
        OwnGroup({"name": "matrices"}, frozenset(mine)),
        OwnGroup({"name": "others", "lr": others[1]["lr"]}, frozenset(theirs), others[1].get("weight_decay")),
    ]
