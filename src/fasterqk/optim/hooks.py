"""``StepHooks``: what an optimizer of ``make_optimizer`` does around every step.

It checks that optimizer and model still belong together, sets the rate of every group (the base rate times
its ratio at this step), and passes gradients to the leaves of fused weights. All of it uses the hooks that a
stock optimizer offers (before and after a step, before a state is loaded), so the optimizer stays an object
of the class that the user passed.
"""

import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule

from fasterqk.errors import InputError
from fasterqk.labels.first_pass import FirstPass
from fasterqk.optim._fused import FusedWeight, forbid_copies, memory_exchanged
from fasterqk.optim._groups import Group, Settings, plain_parameters
from fasterqk.optim._sharded import ShardedWeight
from fasterqk.optim.ratio import PartnerRatio, finite_number

_ATTRIBUTE = "_fasterqk"
_STEP = "ratio_step"  # key of a parameter group: steps taken under a ratio that changes
_START = "partner_norm"  # key of a parameter group: the norm of its partners at the start
_CONVERT = "; load_converted_state(model, optimizer, state) takes what fits from another optimizer's state"
# Rates closer than this to their ratio are left as a scheduler made them, to the last bit.
_CLOSE = 1e-6

# Splits one more group of the user's; the number is that of its first group in the optimizer.
Split = Callable[[Mapping[str, Any], int], tuple[list[Group], list[FusedWeight | ShardedWeight]]]


