"""The autograd probe: which rows of which parameter reach the queries, the keys, the values, the output.

A model runs once on tiny inputs (``probe``), or one block of it on the inputs it has in training
(``probe_call``), isolated from the rest (``_isolated``). The hidden states that enter an attention block are
detached from the graph, so gradients stay inside it. Then gradients of random projections of the queries, the
keys, the probabilities and the contexts (with probabilities detached) are taken: a row is in the QK circuit
where the first three reach it, in the OV circuit where the last does, and shared where both do. ``settle``
then compares this evidence with the guesses of registry and names.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._python_dispatch import _disable_current_modes

from fasterqk.errors import InputError
from fasterqk.labels._layouts import Span, spans_of
from fasterqk.labels._signals import (
    ACTING,
    CONTEXT,
    KEY,
    QUERY,
    SCORE,
    UNKNOWN,
    Finding,
    HeadCounts,
    HeadLines,
    Signals,
    SignalTrace,
    heads_of,
    reach_codes,
    reached_by,
    roles_from_codes,
)
from fasterqk.labels.names import Guess, Scope, code_of, find_scopes, guess, layer_numbers, nearest, stacks
from fasterqk.labels.slices import CIRCUIT_OF_ROLE, Role
from fasterqk.trace.isolated import detached_copy, isolated, nothing_checkpointed, random_states_kept
from fasterqk.trace.modules import nothing_compiled, parameters_by_module, says_attention, stack_of
from fasterqk.trace.recorder import Recorder

# States that enter a block with larger entries than this are replaced by noise.
_MODERATE = 1e4
# Reversible layers do so (Reformer); there is nothing to verify.
WITHOUT_AUTOGRAD = "its attention is formed without autograd, which the probe needs"


@dataclass(kw_only=True)
class Evidence:
    """What the probe saw: findings by parameter name, and which blocks ran.

    ``ran`` are the blocks that formed probabilities, ``complete`` those among them in which a product of
    queries and keys was seen, or a softmax of both; ``silent`` ones ran without any softmax. ``elsewhere``
    are modules outside all blocks in which such a product was seen. ``heads``: their numbers by block, and
    ``head_lines`` the lines of parameters that belong to each; in ``irregular`` blocks a key head does not
    serve neighbours.
    ``foreign``: blocks whose queries or keys are made outside of them. ``failure``: why the forward pass
    ended early, if it did; what was seen until then counts. ``reached``: of blocks that ran
    without such a product, by softmax, the entries of their parameters that reach it. ``inputs``: codes of
    the tensors that a block with foreign keys was called with.
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


# Models of up to this many parameters are probed on copies of all weights, every block by itself. Of larger
# ones no weight is copied outside of one block per stack.
SMALL = 8_000_000
_running = ContextVar("the probe is running", default=False)


def probing() -> bool:
    """Whether the probe is running a model: observers of its training then look away."""
    return _running.get()


def probe(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    scopes: Sequence[str],
    known: Iterable[str] = (),
    heads: bool = False,
) -> Evidence:
    """Probe the attention blocks at the paths ``scopes`` while ``run(model)`` runs the model.

    ``known`` are the paths of blocks that need no look. The model and the random state are left as they were.
    """
    large = sum(parameter.numel() for parameter in model.parameters()) > SMALL
    with random_states_kept(), isolated(model, share_weights=large), _alone():
        torch.manual_seed(0)
        model.eval()
        blocks = [model.get_submodule(path) for path in scopes]
        add_noise(model, blocks if large else None)
        return _probe(model, run, scopes, known, heads=heads)


