"""Fused weights: how an optimizer trains slices of one tensor at different rates.

Between steps the optimizer looks like a stock one: its groups list every parameter once, and its state dict
has one entry per parameter, whatever the ratios. So clipping, loss scaling, ``zero_grad`` and
``torch.distributed.checkpoint`` work as ever. During a step the groups list *leaves* instead: ``Parameter``s
that hold one slice of a fused weight each, with that slice of its gradient.

A step of a fused weight, called by the hooks in ``hooks``:

1. The hook sets the learning rate of each group: the base rate times the ratio of its circuit at this step.
   If gradients are normalised per circuit, that happens next.
2. The groups list leaves in place of fused weights. If a state was loaded or saved, which has one entry per
   parameter, each leaf gets its part of it (``FusedWeight.split``).
3. ``FusedWeights.enter``: slices that are contiguous (rows) are views of the weight and of its gradient.
   Others (the columns of GPT-2's ``c_attn.weight``) are copied, because fused and foreign kernels treat every
   tensor as contiguous and would overwrite the neighbours of a slice.
4. The optimizer steps on the leaves, each with the rate of its group.
5. ``FusedWeights.leave`` writes copies back, and the groups list the weight itself again.

Of a weight that is sharded over processes (FSDP2, HSDP, tensor parallel), leaves are slices of the rows or
columns that this process has. All processes have the same leaves, empty ones included, because all must have
a state to save; the state dict has sharded tensors, which fit every number of processes.
"""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.labels.slices import Slice
from fasterqk.optim._groups import Leaf, Settings, Trained
from fasterqk.optim.ratio import is_sharded
from fasterqk.trace.isolated import random_states_kept

PARTS = "parts"  # key of the state of a fused weight: the entries of each leaf that cannot be joined


