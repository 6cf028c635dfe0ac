"""``qk_clip``: scale back the heads whose attention logits exceed a threshold, after every step.

QK-Clip (Kimi K2), for one attention block:

1. In training, ``Watch`` (``_logits``) reports the scores of every attention call. As long as the longest
   query times the longest key stays below the threshold, no product can exceed it, and none is computed.
2. The largest product of each head is kept until the optimizer has stepped: over micro-batches, over all
   calls of a block, and over processes.
3. ``factor = threshold / max(largest, threshold)``. Queries are multiplied by ``factor ** alpha`` and keys by
   ``factor ** (1 - alpha)``, weights and biases alike (``ScaledHeads``).

Compiled code shows no scores, but its graph bounds the products of each head (``_logits``). Bounds below the
threshold prove that a step needs no clip. After a step with a bound above it, the next step runs uncompiled,
is read exactly and clipped; so is the first step.

At the first call of each block, ``_rehearse`` scales copies of the weights and checks that the scores follow
head by head. If they do not, for example because of a norm on queries or keys, the block is refused.
"""

import math
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fasterqk.errors import InputError
from fasterqk.labels.find import Labels, given_or_found
from fasterqk.labels.slices import Circuits, Slice
from fasterqk.optim.hooks import StepHooks, hooks_of, unwrapped
from fasterqk.optim.ratio import finite_number
from fasterqk.stability._logits import (
    AttentionBlock,
    EagerTraining,
    LogitTrace,
    Observer,
    Watch,
    agreed_sizes,
    attention_blocks,
    in_processes,
    over_processes,
    take_bounds,
    unobserved,
)
from fasterqk.stability._scores import Scores, WrittenScores
from fasterqk.trace.isolated import random_states_kept
from fasterqk.trace.modules import meaning, uncompiled

_ROWS = 16  # rows of scores that a rehearsal compares


@dataclass(frozen=True)
class Clipped:
    """A head above the threshold: its largest logit, and the factor by which its logits are scaled."""

    block: str
    layer: int | None
    head: int
    logit: float
    factor: float


def qk_clip(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    threshold: float = 100.0,
    alpha: float = 0.5,
    *,
    log_only: bool = False,
    labels: Labels | None = None,
    circuits: Circuits | None = None,
    group: Any = None,
) -> "QKClip":
    """After each step of ``optimizer``, scale back the heads whose attention logits exceed ``threshold``.

    The largest logit of a head is its largest product of query and key, with scale and rotary positions, over
    all pairs that the mask allows, in the training passes since the last step. If it exceeds the threshold,
    the head's query weights are multiplied by ``factor ** alpha`` and its key weights by
    ``factor ** (1 - alpha)``, with ``factor = threshold / largest``; biases are scaled like their weights. A
    key shared by several query heads takes the strictest factor of its group, and each query the rest of its
    own factor. In latent attention, the part of the query that meets the shared rotary key takes the whole
    factor. Additive biases and soft caps stay as they are; the product before them is clipped.

    Works with any optimizer, gradient accumulation, DDP and FSDP2. Passes in evaluation mode or without
    gradients do not count. There is no state to save: call it again when training resumes.

    A compiled model runs its first step uncompiled, and every step after one in which the longest query times
    the longest key of some head exceeded the threshold. Only these steps are read and clipped, so a head that
    passes the threshold in a compiled step is clipped one step later. Call ``qk_clip`` before the first
    compiled pass, whose code must contain the bound.

    Arguments:
        model: The model, compiled or not.
        optimizer: The optimizer that trains its queries and keys.
        threshold: The largest logit that is allowed.
        alpha: The share of the factor that queries take, from 0 to 1.
        log_only: Record the heads above the threshold without changing weights.
        labels, circuits: As in :func:`make_optimizer`.
        group: The processes over which maxima are taken, by the names of blocks; by default all. Give it
            where processes hold different layers under the same names (pipelines).

    Returns:
        A :class:`QKClip`, which holds the clipped heads (``last``, ``log()``) and can be removed
        (``remove()``).

    Raises:
        InputError: The model has norms on queries or keys or adapters, or the optimizer does not train its
            queries and keys.

    >>> model = nn.TransformerEncoderLayer(8, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    >>> clip = qk_clip(model, optimizer, threshold=0.01)
    >>> model(torch.randn(3, 1, 8)).sum().backward()
    >>> optimizer.step()
    >>> clip.last[0].block, clip.last[0].head, clip.last[0].logit > 0.01
    ('self_attn', 0, True)
    """
    finite_number(threshold, "threshold")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
        raise InputError(f"alpha={alpha!r} is not a number between 0 and 1")
    if not isinstance(unwrapped(optimizer), torch.optim.Optimizer):
        raise InputError(f"{type(optimizer).__name__} is not a torch optimizer")
    inner = uncompiled(model)
    compiled, model = _is_compiled(model), inner
    labelled = given_or_found(model, circuits, labels, heads=True)
    heads = [part.head for part in labelled if part.role in ("q", "k")]
    if heads and all(head is None for head in heads):
        raise InputError(
            "qk_clip needs labels per head: set num_heads on the attention modules"
            if circuits is None
            else "qk_clip needs labels per head: circuits=find_circuits(model, heads=True)"
        )
    blocks = _clippable(model, attention_blocks(model, labelled), unwrapped(optimizer))
    return QKClip(model, unwrapped(optimizer), blocks, threshold, alpha, log_only, group, compiled)


