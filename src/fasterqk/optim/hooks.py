"""``StepHooks``: what an optimizer of ``make_optimizer`` does around every step.

It checks that optimizer and model still belong together, sets the rate of every group (the base rate times
its ratio at this step), and exchanges fused weights and their leaves. All of it uses the hooks that a stock
optimizer offers (before and after a step, before a state is saved or loaded), so the optimizer stays an
object of the class that the user passed.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from operator import attrgetter, is_not
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.jit import ScriptModule

from fasterqk.errors import InputError
from fasterqk.labels.first_pass import FirstPass
from fasterqk.optim._fused import PARTS, FusedWeight, FusedWeights
from fasterqk.optim._groups import Group, Settings, plain_parameters
from fasterqk.optim.ratio import PartnerRatio, finite_number, is_sharded, partner_norms

COPYING = ("__deepcopy__", "__reduce_ex__")  # the methods that copy and pickle call
_ATTRIBUTE = "_fasterqk"
PLAIN = "_fasterqk_plain"  # attribute of an optimizer at ratio 1, which has no hooks: how to label its model
_STEP = "ratio_step"  # key of a parameter group: steps taken under a ratio that changes
_START = "partner_norm"  # key of a parameter group: the norm of its partners at the start
_CONVERT = "; load_converted_state(model, optimizer, state) takes what fits from another optimizer's state"
SHARD_FIRST = (
    "in a loop of your own call torch.distributed.fsdp.fully_shard(model), then make_optimizer(model, ...); "
    "an Accelerator without an FSDP plugin may then prepare(optimizer), but not the model"
)
# Rates closer than this to their ratio are left as a scheduler made them, to the last bit.
_CLOSE = 1e-6

# Splits one more group of the user's; the number is that of its first group in the optimizer.
Split = Callable[[Mapping[str, Any], int], tuple[list[Group], list[FusedWeight]]]


@dataclass
class StepHooks:
    """The hooks of one optimizer.

    ``groups`` describe its parameter groups, in order. ``leaves`` holds the tensors that each group lists
    during a step; ``split`` makes the groups of parameters that are added later; ``normalize`` is called on
    the gradients before the step; ``frozen`` holds names and parameters that were not trainable, and so are
    not optimized; ``by_role``: ratios were given by role; ``independent``: weight decay is divided by the
    ratio during a step; ``first_pass`` compares the labels with the first training pass.
    """

    groups: list[Group]
    fused: list[FusedWeight]
    model: "weakref.ref[nn.Module]"
    by_role: bool = False
    independent: bool = False
    split: Split | None = None
    normalize: Callable[[torch.optim.Optimizer], None] | None = None
    frozen: Sequence[tuple[str, nn.Parameter]] = ()
    first_pass: FirstPass | None = None
    leaves: list[list[nn.Parameter]] = field(default_factory=list)
    _saved: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list, init=False)
    _inside: bool = field(default=False, init=False)  # between the hooks before and after a step
    _on_leaves: bool = field(default=False, init=False)  # the groups list leaves
    _parameters: list[list[nn.Parameter]] = field(default_factory=list, init=False)
    _kinds: list[list[Any]] = field(default_factory=list, init=False)
    # Parameters of modules, names and parameters: three columns, which are compared in C.
    _owners: list[tuple[Any, ...]] = field(default_factory=list, init=False)
    _together: FusedWeights = field(default_factory=lambda: FusedWeights([]), init=False)
    _last: Any = field(default=None, init=False)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the hooks on ``optimizer``."""
        setattr(optimizer, _ATTRIBUTE, self)
        _forbid_copies(optimizer)
        optimizer.register_step_pre_hook(_uncompiled(self._before))
        optimizer.register_step_post_hook(_uncompiled(self._after))
        optimizer.register_load_state_dict_pre_hook(self._check_state)
        optimizer.register_state_dict_pre_hook(self.join)
        # Torch has no hooks for these; schedulers replace `step` on the object in the same way.
        replace_method(optimizer, "register_step_pre_hook", self._register_step_pre_hook)
        replace_method(optimizer, "add_param_group", self._add_param_group)
        replace_method(optimizer, "step", self._step)
        for name in ("train", "eval"):  # of schedule-free optimizers, which read the state between steps
            if hasattr(type(optimizer), name):
                replace_method(optimizer, name, partial(self._on_whole_state, name))
        self._go_last(optimizer)
        self._start(optimizer)

    def _start(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the groups as they are; ratios that change keep something in them, and so in the state."""
        self._list_whole(optimizer)
        self._together = FusedWeights(self.fused)
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        self._kinds = [_kinds(parameters) for parameters in self._parameters]
        trained, model = self.trained(optimizer), self.model()
        owners = [
            (module._parameters, attribute, parameter)
            for module in (() if model is None else model.modules())
            if not isinstance(module, ScriptModule)
            for attribute, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in trained
        ]
        self._owners = list(zip(*owners, strict=True))
        norms = self._partner_norms()
        for options, group in zip(optimizer.param_groups, self.groups, strict=False):
            if group.changing:
                options.setdefault(_STEP, 0)
            group.independent = self.independent and group.ratio != 1 and "weight_decay" in options
            if isinstance(group.ratio, PartnerRatio):
                options.setdefault(_START, norms[id(group.ratio)])

    def _model(self) -> nn.Module:
        model = self.model()
        if model is None:
            raise InputError("the model of this optimizer is gone, and its ratio depends on the weights")
        return model

    def trained(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """The identities of all parameters that are optimized."""
        return {id(parameter) for options in optimizer.param_groups for parameter in options["params"]}

    # --- Fused weights are listed whole between steps, and as leaves in a step ---

    def _list_whole(self, optimizer: torch.optim.Optimizer) -> None:
        """List each fused weight of new groups once, in the smallest of those that it is split into.

        A group should not be left empty, which torch's ``set_state_dict`` does not expect. A weight stands
        where its first leaf was, so that the order in a group is that of the model.
        """
        new = optimizer.param_groups[len(self.leaves) :]
        self.leaves += [options["params"] for options in new]
        owners = {id(leaf): weight for weight in self.fused for leaf in weight.leaves}
        groups_of: dict[FusedWeight, list[int]] = {}
        for index, options in enumerate(new):
            for leaf in options["params"]:
                if weight := owners.get(id(leaf)):
                    groups_of.setdefault(weight, []).append(index)
        sizes = [sum(id(leaf) not in owners for leaf in options["params"]) for options in new]
        home = {}
        for weight, groups in groups_of.items():
            home[weight] = min(groups, key=lambda index: sizes[index])
            sizes[home[weight]] += 1
        for index, options in enumerate(new if owners else ()):
            listed = {}
            for name, leaf in zip(options["param_names"], options["params"], strict=True):
                if (weight := owners.get(id(leaf))) is None:
                    listed[leaf] = name
                elif home[weight] == index:
                    listed[weight.parameter] = weight.name
            options["params"], options["param_names"] = list(listed), list(listed.values())

    def _exchange(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange fused weights and leaves in the groups; a library may have appended others."""
        self._on_leaves = not self._on_leaves
        for index, (options, others) in enumerate(zip(optimizer.param_groups, self.leaves, strict=False)):
            self.leaves[index], options["params"] = options["params"], others

    def _enter(self, optimizer: torch.optim.Optimizer) -> None:
        if not optimizer.state.keys().isdisjoint(self._together.parameters):
            for weight in self.fused:
                weight.split(optimizer.state)
        if self._together.moved():
            self._check_kinds(optimizer)
            self._together.view_memory()
        self._together.enter()
        self._exchange(optimizer)

    def _leave(self, optimizer: torch.optim.Optimizer) -> None:
        if self._on_leaves:
            self._exchange(optimizer)
            self._together.leave()

    # --- Methods of the optimizer that are replaced ---

    def _register_step_pre_hook(self, optimizer: torch.optim.Optimizer, hook: Any) -> Any:
        handle = type(optimizer).register_step_pre_hook(optimizer, hook)
        self._go_last(optimizer)
        return handle

    def _go_last(self, optimizer: torch.optim.Optimizer) -> None:
        """Take gradients after every other hook, which may still clip them."""
        if self._last is not None:
            self._last.remove()
        self._last = type(optimizer).register_step_pre_hook(optimizer, _uncompiled(self._take))

    def _step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return type(optimizer).step(optimizer, *args, **kwargs)
        finally:
            self.settle(optimizer)

    def _on_whole_state(self, name: str, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self.join(optimizer)
        return getattr(type(optimizer), name)(optimizer, *args, **kwargs)

    def _add_param_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Add a group: parameters of the model are split by circuit, others are taken as they are."""
        names = {id(parameter): name for name, parameter in self._model().named_parameters()}
        if "params" not in group:
            raise InputError(f"the group {group!r} has no 'params', the parameters to add")
        parameters, trained = plain_parameters(group["params"]), self.trained(optimizer)
        for parameter in parameters:
            if id(parameter) in trained:
                name = names.get(id(parameter), "a parameter that was added before")
                raise InputError(f"{name} is trained by this optimizer already and cannot be added")
        inside = [parameter for parameter in parameters if id(parameter) in names]
        outside = [parameter for parameter in parameters if id(parameter) not in names]
        add = type(optimizer).add_param_group
        if inside and self.split is not None:
            options = {"lr": optimizer.defaults.get("lr"), **group, "params": inside}
            groups, fused = self.split(options, len(optimizer.param_groups))
            for added in groups:
                leaves = [leaf.tensor for leaf in added.leaves]
                add(optimizer, added.options(options["lr"]) | added.names(leaves))
            self.groups += groups
            self.fused += fused
        if outside:
            add(optimizer, with_names({**group, "params": outside}, {}))
            self.groups.append(Group(Settings(), name="added", anchor=len(optimizer.param_groups) - 1))
        self._start(optimizer)

    # --- Around a step ---

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.settle(optimizer)
        # At rate 0 nothing is trained: torch's set_state_dict steps so to make a state.
        if self.first_pass is not None and any(options["lr"] != 0 for options in optimizer.param_groups):
            self.first_pass.before_step()
        self.check(optimizer)
        self._set_rates(optimizer)
        self._inside = True

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring optimizer and weights into order if the last step raised half-way."""
        if self._inside:
            self._finish(optimizer)

    def _take(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._normalize(optimizer)
            self._enter(optimizer)
            return None
        # The closure computes the gradients inside the step.
        self._enter(optimizer)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": self._around(optimizer, closure)}
        return (args[0], self._around(optimizer, closure), *args[2:]), kwargs

    def _around(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluated() -> Any:
            self._leave(optimizer)  # the closure sees the weights as they are now, and groups that list them
            loss = closure()
            self._normalize(optimizer)
            self._enter(optimizer)
            return loss

        return evaluated

    def _normalize(self, optimizer: torch.optim.Optimizer) -> None:
        if self.normalize is not None:
            self.normalize(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        first = self._inside  # twice in a class whose step calls its parent's
        self._finish(optimizer)
        for options, group in zip(optimizer.param_groups, self.groups, strict=False):
            if first and group.changing:
                options[_STEP] += 1

    def _finish(self, optimizer: torch.optim.Optimizer) -> None:
        self._inside = False
        self._leave(optimizer)
        for options, key, value in self._saved:
            options[key] = value
        self._saved.clear()

    # --- Do model and optimizer still belong together? ---

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise unless model and optimizer still belong together."""
        self._check_owners()
        self._check_groups(optimizer)
        self._check_frozen(optimizer)

    def _check_owners(self) -> None:
        """Every parameter must still be in the model, perhaps in another module (a parametrization)."""
        model = self.model()
        if model is None or not self._owners:
            return
        of_modules, attributes, parameters = self._owners
        if not any(map(is_not, map(dict.get, of_modules, attributes), parameters)):
            return
        left = {id(parameter) for parameter in model.parameters()}
        for of_module, attribute, parameter in zip(*self._owners, strict=True):
            if id(parameter) in left or of_module.get(attribute) is parameter:
                continue
            if is_sharded(of_module.get(attribute)) and not is_sharded(parameter):
                raise InputError(
                    f"a parameter called {attribute!r} was replaced after the optimizer was made: the "
                    f"model was sharded (by fully_shard, parallelize_module or Accelerate); {SHARD_FIRST}"
                )
            if is_sharded(parameter) and not is_sharded(of_module.get(attribute)):
                raise InputError(
                    f"a parameter called {attribute!r} is not sharded now (unshard(), or "
                    "set_reshard_after_backward(False)): call reshard() on every sharded module before step()"
                )
            raise InputError(
                f"a parameter called {attribute!r} was replaced after the optimizer was made (by "
                "load_state_dict(assign=True) or sharding) and would no longer be trained: "
                "make the optimizer after the model has its final parameters"
            )

    def _check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Libraries that flatten parameters (DeepSpeed) replace those of the groups."""
        if not optimizer.state:
            self._kinds = [_kinds(parameters) for parameters in self._parameters]
        for options, known, kinds in zip(optimizer.param_groups, self._parameters, self._kinds, strict=False):
            now = options["params"]
            if len(now) < len(known) or any(map(is_not, known, now)):
                raise InputError(
                    f"another library has replaced the parameters of group {options.get('name')!r} in this "
                    "optimizer (DeepSpeed flattens them), so circuits can no longer be separated; train with "
                    f"DDP, or {SHARD_FIRST}"
                )
            # A cast of the model reaches the first parameter of each group; that of a fused weight moves it.
            if _kinds(known[:1]) != kinds[:1] + kinds[-1:]:
                self._check_kinds(optimizer)

    def _check_kinds(self, optimizer: torch.optim.Optimizer) -> None:
        """The states have the dtypes and the device that the parameters had."""
        for options, known, kinds in zip(optimizer.param_groups, self._parameters, self._kinds, strict=False):
            now = _kinds(known)
            if now != kinds:
                changes = zip(options.get("param_names", ()), map(is_not, now, kinds), strict=False)
                name = next((name for name, changed in changes if changed), "a parameter")
                raise InputError(
                    f"the memory of {name} was exchanged after the optimizer was made (by .to(...), .half() "
                    "or .data = ...): make the optimizer after the model has its final weights, dtype and "
                    "device"
                )

    def _check_frozen(self, optimizer: torch.optim.Optimizer) -> None:
        """Parameters that were frozen when the optimizer was made would never be trained."""
        thawed = [
            (name, weight) for name, weight in self.frozen if weight.requires_grad and weight.grad is not None
        ]
        trained = self.trained(optimizer) if thawed else set()
        for name, weight in thawed:
            if id(weight) not in trained:
                raise InputError(
                    f"{name} was frozen when the optimizer was made and has a gradient now, but would not be "
                    "trained: make the optimizer while it is trainable, or leave it out with only="
                )

    # --- Rates ---

    def _set_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Every rate is its ratio times the base rate, whatever a scheduler did to the groups.

        The first group (of each of the user's) carries the base rate. A constant ratio is restored in place
        where it is off (by a scheduler with one absolute value for all groups). A ratio that changes is
        multiplied in for this step only, because schedulers like CosineAnnealingLR compute each rate from
        the last. So is the division of independent decay, so that schedules of the decay and loaded states
        keep their meaning.
        """
        bases = [self.base_rate(optimizer, index) for index in range(len(self.groups))]
        ratios = self.ratios_now(optimizer)
        # A library may append other groups.
        for options, group, base, ratio in zip(
            optimizer.param_groups, self.groups, bases, ratios, strict=False
        ):
            if group.changing:
                self._saved.append((options, "lr", options["lr"]))
                options["lr"] = base * ratio
            elif not math.isclose(float(options["lr"]), float(base) * ratio, rel_tol=_CLOSE):
                options["lr"] = base * ratio
            if group.independent:
                self._saved.append((options, "weight_decay", options["weight_decay"]))
                options["weight_decay"] = options["weight_decay"] / ratio

    def base_rate(self, optimizer: torch.optim.Optimizer, index: int = 0) -> Any:
        """The base rate of group ``index``, which its anchor carries."""
        anchor = self.groups[index].anchor
        first, lr = self.groups[anchor].ratio, optimizer.param_groups[anchor]["lr"]
        return lr / first if isinstance(first, float) and first != 1 else lr

    def ratios_now(self, optimizer: torch.optim.Optimizer) -> list[float]:
        """The ratio of each group at the next step."""
        norms = self._partner_norms()
        ratios = []
        for group, options in zip(self.groups, optimizer.param_groups, strict=False):
            ratio: Any = group.ratio
            if not isinstance(ratio, float):
                step = options[_STEP]
                partner = isinstance(ratio, PartnerRatio)
                value = ratio.now(step, options[_START], norms[id(ratio)]) if partner else ratio(step)
                ratio = finite_number(value, f"the ratio of group {group.name!r} at step {step}")
            ratios.append(ratio)
        return ratios

    def _partner_norms(self) -> dict[int, float]:
        ratios = [group.ratio for group in self.groups if isinstance(group.ratio, PartnerRatio)]
        return partner_norms(self._model(), ratios) if ratios else {}

    # --- State dicts ---

    def _check_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """A saved state must belong to the same parameters, and hold the step of a changing ratio."""
        saved = state.get("param_groups", ())
        for options, group, other in zip(optimizer.param_groups, self.groups, saved, strict=False):
            names = options.get("param_names", ())
            for name, saved_name in zip(names, other.get("param_names", names), strict=False):
                # A wrapper such as DDP may have put a prefix before a name.
                if not (name.endswith(saved_name) or saved_name.endswith(name)):
                    raise InputError(
                        f"the saved state has {saved_name!r} where this optimizer has {name!r}; "
                        f"make it for the same model, with the same kind of ratios{_CONVERT}"
                    )
            if group.changing and _STEP not in other:
                raise InputError(
                    f"the saved state does not say how many steps the ratio of group {group.name!r} has "
                    f"seen; it was not saved with a ratio that changes{_CONVERT}"
                )
            if isinstance(group.ratio, PartnerRatio) and _START not in other:
                raise InputError(
                    f"the saved state does not have the norms at the start for group {group.name!r}; it was "
                    f"not saved with PartnerNorm{_CONVERT}"
                )
        ours = [len(options["params"]) for options in optimizer.param_groups]
        theirs = [len(options["params"]) for options in saved]
        if ours != theirs:
            raise InputError(
                f"the saved state has groups of {theirs} parameters, this optimizer has groups of {ours}; "
                "it was saved by another optimizer, or for a model with other trainable parameters" + _CONVERT
            )
        self._check_parts(optimizer, state)
        self._kinds = [_kinds(parameters) for parameters in self._parameters]  # torch casts the state so

    def _check_parts(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Raise unless every saved state has the parts of its parameter here, or can be split into them."""
        counts = {id(weight.parameter): len(weight.leaves) for weight in self.fused}
        for options, other in zip(optimizer.param_groups, state["param_groups"], strict=True):
            for key, parameter, name in zip(
                other["params"], options["params"], options["param_names"], strict=True
            ):
                entries = state["state"].get(key, {})
                if any(map(is_sharded, entries.values())) and not is_sharded(parameter):
                    raise InputError(
                        f"the saved state of {name} is sharded and the model is not; save it whole, by "
                        "get_optimizer_state_dict(model, optimizer, options=StateDictOptions("
                        "full_state_dict=True)) of torch.distributed.checkpoint.state_dict"
                    )
                count, saved = counts.get(id(parameter), 1), len(entries.get(PARTS, ())) or 1
                shapes = [value.shape for value in entries.values() if isinstance(value, torch.Tensor)]
                whole = any(shape.numel() > 1 and shape != parameter.shape for shape in shapes)
                if count != saved and (PARTS in entries or whole):
                    raise InputError(
                        f"the saved state of {name} has {saved} parts, this optimizer steps it in {count}; "
                        "load it into one that splits it in the same way"
                    )

    def join(self, optimizer: torch.optim.Optimizer) -> None:
        """Give ``optimizer.state`` the form of a plain optimizer's, to save or to copy it."""
        for weight in self.fused:
            if any(leaf in optimizer.state for leaf in weight.leaves):
                weight.split(optimizer.state)  # entries that others have written for the parameter
                weight.join(optimizer.state)


def _kinds(parameters: Sequence[nn.Parameter]) -> list[Any]:
    """The dtype of each parameter, and the device of the first; all devices would double the cost."""
    return [*map(attrgetter("dtype"), parameters), *map(attrgetter("device"), parameters[:1])]


def _forbid_copies(optimizer: torch.optim.Optimizer) -> None:
    """Make copying and pickling raise: torch does not copy hooks, and with them ratios would be lost."""

    def refuse(*_: Any) -> NoReturn:
        raise InputError(
            "this optimizer is tied to its model and cannot be copied or pickled whole; call make_optimizer "
            "on the copied model and load_state_dict(copy.deepcopy(optimizer.state_dict()))"
        )

    for name in COPYING:
        setattr(optimizer, name, refuse)


def _uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook``, which ``torch.compile(optimizer.step)`` leaves as it is: leaves change their memory in it."""
    disabled: Callable[..., Any] = torch.compiler.disable(hook)
    return disabled


def replace_method(optimizer: torch.optim.Optimizer, name: str, method: Callable[..., Any]) -> None:
    """Let ``optimizer.name(...)`` call ``method(optimizer, ...)``, without keeping the optimizer alive."""
    reference = weakref.ref(optimizer)

    @wraps(getattr(type(optimizer), name))
    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        if (this := reference()) is None:
            raise InputError(f"this optimizer is gone: keep it in a variable before {name}() is called")
        return method(this, *args, **kwargs)

    setattr(optimizer, name, MethodType(call, weakref.proxy(optimizer)))  # bound, as schedulers expect


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside the one that Accelerate wraps around it."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def hooks_of(optimizer: torch.optim.Optimizer) -> StepHooks | None:
    """The hooks of an optimizer made by :func:`make_optimizer`; None for any other."""
    return getattr(unwrapped(optimizer), _ATTRIBUTE, None)


def with_names(group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """A parameter group with the names of its parameters; those outside the model are numbered."""
    parameters = plain_parameters(group["params"])
    known = [names.get(id(parameter), f"added {number}") for number, parameter in enumerate(parameters)]
    return {"param_names": known, **group, "params": parameters}
