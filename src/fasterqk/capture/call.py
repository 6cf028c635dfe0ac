"""A model called with inputs as users hand them in."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fasterqk.errors import InputError


def call(function: Callable[..., Any], inputs: Any) -> Any:
    """``function`` called with a mapping by keyword, a tuple by position, or one tensor.

    >>> call(max, (1, 2))
    2
    """
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, tuple):
        return function(*inputs)
    if hasattr(inputs, "keys"):
        return function(**{name: inputs[name] for name in inputs.keys()})  # noqa: SIM118 (BatchEncoding)
    raise InputError(f"inputs are a mapping, a tuple or a tensor, not {type(inputs).__name__}")
