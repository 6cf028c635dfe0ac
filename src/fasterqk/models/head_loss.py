"""Cross-entropy of a large vocabulary in one piece: logits, loss and gradients without spare passes.

Logits over tens of thousands of tokens are the largest tensor of a training step, and every pass over them
is a trip through memory. Their gradient is softmax minus target: the softmax is formed in their own place,
and what can be said without them (the target, its smoothing, the division by sums) is said on the rows and
on the weight, which are small.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


def head_loss(rows: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean of ``cross_entropy(linear(rows, weight, bias), labels, label_smoothing=smoothing)``.

    ``rows`` is ``(row, width)``, ``weight`` ``(token, width)``, ``labels`` ``(row,)``. The gradients are
    worked out together with the loss, so it can be differentiated once.

    >>> rows, weight = torch.ones(2, 3), torch.zeros(4, 3)
    >>> round(float(head_loss(rows, weight, torch.zeros(4), torch.tensor([0, 1]))), 4)     # log 4
    1.3863
    """
    with torch.autocast(rows.device.type, enabled=False):  # few rows, many terms: in full precision
        loss: Tensor = _HeadLoss.apply(rows.to(weight.dtype), weight, bias, labels, smoothing)
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, smoothing: float
    ) -> Tensor:
        logits = linear(rows, weight, bias)
        chosen = logits.gather(1, labels[:, None])[:, 0]
        highest = logits.amax(1)
        share = logits.sub_(highest[:, None]).exp_()  # softmax, but for the division by its sum
        total = share.sum(1)
        # The mean logit of a row, which smoothing asks for.
        middle = rows @ weight.mean(0) + bias.mean() if smoothing else 0.0
        loss = highest + total.log() - (1 - smoothing) * chosen - smoothing * middle
        if any(ctx.needs_input_grad):
            scale = 1 / (len(labels) * total)
            ctx.gradients = _gradients(rows, weight, labels, smoothing, share, scale)
        return loss.mean()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (scale,) = upstream
        # Handed over, not kept: whoever adds the gradient of the embedding can then do it in place.
        gradients, ctx.gradients = ctx.gradients, None
        if scale != 1:  # a pass over the weight that is mostly spared
            gradients = tuple(scale * gradient for gradient in gradients)
        return (*gradients, None, None)


def _gradients(
    rows: Tensor, weight: Tensor, labels: Tensor, smoothing: float, share: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of rows, weight and bias; ``scale`` (row,) turns ``share`` into softmax over count."""
    count, tokens = share.shape
    hit, every = (1 - smoothing) / count, smoothing / (count * tokens)
    of_weight = share.T @ (rows * scale[:, None])
    of_weight.index_add_(0, labels, rows, alpha=-hit)
    of_bias = share.T @ scale
    of_bias.index_add_(0, labels, of_bias.new_ones(count), alpha=-hit)
    of_rows = (share @ weight) * scale[:, None] - hit * weight[labels]
    if smoothing:
        of_weight -= every * rows.sum(0)
        of_bias -= every * count
        of_rows -= every * weight.sum(0)
    return of_rows, of_weight, of_bias
