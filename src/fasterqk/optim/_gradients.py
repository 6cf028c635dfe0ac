"""Scale circuits: gradients to a given norm, and weights at the start of training."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fasterqk.errors import InputError
from fasterqk.labels.find import Labels, given_or_found
from fasterqk.labels.slices import CIRCUITS, Circuits, Slice
from fasterqk.optim._fused import local_view, summed
from fasterqk.optim.ratio import finite_number, is_sharded
from fasterqk.trace.modules import uncompiled


@torch.no_grad()
def normalize_gradients(
    model: nn.Module,
    norms: Mapping[str, float],
    circuits: Circuits | None = None,
    labels: Labels | None = None,
) -> dict[str, float]:
    """Scale the gradient of each named circuit to a given norm.

    Call it between the backward pass and the step, like ``clip_grad_norm_``; it scales up as well as down.
    ``rules={"qk": {"gradient_norm": 1.0}}`` in :func:`make_optimizer` does the same at every step. A circuit
    without any gradient is left unchanged.

    Arguments:
        model: The model, with gradients.
        norms: The wanted norm of each circuit: ``qk``, ``ov``, ``shared`` or ``rest``.
        circuits: The result of :func:`find_circuits`, if it is known.
        labels: Your own labels, as in :func:`find_circuits`.

    Returns:
        The norm of each named circuit before scaling.

    Raises:
        InputError: A circuit is unknown, or a norm is not a finite number above 0.

    >>> model = nn.MultiheadAttention(8, 2)
    >>> model(*[torch.randn(3, 1, 8)] * 3)[0].sum().backward()
    >>> before = normalize_gradients(model, {"qk": 1.0, "ov": 1.0})
    >>> list(before)
    ['qk', 'ov']
    """
    for circuit, norm in norms.items():
        if circuit not in CIRCUITS:
            raise InputError(f"{circuit!r} is not a circuit; circuits are {', '.join(CIRCUITS)}")
        finite_number(norm, f"the gradient norm of {circuit!r}")
    model = uncompiled(model)
    slices = given_or_found(model, circuits, labels)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    before = {}
    for circuit, norm in norms.items():
        pairs = [(part, gradients[part.parameter]) for part in slices if part.circuit == circuit]
        parts = [(local_view(part, gradient), gradient) for part, gradient in pairs if gradient is not None]
        before[circuit] = size = _norm(parts)
        if size > 0:
            for part, _ in parts:
                part.mul_(norm / size)
    return before


def normalizer(
    model: nn.Module, circuits: Circuits | None, norms: Mapping[str, float]
) -> Callable[[torch.optim.Optimizer], None]:
    """A function that normalises gradients before a step."""

    def normalize(optimizer: Any) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:
            raise InputError(
                "the gradients are still multiplied by the loss scale, so their norm means nothing: "
                "call scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        normalize_gradients(model, norms, circuits)

    return normalize


def _norm(parts: list[tuple[torch.Tensor, Any]]) -> float:
    """The norm of slices of gradients, given with their whole gradients, over all processes."""
    if not parts:
        return 0.0
    alike: dict[Any, list[tuple[torch.Tensor, Any]]] = {}
    for part, whole in parts:
        dtype = torch.promote_types(part.dtype, torch.float32)
        sharding = (whole.device_mesh, *map(str, whole.placements)) if is_sharded(whole) else ()
        alike.setdefault(sharding, []).append((torch.linalg.vector_norm(part, dtype=dtype), whole))
    norms = []
    for sharding, sizes in alike.items():
        norm = torch.linalg.vector_norm(torch.stack([size.to(sizes[0][0]) for size, _ in sizes]))
        norms.append(summed(norm.square(), sizes[0][1]).sqrt() if sharding else norm)
    return float(norms[0]) if len(norms) == 1 else math.hypot(*map(float, norms))


# --- Weights: scale the factors of a circuit, with or without changing their product ---

# Parameters that shift or scale the scores.
_ON_SCORES = re.compile(r"scale|sink|temperature|table|tau$", re.IGNORECASE)


@torch.no_grad()
def scale_circuits(
    model: nn.Module,
    *,
    qk: float = 1.0,
    ov: float = 1.0,
    keep_product: bool = True,
    circuits: Circuits | None = None,
    labels: Labels | None = None,
) -> None:
    """Scale the weights of the circuits of ``model`` in place.

    Biases of q, k and v are scaled with their weights. The output bias is added after the product and stays.
    Norms on queries or keys would undo the scale, so models with such norms are refused, as are models with
    adapters and models that make queries and keys from one matrix.

    Arguments:
        model: The model.
        qk: The factor of the query-key circuit.
        ov: The factor of the output-value circuit.
        keep_product: If true, queries are multiplied and keys divided by ``qk``, values multiplied and
            outputs divided by ``ov``: the model computes the same function, but its factors learn at other
            speeds. If false, the products W_Q W_K and W_V W_O become ``qk`` and ``ov`` times larger, shared
            equally between their factors.
        circuits: The result of :func:`find_circuits`, if it is known.
        labels: Your own labels, as in :func:`find_circuits`.

    Raises:
        InputError: A factor is not a finite number above 0, or the model cannot be scaled.

    >>> model, inputs = nn.MultiheadAttention(8, 2), torch.randn(3, 1, 8)
    >>> before = model(inputs, inputs, inputs)[0]
    >>> scale_circuits(model, qk=4.0)
    >>> torch.testing.assert_close(model(inputs, inputs, inputs)[0], before)
    """
    finite_number(qk, "qk")
    finite_number(ov, "ov")
    model = uncompiled(model)
    slices = given_or_found(model, circuits, labels)
    wanted = [name for name, factor in (("qk", qk), ("ov", ov)) if factor != 1]
    _check_factors(slices, wanted)
    if keep_product:
        factors = {"q": qk, "k": 1 / qk, "v": ov, "o": 1 / ov}
    else:
        factors = {"q": math.sqrt(qk), "k": math.sqrt(qk), "v": math.sqrt(ov), "o": math.sqrt(ov)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parts = [part for part in slices if part.circuit in wanted]
    # A list first: nothing is scaled before all parts were accepted.
    for part in [part for part in parts if _is_factor(model, part, parameters[part.parameter])]:
        local_view(part, parameters[part.parameter].detach()).mul_(factors[part.role])


def _check_factors(slices: Circuits, wanted: list[str]) -> None:
    """Raise unless each layer has separate weights for both factors of the product."""
    pairs = {"qk": ("q", "k"), "ov": ("v", "o")}
    for circuit in wanted:
        layers = {part.layer for part in slices if part.circuit == circuit}
        if not layers:
            raise InputError(f"the model has no {circuit} parameters to scale")
        for layer in layers:
            roles = {part.role for part in slices if part.layer == layer}
            missing = [role for role in pairs[circuit] if role not in roles]
            if missing:
                raise InputError(
                    f"layer {layer} has no separate {missing[0]} weights, so its {circuit} product cannot "
                    "be scaled"
                )


def _is_factor(model: nn.Module, part: Slice, parameter: nn.Parameter) -> bool:
    """Whether a slice is a factor of its circuit's product, or the bias of one."""
    prefix, _, attribute = part.parameter.rpartition(".")
    owner = model.get_submodule(prefix)
    if "norm" in type(owner).__name__.lower():
        if part.role in ("q", "k", "v"):
            raise InputError(
                f"{part.parameter} normalises after the projection and undoes any scale of it; "
                "scale_circuits cannot scale this model"
            )
        return False
    if "lora_" in part.parameter:
        raise InputError(f"{part.parameter} is an adapter: scale the model before adapters are added")
    if isinstance(owner, nn.Embedding) or _ON_SCORES.search(attribute):
        return False  # it acts on the scores and is not a factor of the product
    if "bias" in attribute or attribute.startswith("b_"):
        return part.role != "o"
    if parameter.ndim < 2:
        raise InputError(
            f"{part.parameter} is neither a weight nor a bias that scale_circuits knows; scale it by hand"
        )
    return True
