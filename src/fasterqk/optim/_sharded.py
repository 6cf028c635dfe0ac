"""Fused weights that are sharded over processes (FSDP2, HSDP, tensor parallel).

Each process has some rows (or columns) of the weight. Between steps its optimizer looks like a stock one: its
groups list the whole sharded parameter, once, and its state is one sharded tensor per parameter and entry. So
``torch.distributed.checkpoint``, clipping and loss scaling work as they do with any sharded model, and a
checkpoint fits every number of processes. During a step the groups list *leaves* instead: the slices of the
process's part of the weight, with the same slices of its gradient and of its state.
"""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.labels.slices import Slice
from fasterqk.trace.isolated import random_states_kept


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a ``DTensor``; torch may have been built without them."""
    return hasattr(tensor, "placements")


def local_view(part: Slice, tensor: Any) -> Tensor:
    """The entries of ``part`` in this process's memory of ``tensor`` (a parameter, or its gradient)."""
    if not is_sharded(tensor):
        return part.view(tensor)
    local: Tensor = tensor.detach().to_local()
    return local if part.axis is None else local.narrow(*_local_span(part, tensor))


def summed(values: Tensor, like: Any) -> Tensor:
    """The sum of ``values`` over the processes that hold other entries of ``like`` than this one."""
    if not is_sharded(like):
        return values
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements = [Replicate() if placement.is_replicate() else Partial() for placement in like.placements]
    total: Tensor = DTensor.from_local(values, like.device_mesh, placements, run_check=False).full_tensor()
    return total


def _local_span(part: Slice, tensor: Any) -> tuple[int, int, int]:
    """Axis, start and length of a slice in the shard of this process; the length may be 0."""
    axis, start, stop = part.axis or 0, part.start or 0, part.stop or 0
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_shard() and placement.dim % tensor.dim() == axis:
            # Shards are those of torch.chunk: equal, then one that is shorter, then empty ones.
            size, count = tensor.shape[axis], tensor.device_mesh.size(dimension)
            rows = -(-size // count)
            first = min(rows * tensor.device_mesh.get_local_rank(dimension), size)
            last = min(first + rows, size)
            start, stop = max(start, first) - first, min(stop, last) - first
            if stop <= start:
                return axis, 0, 0
    return axis, start, stop - start


class ShardedWeight:
    """A fused parameter of which this process has a shard, and the leaves that its optimizer steps on.

    ``slices`` holds the one slice of each leaf; together they cover the parameter. All processes have the
    same leaves, empty ones included, because all must have a state to save.
    """

    def __init__(self, name: str, parameter: nn.Parameter, slices: Sequence[tuple[Slice, ...]]) -> None:
        self.name, self.parameter, self.slices = name, parameter, slices
        if len(slices) > 1:
            _check_placements(name, parameter)
        self.leaves = [nn.Parameter(view.clone()) for view in self._views_of(parameter)]
        self._whole: dict[str, Any] = {}  # the state of the parameter, while the leaves have theirs

    def _views_of(self, tensor: Any) -> list[Tensor]:
        if tensor.placements != self.parameter.placements:  # type: ignore[attr-defined]
            tensor = tensor.redistribute(placements=self.parameter.placements)  # type: ignore[attr-defined]
        return [local_view(part, tensor) for (part,) in self.slices]

    def twin(self, parameter: nn.Parameter) -> "ShardedWeight":
        """The same slices of a copy of the parameter."""
        return ShardedWeight(self.name, parameter, self.slices)

    def check(self) -> None:
        """Nothing to compare: between steps the optimizer has the parameter itself."""

    def collect(self) -> None:
        """Nothing to do: the leaves take the gradient when they enter the step."""

    def enter(self) -> None:
        """Before a step: the leaves are the slices of this process's weight and gradient."""
        gradient = self.parameter.grad
        gradients = [None] * len(self.leaves) if gradient is None else self._views_of(gradient)
        for leaf, view, part in zip(self.leaves, self._views_of(self.parameter), gradients, strict=True):
            leaf.data = view.contiguous()  # a copy where a fused kernel would overwrite its neighbours
            leaf.grad = None if part is None else part.contiguous()

    def flush(self) -> None:
        """Write what the optimizer has computed into the parameter."""
        for leaf, view in zip(self.leaves, self._views_of(self.parameter), strict=True):
            _write(leaf.detach(), view)

    def leave(self) -> None:
        """After a step: the parameter holds the result, and the leaves hold nothing."""
        self.flush()
        for leaf in self.leaves:
            leaf.grad = None
            leaf.data = leaf.detach().new_empty(0)

    def clear(self, set_to_none: bool) -> None:
        """Clear the gradient, also when a closure calls ``zero_grad`` inside of a step."""
        if set_to_none:
            self.parameter.grad = None
        elif self.parameter.grad is not None:
            self.parameter.grad.zero_()

    # --- State ---

    def scatter(self, state: MutableMapping[Any, Any]) -> None:
        """Before a step: give each leaf its slice of the state of the parameter."""
        self._whole = state.pop(self.parameter, {})
        for number, leaf in enumerate(self.leaves if self._whole else ()):
            state[leaf] = {key: self._slice_of(value, number) for key, value in self._whole.items()}

    def _slice_of(self, value: Any, number: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.shape == self.parameter.shape:
            return self._views_of(value)[number].contiguous()
        return value.clone()  # a count of steps, which each leaf increases

    def gather(self, state: MutableMapping[Any, Any]) -> None:
        """After a step: join the states of the leaves to sharded tensors, the state of the parameter."""
        states = [state.pop(leaf, {}) for leaf in self.leaves]
        if not all(states):  # a first step that raised half-way has made some of them
            states = []
            if self._whole:
                state[self.parameter] = self._whole
        whole: dict[str, Any] = {}
        for key, value in (states[0] if states else {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                whole[key] = value
                continue
            joined = self._whole.get(key)
            if not isinstance(joined, Tensor) or joined.dtype != value.dtype:
                joined = torch.empty_like(self.parameter.detach(), dtype=value.dtype)
            for part, view in zip(states, self._views_of(joined), strict=True):
                if part[key].shape != view.shape:
                    raise InputError(
                        f"the optimizer keeps {key!r} of shape {tuple(part[key].shape)} for a part of "
                        f"{self.name} of shape {tuple(view.shape)}, which cannot be saved sharded: use AdamW"
                    )
                _write(part[key], view)
            whole[key] = joined
        if whole:
            state[self.parameter] = whole
        self._whole = {}


def _write(value: Tensor, view: Tensor) -> None:
    if value.data_ptr() != view.data_ptr():
        view.copy_(value)


def _check_placements(name: str, parameter: Any) -> None:
    """Raise unless a process has one block of rows or columns, or all of the parameter."""
    from torch.distributed.tensor import Replicate, Shard

    shards = [placement for placement in parameter.placements if type(placement) is not Replicate]
    if len(shards) > 1 or any(type(placement) is not Shard for placement in shards):
        raise InputError(
            f"{name} is fused and sharded as {tuple(parameter.placements)}: make_optimizer splits weights "
            "that are sharded once (by FSDP2, HSDP or tensor parallel, but not by two of them)"
        )


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
