"""The optimizer of a run: a stock one, its learning rates given by circuit."""

import dataclasses
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn

from fasterqk.circuits import Circuits, Slice, find_circuits, make_optimizer
from fasterqk.errors import InputError
from fasterqk.training.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over all parameters that are not frozen, the chosen ones ``qk_ratio`` times faster."""
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    if config.optimizer == "sgd":
        kind, options["momentum"] = torch.optim.SGD, config.momentum
    frozen = matching(model, config.frozen)
    # Stale gradients are computed, but the optimizer does not know them, so it never clears them.
    for parameter in frozen.values():
        parameter.requires_grad_(config.stale_gradients)
    return make_optimizer(
        model,
        kind,
        qk_ratio=config.qk_ratio,
        ov_ratio=config.ov_ratio,
        rules=_rules(config),
        decay=cast(Any, config.decay),
        circuits=chosen_circuits(model, config),
        only=lambda name, parameter: name not in frozen,
        **options,
    )


def _rules(config: TrainConfig) -> dict[str, dict[str, float]]:
    """The same gradient norm for both circuits of attention, and a rate of its own for the embedding."""
    rules: dict[str, dict[str, float]] = {}
    if config.gradient_norm is not None:
        rules |= {circuit: {"gradient_norm": config.gradient_norm} for circuit in ("qk", "ov")}
    if config.embedding_ratio != 1:
        rules["shared"] = {"lr": config.embedding_ratio * config.lr, "weight_decay": 0.0}
    return rules


def chosen_circuits(model: nn.Module, config: TrainConfig) -> Circuits:
    """The circuits of ``model``; with ``faster`` patterns the parameters they name stand in for QK.

    No model of ours has parameters that both circuits share, so an embedding with a rate of its own takes
    their place.
    """
    circuits = find_circuits(model)
    if not config.faster and config.embedding_ratio == 1:
        return circuits
    chosen = matching(model, config.faster)
    embedding = matching(model, ("embedding.*",)) if config.embedding_ratio != 1 else {}

    def relabelled(part: Slice) -> Slice:
        if part.parameter in embedding:
            return dataclasses.replace(part, role="shared", decided_by="rule")
        if not config.faster:
            return part
        role = "q" if part.parameter in chosen else "rest" if part.circuit == "qk" else part.role
        return dataclasses.replace(part, role=role, decided_by="rule")

    return Circuits(tuple(relabelled(part) for part in circuits))


def matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    """Parameters whose name matches any shell-style pattern; a pattern without a match is an error."""
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            raise InputError(f"no parameter matches {pattern!r}; parameters are {', '.join(parameters)}")
    return {
        name: parameter
        for name, parameter in parameters.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def clip_gradients(parameters: Sequence[nn.Parameter], largest: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most ``largest``; returns the norm before.

    As ``torch.nn.utils.clip_grad_norm_``, but gradients within the bound are not touched.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if norm > largest:
        torch._foreach_mul_(gradients, largest / (norm + 1e-6))
    return norm
