"""The four parameterizations, and how each circuit starts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fasterqk.errors import InputError

# Factorized (F) or collapsed (C) attention (A), then output-value (O).
PARAMETERIZATIONS = ("FAFO", "FACO", "CAFO", "CACO")
CIRCUITS = {
    "key": "qk",
    "query": "qk",
    "query_key": "qk",
    "value": "ov",
    "output": "ov",
    "output_value": "ov",
}
INIT_KINDS = ("gaussian", "identity", "linear")


def factorized_attention(parameterization: str) -> bool:
    """Whether the query-key circuit is a product of two matrices."""
    return _checked(parameterization).startswith("FA")


def factorized_output(parameterization: str) -> bool:
    """Whether the output-value circuit is a product of two matrices."""
    return _checked(parameterization).endswith("FO")


@dataclass(frozen=True)
class Init:
    """How one circuit starts.

    - ``gaussian``: the circuit is one matrix drawn N(0, scale^2); a factorized circuit starts as its
      balanced singular-value factors, so that it starts as the same function;
    - ``identity``: each matrix of the circuit is scale times the identity (released: 1e-6);
    - ``linear``: each matrix is drawn as ``torch.nn.Linear`` does, U(-1/sqrt(d), 1/sqrt(d)); no scale.
    """

    kind: str = "gaussian"
    scale: float = 1e-3

    def __post_init__(self) -> None:
        if self.kind not in INIT_KINDS:
            raise InputError(f"unknown init {self.kind!r}; choose from {', '.join(INIT_KINDS)}")
        if not self.scale > 0:
            raise InputError(f"init scale {self.scale} is not above 0")


def initial_matrices(
    parameterization: str, size: int, qk: Init, ov: Init, seed: int, outputs: Sequence[int] | None = None
) -> dict[str, np.ndarray]:
    """The starting matrices, float64 (size, size), by the names of the plain model's layers.

    They act on column vectors, as linear layers do: W_QK = query^T key, W_OV = output value. With
    ``outputs`` a Gaussian W_OV has rows for those tokens only, so that its factors stay balanced.
    """
    generator = np.random.default_rng([seed, 0])
    # Drawn for each circuit in turn, so that all four parameterizations start from the same numbers.
    wholes = [generator.standard_normal((size, size)) for _ in range(2)]
    if outputs is not None:
        wholes[1][[token for token in range(size) if token not in outputs]] = 0.0
    names = layer_names(parameterization)
    # The layers of the released models draw in this order, also where the draw is then overwritten.
    draws = linear_draws(size, len(names), seed) if "linear" in (qk.kind, ov.kind) else []
    matrices: dict[str, np.ndarray] = {}
    for circuit, init, whole in (("qk", qk, wholes[0]), ("ov", ov, wholes[1])):
        own = [name for name in names if CIRCUITS[name] == circuit]
        if init.kind == "linear":
            matrices |= {name: draws[names.index(name)] for name in own}
        elif init.kind == "identity":
            matrices |= {name: init.scale * np.eye(size) for name in own}
        elif len(own) == 1:
            matrices[own[0]] = init.scale * whole
        else:
            left, values, right = np.linalg.svd(init.scale * whole)
            inner, outer = np.sqrt(values)[:, None] * right, left * np.sqrt(values)
            matrices |= (
                {"key": inner, "query": outer.T} if circuit == "qk" else {"value": inner, "output": outer}
            )
    return matrices


def layer_names(parameterization: str) -> list[str]:
    """The layers of a parameterization, in the order in which the released models make them."""
    attention = ["key", "query"] if factorized_attention(parameterization) else ["query_key"]
    return attention + (["value", "output"] if factorized_output(parameterization) else ["output_value"])


def linear_draws(size: int, layers: int, seed: int, bias: bool = False) -> list[np.ndarray]:
    """The numbers that ``layers`` linear layers get after ``torch.manual_seed(seed)``.

    One (size, size) weight a layer, each followed by its (size,) bias where there is one.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    shapes = ([(size, size), (size,)] if bias else [(size, size)]) * layers
    bound = size**-0.5
    draws = [torch.empty(shape).uniform_(-bound, bound, generator=generator) for shape in shapes]
    return [draw.double().numpy() for draw in draws]


def _checked(parameterization: str) -> str:
    if parameterization not in PARAMETERIZATIONS:
        raise InputError(
            f"unknown parameterization {parameterization!r}; choose from {', '.join(PARAMETERIZATIONS)}"
        )
    return parameterization
