"""Which entries of a tensor one leaf stands for."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.utils import parametrize

from fasterqk.circuits._groups import Assigned, Run, merge
from fasterqk.errors import InputError


@dataclass(frozen=True)
class Window:
    """``start:start+length`` along ``axis``, repeated ``repeat`` times every ``period`` entries.

    A single run is a plain slice. Repeated runs are the heads of an interleaved layout; their view has
    one axis more, (repeat, length), in the place of ``axis``.
    """

    axis: int
    start: int
    length: int
    repeat: int = 1
    period: int = 0

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """These entries of ``tensor``, in its memory.

        >>> Window(0, 1, 2).view(torch.arange(6)).tolist()
        [1, 2]
        >>> Window(0, 1, 1, repeat=3, period=2).view(torch.arange(6)).tolist()
        [[1], [3], [5]]
        """
        if self.repeat == 1:
            return tensor.narrow(self.axis, self.start, self.length)
        apart = tensor.unflatten(self.axis, (self.repeat, self.period))
        return apart.narrow(self.axis + 1, self.start, self.length)

    def label(self, name: str) -> str:
        """``weight[:, 0:64]``, or with the further runs, ``weight[0:64, 192:256, ...]``."""
        runs = [f"{start}:{start + self.length}" for start in self.starts()]
        return f"{name}[{':, ' * self.axis}{', '.join(runs)}]"

    def starts(self) -> list[int]:
        """Where each run begins."""
        return [self.start + turn * self.period for turn in range(self.repeat)]


def regular(axis: int, size: int, spans: Sequence[tuple[int, int]]) -> Window | None:
    """One window for equal (start, stop) runs at equal distances over the whole axis, if they are that."""
    lengths = {stop - start for start, stop in spans}
    steps = {after[0] - before[0] for before, after in pairwise(spans)}
    if len(lengths) != 1 or len(steps) != 1:
        return None
    window = Window(axis, spans[0][0], lengths.pop(), len(spans), steps.pop())
    fits = window.repeat * window.period == size and window.start + window.length <= window.period
    return window if fits else None


# --- Contiguous copies for the time of a step ---
# Fused kernels walk through memory as if every tensor were one piece. A slice that is not (columns of a
# weight stored row by row) would make them overwrite its neighbours, so such a leaf steps on a copy: weights
# and gradient are copied in before the step, weights copied back after it. Between steps the leaf is an
# ordinary view of the fused weight, and so is its gradient; clipping and loss scaling see both as they are.


class Shadow:
    """One leaf, its slice ``view`` of the fused weight, and the two buffers it steps on."""

    def __init__(self, leaf: nn.Parameter, view: torch.Tensor) -> None:
        self._leaf = leaf
        self._view = view
        self._weights: torch.Tensor | None = None
        self._gradients: torch.Tensor | None = None
        self._gradient_view: torch.Tensor | None = None
        self._inside = False

    def enter(self) -> None:
        """Copy weights and gradient in; called again inside a step, take up the new gradient only."""
        leaf = self._leaf
        if not self._inside:
            if self._weights is None:
                self._weights = torch.empty_like(self._view, memory_format=torch.contiguous_format)
            self._weights.copy_(self._view)
            leaf.data = self._weights
            self._inside = True
        if leaf.grad is None or leaf.grad is self._gradients:
            return
        self._gradient_view = leaf.grad
        if self._gradients is None or self._gradients.dtype != leaf.grad.dtype:
            self._gradients = torch.empty_like(leaf.grad, memory_format=torch.contiguous_format)
        self._gradients.copy_(leaf.grad)
        leaf.grad = self._gradients

    def flush(self) -> None:
        """Show the fused weight what the copy holds now, and let the next gradient in."""
        if self._inside:
            self._view.copy_(self._leaf.detach())
            self._restore_gradient()

    def leave(self) -> None:
        """Copy the weights back and be a view again."""
        if not self._inside:
            return
        self._view.copy_(self._leaf.detach())
        self._leaf.data = self._view
        self._restore_gradient()
        self._inside = False

    def _restore_gradient(self) -> None:
        if self._gradients is not None and self._leaf.grad is self._gradients:
            self._leaf.grad = self._gradient_view
        self._gradient_view = None


# --- Slices of a fused weight as parameters of their own, in the same memory ---
# A leaf is a ``Parameter`` whose storage is a slice of the fused weight and whose gradient is a slice of the
# fused gradient. The optimizer knows only the leaves, the module only the fused weight; nothing is copied
# and no key changes. What would quietly pull the two apart is looked for at every step and refused.

COPYING = ("__deepcopy__", "__reduce_ex__")  # what copy and pickle ask for
_AGAIN = "make the optimizer after the model has its final weights, dtype and device"


class Fused:
    """A fused parameter and the leaves that stand for its slices in the optimizer.

    The ``windows`` cover it. ``copied`` says that leaves step on contiguous copies (:class:`Shadow`)
    where their slice is not one piece of memory, ``always`` that all of them do.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        windows: Sequence[Window],
        *,
        copied: bool = True,
        always: bool = False,
    ) -> None:
        self.name = name
        self.parameter = parameter
        self._windows = windows
        self._pointer = parameter.data_ptr()
        # detach() shares the version counter, so that autograd notices a step between a forward and its
        # backward pass, as it does without us.
        self.views = [window.view(parameter.detach()) for window in windows]
        self.leaves = [nn.Parameter(view) for view in self.views]
        for leaf in self.leaves:
            forbid_copies(leaf)
        self.shadows = {
            index: Shadow(leaf, view)
            for index, (leaf, view) in enumerate(zip(self.leaves, self.views, strict=True))
            if always or (copied and not view.is_contiguous())
        }
        self._gradient: torch.Tensor | None = None  # the fused gradient the leaves look at
        self._address = 0  # where it lies
        self._slices: list[torch.Tensor] = []  # and its slices, as given to the leaves
        self._watch()

    @property
    def strided(self) -> bool:
        """Whether some leaf steps on memory that is not in one piece."""
        return any(not view.is_contiguous() for i, view in enumerate(self.views) if i not in self.shadows)

    def _watch(self) -> None:
        """Point the leaves at every new gradient; the watch ends with this object."""
        seen = weakref.ref(self)

        def accumulated(_: torch.Tensor) -> None:
            fused = seen()
            if fused is not None:
                fused.accumulated()

        handle = self.parameter.register_post_accumulate_grad_hook(accumulated)
        weakref.finalize(self, handle.remove)

    def accumulated(self) -> None:
        """The backward pass has added to the fused gradient."""
        gradient = self.parameter.grad
        if gradient is not None and gradient is self._gradient:
            if all(leaf.grad is None for leaf in self.leaves):
                raise InputError(
                    f"the gradient of {self.name} was added to an old one, cleared on the optimizer's "
                    "side only; call optimizer.zero_grad() or model.zero_grad() before the backward pass"
                )
            return
        self._look_at(gradient)

    def collect(self) -> None:
        """Before a step: the leaves' gradients are slices of what the fused gradient is now.

        A gradient that somebody gave to a leaf itself is left alone while the fused one is as it was.
        """
        gradient = self.parameter.grad
        if gradient is self._gradient and (gradient is None or gradient.data_ptr() == self._address):
            return
        if gradient is None:
            for leaf, old in zip(self.leaves, self._slices, strict=True):
                if leaf.grad is old:
                    leaf.grad = None
            self._gradient, self._slices = None, []
            return
        self._look_at(gradient)

    def _look_at(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise InputError(
                f"{self.name} has a {gradient.layout} gradient, which cannot be sliced by circuit; "
                "make its layer with sparse=False"
            )
        detached = gradient.detach()
        self._gradient, self._address = gradient, gradient.data_ptr()
        self._slices = [window.view(detached) for window in self._windows]
        for leaf, part in zip(self.leaves, self._slices, strict=True):
            leaf.grad = part

    def clear(self, set_to_none: bool) -> None:
        """After the optimizer's own ``zero_grad`` cleared the leaves: clear the fused gradient too."""
        gradient = self.parameter.grad
        if set_to_none:
            self.parameter.grad = None
        elif gradient is not None:
            viewed = gradient is self._gradient and all(
                leaf.grad is part for leaf, part in zip(self.leaves, self._slices, strict=True)
            )
            if viewed:  # zeroed already, slice by slice
                return
            gradient.detach_().zero_()
        self._gradient, self._slices = None, []

    def check(self) -> None:
        """Raise unless the leaves still share the memory of the fused weight."""
        if self.parameter.data_ptr() != self._pointer:
            raise InputError(
                f"the memory of {self.name} was exchanged after the optimizer was made "
                f"(by .to(...), .half(), .data = ... or the like): {_AGAIN}"
            )
        for leaf, view in zip(self.leaves, self.views, strict=True):
            if leaf.data_ptr() != view.data_ptr():
                raise InputError(f"a slice of {self.name} was given other memory (.data = ...): {_AGAIN}")

    def enter(self) -> None:
        """Slices that are not in one piece step on copies."""
        for shadow in self.shadows.values():
            shadow.enter()

    def flush(self) -> None:
        """Write what the copies hold now into the fused weight, and stay on the copies."""
        for shadow in self.shadows.values():
            shadow.flush()

    def leave(self) -> None:
        """After a step: the fused weight holds the result, the leaves lie in its memory again."""
        for index, (leaf, view) in enumerate(zip(self.leaves, self.views, strict=True)):
            if index in self.shadows:
                self.shadows[index].leave()
            elif leaf.data_ptr() != view.data_ptr():  # an optimizer that assigns p.data = new
                view.copy_(leaf.detach())
                leaf.data = view


def forbid_copies(thing: nn.Parameter | torch.optim.Optimizer) -> None:
    """Make copying and pickling an error.

    A copied leaf would be part of no model, and a copied optimizer would lose its hooks, which torch does
    not copy, and with them ratios that change.
    """

    def refuse(*_: Any) -> NoReturn:
        raise InputError(
            "this optimizer is tied to its model and cannot be copied or pickled whole; "
            "call make_optimizer on the copied model and load_state_dict(optimizer.state_dict())"
        )

    for name in COPYING:
        setattr(thing, name, refuse)


def zero_grad_with(optimizer: torch.optim.Optimizer, fused: Sequence[Fused]) -> Callable[[bool], None]:
    """A ``zero_grad`` for ``optimizer`` that clears the fused gradients as well as the leaves'."""
    seen = weakref.ref(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        found = seen()
        if found is not None:
            type(found).zero_grad(found, set_to_none)
        for each in fused:
            each.clear(set_to_none)

    return zero_grad


# --- A fused weight made of separate parameters that are joined at every forward pass (only on request) ---
# The parts are real parameters of the module, which any optimizer and any tool sees; the price is one copy
# of the weight at every forward pass and other keys in the state dict. ``torch.nn.utils.parametrize``
# does the bookkeeping, and ``remove_parametrizations`` undoes it.


class Joined(nn.Module):
    """Joins parts into the fused weight: run ``i`` along ``axis`` comes from part ``sources[i]``.

    A part may have several runs (the queries of all heads in an interleaved layout); they lie in it one
    after the other, as they would in a separate projection.
    """

    def __init__(self, axis: int, lengths: Sequence[int], sources: Sequence[int]) -> None:
        super().__init__()
        self.axis = axis
        self.lengths = list(lengths)
        self.sources = list(sources)

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        done = [0] * len(parts)
        pieces = []
        for length, source in zip(self.lengths, self.sources, strict=True):
            pieces.append(parts[source].narrow(self.axis, done[source], length))
            done[source] += length
        return torch.cat(pieces, self.axis)

    def right_inverse(self, fused: torch.Tensor) -> list[torch.Tensor]:
        parts: list[list[torch.Tensor]] = [[] for _ in set(self.sources)]
        for run, source in zip(fused.split(self.lengths, self.axis), self.sources, strict=True):
            parts[source].append(run)
        return [torch.cat(part, self.axis) for part in parts]


def parametrize_split(model: nn.Module, assigned: Assigned) -> list[tuple[Run, nn.Parameter, str]]:
    """Replace one fused parameter by its parts; returns (run, part, name of the part) of each."""
    homes = [
        (prefix, module, attribute)
        for prefix, module in model.named_modules()
        for attribute, parameter in module._parameters.items()
        if parameter is assigned.parameter
    ]
    if len(homes) != 1 or isinstance(homes[0][1], parametrize.ParametrizationList):
        raise InputError(
            f"{assigned.name} is tied or parametrized already: use mechanism='auto', which leaves it as it is"
        )
    prefix, module, attribute = homes[0]
    units = assigned.units()
    sources = [next(i for i, unit in enumerate(units) if run in unit) for run in assigned.runs]
    axis = assigned.runs[0].axis or 0
    joined = Joined(axis, [run.stop - run.start for run in assigned.runs], sources)
    parametrize.register_parametrization(module, attribute, joined)
    parts = module.parametrizations[attribute]
    base = f"{prefix}." if prefix else ""
    return [
        (unit[0], getattr(parts, f"original{i}"), f"{base}parametrizations.{attribute}.original{i}")
        for i, unit in enumerate(units)
    ]


# --- From fused parameters to the leaves an optimizer gets: which slices, and by what mechanism ---

_VECTOR = 64  # entries; a multiple of every vector width in use


def split(
    model: nn.Module, assigned: list[Assigned], mechanism: str, optimizer_class: Any, kwargs: dict[str, Any]
) -> tuple[list[Fused], list[tuple[Run, nn.Parameter, str]]]:
    """Leaves for every slice that goes its own way; whole parameters stay as they are."""
    fused = []
    pieces: list[tuple[Run, nn.Parameter, str]] = []
    for each in assigned:
        if not each.split:
            pieces.append((each.runs[0], each.parameter, each.name))
            continue
        if hasattr(each.parameter, "placements"):
            raise InputError(
                f"{each.name} is fused and sharded over devices, which make_optimizer does not split; "
                "sharded models need separate query, key and value weights"
            )
        if mechanism == "parametrization":
            pieces += parametrize_split(model, each)
            continue
        windows = _windows(each, optimizer_class, kwargs)
        made = Fused(
            each.name,
            each.parameter,
            [window for _, window in windows],
            copied=mechanism != "alias",
            always=mechanism == "shadow",
        )
        if made.strided and not _is_torchs_own(optimizer_class):
            raise InputError(
                f"mechanism='alias' hands {optimizer_class!r} slices of {each.name} that are not one piece "
                "of memory, which only torch's own optimizers are known to respect; use mechanism='auto'"
            )
        fused.append(made)
        for (run, window), leaf in zip(windows, made.leaves, strict=True):
            pieces.append((run, leaf, window.label(each.name)))
    return fused, pieces


def _windows(assigned: Assigned, optimizer_class: Any, kwargs: dict[str, Any]) -> list[tuple[Run, Window]]:
    """What the leaves of a fused parameter look at: a run each, as few as the optimizer allows.

    Where entries do not see each other, queries and keys that lie side by side are one run. Fused kernels
    round the last few entries of a tensor another way than the rest (vector against scalar instructions);
    where that would show, the runs of all heads become one leaf, as in a separate weight.
    """
    axis = assigned.runs[0].axis or 0
    size = assigned.parameter.shape[axis]
    row = assigned.parameter.numel() // size
    uneven = any((run.stop - run.start) * row % _VECTOR for run in assigned.runs)
    if uneven and _uses_torch_fused(optimizer_class, kwargs):
        found = []
        for unit in assigned.units():
            together = regular(axis, size, [(run.start, run.stop) for run in unit])
            windows = [_window(run) for run in unit] if together is None else [(unit[0], together)]
            found += windows
        return found
    runs = assigned.runs
    if _is_elementwise(optimizer_class):
        runs = merge(runs, by_role=False)
    return [_window(run) for run in runs]


def _window(run: Run) -> tuple[Run, Window]:
    return run, Window(run.axis or 0, run.start, run.stop - run.start)


def _uses_torch_fused(optimizer_class: Any, kwargs: dict[str, Any]) -> bool:
    """Also where it is wrapped: ``functools.partial(AdamW, fused=True)``."""
    options = {**getattr(optimizer_class, "keywords", {}), **kwargs}
    return bool(options.get("fused")) and _is_torchs_own(optimizer_class)


def _is_elementwise(optimizer_class: Any) -> bool:
    """Whether an entry's update depends on no other entry, so that slices may be joined."""
    name = getattr(optimizer_class, "func", optimizer_class).__name__
    return _is_torchs_own(optimizer_class) and name not in ("Muon", "Adafactor")


def _is_torchs_own(optimizer_class: Any) -> bool:
    return str(getattr(optimizer_class, "func", optimizer_class).__module__).startswith("torch.optim.")
