"""Fused weights: how an optimizer trains slices of one tensor at different rates.

The optimizer gets a *leaf* for every slice: a ``Parameter`` whose storage is that slice of the fused weight
and whose gradient is that slice of the fused gradient. The optimizer sees only the leaves, the module only
the fused weight, and no key of the model's state dict changes. Slices that are contiguous (rows) share the
memory of the fused weight also during a step; others (the columns of GPT-2's ``c_attn.weight``) are copies
while the optimizer steps. This serves every optimizer: fused and foreign kernels get contiguous memory.

A step of a fused weight, called by the hooks in ``hooks``:

1. The backward pass fills the gradient of the fused weight; a hook makes the leaves' gradients views of it.
2. ``FusedWeight.check``: do leaves and fused weight still share their memory? If the fused weight was given
   equal memory, the leaves view that; if not, an ``InputError``.
3. The hook sets the learning rate of each group: the base rate times the ratio of its circuit at this step.
4. ``FusedWeight.collect``: the leaves' gradients become views of the current fused gradient. If gradients are
   normalised per circuit, that happens next.
5. ``FusedWeight.enter``: leaves that are not contiguous (columns of a weight stored by rows) become copies.
6. The optimizer steps on the leaves, each with the rate of its group.
7. ``FusedWeight.leave``: copies are written back, and every leaf is a view again.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.labels.slices import Slice
from fasterqk.optim._groups import Leaf, Settings, Trained
from fasterqk.optim._sharded import ShardedWeight, is_sharded

COPYING = ("__deepcopy__", "__reduce_ex__")  # the methods that copy and pickle call
_AGAIN = "make the optimizer after the model has its final weights, dtype and device"


def memory_exchanged(name: str) -> str:
    """The message for a parameter that was moved or cast after the optimizer was made."""
    return (
        f"the memory of {name} was exchanged after the optimizer was made "
        f"(by .to(...), .half() or .data = ...): {_AGAIN}"
    )


class FusedWeight:
    """A fused parameter and the leaves that represent it in the optimizer.

    ``slices`` holds the slices of each leaf; together they cover the parameter.
    """

    def __init__(self, name: str, parameter: nn.Parameter, slices: Sequence[tuple[Slice, ...]]) -> None:
        self.name, self.parameter, self.slices = name, parameter, slices
        # detach() shares the version counter, so autograd notices a step between a forward and its backward
        # pass, as it does with a stock optimizer.
        self.leaves = [nn.Parameter(view) for view in self._views_of(parameter)]
        for leaf in self.leaves:
            forbid_copies(leaf)
        self._view_memory()
        self._gradient: Tensor | None = None  # the fused gradient that the leaves' gradients view
        self._gradient_pointer = 0  # its address in memory
        self._gradient_views: list[Tensor] = []  # its slices, as given to the leaves
        self._register_hook()

    def _views_of(self, tensor: Tensor) -> list[Tensor]:
        tensor = tensor.detach()
        return [joint_view(slices, tensor) for slices in self.slices]

    def _view_memory(self) -> None:
        """Make the leaves views of the memory that the fused weight has now."""
        self._pointer = self.parameter.data_ptr()
        self._memory = (self.parameter.shape, self.parameter.dtype, self.parameter.device)
        self.views = self._views_of(self.parameter)
        self._copies: dict[int, StepCopy] = {}
        for index, (leaf, view) in enumerate(zip(self.leaves, self.views, strict=True)):
            leaf.data = view
            if not view.is_contiguous():
                self._copies[index] = StepCopy(leaf, view)

    def _register_hook(self) -> None:
        """Give the leaves every new gradient; the hook is removed with this object."""
        if not self.parameter.requires_grad:
            return  # a copy of a weight that was frozen later has no gradients
        reference = weakref.ref(self)

        def accumulated(_: Tensor) -> None:
            fused = reference()
            if fused is not None:
                fused.accumulated()

        handle = self.parameter.register_post_accumulate_grad_hook(accumulated)
        weakref.finalize(self, handle.remove)

    def twin(self, parameter: nn.Parameter) -> "FusedWeight":
        """The same slices of a copy of the fused parameter."""
        return FusedWeight(self.name, parameter, self.slices)

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

    def _give_gradient(self, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise InputError(
                f"{self.name} has a {gradient.layout} gradient, which cannot be sliced by circuit; "
                "make its layer with sparse=False"
            )
        self._gradient, self._gradient_pointer = gradient, gradient.data_ptr()
        self._gradient_views = self._views_of(gradient)
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
        """Raise unless the leaves share the memory of the fused weight."""
        self._check_memory()
        for leaf, view in zip(self.leaves, self.views, strict=True):
            if leaf.data_ptr() != view.data_ptr():
                raise InputError(f"a slice of {self.name} was given other memory (.data = ...): {_AGAIN}")

    def _check_memory(self) -> None:
        """View the fused weight again if it was given equal memory: by an offload, DDP, or Accelerate."""
        parameter = self.parameter
        if parameter.data_ptr() == self._pointer:
            return
        if (parameter.shape, parameter.dtype, parameter.device) != self._memory:
            raise InputError(memory_exchanged(self.name))
        self._view_memory()

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


# --- Contiguous copies during a step ---
# Fused kernels (``fused=True``) treat every tensor as contiguous and would overwrite the neighbours of a
# slice that is not. Such a leaf therefore steps on a copy: weights and gradient are copied in before the
# step, and weights are copied back after it. Between steps the leaf is a view of the fused weight and its
# gradient a view of the fused gradient, so that clipping and loss scaling work.


class StepCopy:
    """One leaf, its slice ``view`` of the fused weight, and the two buffers it steps on."""

    def __init__(self, leaf: nn.Parameter, view: Tensor) -> None:
        self._leaf = leaf
        self._view = view
        self._weights: Tensor | None = None
        self._gradients: Tensor | None = None
        self._gradient_view: Tensor | None = None
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


def make_leaves(
    assigned: Iterable[Trained],
    optimizer_class: Callable[..., Any],
    kwargs: dict[str, Any],
    by_entry: Callable[[], bool],
) -> tuple[list[FusedWeight | ShardedWeight], list[Leaf]]:
    """The fused weights, and what the optimizer trains: whole parameters, and leaves of fused weights.

    ``by_entry()`` says whether the optimizer steps every entry by itself.
    """
    fused: list[FusedWeight | ShardedWeight] = []
    leaves: list[Leaf] = []
    assigned = list(assigned)
    # Kernels take either sharded tensors or plain ones: with one sharded weight, all step as plain ones.
    all_local = any(is_sharded(trained.parameter) and trained.split for trained in assigned)
    for trained in assigned:
        if trained.per is not None and trained.split and by_entry():
            trained = replace(trained, per=None)  # nothing to gain
        sharded = all_local and is_sharded(trained.parameter)
        if not trained.split and not sharded:
            leaves.append(Leaf(trained.parameter, trained.name, trained.slices[0][1]))
            continue
        if sharded and not by_entry():
            raise InputError(
                f"{trained.name} is split and sharded, so each process has only parts of its matrices, and "
                f"{optimizer_name(optimizer_class)} steps a matrix other than entry by entry; use AdamW "
                "here, or a model that is not sharded"
            )
        joined = _joined_slices(trained, optimizer_class, kwargs, by_entry())
        kind = ShardedWeight if sharded else FusedWeight
        weight = kind(trained.name, trained.parameter, [slices for slices, _ in joined])
        fused.append(weight)
        for leaf, (slices, settings) in zip(weight.leaves, joined, strict=True):
            leaves.append(Leaf(leaf, trained.name, settings, slices))
    return fused, leaves


def optimizer_name(optimizer_class: Any) -> str:
    """The name of a class, also in ``functools.partial(AdamW, fused=True)``."""
    return str(getattr(getattr(optimizer_class, "func", optimizer_class), "__name__", optimizer_class))


def _joined_slices(
    trained: Trained, optimizer_class: Callable[..., Any], kwargs: dict[str, Any], by_entry: bool
) -> list[tuple[tuple[Slice, ...], Settings]]:
    """The slices of each leaf of a fused parameter; as few leaves as the optimizer allows.

    If the update of an entry depends on no other entry, adjacent queries and keys form one slice. Fused
    kernels round the last few entries of a tensor differently from the rest (scalar instead of vector
    instructions); where that matters, the slices of all heads form one leaf, as in a separate weight.
    """
    options = {**getattr(optimizer_class, "keywords", {}), **kwargs}
    runs = trained.runs(by_role=True)
    sharded = is_sharded(trained.parameter)
    uneven = not sharded and any(part.view(trained.parameter).numel() % _VECTOR for part, _ in runs)
    if uneven and options.get("fused") and by_entry:
        joined: list[tuple[tuple[Slice, ...], Settings]] = []
        while runs:
            role, settings = runs[0][0].role, runs[0][1]
            alike = tuple(part for part, its in runs if (part.role, its) == (role, settings))
            runs = [(part, its) for part, its in runs if (part.role, its) != (role, settings)]
            together = is_regular(alike, trained.parameter)
            joined += [(alike, settings)] if together else [((part,), settings) for part in alike]
        return joined
    return [((part,), settings) for part, settings in (trained.runs() if by_entry else runs)]


def _span(part: Slice) -> tuple[int, int, int]:
    """Axis, start and stop of a part of a parameter."""
    return part.axis or 0, part.start or 0, part.stop or 0


def is_regular(slices: Sequence[Slice], tensor: Tensor) -> bool:
    """Whether several slices of equal length repeat at equal distances over the whole axis of ``tensor``."""
    spans = [_span(part) for part in slices]
    lengths = {stop - start for _, start, stop in spans}
    periods = {after[1] - before[1] for before, after in pairwise(spans)}
    if len(lengths) != 1 or len(periods) != 1:
        return False
    (axis, _, stop), (period,) = spans[0], periods
    return len(slices) * period == tensor.shape[axis] and stop <= period


def joint_view(slices: Sequence[Slice], tensor: Tensor) -> Tensor:
    """The entries of ``tensor`` in these slices, in its memory.

    Several regular slices, one role in all heads of an interleaved layout, have two axes, (slice, entry), in
    place of one.

    >>> first = Slice("weight", 0, 1, 2, "q", 0, "label", 1)
    >>> second = replace(first, start=4, stop=5)
    >>> joint_view([first], torch.arange(6)).tolist(), joint_view([first, second], torch.arange(6)).tolist()
    ([1], [[1], [4]])
    """
    if len(slices) == 1:
        return slices[0].view(tensor)
    (axis, start, stop), (_, second, _) = _span(slices[0]), _span(slices[1])
    return tensor.unflatten(axis, (len(slices), second - start)).narrow(axis + 1, start, stop - start)