class FusedWeight:
    """A fused parameter, and the leaves that the optimizer steps on.

    ``slices`` holds the slices of each leaf; together they cover the parameter.
    """

    def __init__(self, name: str, parameter: nn.Parameter, slices: Sequence[tuple[Slice, ...]]) -> None:
        self.name, self.parameter, self.slices = name, parameter, slices
        self._sharded = is_sharded(parameter)
        if len(slices) > 1 and self._sharded:
            _check_placements(name, parameter)
        self._slices = [tuple(_local_slice(part, parameter) for part in parts) for parts in slices]
        local: Any = parameter
        # The address of the part that this process has.
        self.address = (lambda: local.to_local().data_ptr()) if self._sharded else parameter.data_ptr
        # One call makes all views where each leaf is one slice.
        spans = [_span(part) for parts in self._slices for part in parts]
        alone = len(spans) == len(slices) > 1
        self._sizes = ([stop - start for _, start, stop in spans], spans[0][0]) if alone else None
        # detach() shares the version counter, so autograd notices a step between a forward and its backward
        # pass, as it does with a stock optimizer.
        self.leaves = [nn.Parameter(view) for view in self._views_of(parameter.detach())]
        self._no_gradients = [None] * len(slices)
        self._gradients: list[Tensor | None] = [None] * len(slices)  # of leaves that are copies
        self.view_memory()

    def _views_of(self, tensor: Any) -> Sequence[Tensor]:
        """The slice of each leaf in this process's memory of ``tensor``, sharded as the parameter is."""
        if self._sharded:
            if tensor.placements != self.parameter.placements:  # type: ignore[attr-defined]
                tensor = tensor.redistribute(placements=self.parameter.placements)  # type: ignore[attr-defined]
            tensor = tensor.to_local()
        if self._sizes is not None:
            return tensor.split_with_sizes(*self._sizes)
        return [joint_view(parts, tensor) for parts in self._slices]

    def view_memory(self) -> None:
        """Let the leaves view the weight where it is now: an offload, DDP or Accelerate may have moved it."""
        self.views = self._views_of(self.parameter.detach())
        for leaf, view in zip(self.leaves, self.views, strict=True):
            leaf.data = view.contiguous()  # a copy where a view is not
        pairs = zip(self.leaves, self.views, strict=True)
        self.copies = [(leaf.detach(), view) for leaf, view in pairs if not view.is_contiguous()]

    def gradients(self, copies: list[tuple[Tensor, Tensor]]) -> Sequence[Tensor | None]:
        """The gradient of each leaf; ``copies`` takes those still to be filled, with what to copy."""
        gradient = self.parameter.grad
        if gradient is None:
            return self._no_gradients
        if gradient.layout is not torch.strided:
            raise InputError(
                f"{self.name} has a {gradient.layout} gradient, which cannot be sliced by circuit; "
                "make its layer with sparse=False"
            )
        if self._sizes is not None and not self.copies and not self._sharded and gradient.is_contiguous():
            return gradient.split_with_sizes(*self._sizes)
        return [self._contiguous(*view, copies) for view in enumerate(self._views_of(gradient))]

    def _contiguous(self, index: int, view: Tensor, copies: list[tuple[Tensor, Tensor]]) -> Tensor:
        if view.is_contiguous():
            return view
        copy = self._gradients[index]
        if copy is None or copy.dtype != view.dtype or copy.device != view.device:
            self._gradients[index] = copy = torch.empty_like(view, memory_format=torch.contiguous_format)
        copies.append((copy, view))
        return copy

    # --- State ---
    # The optimizer keeps one state per leaf. A state dict has whole tensors, as that of a plain optimizer;
    # only what has no value per entry of the weight (the rows and columns of Adafactor) stays in "parts".

    def split(self, state: MutableMapping[Any, Any]) -> None:
        """Before a step: if a state was joined or loaded, give each leaf its part of it."""
        whole = state.pop(self.parameter, None)
        if not whole:
            return
        parts = [dict(part) for part in whole.get(PARTS, ())] or [{} for _ in self.leaves]
        for key, value in whole.items():
            for part, piece in zip(parts, self._pieces(value), strict=True) if key != PARTS else ():
                part[key] = piece
        for leaf, part in zip(self.leaves, parts, strict=True):
            if part:
                state.setdefault(leaf, {}).update(part)

    def _pieces(self, value: Any) -> list[Any]:
        """The part of each leaf in one entry of a whole state; a count of steps is the same for all."""
        if not isinstance(value, Tensor):
            return [value] * len(self.leaves)
        if value.shape != self.parameter.shape:
            return [value.clone() for _ in self.leaves]
        whole = _sharded_like(value, self.parameter)
        return [view.clone(memory_format=torch.contiguous_format) for view in self._views_of(whole.detach())]

    def join(self, state: MutableMapping[Any, Any]) -> None:
        """For a state dict: join the states of the leaves to one of the parameter."""
        parts = [dict(state.pop(leaf, {})) for leaf in self.leaves]
        whole = {}
        for key in dict.fromkeys(key for part in parts for key in part):
            joined = self._joined(key, [part.get(key) for part in parts])
            if joined is not None:
                whole[key] = joined
                for part in parts:
                    del part[key]
        if any(parts):
            whole[PARTS] = parts
        if whole:
            state[self.parameter] = whole

    def _joined(self, key: str, values: list[Any]) -> Any:
        """The values of all leaves as one; None if they cannot be joined."""
        first, like = values[0], self.parameter.detach()
        tensors = [value for value in values if isinstance(value, Tensor) and value.dim()]
        if not tensors:
            alike = all(type(value) is type(first) and bool(value == first) for value in values)
            return first if alike else None
        shapes = [(type(value), getattr(value, "shape", None)) for value in values]
        if shapes == [(Tensor, leaf.shape) for leaf in self.leaves]:
            device = like.device if is_sharded(like) else first.device
            joined = torch.empty_like(like, dtype=first.dtype, device=device)
            for value, view in zip(values, self._views_of(joined), strict=True):
                view.copy_(value)
            return joined
        if is_sharded(like):
            raise InputError(
                f"the optimizer keeps {key!r} of shape {tuple(tensors[0].shape)} for a part of {self.name}, "
                "which cannot be saved sharded: use AdamW with the same options for all circuits"
            )
        return None


class FusedWeights:
    """All fused weights of an optimizer around a step, in as few calls as possible."""

    def __init__(self, weights: Sequence[FusedWeight]) -> None:
        self._weights = weights
        self.parameters = [weight.parameter for weight in weights]
        self._leaves = [leaf for weight in weights for leaf in weight.leaves]
        self.view_memory()

    def moved(self) -> bool:
        """Whether a weight has other memory than its leaves."""
        return [weight.address() for weight in self._weights] != self._addresses

    def view_memory(self) -> None:
        """Let the leaves view the weights where they are now."""
        for weight in self._weights:
            weight.view_memory()
        self._addresses = [weight.address() for weight in self._weights]
        self._leaf_addresses = [leaf.data_ptr() for leaf in self._leaves]
        self._copies = [pair for weight in self._weights for pair in weight.copies]

    @torch.no_grad()
    def enter(self) -> None:
        """Before a step: leaves hold the slices of the weights and of their gradients."""
        copies = list(self._copies)
        gradients = chain.from_iterable(weight.gradients(copies) for weight in self._weights)
        for leaf, gradient in zip(self._leaves, gradients, strict=True):
            leaf.grad = gradient
        _copy(copies)

    @torch.no_grad()
    def leave(self) -> None:
        """After a step: the weights hold the result, and the leaves have no gradients."""
        for leaf in self._leaves:
            leaf.grad = None  # it would keep the memory of the gradient
        if list(map(Tensor.data_ptr, self._leaves)) != self._leaf_addresses:  # by p.data = new
            views = [view for weight in self._weights for view in weight.views]
            _copy(list(zip(views, self._leaves, strict=True)))
            self.view_memory()
        else:
            _copy([(view, copy) for copy, view in self._copies])


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy to the first of each pair from the second."""
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


# --- Weights that are sharded over processes ---


def local_view(part: Slice, tensor: Any) -> Tensor:
    """The entries of ``part`` in this process's memory of ``tensor`` (a parameter, or its gradient)."""
    if not is_sharded(tensor):
        return part.view(tensor)
    return _local_slice(part, tensor).view(tensor.detach().to_local())