def probe_call(
    model: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], heads: bool
) -> Evidence:
    """Probe the block at ``path`` with the arguments of one call of it, in the middle of a training pass.

    Only what the block holds is copied. One example of the batch is enough, where the block takes it. If its
    keys are made outside of it, it runs again to see which of the arguments they are.
    """
    block = model.get_submodule(path)
    device = next((parameter.device.type for parameter in block.parameters()), "cpu")
    evidence, follow = Evidence(), False
    for inputs in (_first_example((args, kwargs)), (args, kwargs), (args, kwargs)):
        with (
            random_states_kept(),
            torch.enable_grad(),
            torch.autocast(device, enabled=False),
            torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept),
            _disable_current_modes(),  # activation checkpointing counts what runs inside of it
            isolated(block, model),
            _alone(),
        ):
            torch.manual_seed(0)
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                setattr(block, name, OrderedDict())  # they have been called with these arguments
            call = tuple(detached_copy(part, model) for part in inputs)
            leaves = [tensor.requires_grad_() for tensor in float_tensors(call)] if follow else []
            add_noise(block)
            try:
                run = partial(_call, *call)
                again = _probe(block, run, [path], path=path, heads=heads and not follow, inputs=leaves)
                if follow:
                    evidence.inputs = again.inputs
                    break
                evidence = again
            except InputError:
                raise
            except Exception as error:
                evidence = Evidence(failure=f"{type(error).__name__}: {error}")
        if evidence.complete and not evidence.foreign:
            break
        follow = bool(evidence.complete)
    return evidence


def _call(args: tuple[Any, ...], kwargs: dict[str, Any], block: nn.Module) -> Any:
    return block(*args, **kwargs)


