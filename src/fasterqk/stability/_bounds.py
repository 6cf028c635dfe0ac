"""``WeightBounds``: an upper bound on the logits of a block, from its weights alone.

A LayerNorm or RMSNorm makes inputs of the form ``gain * n + shift``, and no ``n`` of width d is longer than
sqrt(d). A logit is a bilinear form of two such vectors. Per head, it is at most d times the spectral norm of
the product of query and key weights; biases add terms. Rotary positions turn queries and keys, so with them
the two spectral norms are multiplied instead.

One training pass shows what the weights do not: which norm makes the input, the factor on the products, and
whether positions turn them. A block whose products do not follow from these has no bound.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.labels.slices import Slice
from fasterqk.stability._logits import AttentionBlock, Hook
from fasterqk.stability._scores import LogitReading, Scores

_ROWS = 16  # of products that are compared


class WeightBounds:
    """Bounds for the blocks whose products ``learn`` explained.

    ``unknown`` has the reasons why other blocks have no bound.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[str, _Bilinear] = {}
        self._inputs: dict[nn.Module, list[Tensor]] = {}
        self._normed: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # the last input and output of each norm
        self.unknown: dict[str, str] = {}

    @contextmanager
    def learning(self, blocks: Sequence[AttentionBlock]) -> Iterator[None]:
        """Watch the norms and projections of the model during the passes in which ``learn`` is called."""
        names = {part.parameter.rpartition(".")[0] for block in blocks for part in block.slices}
        owners = {self._model.get_submodule(name) for name in names}
        project, norm = Hook(self._project), Hook(self._norm)
        with ExitStack() as hooks:
            hooks.callback(self._normed.clear)
            hooks.callback(self._inputs.clear)
            for module in self._model.modules():
                if module in owners:
                    hooks.enter_context(module.register_forward_pre_hook(project, with_kwargs=True))
                elif "norm" in type(module).__name__.lower() and len(list(module.modules())) == 1:
                    hooks.enter_context(module.register_forward_hook(norm))
            yield

    def _project(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs[module] = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]

    def _norm(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and args and isinstance(args[0], Tensor):
            self._normed[module] = args[0], output

    @torch.no_grad()
    def learn(self, block: AttentionBlock, scores: Scores, biased: bool) -> None:
        """Explain the products of a block, by the scores of one of its calls."""
        try:
            if biased:
                raise _NotBounded("its logits have additive biases")
            self._known[block.path] = _fitted(self._side(block, "q"), self._side(block, "k"), scores)
            self.unknown.pop(block.path, None)
        except _NotBounded as reason:
            self.unknown[block.path] = str(reason)

    def _side(self, block: AttentionBlock, role: str) -> "tuple[_Side, Tensor]":
        """The queries or keys, and the hidden states that they are made from."""
        parts = [part for part in block.slices if part.role == role]
        weights = [part for part in parts if self._model.get_parameter(part.parameter).dim() == 2]
        names = {part.parameter.rpartition(".")[0] for part in parts}
        if len(names) != 1 or any(part.head is None for part in weights) or not weights:
            raise _NotBounded("its queries and keys are not one projection each, head by head")
        owner = self._model.get_submodule(next(iter(names)))
        inputs = self._inputs.get(owner, [])
        place = 1 if role == "k" and isinstance(owner, nn.MultiheadAttention) else 0
        for module, (before, after) in self._normed.items():
            if place < len(inputs) and after is inputs[place]:
                norm = _Norm.of(module, before, after)
                return _Side(self._model, owner, norm, sorted(parts, key=lambda part: part.head or 0)), after
        raise _NotBounded("no norm makes its input")

    @torch.no_grad()
    def readings(self) -> dict[str, LogitReading]:
        """The bounds of the current weights, by block."""
        bounds = {path: bilinear.bound() for path, bilinear in self._known.items()}
        return {path: LogitReading(logit=bound, product=bound, way="bound") for path, bound in bounds.items()}


class _NotBounded(Exception):
    """A block has no bound; the message says why."""


@dataclass(eq=False)
class _Norm:
    """A norm whose output is ``gain() * n + shift()`` with ``n`` no longer than the root of its width."""

    module: nn.Module
    offset: float  # Gemma's weights are gains minus one

    @classmethod
    def of(cls, module: nn.Module, states: Tensor, output: Tensor) -> "_Norm":
        """The norm that turned ``states`` into ``output``, recognised by what it computed."""
        eps = vars(module).get("eps") or vars(module).get("variance_epsilon") or torch.finfo(states.dtype).eps
        wide = states.double()
        centred = wide - wide.mean(-1, keepdim=True)
        # Rows that hardly vary are rounding errors.
        clear = centred.norm(dim=-1) > 1e-2 * wide.norm(dim=-1)
        for vectors in (centred[clear], wide[clear]) if bool(clear.any()) else ():
            unit = vectors * (vectors.square().mean(-1, keepdim=True) + eps).rsqrt()
            for norm in (cls(module, 0.0), cls(module, 1.0)):
                error = (norm.gain(unit) * unit + norm.shift(unit) - output[clear]).abs().amax()
                if error <= 1e-2 * output[clear].abs().amax():
                    return norm
        raise _NotBounded(f"its input is made by a norm of unknown form ({type(module).__name__})")

    def gain(self, like: Tensor) -> Tensor:
        weight = getattr(self.module, "weight", None)
        return like.new_ones(like.shape[-1]) if weight is None else _whole(weight).to(like) + self.offset

    def shift(self, like: Tensor) -> Tensor:
        bias = getattr(self.module, "bias", None)
        return like.new_zeros(like.shape[-1]) if bias is None else _whole(bias).to(like)


@dataclass(eq=False)
class _Side:
    """The queries or the keys of a block: the slices of their heads, and the norm that makes their input."""

    model: nn.Module
    owner: nn.Module
    norm: _Norm
    parts: list[Slice]

    def weights(self) -> tuple[Tensor, Tensor]:
        """The weight ``(head, row, column)`` and the bias ``(head, row)``, in double precision."""
        rows: dict[int, list[Tensor]] = {1: [], 2: []}
        for part in self.parts:
            tensor = _whole(self.model.get_parameter(part.parameter))
            piece = part.view(tensor).double()
            transposed = part.axis == 1 or (part.axis is None and type(self.owner).__name__ == "Conv1D")
            rows[tensor.dim()].append(piece.T if transposed and tensor.dim() == 2 else piece)
        weight = torch.stack(rows[2])
        return weight, torch.stack(rows[1]) if rows[1] else weight.new_zeros(weight.shape[:2])

    def vectors(self, states: Tensor) -> Tensor:
        """(batch, head, token, row): the projections of ``states``."""
        weight, bias = self.weights()
        if isinstance(self.owner, nn.MultiheadAttention) and not self.owner.batch_first:
            states = states.transpose(0, 1)
        return torch.einsum("bld,hrd->bhlr", states.double(), weight) + bias[:, None]

    def of_unit(self) -> tuple[Tensor, Tensor]:
        """Weight and bias on the ``n`` of the norm."""
        weight, bias = self.weights()
        like = weight[0, 0]
        return weight * self.norm.gain(like), bias + weight @ self.norm.shift(like)


@dataclass(eq=False)
class _Bilinear:
    """Products of two projections times ``factor``; ``turned`` by rotary positions or not."""

    queries: _Side
    keys: _Side
    factor: float
    turned: bool
    rounding: float

    def bound(self) -> Tensor:
        """The largest product that each head can form."""
        (query, query_bias), (key, key_bias) = self.queries.of_unit(), self.keys.of_unit()
        groups = len(query) // len(key)
        key, key_bias = (part.repeat_interleave(groups, 0) for part in (key, key_bias))
        roots = [math.sqrt(part.shape[-1]) for part in (query, key)]
        lengths = [
            torch.linalg.matrix_norm(part, 2) * root + bias.norm(dim=-1)
            for part, bias, root in zip((query, key), (query_bias, key_bias), roots, strict=True)
        ]
        largest = lengths[0] * lengths[1]
        if not self.turned:
            # The factors R of W' = Q R have all of its spectrum, and are as small as a head.
            factors = [torch.linalg.qr(part.mT, mode="r").R for part in (query, key)]
            spectral = torch.linalg.matrix_norm(factors[0] @ factors[1].mT, 2) * roots[0] * roots[1]
            crossed = torch.einsum("hrd,hr->hd", query, key_bias).norm(dim=-1) * roots[0]
            crossed = crossed + torch.einsum("hrd,hr->hd", key, query_bias).norm(dim=-1) * roots[1]
            constant = (query_bias * key_bias).sum(-1).abs()
            largest = torch.minimum(largest, spectral + crossed + constant)
        return (largest * abs(self.factor) * self.rounding).float().cpu()


def _fitted(queries: tuple[_Side, Tensor], keys: tuple[_Side, Tensor], scores: Scores) -> _Bilinear:
    """The form in which products follow from the projections; positions cancel on the diagonal."""
    q, k = (side.vectors(states) for side, states in (queries, keys))
    rows = torch.arange(min(_ROWS, scores.length))
    products, _, _ = next(scores.parts(None, rows))
    plain = q[:, :, : products.shape[2]] @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    if plain.shape != products.shape:
        raise _NotBounded("its products have another shape than its projections")
    states = queries[1]
    half = states.element_size() < 4 or torch.is_autocast_enabled(states.device.type)
    tolerance, rounding = (5e-2, 1.2) if half else (1e-3, 1.0005)
    for turned, select in ((False, Tensor.flatten), (True, lambda part: part.diagonal(dim1=-2, dim2=-1))):
        measured, expected = select(products.double()), select(plain)
        factor = float((measured * expected).sum() / expected.square().sum().clamp(min=1e-30))
        if float((measured - factor * expected).abs().amax()) <= tolerance * float(measured.abs().amax()):
            return _Bilinear(queries[0], keys[0], factor, turned, rounding)
    raise _NotBounded("its products do not follow from its weights alone (norms on queries or keys, ...)")


def _whole(parameter: Any) -> Tensor:
    """A parameter, gathered if it is sharded."""
    whole: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach()
