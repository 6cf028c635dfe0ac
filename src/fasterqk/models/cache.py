"""Keys and values of what a model has read, so that the next token costs one row and not the whole text."""

import torch
from torch import Tensor, nn


class Cache:
    """What every attention layer remembers of a batch of texts of different lengths.

    Texts stand on the left, each new token goes to the place its own text has reached: what lies between is
    overwritten later and never seen before. ``room`` is the longest text there will be.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._stored: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def extend(
        self, layer: nn.Module, key: Tensor, value: Tensor, position: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values ``(batch, head, token, width)`` of ``layer``; returns all that rows may need.

        Without ``position`` they are the first ones, from place 0 on, and are all there is; else those
        of one token at ``position`` (batch, 1).
        """
        if position is None:
            wider = (0, 0, 0, self.room - key.shape[2])
            self._stored[layer] = (nn.functional.pad(key, wider), nn.functional.pad(value, wider))
            return key, value
        keys, values = self._stored[layer]
        instance = torch.arange(len(key), device=key.device)
        keys[instance, :, position[:, 0]] = key[:, :, 0]
        values[instance, :, position[:, 0]] = value[:, :, 0]
        return keys, values

    def keep(self, chosen: Tensor) -> None:
        """Forget all texts but the ``chosen`` ones."""
        self._stored = {
            layer: (keys[chosen], values[chosen]) for layer, (keys, values) in self._stored.items()
        }