def _first_example(value: Any) -> Any:
    """The arguments of a call with the first example of the batch alone."""
    states = next((tensor for tensor in float_tensors(value) if tensor.dim() > 2), None)
    if states is None:
        return value

    def cut(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part[:1] if part.dim() > 1 and part.shape[0] == states.shape[0] else part
        if type(part) is dict:
            return {key: cut(item) for key, item in part.items()}
        return type(part)(cut(item) for item in part) if type(part) in (tuple, list) else part

    return cut(value)


@contextmanager
def _alone() -> Iterator[None]:
    token = _running.set(True)
    try:
        yield
    finally:
        _running.reset(token)


@torch.no_grad()
def add_noise(model: nn.Module, blocks: Iterable[nn.Module] | None = None) -> nn.Module:
    """``model`` itself, made float32 and trainable, with noise on every parameter (of ``blocks``).

    Fresh models have parameters at exactly zero (gates, LoRA's second factor) that block every gradient.
    """
    generator = torch.Generator().manual_seed(0)
    done: set[int] = set()
    noisy = None if blocks is None else {id(module) for block in blocks for module in block.modules()}
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data = tensor.data.float()
        for name, parameter in parameters_by_module(module, recurse=False):
            if parameter.is_floating_point() and id(parameter) not in done:
                done.add(id(parameter))
                if noisy is not None and id(module) not in noisy:
                    parameter.requires_grad_(True)
                    continue
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
                # A half-precision model that overflowed has infinite weights.
                kept = torch.nan_to_num(parameter.data, 0.0, 0.0, 0.0).clamp(-100.0, 100.0)
                parameter.data = kept + noise / fan_in(module, name, parameter) ** 0.5
                parameter.requires_grad_(True)
    return model


def fan_in(module: nn.Module, name: str, parameter: Tensor) -> float:
    """How many products make one entry of the output of ``parameter``: noise is scaled by its root.

    Where the module does not say which axis is the input (a tensor with an axis for heads), the largest
    number it can be.
    """
    shape = parameter.shape
    if parameter.dim() < 2:
        return 100.0  # biases, gains and gates: small beside the one that most of them are
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return float(shape[1])  # a row is looked up; it shall not drown what is added to it
    if isinstance(module, _ConvTransposeNd):
        return shape[0] / module.groups * shape[2:].numel()
    if isinstance(module, _ConvNd) or (isinstance(module, nn.Linear) and name == "weight"):
        return float(shape[1:].numel())
    return max(1.0, parameter.numel() / max(1, min(shape)))


def _probe(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    scopes: Sequence[str],
    known: Iterable[str] = (),
    path: str = "",
    heads: bool = False,
    inputs: Sequence[Tensor] = (),
) -> Evidence:
    """The evidence of the blocks ``scopes`` in ``model``, which is itself at ``path`` of a larger one.

    ``inputs`` are tensors of the call whose part in it is asked, too.
    """
    recorder = Recorder()
    trace = SignalTrace(recorder)
    blocks = {name: model.get_submodule(name.removeprefix(path).lstrip(".")) for name in scopes}
    outputs: list[Tensor] = []
    finished: set[str] = set()
    without: set[str] = set()
    failure = ""
    try:
        with (
            nothing_compiled(),
            nothing_checkpointed(),
            recorder.watching(model, path),
            _detaching(blocks, outputs, finished, without, {id(tensor) for tensor in inputs}),
            torch.enable_grad(),
            trace,
        ):
            run(model)
    except InputError:
        raise
    except Exception as error:
        if not trace.found:
            raise
        failure = f"{type(error).__name__}: {error}"
    held = {
        path: {n: value for n, value in parameters_by_module(block, path) if value.is_floating_point()}
        for path, block in blocks.items()
    }
    elsewhere_known = set(known)
    inside: dict[str, list[Signals]] = {}
    elsewhere: list[str] = []
    for signals in trace.found:
        around = next((frame.name for frame in signals.frames if frame.name in held), None)
        if not signals.probabilities.requires_grad:
            continue  # formed without autograd
        if around is not None:
            inside.setdefault(around, []).append(signals)
        elif signals.complete and not any(frame.name in elsewhere_known for frame in signals.frames):
            elsewhere.append(_innermost(signals))
    # In a block with scores of queries and keys, other softmaxes (a gate, a kernel) are something else.
    signals_of = {path: [one for one in found if one.complete] or found for path, found in inside.items()}
    signals_of = {path: found for path, found in signals_of.items() if all(one.finite for one in found)}
    parameters = {name: value for path in scopes for name, value in held[path].items()}
    asked: dict[str, Any] = {f" {number}": tensor for number, tensor in enumerate(inputs)}
    codes = reach_codes(parameters | asked, list(signals_of.values()), outputs)
    bits = [_bits(codes.pop(name)) for name in asked]
    signals_of = {
        path: found
        for path, found in signals_of.items()
        if not any((codes[name] & UNKNOWN).any() for name in held[path])
    }
    if signals_of.keys() != inside.keys():
        failure = failure or "numbers that are not finite in the forward pass"
    if without - finished:
        failure = failure or WITHOUT_AUTOGRAD
    counted: dict[str, HeadCounts] = {}
    lines: HeadLines = {}
    irregular: set[str] = set()
    for name, found in signals_of.items() if heads else ():
        if len(found) == 1 and found[0].complete:
            try:
                numbers, own_lines = heads_of(found[0], held[name], {n: codes[n] for n in held[name]})
            except ValueError:
                irregular.add(name)
                continue
            counted |= {} if numbers is None else {name: numbers}
            lines |= own_lines
    return Evidence(
        findings=_findings(parameters, codes, signals_of),
        ran=set(signals_of),
        complete={path for path, found in signals_of.items() if found[0].complete},
        # A block that was called with nothing to attend to (no image, no protein) uses none of its weights.
        silent={path for path in finished - inside.keys() if any(codes[name].any() for name in held[path])},
        elsewhere=tuple(dict.fromkeys(elsewhere)),
        heads=counted,
        head_lines=lines,
        irregular=irregular,
        foreign={
            path: made
            for path, found in signals_of.items()
            if found[0].complete and (made := _made_outside([codes[name] for name in held[path]]))
        },
        failure=failure,
        inputs=bits,
        reached={
            path: [reached_by(one.probabilities, held[path]) for one in found]
            for path, found in signals_of.items()
            if not found[0].complete
        },
    )


def _bits(code: Tensor) -> int:
    return sum(bit for bit in (QUERY, KEY, CONTEXT) if bool((code & bit).any()))


@contextmanager
def _detaching(
    blocks: dict[str, nn.Module],
    outputs: list[Tensor],
    finished: set[str],
    without: set[str],
    kept: Collection[int] = (),
) -> Iterator[None]:
    """Detach what enters each scope from the graph, and keep what leaves it.

    The names of scopes that ran are added to ``finished``, or to ``without`` where autograd was off. With
    ``kept`` tensors nothing is detached.
    """

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if kept else (_detached(args), _detached(kwargs))

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
        (finished if torch.is_grad_enabled() else without).add(name)
        outputs.extend(float_tensors(output))

    with ExitStack() as hooks:
        for name, module in blocks.items():
            hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(leave, name)))
        yield


