"""Greedy decoding in batches, each token at the cost of one row."""

import torch
from torch import Tensor

from fasterqk.models.cache import Cache
from fasterqk.models.generator import GPTAnswerGenerator


@torch.no_grad()
def greedy(
    model: GPTAnswerGenerator, tokens: Tensor, lengths: Tensor, *, end: int, limit: int
) -> list[list[int]]:
    """What the model writes after prompts of ``lengths`` in ``tokens`` (batch, token), padded on the right.

    Each answer ends with ``end``, unless it has ``limit`` tokens before, or fills the model's context.
    """
    context = model.config.context
    cache = Cache(min(context, int(lengths.max()) + limit))
    device = model.head_bias.device
    logits = model.read(tokens[:, : int(lengths.max())].to(device), lengths.to(device), cache)
    written: list[list[int]] = [[] for _ in lengths]
    going = torch.arange(len(lengths))
    position = lengths.clone()
    for _ in range(limit):
        token = logits.argmax(1).cpu()
        for instance, each in zip(going.tolist(), token.tolist(), strict=True):
            written[instance].append(each)
        stays = (token != end) & (position < context)
        if not stays.all():
            going, token, position = going[stays], token[stays], position[stays]
            cache.keep(stays.to(device))
        if not len(going):
            break
        logits = model.extend(token.to(device), position.to(device), cache)
        position = position + 1
    return written
