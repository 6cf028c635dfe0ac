"""``isolated``: run a model (or a part of it) and leave it exactly as it was.

A deep copy of a model does not always run itself. TRL, Accelerate, PEFT and many scripts replace
``model.forward`` by a function that holds the original's bound method. Such a function is not copied, so the
copy would run the original, and gradients would land there. Therefore the modules themselves run here, while
everything they *hold* (parameters, buffers, caches, configurations, hooks) is exchanged for copies.
"""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

_CONTAINERS = (dict, list, set, deque)


@contextmanager
def isolated(
    model: nn.Module, root: nn.Module | None = None, *, share_weights: bool = False
) -> Iterator[None]:
    """Swap everything the modules of ``model`` hold for copies; restore the originals on exit.

    The copied parameters have no gradients and no hooks. ``root`` is the model around a part. With
    ``share_weights``, parameters are new objects in the memory of the originals: no weight is copied, and the
    code inside must not write to them. Sharded models raise ``RuntimeError``: their modules exchange
    parameters with other processes as they run.

    >>> import torch
    >>> model = nn.Linear(2, 2)
    >>> weight = model.weight
    >>> with isolated(model):
    ...     model(torch.ones(2)).sum().backward()
    ...     model.weight is weight, model.weight.grad.shape
    (False, torch.Size([2, 2]))
    >>> model.weight is weight, model.weight.grad
    (True, None)
    """
    live = [*model.parameters(), *model.buffers()]
    if any(hasattr(tensor, "placements") for tensor in live):
        raise RuntimeError(
            "the parameters are sharded over devices (circuits=find_circuits(...) before that)"
        )
    modules = [module for module in model.modules() if not isinstance(module, ScriptModule)]
    held = [vars(module) for module in modules]
    lent = [(tensor, tensor.data, tensor.grad, tensor.requires_grad) for tensor in live]
    memo: dict[int, Any] = {id(module): module for module in (root or model).modules()}
    if share_weights:
        plain = [parameter for parameter in model.parameters() if type(parameter) is nn.Parameter]
        memo |= {id(parameter): nn.Parameter(parameter.detach(), False) for parameter in plain}
    copies = _copies(modules, memo)
    try:
        for module, attributes in zip(modules, copies, strict=True):
            object.__setattr__(module, "__dict__", attributes)
        # Parts compiled by TorchScript cannot be exchanged; they get other memory.
        stayed = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        for tensor in live:
            tensor.grad = None
            if id(tensor) in stayed:
                tensor.data = tensor.data.clone()
        yield
    finally:
        for module, attributes in zip(modules, held, strict=True):
            object.__setattr__(module, "__dict__", attributes)
        for tensor, memory, gradient, trainable in lent:
            if tensor.data_ptr() != memory.data_ptr() or tensor.dtype != memory.dtype:
                tensor.data = memory
            tensor.grad = gradient
            if tensor.requires_grad != trainable:
                tensor.requires_grad_(trainable)


@contextmanager
def nothing_checkpointed() -> Iterator[None]:
    """Let checkpointed parts of a model keep their activations.

    The probe takes gradients of activations that it saw; a checkpoint would compute new ones.
    """

    def keep(*_: Any, **__: Any) -> Iterator[None]:
        yield

    class Plain:
        @staticmethod
        def apply(function: Any, _: Any, *args: Any) -> Any:
            return function(*args)

    ours = {"_checkpoint_without_reentrant_generator": keep, "CheckpointFunction": Plain}
    theirs = {name: vars(checkpoint)[name] for name in ours if name in vars(checkpoint)}
    try:
        for name in theirs:
            setattr(checkpoint, name, ours[name])
        yield
    finally:
        for name, value in theirs.items():
            setattr(checkpoint, name, value)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the random generators of torch, numpy and Python on exit."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore buffers (running statistics) and plain attributes (counters) of all modules on exit."""
    modules = [module for module in model.modules() if not isinstance(module, ScriptModule)]
    held = [attributes for module in modules for attributes in (vars(module), module._buffers)]
    before = [dict(attributes) for attributes in held]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for attributes, values in zip(held, before, strict=True):
            attributes.update(values)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def at_least_single(tensor: Tensor) -> Tensor:
    """``tensor`` in float32 if it is floating-point of fewer bits; float64 stays, as masks may need it."""
    narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.float() if narrow else tensor


class _DetachedCopies(TorchFunctionMode):
    """Detach deep copies of tensors, in at least float32; deepcopy refuses computed ones."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            alone = tensor.detach().clone()
            memo[id(tensor)] = at_least_single(alone)
        return memo[id(tensor)]


def detached_copy(value: Any, root: nn.Module) -> Any:
    """A deep copy of a call's arguments, caches included, detached and in at least float32; modules stay."""
    memo: dict[int, Any] = {id(module): module for module in root.modules()}
    with _DetachedCopies():
        if type(value) in (tuple, list):
            return type(value)(copied(item, memo) for item in value)
        if type(value) is dict:
            return {key: copied(item, memo) for key, item in value.items()}
        return copied(value, memo)


def _copies(modules: list[nn.Module], memo: dict[int, Any]) -> list[dict[str, Any]]:
    """Copies of the attributes of every module; ``memo`` maps what is not copied (the modules) to itself."""
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:  # deepcopy refuses what a module computed
                memo[id(value)] = value.detach().clone()
    copies = []
    for module in modules:
        kept = _left_out(module)
        attributes = {k: value if k in kept else copied(value, memo) for k, value in vars(module).items()}
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            attributes["forward"] = module.module.__call__  # theirs would wait for other processes
        copies.append(attributes)
    return copies


def _left_out(module: nn.Module) -> set[str]:
    """Attributes that a module excludes from its copies: Lightning's trainer, compiled code."""
    if type(module).__getstate__ is nn.Module.__getstate__:
        return set()
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return {"process_group", "reducer", "logger"}  # its __getstate__ needs a process group
    try:
        state = module.__getstate__()
    except Exception:  # some refuse it, parametrized modules for example
        return set()
    if not isinstance(state, dict):
        return set()
    return {key for key, value in vars(module).items() if state.get(key) is not value}


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of ``value`` if possible; ``memo`` is the memo of ``copy.deepcopy``."""
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        # Locks, handles and process groups are shared; a container of them is at least a new container.
        return copy.copy(value) if isinstance(value, _CONTAINERS) else value
