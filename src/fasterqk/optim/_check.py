"""Checks of an optimizer: ``describe`` in one line, and ``check_circuits`` by taking a step on a copy."""

import copy
import dataclasses
import inspect
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, get_args

import torch
from torch import nn

import fasterqk
from fasterqk.errors import InputError
from fasterqk.labels.find import Labels, find_circuits, stack_names
from fasterqk.labels.slices import CIRCUITS, NO_SOFTMAX, Role, Slice, html_table, readable, text_table
from fasterqk.optim._fused import FusedWeight, local_view, summed
from fasterqk.optim._groups import ROLES, Group, Settings
from fasterqk.optim.hooks import COPYING, PLAIN, StepHooks, hooks_of, unwrapped
from fasterqk.optim.ratio import finite_number, is_sharded, with_outer_roles
from fasterqk.trace.isolated import copied, isolated, random_states_kept
from fasterqk.trace.modules import nothing_compiled, stack_of, uncompiled

Member = tuple[Slice, int]  # a labelled slice, and the index of its parameter group


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
        tensors += f", {self.split} split" if self.split else ""
        low, high = rate(min(self.rates, default=None)), rate(max(self.rates, default=None))
        between = low if low == high else f"{low} to {high}"
        now = " at this step" if self.changing else ""
        return f"{self.name} {readable(self.parameters)} parameters ({tensors}) lr {between}{now}"


def describe(optimizer: torch.optim.Optimizer) -> str:
    """The parameters and learning rates of ``optimizer``, in one line.

    Arguments:
        optimizer: Any torch optimizer, also wrapped by Accelerate.

    Returns:
        The line, by circuit for an optimizer of :func:`make_optimizer`, by parameter group for any other.

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
    groups = hooks.groups if hooks else []
    parts = [part for group in groups for part in group.labelled if part.decided_by == NO_SOFTMAX]
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
                options.get("name", f"group {index}"),
                sum(parameter.numel() for parameter in options["params"]),
                len(options["params"]),
                () if options.get("lr") is None else (float(options["lr"]),),
            )
            for index, options in enumerate(optimizer.param_groups)
        ]
    ratios = hooks.ratios_now(optimizer)
    groups_of: dict[str, set[int]] = {}
    for part, index in _members(hooks):
        groups_of.setdefault(part.parameter, set()).add(index)
    in_order = []
    for circuit, members in _by_circuit(hooks):
        names = {part.parameter for part, _ in members}
        groups = sorted({index for _, index in members})
        in_order.append(
            Share(
                circuit,
                sum(part.numel for part, _ in members),
                len(names),
                tuple(float(hooks.base_rate(optimizer, index)) * ratios[index] for index in groups),
                sum(len(groups_of[name]) > 1 for name in names),
                any(hooks.groups[index].changing for index in groups),
            )
        )
    return in_order


def _members(hooks: StepHooks) -> list[Member]:
    return [(part, index) for index, group in enumerate(hooks.groups) for part in group.labelled]


def _by_circuit(hooks: StepHooks) -> list[tuple[str, list[Member]]]:
    """The slices of each circuit that has any or, where ratios were given by role, of each role."""
    by_circuit: dict[str, list[Member]] = {}
    order: list[str] = [*(get_args(Role) if hooks.by_role else CIRCUITS)]
    for part, index in _members(hooks):
        pattern = hooks.groups[index].settings.group  # of parameter names
        known = pattern == "base" or pattern in CIRCUITS or pattern in order
        name = (part.role if hooks.by_role else part.circuit) if known else pattern
        by_circuit.setdefault(name, []).append((part, index))
    order += [name for name in by_circuit if name not in order]
    return [(circuit, by_circuit[circuit]) for circuit in order if circuit in by_circuit]


def rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The learning rate of each circuit at the next step, for a log.

    Arguments:
        optimizer: Any torch optimizer, also wrapped by Accelerate.

    Returns:
        ``lr/qk``, ``lr/ov``, ``lr/rest``, or ``lr/NAME`` of each group of an optimizer that
        :func:`make_optimizer` did not make. Where a circuit has several rates (per layer, per head), the
        largest.

    >>> rates(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    {'lr/group 0': 0.1}
    """
    return {f"lr/{share.name}": max(share.rates) for share in shares(unwrapped(optimizer)) if share.rates}


