"""Check a model before it is measured: do its passes agree, and is attention all that mixes its tokens?

Wrong scores rarely come from arithmetic. They come from which position is read, which kernel answers, and
which layers are seen. Every measurement therefore begins with a few passes over its shortest and its longest
text. What cannot be right is an error; what a reader has to know becomes a note in the header of the results.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fasterqk.attention.aggregation import HALF
from fasterqk.attention.instances import Instance, collate
from fasterqk.errors import InputError

if TYPE_CHECKING:
    from fasterqk.attention.models import Measurable

# The largest difference of probabilities that rounding explains: in single, and in half precision.
_ROUNDING, _HALF_ROUNDING = 1e-4, 0.1
# Names of modules that a note lists.
_SHOWN = 3


def self_check(model: "Measurable", instances: Sequence[Instance]) -> tuple[list[str], bool]:
    """Compare the passes of ``model`` on its shortest and longest text.

    Models without a method ``check``, which implement the protocol themselves, are taken as they are.

    Returns:
        Notes for the reader, and whether texts can share a batch. They cannot if padding changes the answer,
        as with ConvBERT, whose convolutions reach into it.

    Raises:
        InputError: Two predictions of the same texts differ, or the model run by itself predicts something
            else, or the prediction is read somewhere else than the adapter says.
    """
    if not hasattr(model, "check"):
        return [], True
    by_length = sorted(instances, key=lambda instance: len(instance.tokens))
    batch = collate(by_length[:1] if len(instances) == 1 else [by_length[0], by_length[-1]])
    module = getattr(model, "model", None)
    half = isinstance(module, nn.Module) and any(weight.dtype in HALF for weight in module.parameters())
    rounding = _HALF_ROUNDING if half else _ROUNDING
    predicted = model.predict(batch)
    if (change := _largest(predicted, model.predict(batch))) > rounding:
        raise InputError(
            f"the same texts predicted twice differ by {change:.2g} in probability; switch off what is random"
            " in the model (dropout, sampling)"
        )
    notes: list[str] = model.check(batch)
    batched = True
    if hasattr(model, "plain"):
        plain = model.plain(batch)
        batched = _largest(predicted, plain) <= rounding
        if not batched:
            notes.append("padding changes what the model predicts: every text is run by itself")
            batch, plain = batch.rows(slice(0, 1)), plain[:1]
            predicted = model.predict(batch)
        if (change := _largest(predicted, plain)) > rounding:
            raise InputError(f"the model by itself predicts other probabilities, by up to {change:.2g}")
    reading = model.read(batch, read_only=True)
    if (change := _largest(predicted, reading.answer.outcomes)) > rounding:
        if hasattr(model, "answers_plainly"):
            model.answers_plainly = True
        notes.append(
            f"the kernel that shows attention changes probabilities by up to {change:.2g}; predictions are"
            " those of the model's own kernel, attention is not"
        )
    return notes, batched


def _largest(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    if first.shape != second.shape or not (np.isfinite(first).any() and np.isfinite(second).any()):
        return 0.0  # `measure` names what is wrong with them
    return float(np.nan_to_num(np.abs(first - second), nan=np.inf).max())


def mixing_note(model: nn.Module, attention: Sequence[str], run: Callable[[], Any]) -> list[str]:
    """A note on the modules beside ``attention`` through which tokens reach other tokens; empty without any.

    State spaces, linear attention and convolutions mix tokens without attention probabilities. They are found
    by running every module that contains no attention once more with another first token: if its output at
    other tokens changes, it mixes them.
    """
    mixing = _mixing_modules(model, attention, run)
    if not mixing:
        return []
    kinds = ", ".join(sorted({type(model.get_submodule(name)).__name__ for name in mixing}))
    names = ", ".join(mixing[:_SHOWN]) + (", ..." if len(mixing) > _SHOWN else "")
    return [
        f"tokens also reach each other without attention, through {kinds} ({names}); attention, which"
        f" {len(set(attention))} modules form, shows only a part of what the model reads"
    ]


def _mixing_modules(model: nn.Module, attention: Sequence[str], run: Callable[[], Any]) -> list[str]:
    above = {""}
    for name in attention:
        parts = name.split(".")
        above |= {".".join(parts[:depth]) for depth in range(1, len(parts))}
    outside = {
        name: module
        for name, module in model.named_modules()
        if name not in above and name not in attention and name.rpartition(".")[0] in above
    }
    mixing: list[str] = []

    def again(name: str) -> Callable[..., None]:
        def hook(
            module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any
        ) -> None:
            if name not in mixing and _mixes(module, arguments, keywords, output):
                mixing.append(name)

        return hook

    with ExitStack() as hooks, torch.no_grad():
        for name, module in outside.items():
            hooks.enter_context(module.register_forward_hook(again(name), with_kwargs=True))
        run()
    return mixing


def _mixes(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> bool:
    """Whether the output of ``module`` ``(batch, token, width)`` depends on another token than its own."""
    values = [*arguments, *keywords.values()]
    states = next(
        (x for x in values if isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point()), None
    )
    if states is None or states.is_nested or states.shape[1] < 2:  # nested: no padding
        return False
    other = states.clone()
    other[:, 0] = other[:, 0].flip(-1) + 1

    def outputs(replaced: Tensor) -> Any:
        def swapped(value: Any) -> Any:
            return replaced if value is states else value

        return module.forward(*map(swapped, arguments), **{k: swapped(v) for k, v in keywords.items()})

    try:
        before, after = (_states(outputs(x)) for x in (states, other))
    except Exception:  # a module may refuse to run out of its context
        return False
    if before is None or after is None or before.shape[:2] != states.shape[:2]:
        return False
    change = (after[:, 1:] - before[:, 1:]).abs().max()
    return bool(change > 1e-3 * before.abs().max())


def _states(output: Any) -> Tensor | None:
    first = output[0] if isinstance(output, tuple | list) and output else output
    real = isinstance(first, Tensor) and first.dim() == 3 and first.is_floating_point()
    return first.detach().float() if real else None
