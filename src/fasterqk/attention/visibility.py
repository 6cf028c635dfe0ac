"""What each row of attention may see, uniform attention over it, and whether a row is a distribution."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fasterqk.errors import InputError

HALF = (torch.float16, torch.bfloat16)
_WINDOW_EVIDENCE = 16


@dataclass(frozen=True)
class Pattern:
    """Which keys a query may see: only those before it (``causal``), only within a ``window``, or all.

    A window of w hides keys that are w or more tokens away.
    """

    causal: bool
    window: int | None = None

    def pairs(self, real: Tensor) -> Tensor:
        """What each row may see, ``(batch, query, key)``, from a mask of real tokens ``(batch, token)``."""
        pairs = allowed_pairs(real, self.causal)
        return pairs if self.window is None else pairs & (_ahead(real).abs() < self.window)

    def row(self, real: Tensor, read: Tensor) -> Tensor:
        """What the rows at positions ``read`` ``(batch,)`` may see, ``(batch, 1, key)``."""
        ahead = _ahead_of(real, read)
        seen = real.bool() & (ahead <= 0 if self.causal else True)
        return (seen if self.window is None else seen & (ahead.abs() < self.window)).unsqueeze(1)


def allowed_pairs(real: Tensor, causal: bool) -> Tensor:
    """Which key each query may see, ``(batch, query, key)``, from a mask of real tokens ``(batch, token)``.

    Padding is neither seen nor sees.
    """
    real = real.bool()
    pairs = real.unsqueeze(1) & real.unsqueeze(2)
    return pairs.tril() if causal else pairs


def find_pattern(layer: Tensor, real: Tensor, read: Tensor) -> Pattern:
    """The pattern of one layer, read off the weights it gives: no architecture needs to be known.

    ``layer`` is ``(batch, head, query, key)``, or has the one query at position ``read`` ``(batch,)``.
    """
    if layer.shape[2] == 1:
        pairs, ahead = Pattern(causal=False).row(real, read), _ahead_of(real, read).unsqueeze(1)
    else:
        pairs, ahead = allowed_pairs(real, causal=False), _ahead(real).expand(len(real), -1, -1)
    weighted = pairs & (layer > 0).any(1)
    causal = not bool((ahead[weighted] > 0).any())
    if not bool(weighted.any()):
        return Pattern(causal)
    window = int(ahead[weighted].abs().max()) + 1
    beyond = pairs & (ahead.abs() >= window) & (ahead <= 0 if causal else True)
    # Sharp attention underflows to zero on single pairs; a window leaves whole corners empty.
    return Pattern(causal, window if int(beyond.sum()) >= _WINDOW_EVIDENCE else None)


def _ahead(real: Tensor) -> Tensor:
    """How far each key is behind (negative) or ahead of each query, ``(query, key)``."""
    position = torch.arange(real.shape[1], device=real.device)
    return position.unsqueeze(0) - position.unsqueeze(1)


def _ahead_of(real: Tensor, read: Tensor) -> Tensor:
    """How far each key is behind (negative) or ahead of the read position, ``(batch, key)``."""
    return torch.arange(real.shape[1], device=real.device) - read.unsqueeze(1)


def read_rows(layer: Tensor, read: Tensor) -> Tensor:
    """The rows ``(batch, head, key)`` of ``layer`` at the read positions ``(batch,)``.

    A model that computes nothing else in its last layer may give that one row, ``(batch, head, 1, key)``.
    """
    if layer.shape[2] == 1:
        return layer[:, :, 0]
    if layer.shape[2] != layer.shape[3]:
        raise InputError(f"attention of shape {tuple(layer.shape)} is not (batch, head, token, token)")
    return layer[torch.arange(len(read), device=layer.device), :, read]


def in_full_precision(values: Tensor) -> Tensor:
    """Half precision as single; everything else as it is."""
    return values.float() if values.dtype in HALF else values


def uniform_attention(allowed: Tensor) -> Tensor:
    """Attention that spreads evenly over what each row may see, ``(batch, 1, query, key)``.

    Rows that may see nothing (padding) are zero.
    """
    weights = allowed.float()
    return (weights / weights.sum(-1, keepdim=True).clamp_min(1)).unsqueeze(1)


def check_rows(rows: Tensor, allowed: Tensor, name: str, tolerance: float = 1e-3) -> None:
    """Raise unless every row that may see something is finite and sums to one over what it may see.

    ``rows`` and ``allowed`` are ``(batch, query, key)``; ``name`` says which layer it is.
    """
    used = allowed.any(-1)
    total = torch.where(allowed, rows, 0).sum(-1)
    if not bool(torch.isfinite(total[used]).all()):
        where = _where(used & ~torch.isfinite(total))
        raise InputError(f"attention of {name} is not a number at {where}; was the model trained to nan?")
    wrong = used & ((total - 1).abs() > tolerance)
    if bool(wrong.any()):
        worst = float(total[wrong][0])
        raise InputError(
            f"attention of {name} sums to {worst:.4g} over what it may see, not to 1, at {_where(wrong)};"
            " give softmax probabilities and a mask that fits them"
        )


def _where(wrong: Tensor) -> str:
    instance, query = wrong.nonzero()[0].tolist()
    return f"instance {instance}, row {query} of its batch"