def rate(value: float | None) -> str:
    """``0.001`` as ``1e-3``, ``0.00015`` as ``1.5e-4``, ``0.5`` as it is; some optimizers have none."""
    if value is None:
        return "none"
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
        return self.promised == 0 or abs(self.measured / self.promised - 1) < _TOLERANCE


@dataclass(frozen=True)
class CircuitCheck:
    """The result of :func:`check_circuits`; prints as a table, shows as one in a notebook."""

    rows: tuple[CircuitUpdate, ...]
    setting: str
    optimizer: str = "the optimizer"
    audit: tuple[str, ...] = ()

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
        """The audit, and a warning if every circuit moves alike although the ratios differ."""
        measured = [row.measured for row in self.rows if not math.isnan(row.measured)]
        promised = [row.promised for row in self.rows]
        if len(measured) < 2 or max(promised) < 1.2 * min(promised) or max(measured) > 1.1 * min(measured):
            return self.audit
        return (
            *self.audit,
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

    The step is taken twice from the same point: as it is set, and with every rate at the base. Their
    quotient is the measured ratio; it is exact for every optimizer whose update is proportional to the
    rate, whatever its state. The ``update`` column shows the step itself: in the first step of Adam every
    entry moves by about its rate, so there ``update`` is close to ``lr``. The model, its gradients and
    buffers, the optimizer and the random generators are left exactly as they were, also when the model fails
    on the batch. A sharded model takes the steps itself, is put back afterwards, and needs the call on all
    processes; the first one prints.

    An optimizer that :func:`make_optimizer` did not make is audited: rows are by role, ``promised`` is the
    rate of a group over that of the first group whose rate is not 0, and ``audit`` names parameters that are
    in no group, in several, or did not move.

    Arguments:
        model: The model; it may be sharded.
        optimizer: Its optimizer, of :func:`make_optimizer` or any other.
        batch: Passed to the model: a mapping by keyword, a tuple by position.
        loss: ``loss(outputs)`` returns the loss; by default it is ``outputs.loss``, ``outputs["loss"]``, the
            first value of a tuple such as ``(loss, logits)``, or the output itself if it is one number.
        labels: As in :func:`find_circuits`, for an optimizer that :func:`make_optimizer` did not make.

    Returns:
        The :class:`CircuitCheck`, which is printed as well.

    Raises:
        InputError: There is no loss, nothing would move, or the optimizer is not that of this model.

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
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise InputError(
            f"{type(optimizer).__name__} computes the loss several times in a step, so its update is not "
            "proportional to a rate that could be checked"
        )
    hooks = hooks_of(optimizer) or _plain_hooks(model, optimizer, labels)
    hooks.check(optimizer)
    base = float(hooks.base_rate(optimizer))
    if base == 0:
        raise InputError("the base learning rate is 0 at this step (a warm-up?), so nothing would move")
    ratios = hooks.ratios_now(optimizer)
    as_set = _updates(model, optimizer, hooks, batch, loss, at_base=False)
    at_base = _updates(model, optimizer, hooks, batch, loss, at_base=True)
    rows = []
    for circuit, members in _by_circuit(hooks):
        circuit_ratios = sorted({ratios[index] for _, index in members})
        for ratio in circuit_ratios:
            chosen = [member for member in members if ratios[member[1]] == ratio]
            squares, moved, entries = (sum(as_set[member][which] for member in chosen) for which in range(3))
            plain = sum(at_base[member][0] for member in chosen)
            rows.append(
                CircuitUpdate(
                    circuit if len(circuit_ratios) == 1 else f"{circuit} x{ratio:g}",
                    int(entries),
                    len({part.parameter for part, _ in chosen}),
                    max(float(hooks.base_rate(optimizer, index)) for _, index in chosen) * ratio,
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
    ours = hooks_of(optimizer) is hooks or hasattr(optimizer, PLAIN)
    audit = () if ours else _audit(model, optimizer, as_set)
    result = CircuitCheck(tuple(rows), setting, type(optimizer).__name__, audit)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_rank() == 0:
        print(result)
    return result


def _audit(
    model: nn.Module, optimizer: torch.optim.Optimizer, updates: Mapping[Member, tuple[float, int, int]]
) -> tuple[str, ...]:
    """One line per kind of parameter that is not trained once: in no group, in several, without motion."""
    count = Counter(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    trainable = {name: id(weight) for name, weight in model.named_parameters() if weight.requires_grad}
    moved = {part.parameter for (part, _), (_, entries, _) in updates.items() if entries}
    kinds = {
        "trainable parameters are in no group": [n for n, i in trainable.items() if not count[i]],
        "parameters are in several groups": [n for n, i in trainable.items() if count[i] > 1],
        "parameters did not move": [n for n, i in trainable.items() if count[i] and n not in moved],
    }
    return tuple(f"{len(names)} {what}: {stack_names(names)}" for what, names in kinds.items() if names)


def _plain_hooks(model: nn.Module, optimizer: torch.optim.Optimizer, labels: Labels | None) -> StepHooks:
    """Hooks for an optimizer without any: its slices, and its rates as they are."""
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
    rates = [
        finite_number(options.get("lr"), f"the learning rate of group {index}", zero=True)
        for index, options in enumerate(optimizer.param_groups)
    ]
    circuits, roles, by_role = None, ROLES, True
    if hasattr(optimizer, PLAIN):
        circuits, made_with, roles, by_role = getattr(optimizer, PLAIN)
        labels = made_with if labels is None else labels
        groups = [Group(Settings(), anchor=index) for index in range(len(rates))]
    else:
        first = next((index for index, rate in enumerate(rates) if rate), 0)
        base = rates[first] or 1.0
        groups = [Group(Settings(ratio=rate / base), anchor=first) for rate in rates]
    for part in with_outer_roles(model, circuits or find_circuits(model, labels), roles):
        index = group_of.get(id(parameters[part.parameter]))
        if index is not None:
            groups[index].labelled.append(part)
    return StepHooks(groups, fused=[], model=weakref.ref(model), by_role=by_role)


def _updates(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    hooks: StepHooks,
    batch: Any,
    loss: Loss | None,
    *,
    at_base: bool,
) -> dict[Member, tuple[float, int, int]]:
    """Of every member: the sum of squares of its update, entries that moved, all entries."""
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    stepping = (_put_back if sharded else _on_copies)(model, optimizer, hooks)
    rehearsal = nullcontext() if hooks.first_pass is None else hooks.first_pass.rehearsal()
    with rehearsal, random_states_kept(), nothing_compiled(), torch.enable_grad(), stepping as stepper:
        if at_base:
            _all_at_base(stepper, optimizer, hooks)
        before = {member: _tensor(model, member[0]).detach().clone() for member in _members(hooks)}
        _backward(_scalar(_call(model, batch), loss))
        stepper.step()
        updates = {}
        for member, old in before.items():
            change = _tensor(model, member[0]).detach().double() - old.double()
            counts = [change.square().sum().item(), (change != 0).sum().item(), change.numel()]
            parameter = _parameter(model, member[0])
            squares, moved, entries = summed(torch.tensor(counts, dtype=torch.double), parameter).tolist()
            updates[member] = (squares, int(moved), int(entries))
    return updates


@contextmanager
def _on_copies(
    model: nn.Module, optimizer: torch.optim.Optimizer, hooks: StepHooks
) -> Iterator[torch.optim.Optimizer]:
    """A copy of ``optimizer``, for copies of the weights that ``model`` holds meanwhile."""
    live = list(model.parameters())
    with isolated(model):
        yield _twin(optimizer, hooks, dict(zip(map(id, live), model.parameters(), strict=True)))


@contextmanager
def _put_back(
    model: nn.Module, optimizer: torch.optim.Optimizer, hooks: StepHooks
) -> Iterator[torch.optim.Optimizer]:
    """``optimizer`` itself, for sharded modules, which own their parameters; all is put back at the end."""
    tensors = [*model.parameters(), *model.buffers()]
    memory = [getattr(tensor.detach(), "_local_tensor", tensor.detach()) for tensor in tensors]
    values = [(tensor.clone(), whole.grad) for tensor, whole in zip(memory, tensors, strict=True)]
    state = {parameter: copy.deepcopy(entries) for parameter, entries in optimizer.state.items()}
    options, groups = [dict(group) for group in optimizer.param_groups], hooks.groups
    for whole in tensors:
        whole.grad = None
    try:
        yield optimizer
    finally:
        hooks.settle(optimizer)
        for whole, tensor, (value, gradient) in zip(tensors, memory, values, strict=True):
            tensor.copy_(value)
            whole.grad = gradient
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(before)
        hooks.groups = groups


def _twin(
    optimizer: torch.optim.Optimizer, hooks: StepHooks, twins: dict[int, nn.Parameter]
) -> torch.optim.Optimizer:
    """A copy of ``optimizer`` for the copied parameters ``twins`` (by the identity of the originals)."""
    fused = [FusedWeight(weight.name, twins[id(weight.parameter)], weight.slices) for weight in hooks.fused]
    memo: dict[int, Any] = {**twins}
    for weight, twin in zip(hooks.fused, fused, strict=True):
        memo |= {id(leaf): copied_leaf for leaf, copied_leaf in zip(weight.leaves, twin.leaves, strict=True)}
    hooks.join(optimizer)
    with _copies_allowed(optimizer):
        try:
            stepper = copy.deepcopy(optimizer, memo)
        except NotImplementedError as error:
            raise InputError(
                f"the state of {type(optimizer).__name__} cannot be copied for a trial step ({error}); check "
                "before the first step of training, when there is no state"
            ) from error
    # What torch does not copy: attributes that a class of the user's may need in its step.
    for name, value in vars(optimizer).items():
        if not hasattr(stepper, name) and not isinstance(value, StepHooks):
            setattr(stepper, name, copied(value, memo))
    leaves = [[memo[id(leaf)] for leaf in group] for group in hooks.leaves]
    hooks = dataclasses.replace(hooks, fused=fused, leaves=leaves, frozen=[], split=None, first_pass=None)
    hooks.attach(stepper)
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
    plan = [
        (hooks.base_rate(optimizer, index), ratio if hooks.groups[index].independent else 1.0)
        for index, ratio in enumerate(hooks.ratios_now(optimizer))
    ]
    for options, (base, ratio) in zip(stepper.param_groups, plan, strict=False):
        options["lr"] = base
        if ratio != 1:
            options["weight_decay"] /= ratio
    stepper_hooks = hooks_of(stepper)
    if stepper_hooks is not None:  # a sharded model steps with its optimizer, of whatever origin
        stepper_hooks.groups = [
            dataclasses.replace(group, settings=Settings(), independent=False) for group in hooks.groups
        ]


def _parameter(model: nn.Module, part: Slice) -> torch.Tensor:
    """The parameter of a slice, also where the user has parametrized it."""
    prefix, _, attribute = part.parameter.rpartition(".")
    parameter: torch.Tensor = getattr(model.get_submodule(prefix), attribute)
    return parameter


def _tensor(model: nn.Module, part: Slice) -> torch.Tensor:
    """The slice in the memory of this process."""
    return local_view(part, _parameter(model, part))


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
