"""Observe the attention calls of a model while it trains, and read or bound their logits.

``Watch`` puts hooks on the attention blocks of a model. While a block runs in training, ``LogitTrace`` sees
the torch functions that it calls and turns every attention call into ``Scores`` (``_scores``): torch's
kernel, ``nn.MultiheadAttention``, FlexAttention, or a product and a softmax. No computation is replaced, so
training is bit-identical.

A trace cannot run in compiled code. There the hooks are part of the graph: they exchange torch's kernel for a
function that also writes the bound of each head into a tensor of the block (``AttentionBlock.bound``).
"""

import math
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, Self, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.labels.names import nearest, scopes_of
from fasterqk.labels.slices import Circuits, Slice
from fasterqk.stability._scores import (
    MULTI_HEAD,
    SDPA,
    SOFTMAX,
    KernelScores,
    LogitTrace,
    Scores,
    by_head,
)
from fasterqk.trace.calls import seen_inside
from fasterqk.trace.modules import head_counts, nothing_compiled

# --- FlexAttention is not a torch function, so its name is replaced in the files that call it ---

_FLEX = "torch.nn.attention.flex_attention"
_FLEX_ARGUMENTS = ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse")


def _seen_flex(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call FlexAttention and show the call; on a GPU, the kernel returns the largest score of each row."""
    named: dict[str, Any] = {**dict(zip(_FLEX_ARGUMENTS, args, strict=False)), **kwargs}
    user_aux, mask = named.get("return_aux"), named.get("block_mask")
    asks = bool(_traces and named["query"].is_cuda and not named.get("return_lse"))
    if asks:
        request = sys.modules[_FLEX].AuxRequest
        kwargs["return_aux"] = request(lse=bool(user_aux and user_aux.lse), max_scores=True)
    with unobserved():  # the kernel may be compiled, which an active mode would change
        output = kernel(*args, **kwargs)
    _show(
        named["query"],
        named["key"],
        **{name: named.get(name) for name in ("value", "scale", "score_mod")},
        mask_mod=None if mask is None else mask.mask_mod,
        maxima=output[1].max_scores if asks else None,
    )
    return output[0] if asks and user_aux is None else output


_WRAPPED = "compile_friendly_flex_attention"  # Hugging Face's


def flex_names(module: nn.Module) -> list[tuple[Any, str]]:
    """The files and names under which the code of ``module`` has FlexAttention, plain or compiled."""
    if _FLEX not in sys.modules:
        return []
    plain = sys.modules[_FLEX].flex_attention
    files = {owner.__module__ for child in module.modules() for owner in type(child).__mro__}
    places = [
        (sys.modules[file], name)
        for file in sorted(files)
        if file in sys.modules and file != _FLEX
        for name, value in list(vars(sys.modules[file]).items())
        if value is plain or getattr(value, "_torchdynamo_orig_callable", None) is plain
    ]
    hugging_face = sys.modules.get("transformers.integrations.flex_attention")
    return [*places, (hugging_face, _WRAPPED)] if hasattr(hugging_face, _WRAPPED) else places


# --- Blocks, and the hooks on them ---


@dataclass(eq=False)
class AttentionBlock:
    """A module that forms attention, with its labelled queries and keys.

    Attributes:
        heads: The number of query heads; None if only the scores show it.
        bound: Upper bounds on the logits (first row) and the products (second row) of each head, raised by
            compiled training passes; None until a pass has shown the number of heads.
        ran: Whether such a pass ran.
        additive: The input of a written-out softmax is more than products, so these have no bound.
        shifted: The code subtracts the maximum first, so logits have no bound either.
    """

    path: str
    module: nn.Module
    layer: int | None
    heads: int | None
    slices: list[Slice] = field(default_factory=list)
    bound: Tensor | None = None
    ran: bool = False
    additive: bool = False
    shifted: bool = False

    def make_bound(self, scores: Scores) -> None:
        """Allocate the bounds when the first scores are seen."""
        self.shifted |= scores.shifted
        if self.bound is None:
            shape, dtype = (2, scores.heads), torch.promote_types(scores.like.dtype, torch.float32)
            self.bound = torch.full(shape, -math.inf, dtype=dtype, device=scores.like.device)
            if "torch._dynamo" in sys.modules:
                torch._dynamo.mark_static_address(self.bound)  # CUDA graphs may write to it

    def raise_bound(self, logit: Tensor, product: Tensor) -> None:
        """Raise the bounds to these, also in compiled code."""
        if self.bound is not None and len(logit) == self.bound.shape[1]:
            self.bound.copy_(torch.maximum(self.bound, torch.stack([logit, product]).to(self.bound)))


def take_bounds(blocks: Sequence[AttentionBlock]) -> dict[str, Tensor]:
    """The bounds that compiled passes have written since the last call, by path, on the CPU."""
    written = [(block.path, block.bound) for block in blocks if block.ran and block.bound is not None]
    for block in blocks:
        block.ran = False
    if not written:
        return {}
    together = torch.cat([bound.flatten().to(written[0][1]) for _, bound in written]).cpu()  # one transfer
    parts = together.split([bound.numel() for _, bound in written])
    for _, bound in written:
        bound.fill_(-math.inf)
    return {path: part.view(2, -1) for (path, _), part in zip(written, parts, strict=True)}


def attention_blocks(model: nn.Module, circuits: Circuits) -> list[AttentionBlock]:
    """The blocks of ``model`` with labelled queries or keys, in the model's order."""
    scopes = scopes_of(model, circuits)
    inside: dict[str, list[Slice]] = {}
    outside: dict[int | None, list[Slice]] = {}
    for part in circuits:
        if part.role in ("q", "k"):
            scope = nearest(part.parameter, scopes)
            if scope is not None:
                inside.setdefault(scope.path, []).append(part)
            else:
                outside.setdefault(part.layer, []).append(part)
    for parts in outside.values():
        inside.setdefault(_holder(model, [part.parameter for part in parts]), []).extend(parts)
    blocks = []
    for path, parts in inside.items():
        module = scopes[path].module if path in scopes else model.get_submodule(path)
        counts = head_counts(module)
        caller = model.get_submodule(path)
        blocks.append(AttentionBlock(path, caller, parts[0].layer, counts[0] if counts else None, parts))
    return blocks


def _holder(model: nn.Module, names: Sequence[str]) -> str:
    """The innermost module that contains all of these parameters and is not itself a projection."""
    parts = zip(*(name.split(".")[:-1] for name in names), strict=False)
    path = [part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts)]
    module = model.get_submodule(".".join(path))
    while path and (not list(module.children()) or isinstance(module, nn.ModuleList | nn.ModuleDict)):
        path = path[:-1]
        module = model.get_submodule(".".join(path))
    return ".".join(path)