def _findings(
    parameters: dict[str, nn.Parameter], codes: dict[str, Tensor], signals_of: dict[str, list[Signals]]
) -> dict[str, Finding]:
    complete = {path: True for path, found in signals_of.items() if found[0].complete}
    findings = {}
    for name, code in codes.items():
        finding = roles_from_codes(code)
        direct = bool((code & ACTING).any())
        if finding is not None:
            on_scores = bool((code & SCORE).any()) and not bool((code & (QUERY | KEY | CONTEXT)).any())
            # Where queries were not seen, they are scores as far as the probe knows.
            on_scores = on_scores and nearest(name, complete) is not None
            made = code & (QUERY | KEY | CONTEXT)
            latent = bool(((made == KEY | CONTEXT) | (made == QUERY | CONTEXT)).any())
            findings[name] = replace(finding, direct=direct, on_scores=on_scores, latent=latent)
    return findings


def _made_outside(codes: list[Tensor]) -> str:
    """``"queries"`` or ``"keys"`` if no parameter of the block takes part in making them, else empty."""
    for bit, word in ((QUERY, "queries"), (KEY, "keys")):
        if not any((code & bit).any() for code in codes):
            return word
    return ""


def _innermost(signals: Signals) -> str:
    """The innermost module around a softmax that has weight matrices."""
    frames = (f for f in reversed(signals.frames) if any(p.dim() > 1 for p in f.module.parameters()))
    return next((frame.name for frame in frames), "")


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _moderate(value.detach()) if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((key, _detached(item)) for key, item in value.items())
    if type(value) in (tuple, list):
        return type(value)(_detached(item) for item in value)
    return value


def _moderate(states: Tensor) -> Tensor:
    """``states``, or noise of the same shape where they exploded or vanished on the way to a block.

    A model without its trained norms may reach any size in its depth, and then every score is infinite.
    Masks are left alone: they are zero or large and negative.
    """
    if not states.numel():
        return states
    exploded = not bool((states <= _MODERATE).all())  # also where it is not a number
    if exploded or bool(0 < states.abs().amax() < 1 / _MODERATE**2):
        return torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states)
    return states