def summed(values: Tensor, like: Any) -> Tensor:
    """The sum of ``values`` over the processes that hold other entries of ``like`` than this one."""
    if not is_sharded(like):
        return values
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements = [Replicate() if placement.is_replicate() else Partial() for placement in like.placements]
    total: Tensor = DTensor.from_local(values, like.device_mesh, placements, run_check=False).full_tensor()
    return total


def _sharded_like(value: Any, parameter: Any) -> Tensor:
    """``value`` of a saved state, sharded as the parameter is."""
    if is_sharded(value) or not is_sharded(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def _local_slice(part: Slice, tensor: Any) -> Slice:
    """The entries of ``part`` in the shard of this process, as a slice of that; it may be empty."""
    if part.axis is None or not is_sharded(tensor):
        return part
    _, start, stop = _span(part)
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_shard() and placement.dim % tensor.dim() == part.axis:
            # Shards are those of torch.chunk: equal, then one that is shorter, then empty ones.
            size, count = tensor.shape[part.axis], tensor.device_mesh.size(dimension)
            rows = -(-size // count)
            first = min(rows * tensor.device_mesh.get_local_rank(dimension), size)
            last = min(first + rows, size)
            start, stop = max(start, first) - first, min(stop, last) - first
            if stop <= start:
                start, stop = 0, 0
    return replace(part, start=start, stop=stop)


def _check_placements(name: str, parameter: Any) -> None:
    """Raise unless a process has one block of rows or columns, or all of the parameter."""
    from torch.distributed.tensor import Replicate, Shard

    shards = [placement for placement in parameter.placements if type(placement) is not Replicate]
    if len(shards) > 1 or any(type(placement) is not Shard for placement in shards):
        raise InputError(
            f"{name} is fused and sharded as {tuple(parameter.placements)}: make_optimizer splits weights "
            "that are sharded once (by FSDP2, HSDP or tensor parallel, but not by two of them)"
        )


# --- The leaves of a model ---

_VECTOR = 64  # entries; a multiple of every vector width in use


def make_leaves(
    assigned: Iterable[Trained],
    optimizer_class: Callable[..., Any],
    kwargs: dict[str, Any],
    by_entry: Callable[[], bool],
) -> tuple[list[FusedWeight], list[Leaf]]:
    """The fused weights, and the tensors that the optimizer trains: whole parameters, and leaves.

    ``by_entry()`` says whether the update of an entry depends on no other entry.
    """
    fused: list[FusedWeight] = []
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
        weight = FusedWeight(trained.name, trained.parameter, [slices for slices, _ in joined])
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
            alike = tuple(part for part, other in runs if (part.role, other) == (role, settings))
            runs = [(part, other) for part, other in runs if (part.role, other) != (role, settings)]
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


# --- Which optimizers can step on parts of a matrix ---


def steps_by_entry(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> bool:
    """Whether the update of an entry depends on no other entry, found by a trial on a small matrix.

    ``make(parameters)`` returns the optimizer. It trains a matrix, and the four quarters of the same matrix;
    Muon, Adafactor, Shampoo and LAMB, which look at whole matrices, then end elsewhere.

    >>> steps_by_entry(torch.optim.AdamW), steps_by_entry(torch.optim.Adafactor)
    (True, False)
    """
    draw = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 6, 4, generator=draw).unbind()
    trained = []
    try:
        with random_states_kept(), torch.enable_grad():
            for size in ((6, 4), (3, 2)):
                blocks = [nn.Parameter(block.clone()) for block in _blocks(start, *size)]
                optimizer = make(blocks)
                for gradient in gradients:
                    for block, part in zip(blocks, _blocks(gradient, *size), strict=True):
                        block.grad = part.clone()
                    optimizer.step()
                trained.append(blocks)
    except Exception:  # any class of the user's, which may need more than this trial gives it
        return False
    (matrix,), quarters = trained
    pairs = zip(_blocks(matrix, 3, 2), quarters, strict=True)
    return all(torch.allclose(of_matrix, alone, rtol=1e-4, atol=1e-7) for of_matrix, alone in pairs)


def _blocks(matrix: Tensor, rows: int, columns: int) -> list[Tensor]:
    return [block for band in matrix.split(rows) for block in band.split(columns, 1)]
