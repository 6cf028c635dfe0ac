"""Checks of an optimizer: ``describe`` in one line, and ``check_circuits`` by taking a step on a copy."""

import copy
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, get_args

import torch
from torch import nn

import fasterqk
from fasterqk.errors import InputError
from fasterqk.labels.find import Labels, find_circuits
from fasterqk.labels.slices import CIRCUITS, NO_SOFTMAX, Role, Slice, html_table, readable, text_table
from fasterqk.optim._fused import COPYING
from fasterqk.optim.hooks import GroupPlan, StepHooks, hooks_of, unwrapped
from fasterqk.trace.isolated import copied, isolated, random_states_kept
from fasterqk.trace.modules import nothing_compiled, stack_of, uncompiled


@dataclass(frozen=True)
class Share:
    """The share of one circuit (or group) in an optimizer: parameters, tensors, split tensors, rates."""

    name: str
    parameters: int
    tensors: int
    rates: tuple[float, ...]
    split: int = 0
    changing: bool = False

    def __str__(self) -> str:
        tensors = f"{self.tensors} tensor{'s' * (self.tensors != 1)}"
        split = f", {self.split} split" if self.split else ""
        low, high = rate(min(self.rates)), rate(max(self.rates))
        return (
            f"{self.name} {readable(self.parameters)} parameters ({tensors}{split}) lr "
            + (low if low == high else f"{low} to {high}")
            + (" at this step" if self.changing else "")
        )


def describe(optimizer: torch.optim.Optimizer) -> str:
    """The parameters and learning rates of ``optimizer``, in one line.

    By circuit for an optimizer of :func:`make_optimizer`, by parameter group for any other.

    >>> from fasterqk.optim import make_optimizer
    >>> model = nn.MultiheadAttention(8, 2)
    >>> describe(make_optimizer(model, torch.optim.AdamW, lr=1e-4, qk_ratio=10))
    'qk 144 parameters (2 tensors, 2 split) lr 1e-3 - ov 144 parameters (4 tensors, 2 split) lr 1e-4'
    """
    hooks = hooks_of(optimizer)
    unverified = "" if hooks is None or hooks.first_pass is None else hooks.first_pass.note()
    return " - ".join(map(str, shares(optimizer))) + _without_softmax(optimizer) + unverified


def _without_softmax(optimizer: torch.optim.Optimizer) -> str:
    """In brackets, which parameters are at the base rate because their blocks form no softmax attention."""
    hooks = hooks_of(optimizer)
    parts = [part for part, _ in hooks.members if part.decided_by == NO_SOFTMAX] if hooks else []
    if not parts:
        return ""
    stacks = [stack_of(part.parameter).split(".")[:-1] for part in parts]
    levels = takewhile(lambda level: len(set(level)) == 1, zip(*stacks, strict=False))
    place = ".".join(level[0] for level in levels) or "the model"
    return f" ({readable(sum(part.numel for part in parts))} in {place} without softmax attention)"


def shares(optimizer: torch.optim.Optimizer) -> list[Share]:
    """The circuits (roles, if ratios were given by role; or else groups) of ``optimizer``, in order."""
    hooks = hooks_of(optimizer)
    if hooks is None:
        return [
            Share(
                group.get("name", f"group {index}"),
                sum(parameter.numel() for parameter in group["params"]),
                len(group["params"]),
                (float(group["lr"]),),
            )
            for index, group in enumerate(optimizer.param_groups)
        ]
    places: dict[str, set[int]] = {}
    for part, index in hooks.members:
        places.setdefault(part.parameter, set()).add(index)
    found = []
    for circuit, chosen in _by_name(hooks):
        parts = [hooks.members[place] for place in chosen]
        if parts:
            names = {part.parameter for part, _ in parts}
            groups = sorted({index for _, index in parts})
            found.append(
                Share(
                    circuit,
                    sum(part.numel for part, _ in parts),
                    len(names),
                    tuple(
                        float(hooks.base_rate(optimizer, index)) * hooks.ratio_now(optimizer, index)
                        for index in groups
                    ),
                    sum(len(places[name]) > 1 for name in names),
                    any(hooks.plans[index].changing for index in groups),
                )
            )
    return found