# --- Bounds, which compiled code can write, too ---

# Running blocks that bound their logits, and the traces of those that read them, outermost first.
_bounded: list[AttentionBlock] = []
_traces: list[LogitTrace] = []


@contextmanager
def unobserved() -> Iterator[None]:
    """Hide calls from the active traces inside this context."""
    active = _traces[:]
    for trace in reversed(active):
        trace.__exit__(None, None, None)
    _traces.clear()
    try:
        yield
    finally:
        _traces[:] = active
        for trace in active:
            trace.__enter__()


def see_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """Show an attention call to monitors and clips, for kernels that PyTorch does not know.

    Call it beside the kernel, in the attention module. Without a monitor or clip it costs nothing. It can be
    compiled.

    Arguments:
        query, key, value: As the kernel takes them, with axes (batch, head, token, width); keys and values
            may have fewer heads.
        scale: The factor on the products; by default 1 / sqrt(width).
        causal: Whether a query sees only keys up to its own position.
        mask: Any other mask, as for ``torch.nn.functional.scaled_dot_product_attention``.
        lse: The log-sum-exp of each row, (batch, head, token), which no logit of the row exceeds.

    >>> see_attention(*torch.randn(2, 1, 4, 10, 8))
    """
    _show(query, key, value=value, scale=scale, causal=causal, mask=mask, lse=lse)


def _show(query: Tensor, key: Tensor, **options: Any) -> None:
    """Show a kernel's call to the blocks that are running: arguments of ``KernelScores``."""
    for trace in _traces:
        trace.saw(KernelScores, query, key, heads=trace.heads, **options)
    with torch.no_grad():
        for block in _bounded:
            try:
                scores = KernelScores(query, key, heads=block.heads, **options)
            except ValueError:
                continue  # not attention of these heads
            block.raise_bound(scores.logit_bounds(), scores.bounds())


def _bounded_kernel(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **options: Any
) -> Tensor:
    """Torch's attention kernel, under whose name it runs in a block that bounds its logits."""
    _show(query, key, scale=options.get("scale"), mask=attn_mask)
    return SDPA(query, key, value, attn_mask, *args, **options)