@dataclass
class StepHooks:
    """The hooks of one optimizer.

    ``groups`` describe its parameter groups, in order. ``split`` makes the groups of parameters that are
    added later; ``normalize`` is called on the gradients before the step; ``frozen`` are names and parameters
    that were not trainable and so are not optimized; ``by_role``: ratios were given by role; ``independent``:
    weight decay is divided by the ratio during a step; ``first_pass`` compares the labels with the first
    training pass.
    """

    groups: list[Group]
    fused: list[FusedWeight | ShardedWeight]
    model: "weakref.ref[nn.Module]"
    by_role: bool = False
    independent: bool = False
    split: Split | None = None
    normalize: Callable[[torch.optim.Optimizer], None] | None = None
    frozen: Sequence[tuple[str, nn.Parameter]] = ()
    first_pass: FirstPass | None = None
    _saved: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list, init=False)
    _inside: bool = field(default=False, init=False)
    _parameters: list[list[nn.Parameter]] = field(default_factory=list, init=False)
    _dtypes: dict[int, torch.dtype] = field(default_factory=dict, init=False)
    _owners: list[tuple[nn.Module, str, nn.Parameter]] = field(default_factory=list, init=False)
    _last: Any = field(default=None, init=False)
    _stepped: list[list[nn.Parameter]] = field(default_factory=list, init=False)
    _swapped: bool = field(default=False, init=False)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the hooks on ``optimizer``."""
        setattr(optimizer, _ATTRIBUTE, self)
        forbid_copies(optimizer)
        optimizer.register_step_pre_hook(_uncompiled(self._before))
        optimizer.register_step_post_hook(_uncompiled(self._after))
        optimizer.register_load_state_dict_pre_hook(self._check_state)
        optimizer.register_state_dict_pre_hook(self._before_saving)
        # Torch has no hooks for these three; schedulers replace `step` on the object in the same way.
        replace_method(optimizer, "zero_grad", self._zero_grad)
        replace_method(optimizer, "register_step_pre_hook", self._register_step_pre_hook)
        replace_method(optimizer, "add_param_group", self._add_param_group)
        self._go_last(optimizer)
        self._start(optimizer)

    def _start(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the groups as they are; ratios that change keep something in them, and so in the state."""
        self._list_sharded(optimizer)
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        self._dtypes = {id(leaf): leaf.dtype for leaves in self._parameters for leaf in leaves}
        self._owners = []
        if (model := self.model()) is not None:
            trained = self.trained(optimizer)
            self._owners = [
                (module, attribute, parameter)
                for module in model.modules()
                if not isinstance(module, ScriptModule)
                for attribute, parameter in module._parameters.items()
                if parameter is not None and id(parameter) in trained
            ]
        for options, group in zip(optimizer.param_groups, self.groups, strict=False):
            if group.changing:
                options.setdefault(_STEP, 0)
            group.independent = self.independent and group.ratio != 1 and "weight_decay" in options
            if isinstance(group.ratio, PartnerRatio):
                options.setdefault(_START, group.ratio.norm(self._model()))

    def _model(self) -> nn.Module:
        model = self.model()
        if model is None:
            raise InputError("the model of this optimizer is gone, and its ratio depends on the weights")
        return model

    def trained(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """The identities of everything optimized: parameters, leaves and the fused weights of leaves."""
        trained = {id(leaf) for options in optimizer.param_groups for leaf in options["params"]}
        return trained | {id(fused.parameter) for fused in self.fused}

    # --- Sharded weights are listed whole between steps, and as leaves in a step ---

    @property
    def _sharded(self) -> list[ShardedWeight]:
        return [weight for weight in self.fused if isinstance(weight, ShardedWeight)]

    def _list_sharded(self, optimizer: torch.optim.Optimizer) -> None:
        """List each sharded weight once, in the group with the fewest parameters of those it is split into.

        A group should not be left empty, which torch's ``set_state_dict`` does not expect.
        """
        if not self._sharded:
            return
        first = len(self._stepped)
        leaves_of_groups = [list(options["params"]) for options in optimizer.param_groups[first:]]
        self._stepped += leaves_of_groups
        owners = {id(leaf): weight for weight in self._sharded for leaf in weight.leaves}
        groups_of: dict[str, list[dict[str, Any]]] = {}
        for options, leaves in zip(optimizer.param_groups[first:], leaves_of_groups, strict=True):
            for leaf in leaves:
                if id(leaf) in owners:
                    groups_of.setdefault(owners[id(leaf)].name, []).append(options)
            for key in ("param_names", "slices", "params"):
                kept = zip(options.get(key, ()), leaves, strict=False)
                options[key] = [entry for entry, leaf in kept if id(leaf) not in owners]
        for weight in self._sharded:
            if weight.name in groups_of:
                weight.gather(optimizer.state)  # some classes make it before the first step
                weight.leave()
                options = min(groups_of[weight.name], key=lambda options: len(options["params"]))
                options["params"].append(weight.parameter)
                options["param_names"].append(weight.name)
                options["slices"].append([weight.name, None, []])

    def _swap(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange sharded weights and their leaves, in the groups and in the state."""
        if not self._sharded:
            return
        self._swapped = not self._swapped
        for index, (options, others) in enumerate(zip(optimizer.param_groups, self._stepped, strict=False)):
            self._stepped[index], options["params"] = options["params"], others
        for weight in self._sharded:
            (weight.scatter if self._swapped else weight.gather)(optimizer.state)

    # --- Methods of the optimizer that know of fused weights ---

    def _zero_grad(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        type(optimizer).zero_grad(optimizer, set_to_none)
        for fused in self.fused:
            fused.clear(set_to_none)

    def _register_step_pre_hook(self, optimizer: torch.optim.Optimizer, hook: Any) -> Any:
        handle = type(optimizer).register_step_pre_hook(optimizer, hook)
        self._go_last(optimizer)
        return handle

    def _go_last(self, optimizer: torch.optim.Optimizer) -> None:
        """Take gradients after every other hook, which may still clip them."""
        if self._last is not None:
            self._last.remove()
        self._last = type(optimizer).register_step_pre_hook(optimizer, _uncompiled(self._take))

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
            self._leave(optimizer)

    def _take(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._swap(optimizer)
        if not callable(closure):
            self._take_gradients(optimizer)
            return None
        # The closure computes the gradients inside the step.
        for weight in self._sharded:
            weight.enter()
        if "closure" in kwargs:
            return args, {**kwargs, "closure": self._around(optimizer, closure)}
        return (args[0], self._around(optimizer, closure), *args[2:]), kwargs

    def _around(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluated() -> Any:
            with torch.no_grad():
                for fused in self.fused:
                    fused.flush()  # an optimizer may have moved the weights before it calls the closure again
            loss = closure()
            self._take_gradients(optimizer)
            return loss

        return evaluated

    @torch.no_grad()
    def _take_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for fused in self.fused:
            fused.collect()
        if self.normalize is not None:
            self.normalize(optimizer)
        for fused in self.fused:
            fused.enter()

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        first = self._inside  # twice in a class whose step calls its parent's
        self._leave(optimizer)
        for options, group in zip(optimizer.param_groups, self.groups, strict=False):
            if first and group.changing:
                options[_STEP] += 1

    @torch.no_grad()
    def _leave(self, optimizer: torch.optim.Optimizer) -> None:
        self._inside = False
        for fused in self.fused:
            if self._swapped or isinstance(fused, FusedWeight):
                fused.leave()
        if self._swapped:
            self._swap(optimizer)
        for options, key, value in self._saved:
            options[key] = value
        self._saved.clear()

    # --- Do model and optimizer still belong together? ---

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise unless model and optimizer still belong together."""
        self._check_owners()
        for fused in self.fused:
            fused.check()
        self._check_groups(optimizer)
        self._check_frozen(optimizer)

    def _check_owners(self) -> None:
        """A parameter may have moved to another module (a parametrization); it must not be gone."""
        model = self.model()
        for module, attribute, parameter in self._owners:
            if module._parameters.get(attribute) is parameter or model is None:
                continue
            if all(parameter is not other for other in model.parameters()):
                raise InputError(
                    f"a parameter called {attribute!r} was replaced after the optimizer was made (by "
                    "load_state_dict(assign=True) or sharding) and would no longer be trained: "
                    "make the optimizer after the model has its final parameters"
                )

    def _check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Libraries that flatten parameters (DeepSpeed) replace those of the groups."""
        for options, known in zip(optimizer.param_groups, self._parameters, strict=False):
            now = options["params"]
            if len(now) < len(known) or any(
                before is not after for before, after in zip(known, now, strict=False)
            ):
                raise InputError(
                    f"another library has replaced the parameters of group {options.get('name')!r} in this "
                    "optimizer (DeepSpeed flattens them, Accelerate's FSDP shards them), so circuits can no "
                    "longer be separated; train with DDP, or call fully_shard(model) before make_optimizer"
                )
            for name, leaf in zip(options.get("param_names", ()), known, strict=False):
                if leaf.dtype != self._dtypes[id(leaf)] and optimizer.state.get(leaf):
                    raise InputError(memory_exchanged(name))  # the states have the dtype of before

    def _check_frozen(self, optimizer: torch.optim.Optimizer) -> None:
        """What was frozen when the optimizer was made would never be trained."""
        thawed = [(name, weight) for name, weight in self.frozen if weight.requires_grad]
        if not any(weight.grad is not None for _, weight in thawed):
            return
        trained = self.trained(optimizer)
        for name, weight in thawed:
            if weight.grad is not None and id(weight) not in trained:
                raise InputError(
                    f"{name} was frozen when the optimizer was made and has a gradient now, but would not be "
                    "trained: make the optimizer while it is trainable, or leave it out with only="
                )

    # --- Rates ---

    def _set_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Every rate is its ratio times the base rate, whatever a scheduler did to the groups.

        The first group (of each of the user's own) carries the base rate. A constant ratio is restored in
        place where it is off (by a scheduler with one absolute value for all groups); a ratio that changes
        is multiplied in for this step only, because schedulers like CosineAnnealingLR compute each rate
        from the last. Independent decay is divided for this step only, so that schedules of the decay and
        loaded states keep their meaning.
        """
        bases = [self.base_rate(optimizer, index) for index in range(len(self.groups))]
        groups = zip(optimizer.param_groups, self.groups, bases, strict=False)  # a library may append others
        for index, (options, group, base) in enumerate(groups):
            ratio = self.ratio_now(optimizer, index)
            if group.changing:
                self._saved.append((options, "lr", options["lr"]))
                options["lr"] = base * ratio
            elif not math.isclose(float(options["lr"]), float(base) * ratio, rel_tol=_CLOSE):
                options["lr"] = base * ratio
            if group.independent:
                self._saved.append((options, "weight_decay", options["weight_decay"]))
                options["weight_decay"] = options["weight_decay"] / ratio

    def base_rate(self, optimizer: torch.optim.Optimizer, index: int = 0) -> Any:
        """The rate of ratio 1 for group ``index``; its anchor carries it."""
        anchor = self.groups[index].anchor
        first, lr = self.groups[anchor].ratio, optimizer.param_groups[anchor]["lr"]
        return lr / first if isinstance(first, float) and first != 1 else lr

    def ratio_now(self, optimizer: torch.optim.Optimizer, index: int) -> float:
        """The ratio of group ``index`` at the step that comes next."""
        group, options = self.groups[index], optimizer.param_groups[index]
        if isinstance(group.ratio, float):
            return group.ratio
        step = options[_STEP]
        if isinstance(group.ratio, PartnerRatio):
            value = group.ratio.now(self._model(), step, options[_START])
        else:
            value = group.ratio(step)
        return finite_number(value, f"the ratio of group {group.name!r} at step {step}")

    # --- State dicts ---

    def _check_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """A saved state must belong to the same slices, and hold the step of a changing ratio.

        Returns the state with the slices of this optimizer, which older states do not have.
        """
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
        groups = [dict(other) for other in saved]
        for options, group_state in zip(optimizer.param_groups, groups, strict=True):
            if "slices" in options:
                group_state["slices"] = options["slices"]
        return {**state, "param_groups": groups}

    def _before_saving(self, optimizer: torch.optim.Optimizer) -> None:
        """``get_state_dict`` looks for a name of every parameter in the model, where leaves are not."""
        self.settle(optimizer)
        if len(self.fused) == len(self._sharded):
            return
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
                raise InputError(
                    f"{self.fused[0].name} is trained slice by slice, and get_state_dict and set_state_dict "
                    "know whole parameters only: save {'model': model, 'optimizer': optimizer} with "
                    "torch.distributed.checkpoint.save, which calls their state_dict()"
                )


def _uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook`` as ``torch.compile(optimizer.step)`` runs it: as it is, around the compiled step.

    Compiled, it would be taken apart: a leaf changes its memory in it, which a compiler does not expect.
    """
    disabled: Callable[..., Any] = torch.compiler.disable(hook)
    return disabled


def replace_method(optimizer: torch.optim.Optimizer, name: str, method: Callable[..., Any]) -> None:
    """Let ``optimizer.name(...)`` call ``method(optimizer, ...)``, without keeping the optimizer alive."""
    reference = weakref.ref(optimizer)

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(reference(), *args, **kwargs)

    setattr(optimizer, name, call)


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside the one that Accelerate wraps around it."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def hooks_of(optimizer: torch.optim.Optimizer) -> StepHooks | None:
    """The hooks of an optimizer made by :func:`make_optimizer`; None for any other."""
    return getattr(unwrapped(optimizer), _ATTRIBUTE, None)


def with_names(group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """A parameter group with the names of its parameters; strangers to the model are numbered."""
    parameters = plain_parameters(group["params"])
    known = [names.get(id(parameter), f"added {number}") for number, parameter in enumerate(parameters)]
    return {"param_names": known, **group, "params": parameters}
