"""Run only the first token through the end of an encoder that predicts from it.

After the last attention no module mixes tokens: output projection, norms and feed-forward layers act on each
token alone. A classifier that reads the first token therefore needs them for that token only, which saves
most of the last layer. The place to start is found by running the model: of the modules after the last
attention whose inputs can be cut to their first token without changing the logits, the one that saves most.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Shorter matrix products round differently: the largest accepted change, relative to the largest logit.
_ROUNDING = 1e-5
# Saving less than this share of the work is not worth a second way to predict.
_WORTH = 0.01


@contextmanager
def first_token_from(module: nn.Module | None) -> Iterator[None]:
    """Cut the inputs ``(batch, token, width)`` of ``module`` to their first token inside this context."""
    if module is None:
        yield
        return

    def cut(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        shortened = {name: _first(value) for name, value in keywords.items()}
        return tuple(_first(value) for value in arguments), shortened

    with module.register_forward_pre_hook(cut, with_kwargs=True):
        yield


def _first(value: Any) -> Any:
    return value[:, :1] if isinstance(value, Tensor) and value.dim() == 3 else value


def find_first_token_end(
    model: nn.Module, attention: Sequence[nn.Module], logits: Callable[[], Tensor], length: int
) -> nn.Module | None:
    """The module from which on the first token suffices; None if there is none or if it saves nothing.

    ``attention`` are the modules that form attention; ``logits()`` runs ``model`` on texts of ``length``
    tokens.
    """
    with torch.no_grad(), _watched(model) as plain:
        expected = logits()
    mixing = {id(module) for module in attention}
    ends = [place for place, (module, entered, _) in enumerate(plain) if not entered and id(module) in mixing]
    if not ends:
        return None
    calls = Counter(id(module) for module, entered, _ in plain if entered)
    best, least = None, (1 - _WORTH) * _work(plain)
    for place in range(ends[-1], len(plain)):
        module, entered, _ = plain[place]
        if not entered or calls[id(module)] > 1:
            continue
        if _work(plain[:place]) + _work(plain[place:]) / length >= least:
            break  # starting later saves even less
        try:
            with torch.no_grad(), _watched(model) as cut, first_token_from(module):
                shortened = logits()
        except Exception:  # a model may raise anything on inputs of another length
            continue
        change = (shortened - expected).abs().max() if shortened.shape == expected.shape else torch.inf
        if _work(cut) < least and change <= _ROUNDING * expected.abs().max():
            best, least = module, _work(cut)
    return best


# A module, whether it is entered (True) or left, and on leaving the number of products with its weights.
_Call = tuple[nn.Module, bool, int]


def _work(calls: list[_Call]) -> int:
    return sum(work for _, _, work in calls)


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[_Call]]:
    """Yield a list to which every call of a module of ``model`` is added."""
    calls: list[_Call] = []

    def enter(module: nn.Module, arguments: Any) -> None:
        calls.append((module, True, 0))

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        weights = sum(weight.numel() for weight in module.parameters(recurse=False) if weight.dim() == 2)
        weights = 0 if isinstance(module, nn.Embedding) else weights
        rows = (
            output.numel() // max(1, output.shape[-1]) if isinstance(output, Tensor) and output.dim() else 0
        )
        calls.append((module, False, weights * rows))

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(enter))
            hooks.enter_context(module.register_forward_hook(leave))
        yield calls
