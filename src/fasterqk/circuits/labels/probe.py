"""The autograd probe: which rows of which parameter reach the queries, the keys, the values, the output.

A copy of the model is run once on tiny inputs. The hidden states that enter an attention block are cut
out of the graph, so gradients stay inside it. Then random projections of the queries, the keys, the
probabilities and the contexts (probabilities cut out) are sent back: a row is in the QK circuit where
the first three reach it, in the OV circuit where the last does, and shared where both do.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fasterqk.capture.recorder import Recorder
from fasterqk.circuits.labels.reached import reached
from fasterqk.circuits.labels.reading import KEY, QUERY, Finding, read
from fasterqk.circuits.labels.signals import Signals, SignalTrace
from fasterqk.errors import InputError


@dataclass(frozen=True)
class Evidence:
    """What the probe saw: findings by parameter name, and which blocks ran.

    ``attending`` blocks formed probabilities; ``silent`` ones ran without any softmax; of ``doubtful``
    ones it was not seen that queries met keys. ``elsewhere`` are modules outside all blocks in which they
    did. ``heads``: how many the probabilities show. ``foreign``: blocks whose queries or keys are made
    outside of them. ``failure``: why the run ended early, if it did; what was seen until then counts.
    """

    findings: dict[str, Finding]
    attending: frozenset[str]
    silent: frozenset[str]
    doubtful: frozenset[str]
    elsewhere: tuple[str, ...]
    heads: dict[str, int]
    foreign: dict[str, str]
    failure: str


def probe(model: nn.Module, run: Callable[[nn.Module], Any], scopes: Sequence[str]) -> Evidence:
    """Probe the attention blocks at the paths ``scopes`` while ``run(copy)`` runs a copy of ``model``.

    The model itself, its gradients and the random state are left alone.
    """
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=[device.index or 0 for device in devices]):
        torch.manual_seed(0)
        return _probe(scrambled(model), run, scopes)


def scrambled(model: nn.Module) -> nn.Module:
    """A float32 copy in evaluation mode with noise on every parameter.

    Fresh models have parameters at exactly zero (gates, LoRA's second factor) that block every gradient.
    """
    twin = copy.deepcopy(model, _computed(model)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in twin.modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.float()
        for parameter in twin.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
                width = parameter.shape[-1] if parameter.dim() > 1 else 100
                parameter.data = torch.nan_to_num(parameter.data) + noise / width**0.5
                parameter.grad = None
                parameter.requires_grad_(True)
    return twin


def _computed(model: nn.Module) -> dict[int, Any]:
    """Stand-ins for tensors that deepcopy refuses: those a module computed (old weight norm, caches)."""
    return {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }


def _probe(model: nn.Module, run: Callable[[nn.Module], Any], scopes: Sequence[str]) -> Evidence:
    recorder = Recorder()
    trace = SignalTrace(recorder)
    outputs: list[Tensor] = []
    finished: set[str] = set()
    failure = ""
    try:
        with (
            _nothing_compiled(),
            recorder.watching(model),
            _cutting(model, scopes, outputs, finished),
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
    held = {path: _parameters(model, path) for path in scopes}
    inside: dict[str, list[Signals]] = {}
    elsewhere = []
    for signals in trace.found:
        if not signals.probabilities.requires_grad:
            continue  # formed without autograd, which then has nothing to tell
        path = next((frame.name for frame in signals.frames if frame.name in held), None)
        if path is not None:
            inside.setdefault(path, []).append(signals)
        elif signals.complete:
            elsewhere.append(_home(signals))
    # Where queries visibly met keys, other softmaxes of the block (a gate, a kernel) are something else.
    heard = {path: [one for one in found if one.complete] or found for path, found in inside.items()}
    parameters = {name: value for path in scopes for name, value in held[path].items()}
    codes = reached(parameters, list(heard.values()), outputs)
    return Evidence(
        _findings(parameters, codes, heard),
        frozenset(inside),
        # A block that was called with nothing to look at (no picture, no protein) uses none of its weights.
        frozenset(path for path in finished - inside.keys() if any(bool(codes[n].any()) for n in held[path])),
        frozenset(path for path, found in heard.items() if not found[0].complete),
        tuple(dict.fromkeys(elsewhere)),
        {
            path: found[0].probabilities.shape[1]
            for path, found in inside.items()
            if found[0].probabilities.dim() == 4
        },
        {path: made for path in heard if (made := _made_outside(held[path], codes, heard[path]))},
        failure,
    )


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Compiled parts of a model run as they are written; compiling them for one run takes minutes."""
    # Nothing is compiled before dynamo is imported, which takes seconds.
    if "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


@contextmanager
def _cutting(
    model: nn.Module, scopes: Sequence[str], outputs: list[Tensor], finished: set[str]
) -> Iterator[None]:
    """Cut what enters each scope out of the graph, and keep what leaves it."""
    handles = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _detached(args), _detached(kwargs)

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                finished.add(name)
            outputs.extend(_float_tensors(output))

        return hook

    try:
        for name in scopes:
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _findings(
    parameters: dict[str, nn.Parameter], codes: dict[str, Tensor], heard: dict[str, list[Signals]]
) -> dict[str, Finding]:
    projections = {
        number for signals in heard.values() for one in signals for number in one.output_parameters
    }
    findings = {}
    for name, code in codes.items():
        finding = read(code)
        direct = id(parameters[name]) in projections
        if finding is None and direct:
            finding = Finding(None, ((0, 0, "o"),))
        if finding is not None:
            findings[name] = replace(finding, direct=direct)
    return findings


def _made_outside(held: dict[str, nn.Parameter], codes: dict[str, Tensor], signals: list[Signals]) -> str:
    """``"queries"`` or ``"keys"`` where no parameter of the block has a part in them, else nothing."""
    if not signals[0].complete:
        return ""
    seen = 0
    for name in held:
        for value in codes[name].unique().tolist():
            seen |= value
    return next((word for bit, word in ((QUERY, "queries"), (KEY, "keys")) if not seen & bit), "")


def _parameters(model: nn.Module, path: str) -> dict[str, nn.Parameter]:
    prefix = path + "." if path else ""
    return {
        prefix + name: value
        for name, value in model.get_submodule(path).named_parameters()
        if value.is_floating_point()
    }


def _home(signals: Signals) -> str:
    """The innermost module around a softmax that has weight matrices."""
    for frame in reversed(signals.frames):
        if any(parameter.dim() > 1 for parameter in frame.module.parameters()):
            return frame.name
    return ""


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach() if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((key, _detached(item)) for key, item in value.items())
    if type(value) in (tuple, list):
        return type(value)(_detached(item) for item in value)
    return value


def _float_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in _float_tensors(item)]
