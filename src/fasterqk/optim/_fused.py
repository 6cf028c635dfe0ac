"""Fused weights: how an optimizer trains slices of one tensor at different rates.

The optimizer gets a *leaf* for every slice: a ``Parameter`` whose storage is that slice of the fused weight
and whose gradient is that slice of the fused gradient. The optimizer sees only the leaves, the module only
the fused weight, and no key of a state dict changes. Slices of whole rows share the memory of the fused
weight; other slices (the columns of GPT-2's ``c_attn.weight``) are copies while the optimizer steps.

A step of a fused weight, called by the hooks in ``_hooks``:

1. The backward pass fills the gradient of the fused weight; a hook makes the leaves' gradients views of it.
2. ``FusedWeight.check``: do leaves and fused weight still share their memory? If not, an ``InputError``.
3. The hook sets the learning rate of each group: the base rate times the ratio of its circuit at this step.
4. ``FusedWeight.collect``: the leaves' gradients become views of the current fused gradient. If gradients are
   normalised per circuit, that happens next.
5. ``FusedWeight.enter``: leaves that are not contiguous (columns of a weight stored by rows) become copies.
6. The optimizer steps on the leaves, each with the rate of its group.
7. ``FusedWeight.leave``: copies are written back, and every leaf is a view again.

``split_leaves`` makes the leaves. With ``mechanism="parametrization"`` the slices are instead real parameters
of the module (last section).
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.utils import parametrize

from fasterqk.errors import InputError
from fasterqk.optim._groups import TrainedParameter, TrainedSlice, join_neighbours

Leaf = tuple[TrainedSlice, nn.Parameter, str]  # settings, the parameter that the optimizer gets, its name


COPYING = ("__deepcopy__", "__reduce_ex__")  # the methods that copy and pickle call
_AGAIN = "make the optimizer after the model has its final weights, dtype and device"


def memory_exchanged(name: str) -> str:
    """The message for a parameter that was moved or cast after the optimizer was made."""
    return (
        f"the memory of {name} was exchanged after the optimizer was made "
        f"(by .to(...), .half() or .data = ...): {_AGAIN}"
    )


class FusedWeight:
    """A fused parameter and the leaves that represent its ``slices`` in the optimizer; slices cover it.

    With ``mechanism="auto"``, leaves that are not contiguous step on copies (:class:`StepCopy`); with
    ``"copy"``, all leaves do. ``strided`` says that some leaf steps on memory that is not contiguous.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, slices: Sequence["StridedSlice"], mechanism: str
    ) -> None:
        self.name = name
        self.parameter = parameter
        self._slices = slices
        self._mechanism = mechanism
        self._pointer = parameter.data_ptr()
        # detach() shares the version counter, so autograd notices a step between a forward and its backward
        # pass, as it does with a stock optimizer.
        self.views = [part.view(parameter.detach()) for part in slices]
        self.leaves = [nn.Parameter(view) for view in self.views]
        for leaf in self.leaves:
            forbid_copies(leaf)
        self._copies = {
            index: StepCopy(leaf, view)
            for index, (leaf, view) in enumerate(zip(self.leaves, self.views, strict=True))
            if mechanism == "copy" or (mechanism == "auto" and not view.is_contiguous())
        }
        self.strided = mechanism == "view" and not all(view.is_contiguous() for view in self.views)
        self._gradient: torch.Tensor | None = None  # the fused gradient that the leaves' gradients view
        self._gradient_pointer = 0  # its address in memory
        self._gradient_views: list[torch.Tensor] = []  # its slices, as given to the leaves
        self._register_hook()

    def _register_hook(self) -> None:
        """Give the leaves every new gradient; the hook is removed with this object."""
        if not self.parameter.requires_grad:
            return  # a copy of a weight that was frozen later has no gradients
        reference = weakref.ref(self)

        def accumulated(_: torch.Tensor) -> None:
            fused = reference()
            if fused is not None:
                fused.accumulated()

        handle = self.parameter.register_post_accumulate_grad_hook(accumulated)
        weakref.finalize(self, handle.remove)

    def twin(self, parameter: nn.Parameter) -> "FusedWeight":
        """The same slices of a copy of the fused parameter."""
        return FusedWeight(self.name, parameter, self._slices, self._mechanism)

    def accumulated(self) -> None:
        """Called after the backward pass has added to the fused gradient."""
        self._check_memory()
        gradient = self.parameter.grad
        if gradient is not None and gradient is self._gradient:
            if all(leaf.grad is None for leaf in self.leaves):
                raise InputError(
                    f"the gradient of {self.name} was added to an old one, cleared on the optimizer's "
                    "side only; call optimizer.zero_grad() or model.zero_grad() before the backward pass"
                )
            return
        self._give_gradient(gradient)

    def collect(self) -> None:
        """Before a step: make the leaves' gradients slices of the current fused gradient.

        A gradient that was assigned to a leaf directly is kept while the fused gradient is unchanged.
        """
        gradient = self.parameter.grad
        if gradient is self._gradient and (gradient is None or gradient.data_ptr() == self._gradient_pointer):
            return
        if gradient is None:
            for leaf, old in zip(self.leaves, self._gradient_views, strict=True):
                if leaf.grad is old:
                    leaf.grad = None
            self._gradient, self._gradient_views = None, []
        else:
            self._give_gradient(gradient)

    def _give_gradient(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise InputError(
                f"{self.name} has a {gradient.layout} gradient, which cannot be sliced by circuit; "
                "make its layer with sparse=False"
            )
        detached = gradient.detach()
        self._gradient, self._gradient_pointer = gradient, gradient.data_ptr()
        self._gradient_views = [part.view(detached) for part in self._slices]
        for leaf, view in zip(self.leaves, self._gradient_views, strict=True):
            leaf.grad = view

    def clear(self, set_to_none: bool) -> None:
        """Clear the fused gradient, after the optimizer's ``zero_grad`` has cleared the leaves."""
        gradient = self.parameter.grad
        if set_to_none:
            self.parameter.grad = None
        elif gradient is not None:
            viewed = gradient is self._gradient and all(
                leaf.grad is view for leaf, view in zip(self.leaves, self._gradient_views, strict=True)
            )
            if viewed:  # already zeroed, slice by slice
                return
            gradient.detach_().zero_()
        self._gradient, self._gradient_views = None, []

    def check(self) -> None:
        """Raise unless the leaves still share the memory of the fused weight."""
        self._check_memory()
        for leaf, view in zip(self.leaves, self.views, strict=True):
            if leaf.data_ptr() != view.data_ptr():
                raise InputError(f"a slice of {self.name} was given other memory (.data = ...): {_AGAIN}")

    def _check_memory(self) -> None:
        if self.parameter.data_ptr() != self._pointer:
            raise InputError(memory_exchanged(self.name))

    def enter(self) -> None:
        """Before a step: leaves that are not contiguous become copies."""
        for copy in self._copies.values():
            copy.enter()

    def flush(self) -> None:
        """During a step: write the copies into the fused weight, and keep stepping on the copies."""
        for copy in self._copies.values():
            copy.flush()

    def leave(self) -> None:
        """After a step: the fused weight holds the result, and the leaves are views of it again."""
        for index, (leaf, view) in enumerate(zip(self.leaves, self.views, strict=True)):
            if index in self._copies:
                self._copies[index].leave()
            elif leaf.data_ptr() != view.data_ptr():  # an optimizer that assigns p.data = new
                view.copy_(leaf.detach())
                leaf.data = view


def forbid_copies(thing: nn.Parameter | torch.optim.Optimizer) -> None:
    """Make copying and pickling raise an error.

    A copied leaf would belong to no model. A copied optimizer would lose its hooks, which torch does not
    copy, and with them ratios that change.
    """

    def refuse(*_: Any) -> NoReturn:
        raise InputError(
            "this optimizer is tied to its model and cannot be copied or pickled whole; "
            "call make_optimizer on the copied model and load_state_dict(optimizer.state_dict())"
        )

    for name in COPYING:
        setattr(thing, name, refuse)


def zero_grad_with(optimizer: torch.optim.Optimizer, fused: Sequence[FusedWeight]) -> Callable[[bool], None]:
    """A ``zero_grad`` for ``optimizer`` that clears the fused gradients as well as the leaves'."""
    reference = weakref.ref(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        living = reference()
        if living is not None:
            type(living).zero_grad(living, set_to_none)
        for weight in fused:
            weight.clear(set_to_none)

    return zero_grad


# --- Contiguous copies during a step ---
# Fused kernels (``fused=True``) treat every tensor as contiguous and would overwrite the neighbours of a
# slice that is not. Such a leaf therefore steps on a copy: weights and gradient are copied in before the
# step, and weights are copied back after it. Between steps the leaf is a view of the fused weight and its
# gradient a view of the fused gradient, so that clipping and loss scaling work.


class StepCopy:
    """One leaf, its slice ``view`` of the fused weight, and the two buffers it steps on."""

    def __init__(self, leaf: nn.Parameter, view: torch.Tensor) -> None:
        self._leaf = leaf
        self._view = view
        self._weights: torch.Tensor | None = None
        self._gradients: torch.Tensor | None = None
        self._gradient_view: torch.Tensor | None = None
        self._inside = False

    def enter(self) -> None:
        """Copy weights and gradient in; if called again during a step, copy only the new gradient."""
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
        """Write the copy into the fused weight, and give the leaf back its gradient view."""
        if not self._inside:
            return
        self._view.copy_(self._leaf.detach())
        if self._gradients is not None and self._leaf.grad is self._gradients:
            self._leaf.grad = self._gradient_view
        self._gradient_view = None

    def leave(self) -> None:
        """Copy the weights back and make the leaf a view again."""
        self.flush()
        if self._inside:
            self._leaf.data = self._view
            self._inside = False


# --- The leaves of a model ---

_VECTOR = 64  # entries; a multiple of every vector width in use


def split_leaves(
    model: nn.Module,
    assigned: list[TrainedParameter],
    mechanism: str,
    optimizer_class: Any,
    kwargs: dict[str, Any],
) -> tuple[list[FusedWeight], list[Leaf]]:
    """The fused weights, and what the optimizer trains: whole parameters, and leaves of fused weights."""
    fused = []
    leaves: list[Leaf] = []
    for trained in assigned:
        if not trained.split:
            leaves.append((trained.slices[0], trained.parameter, trained.name))
            continue
        if hasattr(trained.parameter, "placements"):
            raise InputError(
                f"{trained.name} is fused and sharded over devices, which make_optimizer does not split; "
                "sharded models need separate query, key and value weights"
            )
        if mechanism == "parametrization":
            leaves += parametrize_split(model, trained)
            continue
        slices = _leaf_slices(trained, optimizer_class, kwargs)
        weight = FusedWeight(trained.name, trained.parameter, [strided for _, strided in slices], mechanism)
        if weight.strided and not _is_torchs_own(optimizer_class):
            raise InputError(
                f"mechanism='view' gives {optimizer_class!r} slices of {trained.name} that are not "
                "contiguous, which only torch's own optimizers are known to support; use mechanism='auto'"
            )
        fused.append(weight)
        for (part, strided), leaf in zip(slices, weight.leaves, strict=True):
            leaves.append((part, leaf, strided.name_in(trained.name)))
    return fused, leaves


def _leaf_slices(
    trained: TrainedParameter, optimizer_class: Any, kwargs: dict[str, Any]
) -> list[tuple[TrainedSlice, "StridedSlice"]]:
    """The slices that become leaves of a fused parameter: as few as the optimizer allows.

    If the update of an entry depends on no other entry, adjacent queries and keys form one slice. Fused
    kernels round the last few entries of a tensor differently from the rest (scalar instead of vector
    instructions); where that matters, the slices of all heads form one leaf, as in a separate weight.
    """
    axis = trained.slices[0].axis or 0
    size = trained.parameter.shape[axis]
    row = trained.parameter.numel() // size
    uneven = any((part.stop - part.start) * row % _VECTOR for part in trained.slices)
    if uneven and _uses_torch_fused(optimizer_class, kwargs):
        leaf_slices = []
        for parts in trained.by_role():
            together = repeated(axis, size, [(part.start, part.stop) for part in parts])
            leaf_slices += [(parts[0], together)] if together else [_single(part) for part in parts]
        return leaf_slices
    slices = trained.slices
    if _is_elementwise(optimizer_class):
        slices = join_neighbours(slices, by_role=False)
    return [_single(part) for part in slices]


def _single(part: TrainedSlice) -> tuple[TrainedSlice, "StridedSlice"]:
    return part, StridedSlice(part.axis or 0, part.start, part.stop - part.start)


def _uses_torch_fused(optimizer_class: Any, kwargs: dict[str, Any]) -> bool:
    """Whether torch's fused kernel is used, also through ``functools.partial(AdamW, fused=True)``."""
    options = {**getattr(optimizer_class, "keywords", {}), **kwargs}
    return bool(options.get("fused")) and _is_torchs_own(optimizer_class)


def _is_elementwise(optimizer_class: Any) -> bool:
    """Whether an entry's update depends on no other entry, so that slices may be joined."""
    name = getattr(optimizer_class, "func", optimizer_class).__name__
    return _is_torchs_own(optimizer_class) and name not in ("Muon", "Adafactor")


def _is_torchs_own(optimizer_class: Any) -> bool:
    return str(getattr(optimizer_class, "func", optimizer_class).__module__).startswith("torch.optim.")


@dataclass(frozen=True)
class StridedSlice:
    """``start:start+length`` along ``axis``, repeated ``repeat`` times every ``period`` entries.

    With ``repeat=1`` it is a plain slice. Otherwise it is one role in all heads of an interleaved layout, and
    its view has two axes, (repeat, length), in place of ``axis``.
    """

    axis: int
    start: int
    length: int
    repeat: int = 1
    period: int = 0

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """These entries of ``tensor``, in its memory.

        >>> StridedSlice(0, 1, 2).view(torch.arange(6)).tolist()
        [1, 2]
        >>> StridedSlice(0, 1, 1, repeat=3, period=2).view(torch.arange(6)).tolist()
        [[1], [3], [5]]
        """
        if self.repeat == 1:
            return tensor.narrow(self.axis, self.start, self.length)
        repeats = tensor.unflatten(self.axis, (self.repeat, self.period))
        return repeats.narrow(self.axis + 1, self.start, self.length)

    def name_in(self, parameter: str) -> str:
        """``weight[:, 0:64]``, or ``weight[0:64, 192:256, ...]`` if the slice repeats."""
        spans = [f"{start}:{start + self.length}" for start in self.starts()]
        return f"{parameter}[{':, ' * self.axis}{', '.join(spans)}]"

    def starts(self) -> list[int]:
        """Where each repetition begins."""
        return [self.start + turn * self.period for turn in range(self.repeat)]


def repeated(axis: int, size: int, spans: Sequence[tuple[int, int]]) -> StridedSlice | None:
    """One slice for spans of equal length at equal distances over the whole axis; else None."""
    lengths = {stop - start for start, stop in spans}
    steps = {after[0] - before[0] for before, after in pairwise(spans)}
    if len(lengths) != 1 or len(steps) != 1:
        return None
    strided = StridedSlice(axis, spans[0][0], lengths.pop(), len(spans), steps.pop())
    fits = strided.repeat * strided.period == size and strided.start + strided.length <= strided.period
    return strided if fits else None


# --- mechanism="parametrization": separate parameters, joined at every forward pass ---
# The parts are real parameters of the module, visible to every optimizer and tool. This costs one copy of the
# weight per forward pass and changes the keys of the state dict. ``torch.nn.utils.parametrize`` does the
# bookkeeping, and ``remove_parametrizations`` undoes it.


class Joined(nn.Module):
    """Joins parts into the fused weight: slice ``i`` along ``axis`` comes from part ``sources[i]``.

    A part may have several slices (the queries of all heads in an interleaved layout); they follow one
    another in it, as in a separate projection.
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
        for piece, source in zip(fused.split(self.lengths, self.axis), self.sources, strict=True):
            parts[source].append(piece)
        return [torch.cat(part, self.axis) for part in parts]


def parametrize_split(model: nn.Module, trained: TrainedParameter) -> list[Leaf]:
    """Replace one fused parameter by its parts; returns a leaf for each."""
    owners = [
        (prefix, module, attribute)
        for prefix, module in model.named_modules()
        for attribute, parameter in module._parameters.items()
        if parameter is trained.parameter
    ]
    if len(owners) != 1 or isinstance(owners[0][1], parametrize.ParametrizationList):
        raise InputError(
            f"{trained.name} is tied or parametrized already: use mechanism='auto', which leaves it as it is"
        )
    prefix, module, attribute = owners[0]
    roles = trained.by_role()
    sources = [next(i for i, same in enumerate(roles) if part in same) for part in trained.slices]
    axis = trained.slices[0].axis or 0
    joined = Joined(axis, [part.stop - part.start for part in trained.slices], sources)
    parametrize.register_parametrization(module, attribute, joined)
    parts = module.parametrizations[attribute]
    base = f"{prefix}." if prefix else ""
    return [
        (same[0], getattr(parts, f"original{i}"), f"{base}parametrizations.{attribute}.original{i}")
        for i, same in enumerate(roles)
    ]
