"""Observe the attention calls of a model while it trains, and read their logits.

``Watch`` puts hooks on the attention blocks of a model. While a block runs in training, ``LogitTrace`` sees
the torch functions that the block calls and turns each attention call into ``Scores`` (``_scores``), however
it is written: torch's kernel, ``nn.MultiheadAttention``, FlexAttention, or a product and a softmax. Nothing
is replaced, so training is bit-identical.
"""

import math
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.labels.names import find_scopes, nearest
from fasterqk.labels.slices import Circuits, Slice
from fasterqk.stability._scores import KernelScores, Scores, WrittenScores
from fasterqk.trace.calls import SCORES, AttentionTrace, Operation, carries, is_parameter
from fasterqk.trace.modules import head_counts

# --- The trace: the scores that a block forms ---

_MULTIPLIED = {torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__}
_DIVIDED = {torch.div, Tensor.div, Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__, torch.true_divide}
_SUBTRACTED = {torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__isub__}
_TANH = {torch.tanh, Tensor.tanh, Tensor.tanh_, F.tanh}
_SAME = "view reshape transpose permute contiguous float half bfloat16 double to type type_as clone flatten"
_SAME += " unflatten unsqueeze squeeze swapaxes movedim __getitem__ view_as reshape_as moveaxis detach"
_RESHAPED = {getattr(home, name) for home in (Tensor, torch) for name in _SAME.split() if hasattr(home, name)}


@dataclass(eq=False)
class Products:
    """The origin of a tensor of scores: its products of queries and keys are ``products`` times ``factor``.

    ``pure``: only factors were applied since. ``logits``: the scores before their maximum was subtracted.
    """

    products: Tensor
    factor: float = 1.0
    pure: bool = True
    capped: bool = False
    logits: Tensor | None = None


