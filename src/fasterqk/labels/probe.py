"""The autograd probe: which rows of which parameter reach the queries, the keys, the values, the output.

``probe`` runs a model once on tiny inputs, ``probe_call`` one of its blocks on the inputs it has in training;
both isolate what they run (``trace.isolated``). The hidden states that enter an attention block are detached,
so gradients stay inside it. The probe takes gradients of random projections of the queries, the keys, the
probabilities, and the contexts (with probabilities detached). A row that one of the first three reaches is in
the QK circuit, one that the last reaches in the OV circuit; a row in both is shared. ``_verdicts`` compares
this ``Evidence`` with the guesses from registry and names.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fasterqk.errors import InputError
from fasterqk.labels._signals import (
    CONTEXT,
    KEY,
    QUERY,
    STREAM,
    UNKNOWN,
    Finding,
    ProbedCall,
    ProbeTrace,
    finding_from_codes,
    gradients_of,
    leading_axes,
    reach_codes,
    reached_by,
)
from fasterqk.labels.names import nearest
from fasterqk.trace.calls import Running, innermost_with_weights, probe_running
from fasterqk.trace.calls import probing as probing
from fasterqk.trace.isolated import (
    at_least_single,
    detached_copy,
    isolated,
    nothing_checkpointed,
    random_states_kept,
)
from fasterqk.trace.modules import nothing_compiled, parameters_by_module

_MOST_HEADS = 256
# (query heads, key heads), and the same of contexts and values
HeadCounts = tuple[int, int, int, int]
# By parameter the axis along which heads follow each other, and the head of every line (None: no single one).
HeadLines = dict[str, tuple[int, tuple[int | None, ...]]]

# Hidden states with larger entries than this are replaced by noise before they enter a block.
_MODERATE = 1e4
# Reversible layers (Reformer) cannot be verified.
WITHOUT_AUTOGRAD = "its attention is formed without autograd, which the probe needs"
# Up to this many parameters, the probe copies all weights and probes every block. In a larger model it copies
# and probes one block per stack.
SMALL = 8_000_000


@dataclass
class Evidence:
    """What the probe saw: findings by parameter name, and which blocks ran.

    Attributes:
        findings: Findings by parameter name.
        ran: Blocks that formed probabilities.
        complete: Those among them that multiplied queries with keys.
        silent: Blocks that ran without any softmax.
        elsewhere: Modules outside all blocks that multiplied queries with keys.
        heads: Head counts by block.
        head_lines: The lines of parameters that belong to each head.
        irregular: Blocks in which a key head serves query heads that are not neighbours.
        foreign: Blocks whose queries or keys are made outside, with the word for which.
        failure: Why the forward pass ended early; what was seen until then counts.
        reached: For blocks without such a product, by softmax: the entries of their parameters that reach it.
        inputs: Codes of the tensors that a block with foreign keys was called with.
    """

    findings: dict[str, Finding] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)
    complete: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    elsewhere: tuple[str, ...] = ()
    heads: dict[str, HeadCounts] = field(default_factory=dict)
    head_lines: HeadLines = field(default_factory=dict)
    irregular: set[str] = field(default_factory=set)
    foreign: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    reached: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)


def is_large(model: nn.Module) -> bool:
    """Whether a model has too many parameters to be copied."""
    return sum(parameter.numel() for parameter in model.parameters()) > SMALL


def probe(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    scopes: Sequence[str],
    known: Iterable[str] = (),
    heads: bool = False,
) -> Evidence:
    """Probe the attention blocks at the paths ``scopes`` while ``run(model)`` runs the model.

    ``known`` are the paths of blocks that need no probe. Model and random state stay as they were.
    """
    large = is_large(model)
    with random_states_kept(), isolated(model, share_weights=large), probe_running():
        torch.manual_seed(0)
        for module in model.modules():  # not `eval`, which a model may override
            module.training = False
        add_noise(model, [model.get_submodule(path) for path in scopes] if large else None)
        return _probe(model, run, scopes, known, heads=heads)


def probe_call(
    model: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], heads: bool
) -> Evidence:
    """Probe the block at ``path`` with the arguments of one of its calls, in the middle of a training pass.

    Only the block is copied. It gets one example of the batch, or the whole batch if that fails. A block
    whose keys are made outside runs again, to see which of the arguments they are.
    """
    call = (args, kwargs)
    evidence = Evidence()
    for arguments in (_first_example(call), call):
        try:
            evidence = _probe_block(model, path, arguments, heads)
        except InputError:
            raise
        except Exception as error:
            evidence = Evidence(failure=f"{type(error).__name__}: {error}")
        if evidence.complete:
            break
    if evidence.complete and evidence.foreign:
        evidence.inputs = _probe_block(model, path, call, heads=False, follow=True).inputs
    return evidence


def _probe_block(
    model: nn.Module, path: str, call: tuple[Any, Any], heads: bool, follow: bool = False
) -> Evidence:
    """Run one block on its own; with ``follow``, also code the tensors in its arguments."""
    block = model.get_submodule(path)
    device = next((parameter.device.type for parameter in block.parameters()), "cpu")
    with (
        random_states_kept(),
        torch.enable_grad(),
        torch.autocast(device, enabled=False),
        torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda kept: kept),
        _disable_current_modes(),  # activation checkpointing counts what runs inside of it
        isolated(block, model),
        probe_running(),
    ):
        torch.manual_seed(0)
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            setattr(block, name, OrderedDict())  # they have already seen these arguments
        args, kwargs = (detached_copy(part, model) for part in call)
        inputs = [tensor.requires_grad_() for tensor in float_tensors((args, kwargs))] if follow else []
        add_noise(block)
        return _probe(
            block, lambda block: block(*args, **kwargs), [path], path=path, heads=heads, inputs=inputs
        )


def _first_example(value: Any) -> Any:
    """The arguments of a call with the first example of the batch alone."""
    states = next((tensor for tensor in float_tensors(value) if tensor.dim() > 2), None)
    if states is None:
        return value

    def cut(part: Tensor) -> Tensor:
        return part[:1] if part.dim() > 1 and part.shape[0] == states.shape[0] else part

    return tree_map_only(Tensor, cut, value)


@torch.no_grad()
def add_noise(model: nn.Module, blocks: Iterable[nn.Module] | None = None) -> nn.Module:
    """Make ``model`` trainable in at least float32, with noise on every parameter (of ``blocks``).

    Parameters that start at zero (gates, LoRA's second factor) would block every gradient.
    """
    generator = torch.Generator().manual_seed(0)
    done: set[int] = set()
    noisy = {id(module) for block in ([model] if blocks is None else blocks) for module in block.modules()}
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data = at_least_single(tensor.data)
        for name, parameter in parameters_by_module(module, recurse=False):
            if parameter.is_floating_point() and id(parameter) not in done:
                done.add(id(parameter))
                parameter.requires_grad_(True)
                if id(module) in noisy:
                    noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                    # A half-precision model that overflowed has infinite weights.
                    kept = torch.nan_to_num(parameter.data, 0.0, 0.0, 0.0).clamp(-100.0, 100.0)
                    parameter.data = kept + noise / fan_in(module, name, parameter) ** 0.5
    return model


def fan_in(module: nn.Module, name: str, parameter: Tensor) -> float:
    """How many products make one entry of the output of ``parameter``; noise is divided by its root.

    If the module does not show the input axis (a tensor with an axis for heads), this is an upper bound.
    """
    shape = parameter.shape
    if parameter.dim() < 2:
        return 100.0  # biases, gains and gates: the noise is small beside a gain of one
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return float(shape[1])  # a row is looked up and must not drown what is added to it
    if isinstance(module, _ConvTransposeNd):
        return shape[0] / module.groups * shape[2:].numel()
    if isinstance(module, _ConvNd) or (isinstance(module, nn.Linear) and name == "weight"):
        return float(shape[1:].numel())
    return max(1.0, parameter.numel() / max(1, min(shape)))


# --- One forward pass, and the evidence in it ---


def _probe(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    scopes: Sequence[str],
    known: Iterable[str] = (),
    path: str = "",
    heads: bool = False,
    inputs: Sequence[Tensor] = (),
) -> Evidence:
    """The evidence for the blocks ``scopes`` in ``model``, which may itself be at ``path`` of a larger one.

    ``inputs`` are arguments of the call that get codes, too.
    """
    running = Running()
    trace = ProbeTrace(running.frames)
    blocks = _Blocks({name: model.get_submodule(name.removeprefix(path).lstrip(".")) for name in scopes})
    evidence = Evidence()
    try:
        with (
            nothing_compiled(),
            nothing_checkpointed(),
            running.watching(model, path),
            blocks.observed(detach=not inputs),
            torch.enable_grad(),
            trace,
        ):
            run(model)
    except InputError:
        raise
    except Exception as error:
        if not trace.calls:
            raise
        evidence.failure = f"{type(error).__name__}: {error}"
    inside, evidence.elsewhere = _calls_by_block(trace.calls, blocks.parameters, set(known))
    # In a block with a product of queries and keys, other softmaxes (a gate, a kernel) do not count.
    chosen = {name: [call for call in calls if call.complete] or calls for name, calls in inside.items()}
    calls_of = {name: calls for name, calls in chosen.items() if all(call.finite for call in calls)}
    parameters = {name: value for block in blocks.parameters.values() for name, value in block.items()}
    asked: dict[str, Any] = {f" {number}": tensor for number, tensor in enumerate(inputs)}
    codes = reach_codes(parameters | asked, list(calls_of.values()), blocks.outputs)
    evidence.inputs = [_bits(codes.pop(name)) for name in asked]
    codes_of = {name: {n: codes[n] for n in held} for name, held in blocks.parameters.items()}
    for name in list(calls_of):
        if any((code & UNKNOWN).any() for code in codes_of[name].values()):
            del calls_of[name]
    if calls_of.keys() != inside.keys():
        evidence.failure = evidence.failure or "numbers that are not finite in the forward pass"
    if blocks.without_autograd - blocks.finished:
        evidence.failure = evidence.failure or WITHOUT_AUTOGRAD
    evidence.ran = set(calls_of)
    evidence.complete = {name for name, calls in calls_of.items() if calls[0].complete}
    complete = dict.fromkeys(evidence.complete, True)
    for name, code in codes.items():
        finding = finding_from_codes(name, code, nearest(name, complete) is not None)
        if finding is not None:
            evidence.findings[name] = finding
    # A block without anything to attend to (no image, no protein) uses none of its weights.
    silent = blocks.finished - inside.keys()
    evidence.silent = {name for name in silent if any(code.any() for code in codes_of[name].values())}
    for name, calls in calls_of.items():
        if name not in evidence.complete:
            held = blocks.parameters[name]
            evidence.reached[name] = [reached_by(call, held) for call in calls]
            continue
        foreign = _made_outside(codes_of[name].values())
        evidence.foreign |= {name: foreign} if foreign else {}
        if heads and len(calls) == 1:
            _count_heads(evidence, name, calls[0], blocks.parameters[name], codes_of[name])
    for call in trace.calls:  # break cycles through autograd, which Python's collector cannot see
        vars(call).clear()
    return evidence


def _count_heads(
    evidence: Evidence, name: str, call: ProbedCall, held: dict[str, nn.Parameter], codes: dict[str, Tensor]
) -> None:
    try:
        counts, lines = heads_of(call, held, codes)
    except ValueError:
        evidence.irregular.add(name)
        return
    evidence.heads |= {} if counts is None else {name: counts}
    evidence.head_lines |= lines


def _bits(code: Tensor) -> int:
    return sum(bit for bit in (QUERY, KEY, CONTEXT) if bool((code & bit).any()))


class _Blocks:
    """The probed blocks while they run: their parameters, their outputs, and which have ``finished``.

    ``without_autograd`` are those that ran with autograd off.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules
        self.parameters = {
            path: {n: value for n, value in parameters_by_module(block, path) if value.is_floating_point()}
            for path, block in modules.items()
        }
        self.outputs: list[Tensor] = []
        self.finished: set[str] = set()
        self.without_autograd: set[str] = set()

    @contextmanager
    def observed(self, detach: bool) -> Iterator[None]:
        """Keep the outputs of each block; with ``detach``, detach its inputs from the graph."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return tree_map_only(Tensor, _detached, (args, kwargs)) if detach else None

        def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
            (self.finished if torch.is_grad_enabled() else self.without_autograd).add(name)
            self.outputs.extend(float_tensors(output))

        with ExitStack() as hooks:
            for name, module in self.modules.items():
                hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(partial(leave, name)))
            yield


def _calls_by_block(
    calls: list[ProbedCall], blocks: dict[str, Any], known: set[str]
) -> tuple[dict[str, list[ProbedCall]], tuple[str, ...]]:
    """The calls inside each block, and the modules that attend outside all blocks and all ``known`` ones."""
    inside: dict[str, list[ProbedCall]] = {}
    elsewhere: dict[str, None] = {}
    for call in calls:
        if call.probabilities is None or not call.probabilities.requires_grad:
            continue  # formed without autograd
        around = next((frame.name for frame in call.frames if frame.name in blocks), None)
        if around is not None:
            inside.setdefault(around, []).append(call)
        elif call.complete and not any(frame.name in known for frame in call.frames):
            elsewhere[innermost_with_weights(call.frames) or ""] = None
    return inside, tuple(elsewhere)


def _made_outside(codes: Iterable[Tensor]) -> str:
    """``"queries"`` or ``"keys"`` if no parameter of the block takes part in making them, else empty."""
    bits = 0
    for code in codes:
        bits |= _bits(code)
    return "queries" if not bits & QUERY else "keys" if not bits & KEY else ""


def _detached(tensor: Tensor) -> Tensor:
    """``tensor`` without its graph; noise instead of hidden states that exploded or vanished.

    Without its trained norms, a deep model may reach any size, and then every score is infinite. Masks are
    left alone: they are zero or large and negative.
    """
    states = tensor.detach()
    if not states.is_floating_point() or not states.numel():
        return states
    exploded = not bool((states <= _MODERATE).all())  # true for nan
    if exploded or bool(0 < states.abs().amax() < 1 / _MODERATE**2):
        return torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states)
    return states


def float_tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors in nested arguments, in order."""
    return [part for part in tree_leaves(value) if isinstance(part, Tensor) and part.is_floating_point()]


# --- Heads: which entries one head of the products, or of the contexts, reaches ---


def heads_of(
    call: ProbedCall, parameters: dict[str, nn.Parameter], codes: dict[str, Tensor]
) -> tuple[HeadCounts | None, HeadLines]:
    """The head counts of one attention call, and the lines of the parameters that belong to each head.

    Raises ``ValueError`` unless query heads that share a key head are neighbours. The counts are None if the
    axis of the heads is unknown.
    """
    scores = call.scores()
    looking = _reached_by_head(scores, [leading_axes(tensor.dim()) for tensor in scores], parameters)
    saying = _reached_by_head(call.contexts, call.head_axes, parameters)
    lines: HeadLines = {}
    sharing: dict[str, list[int]] = {"q": [1], "k": [], "v": []}  # how many heads share a line
    for name, code in codes.items():
        for role, bit, (number, reached) in (
            ("q", QUERY, looking),
            ("k", KEY, looking),
            ("v", CONTEXT, saying),
        ):
            entries = (code & STREAM) == bit
            if not number or name not in reached or not bool(entries.any()):
                continue
            first, size = _groups(reached[name], entries)
            if code.dim() > 1:
                sharing[role].append(size)
            if size < number:
                _add_lines(lines, name, first // size, entries)
    numbers = looking[0], saying[0]
    if not all(numbers):
        return None, {}
    keys, values = (
        number // min(sharing[role], default=1) for role, number in zip("kv", numbers, strict=True)
    )
    return (numbers[0], keys, numbers[1], values), lines


def _reached_by_head(
    tensors: list[Tensor], axes: list[tuple[int, ...]], parameters: dict[str, nn.Parameter]
) -> tuple[int, dict[str, Tensor]]:
    """The number of heads, and for every entry of a parameter which heads reach it (along the first axis)."""
    sizes = {tuple(tensor.shape[i] for i in heads) for tensor, heads in zip(tensors, axes, strict=True)}
    number = math.prod(next(iter(sizes))) if len(sizes) == 1 else 0
    if not all(axes) or not 0 < number <= _MOST_HEADS:
        return 0, {}
    reached: dict[str, Tensor] = {}
    for head in range(number):
        one_head = [
            tensor.movedim(heads, tuple(range(len(heads)))).flatten(0, len(heads) - 1)[head]
            for tensor, heads in zip(tensors, axes, strict=True)
        ]
        for name, gradient in gradients_of(one_head, parameters, torch.Generator().manual_seed(1)).items():
            if name not in reached:
                reached[name] = torch.zeros((number, *gradient.shape), dtype=torch.bool)
            reached[name][head] = (gradient != 0).cpu()
    return number, reached


def _groups(reached: Tensor, entries: Tensor) -> tuple[Tensor, int]:
    """For every entry the first head that reaches it, and how many heads do."""
    count = reached.sum(0)
    numbers = [number for number in count[entries].unique().tolist() if number]
    first = reached.int().argmax(0)
    last = len(reached) - 1 - reached.flip(0).int().argmax(0)
    size = numbers[0] if numbers else 1
    whole = (last - first + 1 == size) & (first % size == 0)
    if len(numbers) > 1 or not bool(whole[entries & (count > 0)].all()):
        raise ValueError("not groups of neighbours")
    return first, size


def _add_lines(lines: HeadLines, name: str, head: Tensor, entries: Tensor) -> None:
    """Add the heads of ``entries`` along the axis on which every line has one head."""
    numbers = torch.where(entries, head + 1, 0)  # of the head, from 1
    for axis in range(head.dim()) if name not in lines else [lines[name][0]]:
        by_line = numbers.movedim(axis, 0).reshape(numbers.shape[axis], -1)
        top = by_line.amax(1)
        if bool(((by_line == top[:, None]) | (by_line == 0)).all()) and len(top.unique()) > 1:
            before = lines[name][1] if name in lines else (None,) * len(top)
            lines[name] = (
                axis,
                tuple(new - 1 if new else old for old, new in zip(before, top.tolist(), strict=True)),
            )
            return