def _bounded_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Tensor:
    """Torch's softmax likewise, for attention in plain operations; the bounds are the logits themselves."""
    if dim in (-1, input.dim() - 1):
        with torch.no_grad():
            for block in _bounded:
                try:
                    logit = by_head(input.detach(), block.heads).amax((0, 2, 3))
                except ValueError:
                    continue  # not attention of these heads
                unknown = torch.full_like(logit, math.inf)
                logit = unknown if block.shifted else logit
                block.raise_bound(logit, unknown if block.additive else logit)
    return SOFTMAX(input, dim, _stacklevel, dtype)


_bounded_multi_head = seen_inside(
    F.multi_head_attention_forward,
    scaled_dot_product_attention=_bounded_kernel,
    softmax=_bounded_softmax,
    _check_key_padding_mask=lambda *_: None,  # it cannot be compiled
)


def _nothing(*_: Any, **__: Any) -> None:
    pass


@dataclass(eq=False)
class Hook:
    """A hook that a copied or pickled module does not inherit: its copy does nothing."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return Hook, (_nothing,)


class Watch:
    """Hooks on the blocks of a model that pass the scores of training passes to ``see``.

    A pass counts in training mode with gradients enabled. With activation checkpointing, that is the pass
    whose activations the gradients use. ``after`` gets the arguments of every call that counts, while the
    weights of a sharded block are whole. ``unseen`` gets the reason why a block shows no scores.

    Compiled blocks only raise their ``bound``, and all blocks do while ``bounding``. With ``any_pass``,
    passes in evaluation mode or without gradients count, too.
    """

    def __init__(
        self,
        blocks: Sequence[AttentionBlock],
        see: Callable[[AttentionBlock, Scores], None],
        unseen: Callable[[AttentionBlock, str], None],
        after: Callable[[AttentionBlock, Any, Any], None] = lambda *_: None,
        any_pass: bool = False,
    ) -> None:
        self._see, self._unseen, self._after, self._any_pass = see, unseen, after, any_pass
        self._removed = False
        self._running: list[tuple[AttentionBlock, ExitStack]] = []
        self._flex = {block.path: flex_names(block.module) for block in blocks}
        self._seen: set[str] = set()
        self._hooks = ExitStack()
        self.entered = self.bounding = False
        for block in blocks:
            enter, leave = Hook(partial(self.enter, block)), Hook(partial(self._leave, block))
            self._hooks.enter_context(block.module.register_forward_pre_hook(enter))
            # Before all other hooks: FSDP2's shards the weights of the block again.
            self._hooks.enter_context(
                block.module.register_forward_hook(leave, with_kwargs=True, always_call=True, prepend=True)
            )

    def enter(self, block: AttentionBlock, module: nn.Module, args: Any) -> None:
        """Before the forward pass of a block."""
        if self._removed or not (self._any_pass or (module.training and torch.is_grad_enabled())):
            return
        if torch.compiler.is_compiling() or self.bounding:
            self._enter_bounding(block)
            return
        self.entered = True
        trace, running = LogitTrace(block.heads, partial(self._saw, block)), ExitStack()
        running.enter_context(trace)
        _traces.append(trace)
        running.callback(self._restore, block)
        running.callback(_traces.remove, trace)
        self._exchange(block)
        self._running.append((block, running))

    def _enter_bounding(self, block: AttentionBlock) -> None:
        """The part of a hook that a graph contains: no Python calls, only other kernels under their names."""
        block.ran = True
        _bounded.append(block)
        F.scaled_dot_product_attention, F.softmax = _bounded_kernel, _bounded_softmax
        F.multi_head_attention_forward = _bounded_multi_head
        self._exchange(block)

    def _leave_bounding(self, block: AttentionBlock) -> None:
        _bounded.pop()
        if not _bounded:
            F.scaled_dot_product_attention, F.softmax = SDPA, SOFTMAX
            F.multi_head_attention_forward = MULTI_HEAD
        self._restore(block)

    def _exchange(self, block: AttentionBlock) -> None:
        for file, name in self._flex[block.path]:
            if not isinstance(getattr(file, name), partial):
                setattr(file, name, partial(_seen_flex, getattr(file, name)))

    def _restore(self, block: AttentionBlock) -> None:
        for file, name in () if _bounded or _traces else self._flex[block.path]:
            setattr(file, name, getattr(file, name).args[0])

    def _saw(self, block: AttentionBlock, scores: Scores) -> None:
        self._seen.add(block.path)
        self._see(block, scores)

    def _leave(self, block: AttentionBlock, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if _bounded and _bounded[-1] is block:
            self._leave_bounding(block)
            return
        if not self._running or self._running[-1][0] is not block:
            return
        self._running.pop()[1].close()
        if output is None:
            return  # the forward pass raised
        if block.path in self._seen:
            self._after(block, args, kwargs)
            return
        advice = (
            "a Hugging Face model shows them with attn_implementation='sdpa', 'eager' or 'flex_attention', "
            "other code with torch's scaled_dot_product_attention or a softmax"
        )
        if any(hasattr(parameter, "placements") for parameter in module.parameters()):
            advice = "its heads are split over devices (tensor parallel)"
        self._unseen(
            block,
            f"{block.path or 'the model'} ({type(module).__name__}) forms no attention scores that can be "
            f"seen; {advice}",
        )

    def remove(self) -> None:
        """Remove the hooks; a pass that has begun may still call them."""
        self._removed = True
        self._hooks.close()


class Observer:
    """Observes a model until ``remove()`` or, as a context manager, until its exit."""

    def remove(self) -> None:
        """Remove all hooks."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class EagerTraining:
    """Runs training passes of a model uncompiled from ``start`` to ``stop``; evaluation stays compiled."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._session, self._eager = ExitStack(), ExitStack()
        weakref.finalize(model, self._eager.close)

    def start(self) -> None:
        """Run training passes uncompiled from now on."""
        self._session.enter_context(_observed_modes(self._model, self._set))
        self._session.callback(self.pause)
        self._set(self._model.training)

    def pause(self) -> None:
        """Run everything as before until the model is set to train again."""
        self._eager.close()

    def stop(self) -> None:
        """Run everything as before."""
        self._session.close()

    def _set(self, training: bool) -> None:
        self.pause()
        if training:
            self._eager.enter_context(nothing_compiled())


_OBSERVERS = "_fasterqk_observers"  # attribute of a model: functions to call when its mode is set


def train(model: nn.Module, mode: bool = True) -> nn.Module:
    """``model.train(mode)`` of an observed model; pickle finds it under this name."""
    held = vars(model)
    for observer in held.get(_OBSERVERS, ()):
        observer(mode)
    before = held.get("_fasterqk_train", {}).get("train", types.MethodType(type(model).train, model))
    return cast(nn.Module, before(mode))


@contextmanager
def _observed_modes(model: nn.Module, observe: Callable[[bool], None]) -> Iterator[None]:
    """Call ``observe(training)`` whenever the mode of ``model`` is set; torch has no hook for that."""
    held, observer = vars(model), Hook(observe)
    if _OBSERVERS not in held:
        replaced = {name: held[name] for name in ("train",) if name in held}
        # A method of the object, which a copy of the model has as its own.
        method = types.MethodType(train, model)
        held |= {_OBSERVERS: [], "train": method, "_fasterqk_train": replaced}
    held[_OBSERVERS].append(observer)
    try:
        yield
    finally:
        held[_OBSERVERS].remove(observer)
        if not held[_OBSERVERS]:
            for name in (_OBSERVERS, "train"):
                del held[name]
            held |= held.pop("_fasterqk_train")


# --- Several processes ---


def in_processes(group: Any = None) -> bool:
    """Whether several processes (of ``group``) train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def agreed_sizes(sizes: dict[str, int], group: Any = None) -> dict[str, int]:
    """The head counts of the blocks of all processes, by path; processes may hold or run different blocks."""
    if not in_processes(group):
        return sizes
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, sizes, group=group)
    agreed: dict[str, int] = {}
    for theirs in everywhere:
        for path, heads in theirs.items():
            if agreed.setdefault(path, heads) != heads:
                raise InputError(
                    f"{path} has {heads} heads in one process and {agreed[path]} in another, so they are "
                    "different blocks; name the processes that hold the same ones with group="
                )
    return dict(sorted(agreed.items()))


def over_processes(
    maxima: dict[str, Tensor], sizes: dict[str, int], device: torch.device, group: Any = None
) -> dict[str, Tensor]:
    """The maxima over all processes, of the blocks in ``sizes``, on which all processes agree.

    A block that ran nowhere has -inf. NaN, which a reduction may drop, becomes infinite.
    """
    parts = [maxima.get(path, torch.full((size,), -math.inf)) for path, size in sizes.items()]
    if not parts or not in_processes(group):
        return dict(zip(sizes, parts, strict=True))
    shared = torch.nan_to_num(torch.cat(parts).double(), nan=math.inf, neginf=-math.inf, posinf=math.inf)
    shared = shared.to(device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(sizes, shared.cpu().split(list(sizes.values())), strict=True))
