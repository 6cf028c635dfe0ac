"""A second opinion on labels, by perturbation: change a slice, and see which part of attention changes first.

It shares nothing with the probe: no gradients, no names, no marks on tensors. The model runs once, and the
operands of every product of activations and the result of every softmax are noted, as two sums each. A
softmax belongs to the last product before it whose result has as many entries (its queries and keys), and to
the first product after it that takes its result, or else as many entries (its values). Then one slice is
changed and the model runs again, until the first noted number differs. If that is in the queries or keys of
the slice's attention, the slice is in the QK circuit; if in the values, it is v; if only later, it is o.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fasterqk.labels.slices import Slice
from fasterqk.trace.calls import PRODUCTS, SOFTMAXES, WRITTEN_OUT, tensors_in
from fasterqk.trace.modules import nothing_compiled, stack_of

LARGEST = 2**27  # entries of one tensor
_BOTH, _SCORE, _LATER = "q and k", "score", "later"
# What may change first, by the role of the slice.
_EXPECTED = {"q": {"q", "k", _BOTH, _SCORE}, "k": {"q", "k", _BOTH, _SCORE}, "v": {"v"}, "o": {_LATER}}


@dataclass
class Event:
    """One product of activations, or one softmax: sizes and sums of what goes in and comes out.

    ``weights``: the identities of parameters that are multiplied in the same product (an einsum of several).
    """

    softmax: bool
    sizes: tuple[int, ...]
    output: int
    sums: tuple[Any, ...]
    modules: tuple[str, ...]
    weights: frozenset[int] = frozenset()


@dataclass
class Call:
    """One attention call: the numbers of its events, and which operand of the last has the probabilities.

    ``more`` maps the numbers of further products of the same probabilities, such as values of relative
    positions, to the operand that has the probabilities.
    """

    product: int
    softmax: int
    context: int
    probabilities: int
    modules: tuple[str, ...]
    more: dict[int, int]


@dataclass(eq=False)
class _Changed(BaseException):  # no error: it ends a forward pass through whatever catches errors
    number: int
    operands: tuple[int, ...]


class _Log(TorchFunctionMode):
    """Notes events; with ``reference`` it ends the forward pass at the first that differs."""

    def __init__(self, reference: list[Event] | None = None) -> None:
        super().__init__()
        self.reference = reference
        self.events: list[Event] = []
        self.running: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WRITTEN_OUT:
            with self:
                return WRITTEN_OUT[func](*args, **kwargs)
        tensors = tensors_in(args, kwargs) if func in PRODUCTS else []
        tensors = tensors[-2:] if func in (torch.baddbmm, Tensor.baddbmm) else tensors
        weights = frozenset(id(_source(tensor)) for tensor in tensors if _is_weight(tensor))
        tensors = [tensor for tensor in tensors if not _is_weight(tensor)]  # einsum takes several
        output = func(*args, **kwargs)
        if isinstance(output, Tensor) and output.numel() > LARGEST:
            raise MemoryError(f"a tensor of shape {tuple(output.shape)}")
        if len(tensors) > 1:
            self._note(False, tensors, output, weights)
        elif func in SOFTMAXES:
            self._note(True, [output], output)
        return output

    def end(self, output: Any) -> None:
        """Note the output of the model: the last output projection changes nothing else."""
        self._compare(Event(False, (), 0, tuple(_sums(tensor) for tensor in _tensors(output)), ()))

    def _note(
        self, softmax: bool, tensors: Sequence[Tensor], output: Tensor, weights: frozenset[int] = frozenset()
    ) -> None:
        sums = tuple(_sums(tensor) for tensor in tensors)
        sizes = tuple(tensor.numel() for tensor in tensors)
        self._compare(Event(softmax, sizes, output.numel(), sums, tuple(self.running), weights))

    def _compare(self, event: Event) -> None:
        if self.reference is not None:
            number = len(self.events)
            if number >= len(self.reference) or self.reference[number].sizes != event.sizes:
                raise _Changed(number, ())  # another path through the model
            before = self.reference[number].sums
            changed = tuple(i for i, sums in enumerate(event.sums) if sums != before[i])
            if changed:
                raise _Changed(number, changed)
        self.events.append(event)


def _source(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(_source(tensor), nn.Parameter)


def _sums(tensor: Tensor) -> tuple[str, str]:
    """The sum and the sum of squares, as text, so that nan is equal to itself."""
    values = tensor.detach().double()
    return repr(values.sum().item()), repr(values.square().sum().item())


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    items = (
        output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    )
    return [tensor for item in items for tensor in _tensors(item)]


@contextmanager
def _followed(model: nn.Module, log: _Log) -> Iterator[None]:
    """While it lasts, ``log.running`` has the names of the modules that run."""

    def enter(name: str, module: nn.Module, args: Any) -> None:
        log.running.append(name)

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
        while log.running and log.running.pop() != name:
            pass

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, name)))
            hooks.enter_context(module.register_forward_hook(partial(leave, name), always_call=True))
        yield


def _run(model: nn.Module, run: Callable[[nn.Module], Any], reference: list[Event] | None = None) -> _Log:
    log = _Log(reference)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), nothing_compiled(), _followed(model, log), log:
        torch.manual_seed(0)  # some models draw their latents
        output = run(model)
    log.end(output)
    return log


def attention_calls(events: Sequence[Event]) -> list[Call]:
    """The softmaxes with the products before and after them that match by numbers or sizes."""
    calls = []
    for number, event in enumerate(events):
        if not event.softmax:
            continue
        before = next(
            (
                i
                for i in reversed(range(number))
                if not events[i].softmax and events[i].output == event.output
            ),
            None,
        )
        later = [i for i in range(number + 1, len(events)) if not events[i].softmax]
        # The same numbers, or as many where dropout, a mask or a mixture of heads lies between.
        same = next((i for i in later if event.sums[0] in events[i].sums), None)
        after = next((i for i in later if event.output in events[i].sizes), None) if same is None else same
        if before is not None and after is not None:
            last = events[after]
            operand = last.sizes.index(event.output) if same is None else last.sums.index(event.sums[0])
            more = {i: place for i in later if i > after for place in _places(event, events[i])}
            calls.append(Call(before, number, after, operand, event.modules, more))
    return calls


def _places(softmax: Event, product: Event) -> list[int]:
    """The operands of ``product`` that are the probabilities, perhaps padded or in another order."""
    if product.modules != softmax.modules:
        return []
    total, squares = (float(text) for text in softmax.sums[0])
    return [
        place
        for place, sums in enumerate(product.sums)
        if isclose(float(sums[0]), total, rel_tol=1e-9) and isclose(float(sums[1]), squares, rel_tol=1e-9)
    ]


def contradictions(
    model: nn.Module, slices: Sequence[Slice], run: Callable[[nn.Module], Any]
) -> tuple[int, list[str]]:
    """Check labels by perturbation.

    Arguments:
        model: is changed, and changed back.
        slices: the labels. Of every stack of layers the first and the last are tried; biases and other
            vectors are not.
        run: runs the model; its random numbers are the same in every run.

    Returns:
        How many slices were judged, and a line for every label that is contradicted. A slice is not judged if
        its attention is not found, if it changes nothing, or if it is v or o and multiplied in the same
        product as the probabilities.
    """
    events = _run(model, run).events
    calls = attention_calls(events)
    parameters = dict(model.named_parameters())
    judged, lines = 0, []
    for piece in _chosen(slices, parameters):
        calls_around = _innermost_calls(calls, events, piece.parameter)
        if not calls_around:
            continue
        change = _first_change(model, parameters[piece.parameter], piece, run, events, calls_around)
        inside = any(id(parameters[piece.parameter]) in events[call.context].weights for call in calls_around)
        if change is None or (inside and change == _LATER and piece.role in ("v", "o")):
            continue  # one product makes values and output; only the order of its factors tells them apart
        judged += 1
        if change not in _EXPECTED[piece.role]:
            place = (
                piece.parameter if piece.axis is None else f"{piece.parameter}[{piece.start}:{piece.stop}]"
            )
            lines.append(f"{place} is labelled {piece.role}, and what changes first is {change}")
    return judged, lines


def _chosen(slices: Sequence[Slice], parameters: dict[str, nn.Parameter]) -> list[Slice]:
    """The first and the last of slices that only differ in their layer."""
    ends: dict[tuple[Any, ...], list[Slice]] = {}
    for piece in slices:
        weight = parameters.get(piece.parameter)
        if piece.role in _EXPECTED and weight is not None and weight.dim() > 1 and weight.is_floating_point():
            key = (stack_of(piece.parameter), piece.axis, piece.start, piece.stop, piece.role)
            ends[key] = [*ends.get(key, [])[:1], piece]
    return [piece for pieces in ends.values() for piece in pieces]


def _innermost_calls(calls: Sequence[Call], events: Sequence[Event], parameter: str) -> list[Call]:
    """The calls made in the innermost module that holds ``parameter`` and forms attention.

    Empty if no softmax of that module is understood (its queries are a parameter): the calls of modules
    further out say nothing about it.
    """

    def depth(modules: tuple[str, ...]) -> int:
        around = (len(name) for name in modules if not name or parameter.startswith(name + "."))
        return max(around, default=-1)

    innermost = max((depth(event.modules) for event in events if event.softmax), default=-1)
    return [call for call in calls if depth(call.modules) == innermost >= 0]


def _first_change(
    model: nn.Module,
    parameter: nn.Parameter,
    piece: Slice,
    run: Callable[[nn.Module], Any],
    events: list[Event],
    calls: list[Call],
) -> str | None:
    """Which part of ``calls`` changes first when ``piece`` is changed; None if nothing does."""
    original = parameter.detach().clone()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        part = piece.view(parameter)
        size = float(part.std()) if part.numel() > 1 else 0.0
        part += torch.randn(part.shape, generator=generator).to(part) * (0.1 * size + 1e-3)
    try:
        _run(model, run, events)
    except _Changed as change:
        return _meaning(change, calls, piece.role)
    finally:
        with torch.no_grad():
            parameter.copy_(original)
    return None


def _meaning(change: _Changed, calls: list[Call], role: str) -> str | None:
    if role == "o" and change.number > calls[0].context and change.number not in calls[0].more:
        return _LATER  # also where all layers are in one module
    for call in calls:
        if change.number == call.product:
            if change.operands:
                return _BOTH if len(change.operands) > 1 else "qk"[min(change.operands[0], 1)]
            return None
        if call.product < change.number <= call.softmax:
            return _SCORE
        if change.number == call.context or change.number in call.more:
            probabilities = call.more.get(change.number, call.probabilities)
            return _SCORE if probabilities in change.operands or not change.operands else "v"
    return _LATER if change.number > calls[0].context else None
