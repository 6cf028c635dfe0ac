"""``StepHooks``: what an optimizer of ``make_optimizer`` does around every step.

It checks that optimizer and model still belong together, sets the rate of every group (the base rate times
its ratio at this step), and passes gradients to the leaves of fused weights. All of it uses the hooks that a
stock optimizer offers (before and after a step, before a state is loaded), so the optimizer stays an object
of the class that the user passed.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fasterqk.errors import InputError
from fasterqk.labels.first_pass import FirstPass
from fasterqk.labels.slices import Slice
from fasterqk.optim._fused import FusedWeight, forbid_copies, memory_exchanged, zero_grad_with
from fasterqk.optim._request import plain_parameters
from fasterqk.optim.ratio import PartnerRatio, Ratio, finite_number

_ATTRIBUTE = "_fasterqk"
_STEP = "ratio_step"  # key of a parameter group: steps taken under a ratio that changes
_START = "partner_norm"  # key of a parameter group: the norm of its partners at the start
_CONVERT = "; load_converted_state(model, optimizer, state) takes what fits from another optimizer's state"
# Rates closer than this to their ratio are left as a scheduler made them, to the last bit.
_CLOSE = 1e-6


@dataclass(frozen=True)
class GroupPlan:
    """The ratio of one parameter group.

    ``independent``: its weight decay is divided by the ratio during a step. ``anchor`` is the index of the
    group that carries its base rate: the first, or the first of the user's own group.
    """

    name: str
    ratio: Ratio
    independent: bool = False
    anchor: int = 0

    @property
    def changing(self) -> bool:
        """Whether the ratio is computed at every step."""
        return not isinstance(self.ratio, float)


@dataclass
class StepHooks:
    """The hooks of one optimizer.

    ``owners`` are (module, attribute, parameter) of everything optimized; ``members`` are the labelled
    slices with the index of their group; ``normalize`` is called on the gradients before the step;
    ``frozen`` are names and parameters that were not trainable and so are not optimized; ``by_role``: ratios
    were given by role; ``recipe`` splits groups that are added later; ``first_pass`` compares the labels with
    the first training pass.
    """

    plans: list[GroupPlan]
    fused: list[FusedWeight]
    owners: list[tuple[nn.Module, str, nn.Parameter]]
    model: "weakref.ref[nn.Module]"
    members: list[tuple[Slice, int]]
    by_role: bool = False
    recipe: Any = None
    normalize: Callable[[torch.optim.Optimizer], None] | None = None
    frozen: Sequence[tuple[str, nn.Parameter]] = ()
    first_pass: FirstPass | None = None
    _saved: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list, init=False)
    _inside: bool = field(default=False, init=False)
    _parameters: list[list[nn.Parameter]] = field(default_factory=list, init=False)
    _dtypes: dict[int, torch.dtype] = field(default_factory=dict, init=False)
    _last: Any = field(default=None, init=False)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the hooks on ``optimizer``."""
        setattr(optimizer, _ATTRIBUTE, self)
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        self._dtypes = {id(each): each.dtype for known in self._parameters for each in known}
        forbid_copies(optimizer)
        optimizer.register_step_pre_hook(_uncompiled(self._before))
        optimizer.register_step_post_hook(_uncompiled(self._after))
        optimizer.register_load_state_dict_pre_hook(self._check_state)
        self._check_kernels(optimizer)
        # Torch has no hooks for these three; schedulers replace `step` on the object in the same way.
        setattr(optimizer, "zero_grad", zero_grad_with(optimizer, self.fused))  # noqa: B010
        setattr(optimizer, "register_step_pre_hook", self._registering(optimizer))  # noqa: B010
        setattr(optimizer, "add_param_group", self._adding(optimizer))  # noqa: B010
        self._go_last(optimizer)
        self._start(optimizer)

    def _start(self, optimizer: torch.optim.Optimizer) -> None:
        """What ratios that change keep in their groups, and so in the state dict."""
        for group, plan in zip(optimizer.param_groups, self.plans, strict=False):
            if plan.changing:
                group.setdefault(_STEP, 0)
            if isinstance(plan.ratio, PartnerRatio):
                group.setdefault(_START, plan.ratio.norm(self._model()))

    def _model(self) -> nn.Module:
        model = self.model()
        if model is None:
            raise InputError("the model of this optimizer is gone, and its ratio depends on the weights")
        return model

    def _adding(self, optimizer: torch.optim.Optimizer) -> Callable[[dict[str, Any]], None]:
        reference = weakref.ref(optimizer)

        def add_param_group(group: dict[str, Any]) -> None:
            found = reference()
            assert found is not None  # it is being called
            self._add(found, group)

        return add_param_group

    def _add(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Add a group: parameters of the model are split by circuit, others are taken as they are."""
        names = {id(each): name for name, each in self._model().named_parameters()}
        if "params" not in group:
            raise InputError(f"the group {group!r} has no 'params', the parameters to add")
        parameters = plain_parameters(group["params"])
        known = {id(each) for own in optimizer.param_groups for each in own["params"]}
        known |= {id(fused.parameter) for fused in self.fused}
        for each in parameters:
            if id(each) in known:
                name = names.get(id(each), "a parameter that was added before")
                raise InputError(f"{name} is trained by this optimizer already and cannot be added")
        inside = [each for each in parameters if id(each) in names]
        outside = [each for each in parameters if id(each) not in names]
        first, add = len(optimizer.param_groups), type(optimizer).add_param_group
        if inside and self.recipe is not None:
            given = {"lr": optimizer.defaults.get("lr"), **group, "params": inside}
            parts = self.recipe.added(given)
            for each in parts.groups:
                add(optimizer, each.named(given["lr"]))
            made = optimizer.param_groups[first:]
            self.plans += parts.plans(made, self.recipe.decay, first)
            self.fused += parts.fused
            self.owners += parts.owners(self._model())
            self.members += [(part, first + index) for part, index in parts.members]
        if outside:
            add(optimizer, with_names({**group, "params": outside}, {}))
            self.plans.append(GroupPlan("added", 1.0, anchor=len(optimizer.param_groups) - 1))
        for made_group in optimizer.param_groups[first:]:
            self._parameters.append(list(made_group["params"]))
            self._dtypes |= {id(each): each.dtype for each in made_group["params"]}
        self._start(optimizer)

    def _go_last(self, optimizer: torch.optim.Optimizer) -> None:
        """Take gradients after every other hook, which may still clip them."""
        if self._last is not None:
            self._last.remove()
        self._last = type(optimizer).register_step_pre_hook(optimizer, _uncompiled(self._take))

    def _registering(self, optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
        reference = weakref.ref(optimizer)

        def register_step_pre_hook(hook: Any) -> Any:
            found = reference()
            assert found is not None  # it is being called
            handle = type(found).register_step_pre_hook(found, hook)
            self._go_last(found)
            return handle

        return register_step_pre_hook

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside:
            self._leave()  # the last step raised half-way
        if self.first_pass is not None:
            self.first_pass.before_step()
        self.check(optimizer)
        self._set_rates(optimizer)
        self._inside = True

    def _take(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._take_gradients(optimizer)
            return None
        # The closure computes the gradients inside the step.
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
        self._leave()
        for group, plan in zip(optimizer.param_groups, self.plans, strict=False):
            if first and plan.changing:
                group[_STEP] += 1

    @torch.no_grad()
    def _leave(self) -> None:
        self._inside = False
        for fused in self.fused:
            fused.leave()
        for group, key, value in self._saved:
            group[key] = value
        self._saved.clear()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise unless model and optimizer still belong together."""
        self._check_owners()
        for fused in self.fused:
            fused.check()
        self._check_groups(optimizer)
        self._check_frozen(optimizer)
        self._check_kernels(optimizer)

    def _check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Libraries that flatten parameters (DeepSpeed) replace those of the groups."""
        for group, known in zip(optimizer.param_groups, self._parameters, strict=False):
            now = group["params"]
            if len(now) < len(known) or any(one is not other for one, other in zip(known, now, strict=False)):
                raise InputError(
                    f"another library has replaced the parameters of group {group.get('name')!r} in this "
                    "optimizer (DeepSpeed flattens them), so circuits can no longer be separated; train "
                    "with DDP, Accelerate or FSDP2 instead"
                )
            for name, each in zip(group.get("param_names", ()), known, strict=False):
                if each.dtype != self._dtypes[id(each)] and optimizer.state.get(each):
                    raise InputError(memory_exchanged(name))  # the states have the dtype of before

    def _check_frozen(self, optimizer: torch.optim.Optimizer) -> None:
        """What was frozen when the optimizer was made would never be trained."""
        thawed = [(name, each) for name, each in self.frozen if each.requires_grad and each.grad is not None]
        if not thawed:
            return
        known = {id(each) for group in optimizer.param_groups for each in group["params"]}
        known |= {id(fused.parameter) for fused in self.fused}
        for name, parameter in thawed:
            if id(parameter) not in known:
                raise InputError(
                    f"{name} was frozen when the optimizer was made and has a gradient now, but would not be "
                    "trained: make the optimizer while it is trainable, or leave it out with only="
                )

    def _check_kernels(self, optimizer: torch.optim.Optimizer) -> None:
        """Fused kernels need contiguous memory; a loaded state may have switched them on."""
        strided = next((fused.name for fused in self.fused if fused.strided), None)
        if strided is not None and any(group.get("fused") for group in optimizer.param_groups):
            raise InputError(
                f"fused=True would overwrite the other circuit in {strided}, whose slices are not "
                "contiguous; use mechanism='auto' or fused=False"
            )

    def _check_owners(self) -> None:
        """A parameter may have moved to another module (a parametrization); it must not be gone."""
        model = self.model()
        for module, attribute, parameter in self.owners:
            if module._parameters.get(attribute) is parameter or model is None:
                continue
            if all(parameter is not each for each in model.parameters()):
                raise InputError(
                    f"a parameter called {attribute!r} was replaced after the optimizer was made (by "
                    "load_state_dict(assign=True) or sharding) and would no longer be trained: "
                    "make the optimizer after the model has its final parameters"
                )

    def _set_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Every rate is its ratio times the base rate, whatever a scheduler did to the groups.

        The first group (of each of the user's own) carries the base rate. A constant ratio is restored in
        place where it is off (by a scheduler with one absolute value for all groups); a ratio that changes
        is multiplied in for this step only, because schedulers like CosineAnnealingLR compute each rate
        from the last. Independent decay is divided for this step only, so that schedules of the decay and
        loaded states keep their meaning.
        """
        bases = [self.base_rate(optimizer, index) for index in range(len(self.plans))]
        groups = zip(optimizer.param_groups, self.plans, bases, strict=False)  # a library may append others
        for index, (group, plan, base) in enumerate(groups):
            ratio = self.ratio_now(optimizer, index)
            if plan.changing:
                self._saved.append((group, "lr", group["lr"]))
                group["lr"] = base * ratio
            elif not math.isclose(float(group["lr"]), float(base) * ratio, rel_tol=_CLOSE):
                group["lr"] = base * ratio
            if plan.independent:
                self._saved.append((group, "weight_decay", group["weight_decay"]))
                group["weight_decay"] = group["weight_decay"] / ratio

    def base_rate(self, optimizer: torch.optim.Optimizer, index: int = 0) -> Any:
        """The rate of ratio 1 for group ``index``; its anchor carries it."""
        anchor = self.plans[index].anchor
        first, lr = self.plans[anchor].ratio, optimizer.param_groups[anchor]["lr"]
        return lr / first if isinstance(first, float) and first != 1 else lr

    def ratio_now(self, optimizer: torch.optim.Optimizer, index: int) -> float:
        """The ratio of group ``index`` at the step that comes next."""
        plan, group = self.plans[index], optimizer.param_groups[index]
        if isinstance(plan.ratio, float):
            return plan.ratio
        step = group[_STEP]
        if isinstance(plan.ratio, PartnerRatio):
            value = plan.ratio.now(self._model(), step, group[_START])
        else:
            value = plan.ratio(step)
        return finite_number(value, f"the ratio of group {plan.name!r} at step {step}")

    def _check_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """A saved state must belong to the same slices, and hold the step of a changing ratio."""
        saved = state.get("param_groups", ())
        for group, plan, other in zip(optimizer.param_groups, self.plans, saved, strict=False):
            names = group.get("param_names", ())
            others = other.get("param_names", names)
            for name, its in zip(names, others, strict=False):
                if not (name.endswith(its) or its.endswith(name)):
                    raise InputError(
                        f"the saved state has {its!r} where this optimizer has {name!r}; "
                        f"make it for the same model, with the same kind of ratios and mechanism{_CONVERT}"
                    )
            if plan.changing and _STEP not in other:
                raise InputError(
                    f"the saved state does not say how many steps the ratio of group {plan.name!r} has "
                    f"seen; it was not saved with a ratio that changes{_CONVERT}"
                )
            if isinstance(plan.ratio, PartnerRatio) and _START not in other:
                raise InputError(
                    f"the saved state does not have the norms at the start for group {plan.name!r}; it was "
                    f"not saved with PartnerNorm{_CONVERT}"
                )
        ours = [len(group["params"]) for group in optimizer.param_groups]
        theirs = [len(group["params"]) for group in saved]
        if ours != theirs:
            raise InputError(
                f"the saved state has groups of {theirs} parameters, this optimizer has groups of {ours}; "
                "it was saved by another optimizer, or for a model with other trainable parameters" + _CONVERT
            )


def _uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook`` as ``torch.compile(optimizer.step)`` runs it: as it is, around the compiled step.

    Compiled, it would be taken apart: a leaf changes its memory in it, which a compiler does not expect.
    """
    found: Callable[..., Any] = torch.compiler.disable(hook)
    return found


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
    known = [names.get(id(each), f"added {number}") for number, each in enumerate(parameters)]
    return {"param_names": known, **group, "params": parameters}
