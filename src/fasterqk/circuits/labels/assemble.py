"""Slices from judgements: every parameter covered once, cut by head on request, neighbours merged."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from fasterqk.capture.heads import head_counts
from fasterqk.capture.names import meaning
from fasterqk.circuits.labels.guess import guess
from fasterqk.circuits.labels.heads import cut_by_head
from fasterqk.circuits.labels.judge import Judgement
from fasterqk.circuits.labels.layouts import Block, matching
from fasterqk.circuits.labels.scopes import Scope, layer_prefixes, nearest
from fasterqk.circuits.slices import CIRCUIT_OF_ROLE, Circuits, Role, Slice


def assemble(model: nn.Module, judgement: Judgement, stated: Mapping[str, Any], heads: bool) -> Circuits:
    """The labels of all parameters of ``model``, in its order."""
    prefixes = layer_prefixes(judgement.scopes.values())
    tied = _tied(model)
    slices: list[Slice] = []
    for name, parameter in model.named_parameters():
        scope = judgement.scope_of(name)
        layer = scope.layer if scope is not None else nearest(name, prefixes)
        whole = Slice(name, None, None, None, "rest", layer, "name", parameter.numel())
        if name in stated:
            cut = _stated(whole, parameter, stated[name])
        elif scope is None:
            cut = [replace(whole, role=_outside(name, judgement))]
        else:
            cut = _labelled(whole, parameter, scope, judgement, heads)
        if _crosses(model, judgement, cut, tied.get(id(parameter), ())):
            cut = [replace(whole, role="shared", decided_by="name")]
        elif heads and scope is not None:
            cut = cut_by_head(model, scope, parameter, cut, judgement.heads.get(scope.path))
        slices += _merged(cut)
    return Circuits(tuple(slices))


def _labelled(
    whole: Slice, parameter: nn.Parameter, scope: Scope, judgement: Judgement, heads: bool
) -> list[Slice]:
    name = whole.parameter
    finding, own = judgement.found.get(name), judgement.guesses[name]
    if finding is not None:
        by = "probe"
        if finding.axis is None:
            return [replace(whole, role=finding.runs[0][2], decided_by=by)]
        counts = head_counts(scope.module)
        blocks = matching(finding.runs, *counts) if counts else None
        if blocks is None:
            blocks = [Block(role, stop - start) for start, stop, role in finding.runs]
        return list(_cut(whole, parameter, finding.axis, blocks, by, heads))
    assert own is not None  # what is open has been refused
    by = own.by + ("+probe" if name in judgement.confirmed else "")
    if own.role is not None:
        return [replace(whole, role=own.role, decided_by=by)]
    assert own.axis is not None
    return list(_cut(whole, parameter, own.axis, own.blocks, by, heads))


def _cut(
    whole: Slice, parameter: nn.Parameter, axis: int, blocks: Any, by: str, heads: bool
) -> Iterator[Slice]:
    start, line = 0, parameter.numel() // parameter.shape[axis]
    for block in blocks:
        yield replace(
            whole,
            axis=axis,
            start=start,
            stop=start + block.size,
            role=block.role,
            decided_by=by,
            numel=block.size * line,
            head=block.head if heads else None,
        )
        start += block.size


def _stated(whole: Slice, parameter: nn.Parameter, value: Role | list[Any]) -> list[Slice]:
    if isinstance(value, str):
        return [replace(whole, role=value, decided_by="rule")]
    blocks = [Block(role, stop - start) for _, start, stop, role in value]
    return list(_cut(whole, parameter, value[0][0], blocks, "rule", heads=False))


def _outside(name: str, judgement: Judgement) -> Role:
    """Outside attention everything is rest, but for tables of biases that are added to the scores."""
    parts = name.split(".")
    said = [meaning(part) for part in parts[-3:]]
    table = any(one.score for one in said) and "bias" in name and not any(one.norm for one in said)
    return "k" if table and judgement.scopes and parts[-1] != "bias" else "rest"


def _merged(cut: list[Slice]) -> list[Slice]:
    """Neighbours of one role, head and origin as one slice; a single slice is the whole tensor."""
    joined: list[Slice] = []
    for piece in cut:
        last = joined[-1] if joined else None
        if last is not None and (last.role, last.head) == (piece.role, piece.head):
            joined[-1] = replace(last, stop=piece.stop, numel=last.numel + piece.numel)
        else:
            joined.append(piece)
    if len(joined) == 1:
        return [replace(joined[0], axis=None, start=None, stop=None)]
    return joined


def _tied(model: nn.Module) -> dict[int, list[str]]:
    """The names of parameters that have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {key: value for key, value in names.items() if len(value) > 1}


def _crosses(model: nn.Module, judgement: Judgement, cut: list[Slice], names: Any) -> bool:
    """Whether a tied parameter serves different circuits under its other names."""
    parameters = dict(model.named_parameters(remove_duplicate=False)) if names else {}
    for other in names:
        scope = judgement.scope_of(other)
        role: Role | None = "rest"
        if scope is not None:
            own = guess(model, scope, other, parameters[other])
            role = None if own is None else own.role
        if role is not None and CIRCUIT_OF_ROLE[role] not in {piece.circuit for piece in cut}:
            return True
    return False