class LogitTrace(AttentionTrace):
    """While active, passes the scores of every attention call to ``see``; no computation is changed.

    Scores are tagged with their ``Products`` until they enter a softmax. A monitor and a clip may be active
    together, so each trace has its own tag.
    """

    def __init__(self, heads: int | None, see: Callable[[Scores], None]) -> None:
        super().__init__()
        self.heads = heads
        self.see = see
        self.tag = f"{SCORES}_{id(self)}"

    def flex_attention(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call FlexAttention; on a GPU the kernel itself returns the largest score of each row."""
        named = {**dict(zip(_FLEX_ARGUMENTS, args, strict=False)), **kwargs}
        user_aux, mask = named.get("return_aux"), named.get("block_mask")
        request = _aux_request()
        asks = request is not None and named["query"].is_cuda and not named.get("return_lse")
        if asks:
            kwargs["return_aux"] = request(lse=bool(user_aux and user_aux.lse), max_scores=True)
        self.__exit__(None, None, None)  # the kernel may be compiled, which an active mode would change
        try:
            output = kernel(*args, **kwargs)
        finally:
            self.__enter__()
        arguments = (named["query"], named["key"], named.get("scale"), self.heads, False, None)
        mask_mod = None if mask is None else mask.mask_mod
        self._saw(KernelScores, *arguments, named.get("score_mod"), mask_mod, output[1] if asks else None)
        return output[0] if asks and user_aux is None else output

    def kernel(self, operation: Operation) -> Any:
        if operation.func is F.scaled_dot_product_attention:
            self._kernel(*operation.args, **operation.kwargs)
            return operation.run()
        with self:
            return _seen_inside(operation.func)(*operation.args, **operation.kwargs)

    def _kernel(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        self._saw(KernelScores, query, key, scale, self.heads, is_causal, attn_mask)

    def _saw(self, kind: Callable[..., Scores], *arguments: Any) -> None:
        try:
            scores = kind(*arguments)
        except (ValueError, RuntimeError):
            return  # another shape: this softmax is not attention of these heads
        self.see(scores)

    def product(self, operation: Operation) -> Any:
        output, tensors = operation.run(), operation.tensors
        # A product with a weight is a projection; scores come from two activations.
        if not isinstance(output, Tensor) or any(map(is_parameter, tensors)):
            return output
        products, pure = output.detach(), True
        if operation.func in (torch.baddbmm, Tensor.baddbmm):
            added = tensors[0].detach() * operation.kwargs.get("beta", 1)
            pure = not bool(added.any())
            products = products if pure else torch.nan_to_num(products - added)
        setattr(output, self.tag, Products(products, pure=pure))
        return output

    def softmax(self, operation: Operation) -> Any:
        logits = operation.tensors[0]
        origin: Products | None = getattr(logits, self.tag, None)
        if origin is not None:
            shown = logits.detach() if origin.logits is None else origin.logits
            products = origin.products if origin.factor == 1.0 else origin.products * origin.factor
            self._saw(WrittenScores, products, shown, self.heads, origin.capped)
            delattr(logits, self.tag)  # autograd may keep the tensor
        return operation.run()

    def other(self, operation: Operation) -> Any:
        """Pass the tag on to an output that still holds the scores."""
        func, args, kwargs = operation.func, operation.args, operation.kwargs
        tagged = [tensor for tensor in operation.tensors if hasattr(tensor, self.tag)]
        if not tagged:
            return operation.run()
        source, origins = tagged[0], [getattr(tensor, self.tag) for tensor in tagged]
        origin: Products = origins[0]
        others = [other for other in origins if other is not origin]
        keeps_pure = func in _MULTIPLIED or func in _DIVIDED
        if _in_place(func) and not keeps_pure and origin.products.data_ptr() == source.data_ptr():
            origin.products = origin.products.clone()
        output = operation.run()
        if not isinstance(output, Tensor) or not _holds(func, source, output):
            return output
        if func in _RESHAPED and args[0] is source:
            moved = output.detach() if origin.pure else func(origin.products, *args[1:], **kwargs)
            setattr(output, self.tag, replace(origin, products=moved))
        elif keeps_pure and not others:
            setattr(output, self.tag, _scaled(origin, func, args, output))
        elif others and origin.pure and all(other.pure for other in others):
            setattr(output, self.tag, Products(output.detach()))  # a sum of products
        elif all(other.products is origin.products for other in others):
            before = origin.logits
            if before is None and func in _SUBTRACTED and _is_row_value(args[-1]):
                before = source.detach()
            capped = origin.capped or func in _TANH
            setattr(output, self.tag, replace(origin, pure=False, capped=capped, logits=before))
        return output


def _scaled(origin: Products, func: Any, args: Any, output: Tensor) -> Products:
    if origin.pure:
        return replace(origin, products=output.detach())
    number = next((argument for argument in args if isinstance(argument, int | float)), None)
    if number is None or not origin.capped:
        return origin
    return replace(origin, factor=origin.factor * number if func in _MULTIPLIED else origin.factor / number)


def _holds(func: Any, source: Tensor, output: Tensor) -> bool:
    """Whether ``output`` still holds the scores in ``source``; a mask of their shape does not."""
    if getattr(func, "__name__", "").endswith("_like") or not output.is_floating_point():
        return False
    return carries(func, source, output) or (func is torch.cat and output.dim() == source.dim())


def _is_row_value(value: Any) -> bool:
    """Whether ``value`` has one number per row, such as the maximum that is subtracted before a softmax."""
    return isinstance(value, Tensor) and value.dim() > 2 and value.shape[-1] == 1


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


@cache
def _seen_inside(func: Any) -> Callable[..., Any]:
    """A copy of a torch function that skips its dispatch to active modes, so that a trace sees its inside."""
    namespace = {**func.__globals__, "has_torch_function": lambda _: False}
    copy = types.FunctionType(func.__code__, namespace, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


# --- FlexAttention is not a torch function, so its name is replaced in the modules that call it ---

_FLEX = "torch.nn.attention.flex_attention"
_FLEX_ARGUMENTS = ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse")


def _aux_request() -> Any:
    try:
        from torch.nn.attention.flex_attention import AuxRequest
    except ImportError:
        return None  # before torch 2.9
    return AuxRequest


def flex_names(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The namespaces and names under which the code of ``module`` has FlexAttention, plain or compiled."""
    if _FLEX not in sys.modules:
        return []
    plain = sys.modules[_FLEX].flex_attention
    files = {owner.__module__ for child in module.modules() for owner in type(child).__mro__}
    spaces = [vars(sys.modules[name]) for name in sorted(files) if name in sys.modules and name != _FLEX]
    places = [
        (space, name)
        for space in spaces
        for name, value in list(space.items())
        if value is plain or getattr(value, "_torchdynamo_orig_callable", None) is plain
    ]
    hugging_face = sys.modules.get("transformers.integrations.flex_attention")
    if hugging_face is not None and hasattr(hugging_face, _WRAPPED):
        places.append((vars(hugging_face), _WRAPPED))
    return places


_WRAPPED = "compile_friendly_flex_attention"


# --- Blocks, and the hooks on them ---


@dataclass(eq=False)
class AttentionBlock:
    """A module that forms attention, with its labelled queries and keys.

    ``heads`` is the number of query heads; None if only the scores show it.
    """

    path: str
    module: nn.Module
    layer: int | None
    heads: int | None
    slices: list[Slice] = field(default_factory=list)


def attention_blocks(model: nn.Module, circuits: Circuits) -> list[AttentionBlock]:
    """The blocks of ``model`` with labelled queries or keys, in the model's order."""
    scopes = find_scopes(model)
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
    parts = [name.split(".")[:-1] for name in names]
    shared = 0
    while all(len(prefix) > shared and prefix[shared] == parts[0][shared] for prefix in parts):
        shared += 1
    path = parts[0][:shared]
    while path and not any(True for _ in model.get_submodule(".".join(path)).children()):
        path.pop()
    while path and isinstance(model.get_submodule(".".join(path)), nn.ModuleList | nn.ModuleDict):
        path.pop()
    return ".".join(path)


class Watch:
    """Hooks on the blocks of a model that pass the scores of training passes to ``see``.

    A pass counts if the block is in training mode and gradients are enabled; with activation checkpointing
    that is the pass whose activations the gradients use. ``after`` is called with the arguments of every call
    that counted, while the weights of a sharded block are whole; ``unseen`` with the reason why a block that
    ran shows no scores.
    """

    def __init__(
        self,
        blocks: Sequence[AttentionBlock],
        see: Callable[[AttentionBlock, Scores], None],
        unseen: Callable[[AttentionBlock, str], None],
        after: Callable[[AttentionBlock, Any, Any], None] = lambda *_: None,
    ) -> None:
        self._see, self._unseen, self._after = see, unseen, after
        self._running: list[tuple[AttentionBlock, ExitStack]] = []
        self._flex: dict[str, list[tuple[dict[str, Any], str]]] = {}
        self._seen: set[str] = set()
        self._hooks = ExitStack()
        self.entered = False
        for block in blocks:
            enter, leave = partial(self.enter, block), partial(self._leave, block)
            self._hooks.enter_context(block.module.register_forward_pre_hook(enter))
            # Before all other hooks: FSDP2 shards the weights of the block again in one of them.
            self._hooks.enter_context(
                block.module.register_forward_hook(leave, with_kwargs=True, always_call=True, prepend=True)
            )

    def enter(self, block: AttentionBlock, module: nn.Module, args: Any) -> None:
        """Before the forward pass of a block."""
        if torch.compiler.is_compiling():
            return  # compiled code is invisible to the trace
        if not (module.training and torch.is_grad_enabled()):
            return
        self.entered = True
        trace, running = LogitTrace(block.heads, partial(self._saw, block)), ExitStack()
        running.enter_context(trace)
        if block.path not in self._flex:
            self._flex[block.path] = flex_names(block.module)
        for space, name in self._flex[block.path]:
            running.callback(space.__setitem__, name, space[name])
            space[name] = partial(trace.flex_attention, space[name])
        self._running.append((block, running))

    def _saw(self, block: AttentionBlock, scores: Scores) -> None:
        self._seen.add(block.path)
        self._see(block, scores)

    def _leave(self, block: AttentionBlock, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
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
        """Remove the hooks."""
        self._hooks.close()


# --- Several processes ---


def in_processes(group: Any = None) -> bool:
    """Whether several processes (of ``group``) train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def agreed_sizes(sizes: dict[str, int], group: Any = None) -> dict[str, int]:
    """The head counts of the blocks of all processes, by path: these may hold, or run, different blocks."""
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
    """The maxima over all processes of the blocks in ``sizes``, which all processes agree on.

    -inf stands for a block that ran nowhere; NaN, which a reduction may drop, counts as infinite.
    """
    parts = [maxima.get(path, torch.full((size,), -math.inf)) for path, size in sizes.items()]
    if not parts or not in_processes(group):
        return dict(zip(sizes, parts, strict=True))
    shared = torch.nan_to_num(torch.cat(parts).double(), nan=math.inf, neginf=-math.inf, posinf=math.inf)
    shared = shared.to(device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(sizes, shared.cpu().split(list(sizes.values())), strict=True))