def _by_name(hooks: StepHooks) -> list[tuple[str, list[int]]]:
    """The places in ``hooks.members`` of each circuit or, where ratios were given by role, of each role."""
    names = [part.role if hooks.by_role else part.circuit for part, _ in hooks.members]
    order: Sequence[str] = get_args(Role) if hooks.by_role else CIRCUITS
    return [(name, [i for i, own in enumerate(names) if own == name]) for name in order]


def rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The learning rate of each circuit at the next step: ``lr/qk``, ``lr/ov``, ``lr/rest``.

    Where a circuit has several (per layer, per head), the largest.
    """
    return {f"lr/{share.name}": max(share.rates) for share in shares(unwrapped(optimizer))}


def rate(value: float) -> str:
    """``0.001`` as ``1e-3``, ``0.00015`` as ``1.5e-4``, ``0.5`` as it is."""
    if value == 0 or 0.01 <= value < 1000:
        return f"{value:.3g}"
    digits, power = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}"


_TOLERANCE = 0.01


@dataclass(frozen=True)
class CircuitUpdate:
    """How far one circuit moved in one step.

    ``update`` is the root mean square over the entries that moved, ``moved`` their share. ``promised`` is
    the ratio of its rate to the base rate; ``measured`` is its update over that of the same step taken
    with every rate at the base. ``ok`` says that the two agree to one percent.
    """

    circuit: str
    parameters: int
    tensors: int
    lr: float
    update: float
    moved: float
    promised: float
    measured: float

    @property
    def ok(self) -> bool:
        return abs(self.measured / self.promised - 1) < _TOLERANCE


@dataclass(frozen=True)
class CircuitCheck:
    """The result of :func:`check_circuits`; prints as a table, shows as one in a notebook."""

    rows: tuple[CircuitUpdate, ...]
    setting: str
    optimizer: str = "the optimizer"

    @property
    def ok(self) -> bool:
        """Whether every circuit moves as its ratio promises."""
        return all(row.ok for row in self.rows)

    def _table(self) -> list[dict[str, str]]:
        return [
            {
                "circuit": row.circuit,
                "parameters": readable(row.parameters),
                "tensors": str(row.tensors),
                "lr": rate(row.lr),
                "update (rms)": f"{row.update:.3e}",
                "moved": f"{row.moved:.0%}",
                "promised": f"{row.promised:.4g}",
                "measured": "did not move" if math.isnan(row.measured) else f"{row.measured:.4g}",
                "": "ok" if row.ok else "DIFFERS",
            }
            for row in self.rows
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """What is wrong with the optimizer itself, if every circuit moves alike where ratios differ."""
        measured = [row.measured for row in self.rows if not math.isnan(row.measured)]
        promised = [row.promised for row in self.rows]
        if len(measured) < 2 or max(promised) < 1.2 * min(promised) or max(measured) > 1.1 * min(measured):
            return ()
        return (
            f"{self.optimizer} does not keep the rates of its groups apart: a ratio has no effect; "
            "use an optimizer whose step is proportional to the rate of each group, such as AdamW",
        )

    def __str__(self) -> str:
        return "\n".join([self.setting, text_table(self._table()), *self.notes])

    def _repr_html_(self) -> str:
        return html_table(self._table(), "; ".join([self.setting, *self.notes]))


# --- The check: does every circuit move as fast as its ratio promises? ---

Loss = Callable[[Any], torch.Tensor]


def check_circuits(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss: Loss | None = None,
    labels: Labels | None = None,
) -> CircuitCheck:
    """Take one step on copies of the weights and compare each circuit's update with what its ratio promises.

    Prints the table and returns it. ``batch`` is passed to the model (a mapping by keyword, a tuple by
    position). ``loss(outputs)`` returns the loss; by default it is ``outputs.loss``, ``outputs["loss"]``,
    the first value of a tuple such as ``(loss, logits)``, or the output itself if it is one number.
    ``labels`` are as in :func:`find_circuits`; only an optimizer that was not made by
    :func:`make_optimizer` needs them. The model, its gradients and buffers, the optimizer and the random
    generators are left exactly as they were, also when the model fails on the batch.

    The step is taken twice from the same point: as it is set, and with every rate at the base. Their
    quotient is the measured ratio; it is exact for every optimizer whose update is proportional to the
    rate, whatever its state. The ``update`` column shows the step itself: in the first step of Adam every
    entry moves by about its rate, so there ``update`` is close to ``lr``.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> from fasterqk.optim import make_optimizer
    >>> optimizer = make_optimizer(model, torch.optim.AdamW, lr=1e-3, qk_ratio=10)
    >>> check_circuits(model, optimizer, (torch.randn(2, 3, 8),), lambda outputs: outputs.square().sum()).ok
    TransformerEncoderLayer, AdamW, base lr 1e-3, fasterqk ...
    circuit  parameters  tensors  lr    update (rms)  moved  promised  measured
    qk       144         2        0.01  ...  100%   10        10        ok
    ov       144         4        1e-3  ...  100%   1         1         ok
    rest     312         8        1e-3  ...  100%   1         1         ok
    True
    """
    model = uncompiled(model)
    optimizer = unwrapped(optimizer)
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        raise InputError("check_circuits takes a model that is not sharded; check it before fully_shard")
    hooks = hooks_of(optimizer) or _plain_hooks(model, optimizer, labels)
    hooks.check(optimizer)
    members = hooks.members
    base = float(hooks.base_rate(optimizer))
    if base == 0:
        raise InputError("the base learning rate is 0 at this step (a warm-up?), so nothing would move")
    ratios = [hooks.ratio_now(optimizer, index) for index in range(len(hooks.plans))]
    as_set = _updates(model, optimizer, hooks, batch, loss, at_base=False)
    plain_step = _updates(model, optimizer, hooks, batch, loss, at_base=True)
    rows = []
    for circuit, places in _by_name(hooks):
        found = sorted({ratios[members[i][1]] for i in places})
        for ratio in found:
            chosen = [i for i in places if ratios[members[i][1]] == ratio]
            squares, moved, entries = (sum(as_set[i][which] for i in chosen) for which in range(3))
            plain = sum(plain_step[i][0] for i in chosen)
            rows.append(
                CircuitUpdate(
                    circuit if len(found) == 1 else f"{circuit} x{ratio:g}",
                    int(entries),
                    len({members[i][0].parameter for i in chosen}),
                    max(float(hooks.base_rate(optimizer, members[i][1])) for i in chosen) * ratio,
                    math.sqrt(squares / moved) if moved else 0.0,
                    moved / entries,
                    ratio,
                    math.sqrt(squares / plain) if plain else math.nan,
                )
            )
    setting = (
        f"{type(model).__name__}, {type(optimizer).__name__}, base lr {rate(base)}, "
        f"fasterqk {fasterqk.__version__}, torch {torch.__version__}"
    )
    result = CircuitCheck(tuple(rows), setting, type(optimizer).__name__)
    print(result)
    return result


def _plain_hooks(model: nn.Module, optimizer: torch.optim.Optimizer, labels: Labels | None) -> StepHooks:
    """Hooks for an optimizer that was made elsewhere: its slices, and its rates as they are."""
    group_of = {
        id(parameter): index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    parameters = dict(model.named_parameters(remove_duplicate=False))
    strangers = group_of.keys() - {id(parameter) for parameter in parameters.values()}
    if strangers:
        raise InputError(
            f"{len(strangers)} parameters of the optimizer are not in this model; "
            "check_circuits needs the model that the optimizer was made for"
        )
    known = [(part, group_of.get(id(parameters[part.parameter]))) for part in find_circuits(model, labels)]
    members = [(part, index) for part, index in known if index is not None]
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    plans = [GroupPlan("", rate / rates[0] if rates[0] else 1.0) for rate in rates]
    return StepHooks(plans, fused=[], owners=[], model=weakref.ref(model), members=members)


def _updates(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    hooks: StepHooks,
    batch: Any,
    loss: Loss | None,
    *,
    at_base: bool,
) -> list[tuple[float, int, int]]:
    """Of every member: the sum of squares of its update, entries that moved, all entries."""
    live = list(model.parameters())
    rehearsal = nullcontext() if hooks.first_pass is None else hooks.first_pass.rehearsal()
    with rehearsal, random_states_kept(), nothing_compiled(), torch.enable_grad(), isolated(model):
        stepper = _twin(optimizer, hooks, dict(zip(map(id, live), model.parameters(), strict=True)))
        if at_base:
            _all_at_base(stepper, optimizer, hooks)
        before = [_tensor(model, part).detach().clone() for part, _ in hooks.members]
        _backward(_scalar(_call(model, batch), loss))
        stepper.step()
        found = []
        for (part, _), old in zip(hooks.members, before, strict=True):
            change = _tensor(model, part).detach().double() - old.double()
            found.append((float(change.square().sum()), int((change != 0).sum()), change.numel()))
    return found


def _twin(
    optimizer: torch.optim.Optimizer, hooks: StepHooks, twins: dict[int, nn.Parameter]
) -> torch.optim.Optimizer:
    """A copy of ``optimizer`` for the copied parameters ``twins`` (by the identity of the originals)."""
    fused = [each.twin(twins[id(each.parameter)]) for each in hooks.fused]
    memo: dict[int, Any] = {**twins}
    for each, other in zip(hooks.fused, fused, strict=True):
        memo |= {id(leaf): twin for leaf, twin in zip(each.leaves, other.leaves, strict=True)}
    with _copies_allowed(optimizer):
        stepper = copy.deepcopy(optimizer, memo)
    # What torch does not copy: attributes that a class of the user's may need in its step.
    for name, value in vars(optimizer).items():
        if not hasattr(stepper, name) and not isinstance(value, StepHooks):
            setattr(stepper, name, copied(value, memo))
    twin = dataclasses.replace(hooks, fused=fused, owners=[], frozen=[], recipe=None, first_pass=None)
    twin.attach(stepper)
    return stepper


@contextmanager
def _copies_allowed(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Allow the copy here, where the hooks are registered on it again."""
    held = {name: vars(optimizer).pop(name) for name in COPYING if name in vars(optimizer)}
    try:
        yield
    finally:
        vars(optimizer).update(held)