class QKClip(Observer):
    """The clip of one model and its optimizer, made by :func:`qk_clip`.

    As a context manager it removes the clip on exit.

    Attributes:
        last: The heads above the threshold in the last step; ``total`` counts such heads since the start.
        steps: The number of steps; ``exact_steps`` of them were read exactly, the others ran compiled.
        compiled: Whether passes run compiled, or are expected to.
        bound: An upper bound on all products of the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        blocks: "list[ScaledHeads]",
        threshold: float,
        alpha: float,
        log_only: bool,
        group: Any,
        compiled: bool,
    ) -> None:
        self.model, self.blocks, self.compiled = model, blocks, compiled
        self.threshold, self.alpha, self.log_only = float(threshold), float(alpha), log_only
        self.last: list[Clipped] = []
        self.total = self.steps = self.exact_steps = 0
        self.bound = -math.inf
        self._group = group
        self._by_path = {scaled.block.path: scaled for scaled in blocks}
        self._unverified = set(self._by_path)
        self._warned = self._ever_entered = False
        self._blind: set[str] = set()
        self._sizes: dict[str, int] | None = None
        self._watched = [scaled.block for scaled in blocks]
        self._inside = any(_is_compiled(part) for block in self._watched for part in block.module.children())
        self._watch = Watch(self._watched, self._see, _refuse, self._verify)
        self._step_hook = optimizer.register_step_post_hook(self._after_step)
        self._eager = EagerTraining(model)
        self._eager.start()

    def __repr__(self) -> str:
        sizes = f"{len(self.blocks)} blocks, {sum(scaled.heads for scaled in self.blocks)} heads"
        settings = f"threshold {self.threshold:g}, alpha {self.alpha:g}{', log only' * self.log_only}"
        return f"QKClip({sizes}, {settings})"

    def log(self) -> dict[str, float]:
        """Numbers of the last step for a log: the clipped heads, their largest logit, the bound."""
        numbers = {"logits/clipped_heads": float(len(self.last)), "logits/clip_bound": self.bound}
        if self.last:
            numbers["logits/largest_clipped"] = max(head.logit for head in self.last)
        return numbers

    def remove(self) -> None:
        """Remove all hooks from model and optimizer."""
        self._eager.stop()
        self._watch.remove()
        self._step_hook.remove()

    def _see(self, block: AttentionBlock, scores: Scores) -> None:
        scaled = self._by_path[block.path]
        scaled.maxima = torch.maximum(scaled.maxima, torch.stack(scores.largest_products(self.threshold)))
        block.make_bound(scores)
        if block.path in self._unverified and isinstance(scores, WrittenScores):
            reading = scores.reading(_ROWS)
            block.additive |= reading.biased or reading.capped

    def _verify(self, block: AttentionBlock, args: Any, kwargs: Any) -> None:
        if block.path in self._unverified:
            self._unverified.remove(block.path)
            _rehearse(self._by_path[block.path], self.alpha, args, kwargs)

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        ran_compiled = {block.path for block in self._watched if block.ran}
        self.exact_steps += self._watch.entered and not ran_compiled
        self._check_pass(bool(ran_compiled))
        taken = self._taken(ran_compiled)
        maxima = {path: numbers[0] for path, numbers in taken.items()}
        self._warn(maxima)
        clipped = []
        for path, scaled in self._by_path.items():
            # A head that was scaled to the threshold may be above it by rounding in the next step.
            dtype = self.model.get_parameter(scaled.parts[0][0].parameter).dtype
            limit = self.threshold * (1 + 2 * torch.finfo(dtype).eps)
            above = maxima[path].isfinite() & (maxima[path] > limit)
            if bool(above.any()):
                factors = torch.where(above, self.threshold / maxima[path], 1.0)
                clipped += [
                    Clipped(path, scaled.block.layer, head, float(maxima[path][head]), float(factors[head]))
                    for head in above.nonzero().squeeze(1).tolist()
                ]
                if not self.log_only:
                    scaled.scale(self.model, factors, self.alpha)
        self.last = clipped
        self.total += len(clipped)
        self.steps += 1
        self.bound = float(torch.cat([numbers[1] for numbers in taken.values()]).amax())
        self._choose_next()

    def _taken(self, ran_compiled: set[str]) -> dict[str, Tensor]:
        """The largest products since the last step and their bounds, by block, over processes."""
        written = take_bounds(self._watched)
        for path, scaled in self._by_path.items():
            if path in written:
                scaled.maxima[1] = torch.maximum(scaled.maxima[1], written[path][1])
            if path in ran_compiled and not bool((scaled.maxima[1] > -math.inf).any()):
                self._see_nothing(scaled.block)
        maxima = {path: scaled.maxima.flatten() for path, scaled in self._by_path.items()}
        for scaled in self.blocks:
            scaled.maxima = torch.full_like(scaled.maxima, -math.inf)
        if self._sizes is None:
            self._sizes = agreed_sizes({path: len(numbers) for path, numbers in maxima.items()}, self._group)
        device = next(self.model.parameters()).device
        maxima = over_processes(maxima, self._sizes, device, self._group)
        return {path: numbers.view(2, -1) for path, numbers in maxima.items()}

    def _see_nothing(self, block: AttentionBlock) -> None:
        """Warn if a verified block ran compiled and wrote no bound."""
        if block.path not in self._unverified and block.path not in self._blind:
            self._blind.add(block.path)
            warnings.warn(
                f"the compiled code of {block.path or 'the model'} shows qk_clip no queries and keys, so all "
                "steps run uncompiled; torch's scaled_dot_product_attention and torch.nn.functional.softmax "
                "show them, and fasterqk.stability.see_attention those of other kernels",
                stacklevel=2,
            )

    def _choose_next(self) -> None:
        """Run the next step uncompiled if a head may be above the threshold, or a block is unknown."""
        unknown = bool(self._unverified or self._blind)
        eager = self.compiled and (unknown or not self.bound <= self.threshold)
        self._eager.stop()
        self._watch.bounding = self._inside and not eager
        if eager:
            self._eager.start()

    def _check_pass(self, ran_compiled: bool) -> None:
        """Raise if the step had gradients from a training pass that was not seen.

        Loading a checkpoint may take a step without gradients, which is no training. A process may skip every
        block and still get gradients from the others.
        """
        entered, self._watch.entered = self._watch.entered or ran_compiled, False
        self.compiled |= ran_compiled or self._inside
        self._ever_entered |= entered
        if entered or (self._ever_entered and in_processes(self._group)):
            return
        names = {part.parameter for scaled in self.blocks for part, _ in scaled.parts}
        gradients = [self.model.get_parameter(name).grad for name in names]
        if any(gradient is not None and bool(gradient.any()) for gradient in gradients):
            raise InputError(
                "no training pass was seen before this step of qk_clip; call model.train(), and run the "
                "model that was given to it, or one that was compiled from it and had not run before "
                "(torch._dynamo.reset() forgets older code)"
            )

    def _warn(self, maxima: dict[str, Tensor]) -> None:
        together = torch.cat(list(maxima.values()))
        if not self._warned and bool((together.isnan() | (together == math.inf)).any()):
            self._warned = True
            warnings.warn(
                f"attention logits are not finite after {self.steps} steps, and qk_clip leaves these heads "
                "alone; go back to a checkpoint, with a lower learning rate or threshold",
                stacklevel=2,
            )


def _is_compiled(module: nn.Module) -> bool:
    return any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
    )


# --- Which weights belong to which head ---


@dataclass(eq=False)
class ScaledHeads:
    """The queries and keys of one block by head, and the largest products since the last step.

    ``parts`` are slices that make the queries or keys of one head. True marks queries that take the whole
    factor, because all heads share their key, which is not scaled. ``maxima`` has two rows: the largest
    products, and upper bounds on them.
    """

    block: AttentionBlock
    heads: int
    keys: int
    parts: list[tuple[Slice, bool]]
    maxima: Tensor

    def multipliers(self, factors: Tensor, alpha: float) -> dict[str, list[tuple[Slice, float]]]:
        """For each parameter its slices with their multipliers."""
        strictest = factors.reshape(self.keys, -1).amin(1)
        roles = {part.role for part, _ in self.parts}
        share = 1.0 - alpha if roles == {"q", "k"} else 0.0 if roles == {"q"} else 1.0
        keys = strictest.double() ** share
        queries = factors.double() / keys.repeat_interleave(self.heads // self.keys)
        multipliers: dict[str, list[tuple[Slice, float]]] = {}
        for part, whole in self.parts:
            by_head = factors if whole else keys if part.role == "k" else queries
            multipliers.setdefault(part.parameter, []).append((part, float(by_head[part.head])))
        return multipliers

    def scale(self, model: nn.Module, factors: Tensor, alpha: float) -> None:
        """Multiply the weights in place; entries with a multiplier of one keep their bits."""
        for name, numbers in self.multipliers(factors, alpha).items():
            if any(number != 1 for _, number in numbers):
                _multiply(model.get_parameter(name), numbers)


def _vector(shape: Sequence[int], numbers: Sequence[tuple[Slice, float]]) -> Tensor:
    """Multipliers that broadcast to ``shape``; 1 outside the slices."""
    axis = numbers[0][0].axis or 0
    vector = torch.ones(shape[axis], dtype=torch.float64)
    for part, number in numbers:
        vector[part.start : part.stop] = number
    return vector.reshape([-1 if dimension == axis else 1 for dimension in range(len(shape))])


def _multiply(parameter: Any, numbers: Sequence[tuple[Slice, float]]) -> None:
    """Multiply the slices of a parameter (of a sharded one: of this process's shard) in place."""
    vector, local = _vector(parameter.shape, numbers), parameter
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor

        whole = vector.to(parameter.device).expand(parameter.shape).contiguous()
        vector = distribute_tensor(whole, parameter.device_mesh, parameter.placements).to_local()
        local = parameter.to_local()
    local.detach().mul_(vector.to(local.device, torch.promote_types(local.dtype, torch.float32)))


def _clippable(
    model: nn.Module, blocks: Sequence[AttentionBlock], optimizer: torch.optim.Optimizer
) -> list[ScaledHeads]:
    """The trained blocks with their heads; ``InputError`` if one of them cannot be clipped."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    hooks = hooks_of(optimizer) or StepHooks([], [], weakref.ref(model))
    trained = hooks.trained(optimizer)
    owners: dict[int, str] = {}
    clippable = []
    for block in blocks:
        scaled = _scaled_heads(model, block)
        weights = {part.parameter: parameters[part.parameter] for part, _ in scaled.parts}
        weights = {name: weight for name, weight in weights.items() if weight.dim() > 1}
        frozen = [name for name, weight in weights.items() if not weight.requires_grad]
        if len(frozen) == len(weights):
            continue
        if frozen:
            raise InputError(f"{frozen[0]} is frozen, but other queries or keys of {block.path} are trained")
        for name, weight in weights.items():
            if id(weight) not in trained:
                raise InputError(
                    f"{name} is not trained by this optimizer, which would undo or miss the clip; give "
                    "qk_clip the optimizer that trains the queries and keys of this model"
                )
            if owners.setdefault(id(weight), block.path) != block.path:
                raise InputError(f"{name} also makes the queries or keys of {owners[id(weight)]}: it is tied")
        clippable.append(scaled)
    if not clippable:
        raise InputError("no queries or keys of this model are trained: there is nothing to clip")
    return clippable


def _scaled_heads(model: nn.Module, block: AttentionBlock) -> ScaledHeads:
    parts: list[tuple[Slice, bool]] = []
    shared = False
    for part in block.slices:
        if _acts_on_scores(model, part.parameter):
            continue
        _refuse_norm(model, block, part)
        if "lora_" in part.parameter or ".base_layer." in part.parameter:
            raise InputError(f"{part.parameter} is in an adapter: merge adapters before qk_clip")
        if part.head is None:
            shared |= part.role == "k" and part.axis is not None
            continue  # a factor before the heads, or a key that all heads share
        parts.append((part, False))
    query_heads, key_heads = ({part.head for part, _ in parts if part.role == role} for role in ("q", "k"))
    heads, keys = len(query_heads) or len(key_heads), len(key_heads) or len(query_heads)
    gaps = any(numbers != set(range(len(numbers))) for numbers in (query_heads, key_heads))
    if not parts or heads % keys or gaps:
        raise InputError(
            f"qk_clip does not know which rows of {block.path or 'the model'} make the queries and keys of "
            "which head; leave it out with labels= that call its queries and keys rest"
        )
    if shared:
        parts = _with_rotary(block, [part for part, _ in parts])
    block.heads = heads
    return ScaledHeads(block, heads, keys, parts, torch.full((2, heads), -math.inf, dtype=torch.float64))


def _with_rotary(block: AttentionBlock, parts: list[Slice]) -> list[tuple[Slice, bool]]:
    """Split the queries of latent attention: the last rows of each head meet the shared rotary key."""
    rotary = getattr(block.module, "qk_rope_head_dim", None)
    if not isinstance(rotary, int):
        raise InputError(f"{block.path} has a key that all heads share, in a form qk_clip does not know")
    split: list[tuple[Slice, bool]] = []
    for part in parts:
        if part.role == "k" or part.start is None or part.stop is None:
            split.append((part, False))
            continue
        middle = part.stop - rotary
        if part.start < middle:
            split.append((replace(part, stop=middle), False))
        split.append((replace(part, start=middle), True))
    return split


def _acts_on_scores(model: nn.Module, name: str) -> bool:
    """Whether a parameter shifts or scales the scores instead of making queries or keys."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return isinstance(owner, nn.Embedding) or any(meaning(part).score for part in name.split("."))


def _refuse_norm(model: nn.Module, block: AttentionBlock, part: Slice) -> None:
    """Refuse norms on queries or keys; the rehearsal decides on norms between two factors of a projection."""
    if "norm" not in type(model.get_submodule(part.parameter.rpartition(".")[0])).__name__.lower():
        return
    matrices = {
        other.parameter
        for other in block.slices
        if other.role == part.role and model.get_parameter(other.parameter).dim() > 1
    }
    if len(matrices) < 2:
        raise InputError(
            f"{part.parameter} normalises queries or keys, so scaling their weights changes nothing: this "
            "model bounds its logits itself; watch them with LogitMonitor"
        )


def _refuse(block: AttentionBlock, reason: str) -> None:
    raise InputError(f"{reason}; qk_clip cannot clip it")


# --- The rehearsal: do the scores follow the weights? ---


def _rehearse(scaled: ScaledHeads, alpha: float, args: Any, kwargs: Any) -> None:
    """Raise unless the scores of a block follow its weights head by head, tried on copies."""
    module, block = scaled.block.module, scaled.block
    prefix = f"{block.path}." if block.path else ""
    tensors = {name: parameter.detach() for name, parameter in module.named_parameters()}
    if any(hasattr(tensor, "placements") for tensor in tensors.values()):
        _refuse(block, f"the weights of {block.path} are sharded inside of it (tensor parallel)")
    factors = torch.linspace(0.5, 0.9, scaled.heads)
    scaled_tensors = dict(tensors)
    for name, numbers in scaled.multipliers(factors, alpha).items():
        before = tensors[name.removeprefix(prefix)]
        scaled_tensors[name.removeprefix(prefix)] = before * _vector(before.shape, numbers).to(before)
    args = [_without_cache(value) for value in args]
    kwargs = {name: _without_cache(value) for name, value in kwargs.items()}
    try:
        plain = _scores(module, scaled.heads, tensors, args, kwargs)
        changed = _scores(module, scaled.heads, scaled_tensors, args, kwargs)
    except Exception as error:
        line = str(error).partition("\n")[0]
        warnings.warn(
            f"qk_clip could not verify {block.path}, whose forward pass did not run again: {line}",
            stacklevel=2,
        )
        return
    width = min(tensor.element_size() for tensor in tensors.values())
    for (original, precision), (rescaled, _) in zip(plain, changed, strict=True):
        expected = original * factors.to(original.device).view(1, -1, 1, 1)
        size = original.abs().amax()
        half = min(precision, width) < 4 or torch.is_autocast_enabled(original.device.type)
        tolerance = 5e-2 if half else 1e-3
        if bool(size.isfinite()) and not bool((rescaled - expected).abs().amax() <= tolerance * size):
            raise InputError(
                f"the scores of {block.path or 'the model'} ({type(module).__name__}) do not follow the "
                "weights of its queries and keys head by head (a norm on them bounds the logits, or another "
                "term is in the scores): qk_clip cannot clip it; watch it with LogitMonitor"
            )


def _scores(
    module: nn.Module, heads: int, tensors: dict[str, Tensor], args: Any, kwargs: Any
) -> list[tuple[Tensor, int]]:
    """Run the module again: some rows of the products of every call, and the bytes of one number."""
    samples: list[tuple[Tensor, int]] = []

    def see(scores: Scores) -> None:
        rows = torch.arange(min(_ROWS, scores.length))
        formed = [products[:1].clone() for products, _, _ in scores.parts(None, rows)]
        samples.extend((products, scores.like.element_size()) for products in formed)

    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    hooks = {name: vars(module)[name] for name in ("_forward_pre_hooks", "_forward_hooks")}
    try:
        for name in hooks:  # FSDP2's would shard the block again; others have run
            setattr(module, name, OrderedDict())
        with torch.no_grad(), random_states_kept(), unobserved(), LogitTrace(heads, see):
            functional_call(module, {**tensors, **buffers}, tuple(args), kwargs)
    finally:
        vars(module).update(hooks)
    return samples


def _without_cache(value: Any) -> Any:
    """Drop a cache of keys and values, which would store the same keys twice."""
    return None if "Cache" in type(value).__name__ and hasattr(value, "update") else value
