"""Tiny inputs that make a model run: guessed from its signature and configuration, or handed in."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fasterqk.capture.call import call
from fasterqk.capture.huggingface import attention_implementation
from fasterqk.circuits.labels.huggingface_inputs import LENGTH, huggingface_inputs
from fasterqk.errors import InputError


def runner(inputs: Any) -> Callable[[nn.Module], Any]:
    """A function that runs a model on the user's ``inputs``, as ``capture`` does, and tells if it cannot."""

    def run(model: nn.Module) -> Any:
        try:
            with attention_implementation(model, "eager"):
                return call(model, inputs)
        except InputError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise InputError(
                f"{type(model).__name__} does not run on the inputs given for the probe: {reason}"
            ) from error

    return run


def guesses(model: nn.Module) -> Iterator[dict[str, Any] | tuple[Any, ...]]:
    """Inputs worth trying on ``model``, the likeliest first."""
    config = getattr(model, "config", None)
    if hasattr(model, "main_input_name") and config is not None:
        yield from huggingface_inputs(model, config)
    else:
        yield from _for_module(model)


def run_guessed(model: nn.Module) -> list[str]:
    """Run ``model`` on the first inputs it accepts, then parts of it that did not take part.

    Returns the paths of what ran ("" is the model itself); the caller listens to what happens inside.
    Raises ``RuntimeError`` where nothing would run.
    """
    ran: list[str] = []
    failures: list[str] = []
    entered: set[int] = set()
    handles = [
        module.register_forward_pre_hook(lambda own, _: entered.add(id(own))) for module in model.modules()
    ]
    try:
        for path, part in model.named_modules():
            whole = path == "" or hasattr(part, "main_input_name")
            if whole and id(part) not in entered and _try(part, entered, failures):
                ran.append(path)
    finally:
        for handle in handles:
            handle.remove()
    if not ran:
        raise RuntimeError("; ".join(["no inputs could be guessed that run it", *failures[:1]]))
    return ran


def _try(model: nn.Module, entered: set[int], failures: list[str]) -> bool:
    for inputs in guesses(model):
        before = set(entered)
        try:
            with attention_implementation(model, "eager"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about inputs the user never wrote
                call(model, inputs)
        except Exception as error:
            # Wrong guess; what ran inside counts as not run.
            failures.append(f"{type(error).__name__}: {error}")
            entered.clear()
            entered.update(before)
        else:
            return True
    return False


def _for_module(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """For modules of unknown make: token numbers, hidden states, pictures, by what it begins with."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(model, nn.MultiheadAttention):
        sizes = (model.embed_dim, model.kdim, model.vdim)
        yield tuple(torch.randn(LENGTH, 1, size, generator=generator) for size in sizes)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            tokens = torch.randint(0, module.num_embeddings, (1, LENGTH), generator=generator)
            yield (tokens,)
            yield (tokens, tokens)
            break
    widths = dict.fromkeys(_widths(model))
    for width in list(widths)[:3]:
        states = torch.randn(1, LENGTH, width, generator=generator)
        yield (states,)
        yield (states, states)
        yield (states, states, states)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            for size in (224, 32, 64, 28, 16):
                yield (torch.randn(1, module.in_channels, size, size, generator=generator),)
            break


def _widths(model: nn.Module) -> Iterator[int]:
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            yield module.embed_dim
        elif isinstance(module, nn.Linear):
            yield module.in_features
        elif isinstance(module, nn.LayerNorm):
            yield module.normalized_shape[-1]
