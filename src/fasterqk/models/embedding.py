"""Token embeddings of which only the rows that occur in training carry optimizer state.

A row whose token never occurs in training has no gradient: all an optimizer ever does to it is decay,
and that is the same factor for every such row. So one number, ``unseen_scale``, stands for all of them.
It belongs to the same parameter group as the table and its gradient is zero, so the optimizer itself
computes the factor: AdamW multiplies it by ``1 - lr * weight_decay`` a step, SGD runs its own linear
recursion, momentum included. Nothing is approximated.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Embedding(nn.Module):
    """A table of ``(token, width)`` rows, kept as the rows ``seen`` in training and the others.

    ``table`` holds the initial rows of all tokens. Without ``seen`` every row is trained, as in
    ``nn.Embedding``.

    >>> embedding = Embedding(torch.eye(4), seen=[0, 2])
    >>> embedding(torch.tensor([2, 3])).tolist()
    [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    """

    slot: Tensor
    unseen: Tensor

    def __init__(self, table: Tensor, seen: Sequence[int] | Tensor | None = None) -> None:
        super().__init__()
        chosen = torch.zeros(len(table), dtype=torch.bool)
        chosen[torch.as_tensor(range(len(table)) if seen is None else seen, dtype=torch.long)] = True
        order = torch.cat([chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0]])
        self.weight = nn.Parameter(table[chosen].clone())
        self.unseen_scale = nn.Parameter(table.new_ones(1)) if not chosen.all() else None
        self.register_buffer("unseen", table[~chosen].clone())
        self.register_buffer("slot", torch.argsort(order), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows of ``tokens``, shape ``tokens.shape + (width,)``."""
        slots = self.slot[tokens]
        trained = len(self.weight)
        if self.unseen_scale is None or int(slots.max()) < trained:
            return nn.functional.embedding(slots, self.weight)
        # Seen rows where there are any, then the few others in their places: the whole table would be
        # many times what a batch needs.
        others = slots >= trained
        rows = nn.functional.embedding(slots.where(~others, 0), self.weight)
        return rows.index_put((others,), self.unseen[slots[others] - trained] * self.unseen_scale)

    def full_table(self) -> Tensor:
        """The rows of all tokens in the order of their ids, ``(token, width)``."""
        return self(torch.arange(len(self.slot)))

    def zero_unseen_gradient(self) -> None:
        """Give ``unseen_scale`` a gradient of zero, without which an optimizer would pass it over."""
        if self.unseen_scale is not None:
            self.unseen_scale.grad = torch.zeros_like(self.unseen_scale)