def _all_at_base(stepper: torch.optim.Optimizer, optimizer: torch.optim.Optimizer, hooks: StepHooks) -> None:
    """Set all rates to the base; the decay of the real step stays."""
    for index, (group, plan) in enumerate(zip(stepper.param_groups, hooks.plans, strict=False)):
        if plan.independent:
            group["weight_decay"] /= hooks.ratio_now(optimizer, index)
        group["lr"] = hooks.base_rate(optimizer, index)
    own = hooks_of(stepper)
    assert own is not None  # a copy has the hooks of the original
    own.plans = [GroupPlan(plan.name, 1.0, anchor=plan.anchor) for plan in hooks.plans]


def _tensor(model: nn.Module, part: Slice) -> torch.Tensor:
    """The slice in the model, also where the parameter is parametrized."""
    prefix, _, attribute = part.parameter.rpartition(".")
    return part.view(getattr(model.get_submodule(prefix), attribute))


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _scalar(outputs: Any, loss: Loss | None) -> torch.Tensor:
    """The loss: of the user's function, or what Hugging Face models and training loops return."""
    value: Any
    if loss is not None:
        value = loss(outputs)
    elif isinstance(outputs, Mapping):
        value = outputs.get("loss")
    else:
        value = getattr(outputs, "loss", outputs)
        value = value[0] if isinstance(value, tuple | list) and value else value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value
    if loss is not None:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise InputError(f"loss= returned a {type(value).__name__}{shape}, not a tensor with one value")
    raise InputError(
        f"the model returned {type(outputs).__name__} without a loss; put labels into the batch or pass "
        "loss=lambda outputs: ..."
    )


def _backward(loss: torch.Tensor) -> None:
    if not loss.requires_grad:
        raise InputError(
            "the loss does not depend on the parameters (was it computed under torch.no_grad(), or are all "
            "parameters frozen?), so nothing would move"
        )
    loss.backward()