def float_tensors(value: Any) -> list[Tensor]:
    """The tensors of numbers in nested arguments, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in float_tensors(item)]


# --- Guesses and probe together: what is confirmed, what the probe decides, what stays open ---


@dataclass
class Judgement(Evidence):
    """What is known of the attention parameters of a model: guesses, and the evidence of a probe.

    ``guesses`` has every parameter in a scope; ``confirmed`` those the probe agrees with; ``found`` what
    the probe decides otherwise. ``linear``: the blocks that mix positions without a softmax.
    ``unused``: fused weights beside which all of q, k and v were seen, and that reach nothing.
    """

    scopes: dict[str, Scope]
    guesses: dict[str, Guess | None]
    confirmed: set[str] = field(default_factory=set)
    found: dict[str, Finding] = field(default_factory=dict)
    linear: dict[str, nn.Module] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def is_linear(self, parameter: str) -> bool:
        """Whether the parameter belongs to a block without a softmax over queries and keys."""
        return bool(self.linear) and ("" in self.linear or nearest(parameter, self.linear) is not None)

    def scope_of(self, parameter: str) -> Scope | None:
        """The scope that holds the parameter."""
        return nearest(parameter, self.scopes)

    def open(self) -> list[str]:
        """Parameters without a label, and fused ones whose layout is unconfirmed."""
        return [
            name
            for name, own in self.guesses.items()
            if name not in self.confirmed
            and name not in self.found
            and (own is None or not own.certain)
            and not self.is_linear(name)
        ]


def first_guesses(model: nn.Module, scopes: dict[str, Scope] | None = None) -> Judgement:
    """Scopes and guesses, before any probe."""
    judgement = Judgement(find_scopes(model) if scopes is None else scopes, {})
    for name, parameter in parameters_by_module(model):
        scope = judgement.scope_of(name)
        if scope is not None:
            judgement.guesses[name] = guess(model, scope, name, parameter)
    return judgement


def judge(model: nn.Module, run: Callable[[nn.Module], Any], heads: bool = False) -> Judgement:
    """Guesses of ``model`` with what the probe sees while ``run`` runs it.

    Of a large model one block per stack is probed, for all of the stack.
    """
    large = sum(parameter.numel() for parameter in model.parameters()) > SMALL
    judgement = first_guesses(model)
    for _ in range(2):
        alike = stacks(model, judgement.scopes) if large else {path: [path] for path in judgement.scopes}
        evidence = probe(model, run, list(alike), judgement.scopes, heads)
        if not evidence.elsewhere:
            break
        judgement = first_guesses(model, with_discovered(model, judgement.scopes, evidence.elsewhere))
    return settle(judgement, _spread(evidence, alike), dict(parameters_by_module(model)))


def _spread(evidence: Evidence, alike: dict[str, list[str]]) -> Evidence:
    """What was seen of the first block of each stack, for all of its blocks."""
    for first, paths in alike.items():

        def moved(table: dict[str, Any], path: str, first: str = first) -> dict[str, Any]:
            inside = (name for name in table if name == first or name.startswith(first + "."))
            return {path + name.removeprefix(first): table[name] for name in list(inside)}

        for path in paths[1:]:
            for blocks in (evidence.ran, evidence.complete, evidence.silent, evidence.irregular):
                blocks |= {path} if first in blocks else set()
            for table in (evidence.heads, evidence.head_lines, evidence.foreign, evidence.findings):
                table |= moved(table, path)
            if first in evidence.reached:
                evidence.reached[path] = [moved(softmax, path) for softmax in evidence.reached[first]]
    return evidence


def settle(judgement: Judgement, evidence: Evidence, parameters: dict[str, nn.Parameter]) -> Judgement:
    """Guesses and evidence together: which guess is confirmed, and what the probe decides otherwise."""
    judgement = Judgement(judgement.scopes, judgement.guesses, **vars(evidence))
    meeting = {path: _meet(judgement, path) for path in judgement.reached}
    judgement.complete |= {path for path, meet in meeting.items() if meet}
    judgement.silent |= {path for path, meet in meeting.items() if meet is False}
    for name, guessed in judgement.guesses.items():
        finding = judgement.findings.get(name)
        scope = judgement.scope_of(name)
        if finding is None or scope is None or scope.path not in judgement.ran:
            continue
        # A weight named `value` that attention never multiplies belongs to the output.
        beside = (
            guessed is not None and guessed.role == "v" and finding.role == "o" and _has_all(judgement, scope)
        )
        complete = scope.path in judgement.complete
        if guessed is not None and agree(guessed, finding) and not beside:
            judgement.confirmed.add(name)
        elif not complete and guessed is not None and guessed.role in ("q", "k"):
            # A softmax that does not depend on what is called queries and keys is not over their scores.
            judgement.silent.add(scope.path)
        elif guessed is None and _is_feed_forward(judgement, scope, name, parameters):
            judgement.found[name] = Finding(None, ((0, 0, "rest"),))
        elif _decides(guessed, finding, scope, parameters[name], complete):
            judgement.found[name] = finding
    judgement.ran -= judgement.silent
    _biases_follow(judgement, parameters)
    for name in judgement.open():
        scope = judgement.scope_of(name)
        if scope is not None and name not in judgement.findings and _has_all(judgement, scope):
            judgement.found[name] = Finding(None, ((0, 0, "rest"),))
            judgement.unused.append(name)
    return judgement


def _has_all(judgement: Judgement, scope: Scope) -> bool:
    """Whether queries, keys and values of a block that attends come from parameters that were seen."""
    seen = (name for name in judgement.findings if judgement.scope_of(name) is scope)
    roles = {role for name in seen for _, _, role in judgement.findings[name].spans}
    return scope.path in judgement.complete and {"q", "k", "v"} <= roles


def _is_feed_forward(
    judgement: Judgement, scope: Scope, name: str, parameters: dict[str, nn.Parameter]
) -> bool:
    """Whether a matrix (or the bias of one) reaches the output without acting on it, beside one that does."""
    weight = name if parameters[name].dim() > 1 else name.removesuffix("bias") + "weight"
    finding = judgement.findings.get(weight)
    if finding is None or finding.role != "o" or finding.direct or parameters[weight].dim() < 2:
        return False
    inside = (other for key, other in judgement.findings.items() if judgement.scope_of(key) is scope)
    return any(other.direct and other.role == "o" for other in inside)


def _meet(judgement: Judgement, path: str) -> bool | None:
    """Whether what is called queries and what is called keys reach one softmax; None if nothing is.

    Linear attention has softmaxes too: of the keys alone, over positions, and of the queries alone.
    """
    named = {
        name: own
        for name, own in judgement.guesses.items()
        if own is not None and judgement.scope_of(name) is judgement.scopes[path]
    }
    roles = {role for own in named.values() for role in (own.role, *(block.role for block in own.blocks))}
    if not {"q", "k"} <= roles:
        return None

    def reaches(softmax: dict[str, Tensor], role: Role) -> bool:
        parts = (_of_role(named.get(name), entries, role) for name, entries in softmax.items())
        return any(bool(part.any()) for found in parts for part in found)

    return any(reaches(one, "q") and reaches(one, "k") for one in judgement.reached[path])


def _of_role(own: Guess | None, entries: Tensor, role: Role) -> list[Tensor]:
    """The parts of ``entries`` to which the guess gives ``role``."""
    if own is None:
        return []
    if own.role is not None or own.axis is None:
        return [entries] if own.role == role and entries.dim() > 1 else []
    return [
        entries.narrow(own.axis, start, stop - start)
        for start, stop, part in spans_of(own.blocks)
        if part == role
    ]


def transfer(small: Judgement, model: nn.Module) -> tuple[Judgement, bool]:
    """What a judgement of a small copy says about ``model``, and whether that settles everything.

    Parameters correspond by name without the layer numbers and by guess: layers of one stack may differ.
    Slices that the probe found in the small copy against its guess cannot be carried over: their rows are
    other rows. Blocks that run other code than the copy (an instance with its own ``forward``) are left out.
    """
    scopes = find_scopes(model)
    discovered = {stack_of(path) for path in small.scopes} - {stack_of(path) for path in scopes}
    scopes = with_discovered(
        model, scopes, [path for path, _ in model.named_modules() if stack_of(path) in discovered]
    )
    judgement = first_guesses(model, scopes)
    confirmed = {_kind(small, name) for name in small.confirmed}
    found = {_kind(small, name): finding for name, finding in small.found.items()}
    running: dict[str, set[Any]] = {}
    for path, own in small.scopes.items():
        running.setdefault(stack_of(path), set()).update(_code(own.module))
    patched = {p for p, own in scopes.items() if not _code(own.module) <= running.get(stack_of(p), set())}
    settled = not patched
    for name in judgement.guesses:
        kind = _kind(judgement, name)
        finding = found.get(kind)
        scope = judgement.scope_of(name)
        if scope is not None and scope.path in patched:
            continue
        if finding is not None and finding.axis is None:
            judgement.found[name] = finding
        elif finding is not None:
            settled = False
        elif kind in confirmed:
            judgement.confirmed.add(name)

    def corresponding(paths: set[str]) -> set[str]:
        # A hybrid may keep attention and another mixer under one name.
        kinds = {(stack_of(path), type(small.scopes[path].module).__name__) for path in paths}
        alike = {p for p, own in scopes.items() if (stack_of(p), type(own.module).__name__) in kinds}
        return alike - patched

    judgement.ran = corresponding(small.ran)
    judgement.complete = corresponding(small.complete)
    judgement.silent = corresponding(small.silent)
    judgement.ran -= judgement.silent
    foreign = {stack_of(path): made for path, made in small.foreign.items()}
    judgement.foreign = {path: foreign[stack_of(path)] for path in scopes if stack_of(path) in foreign}
    judgement.failure = small.failure
    return judgement, settled and not judgement.open()


def _code(block: nn.Module) -> set[Any]:
    return {(stack_of(name), code_of(module)) for name, module in block.named_modules()}


def _kind(judgement: Judgement, name: str) -> tuple[str, tuple[Role | None, ...]]:
    """The name without layer numbers, and the roles in the guess, repeated heads once."""
    own = judgement.guesses[name]
    roles = () if own is None else (own.role, *dict.fromkeys(block.role for block in own.blocks))
    return stack_of(name), roles


def agree(own: Guess, finding: Finding) -> bool:
    """Whether guess and finding put every row into the same circuit.

    Between v and o the probe is trusted: what is called ``dense_3`` may make values.
    """
    if own.role == "o" and finding.role == "v":
        return False
    if own.role is not None:
        return {CIRCUIT_OF_ROLE[role] for _, _, role in finding.spans} == {CIRCUIT_OF_ROLE[own.role]}
    if own.axis != finding.axis:
        return False
    if own.by == "name" and {"q", "k"} <= {role for _, _, role in finding.spans}:
        # A name does not say which of its rows are queries and which keys.
        return spans_of(own.blocks) == list(finding.spans)
    return _circuits(spans_of(own.blocks)) == _circuits(finding.spans)


def _circuits(spans: Iterable[Span]) -> list[tuple[str, int]]:
    """The circuits of neighbouring rows, each with the row where it ends."""
    found = groupby(spans, lambda span: CIRCUIT_OF_ROLE[span[2]])
    return [(circuit, list(same)[-1][1]) for circuit, same in found]


def _decides(
    guessed: Guess | None, finding: Finding, scope: Scope, parameter: nn.Parameter, complete: bool
) -> bool:
    """Whether the finding replaces the guess it disagrees with."""
    if guessed is None:
        return True
    if guessed.role == "rest":
        # A norm in front of attention is reached from both circuits without being part of them; a block
        # that is not called attention holds other things too. What acts on a context itself is output, and
        # what acts on scores or probabilities alone is part of where a model looks.
        looks = any(role in ("q", "k", "v") for _, _, role in finding.spans) or finding.latent
        looks = looks and (guessed.open or not scope.named) and (complete or parameter.dim() > 1)
        return looks or finding.on_scores or (finding.direct and finding.role == "o")
    # The softmax is blind to a bias of the keys: what the probe sees of it is rounding noise.
    return not (guessed.firm or (parameter.dim() == 1 and guessed.role is not None and finding.role is None))


def _biases_follow(judgement: Judgement, parameters: dict[str, nn.Parameter]) -> None:
    """The bias of a fused weight is sliced as its weight is.

    The softmax is blind to a bias of the keys; where only the probabilities were seen, the probe sees
    nothing but rounding noise of it.
    """
    for name in [name for name in judgement.guesses if name.endswith("bias")]:
        weight = name.removesuffix("bias") + "weight"
        if weight not in judgement.guesses or parameters[name].dim() != 1 or name in judgement.confirmed:
            continue
        spans = judgement.findings[weight].spans if weight in judgement.findings else ()
        if len(spans) > 1 and spans[-1][1] == len(parameters[name]):
            if weight in judgement.confirmed:
                judgement.found.pop(name, None)
                judgement.confirmed.add(name)
            elif weight in judgement.found:
                judgement.found[name] = replace(judgement.found[weight], axis=0)


def with_discovered(model: nn.Module, scopes: dict[str, Scope], paths: Sequence[str]) -> dict[str, Scope]:
    """The scopes, and the modules whose attention only the probe has seen."""
    layers = layer_numbers(list(paths), model)
    found = dict(scopes)
    for path in paths:
        if not any(own == path or own.startswith(path + ".") for own in scopes):
            module = model.get_submodule(path)
            found[path] = Scope(path, path, module, layers[path], says_attention(module))
    return found
