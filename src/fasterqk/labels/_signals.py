"""Signals for the probe: tensors of every attention call, and the roles their gradients reveal.

``SignalTrace`` keeps the queries, keys, probabilities and contexts that a model forms. ``reach_codes`` sends
gradients back from them and codes, for every entry of every parameter, which of them reach it.
``roles_from_codes`` turns the codes of one parameter into roles along an axis.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fasterqk.labels._layouts import Block, Span, spans_of
from fasterqk.labels.slices import Role
from fasterqk.trace.calls import PRODUCTS, SOFTMAXES, WRITTEN_OUT, carries, tensors_in
from fasterqk.trace.recorder import Frame, Recorder

# --- Queries, keys, probabilities and contexts of every attention call ---
# The tensors that `fasterqk.trace.calls` sees, with their origin. Probabilities are detached from the
# autograd graph where they weight the values, so that a context depends on values alone.

_SCORES = "_fasterqk_scores"
_PROBABILITIES = "_fasterqk_weights"
_CONTEXT = "_fasterqk_context"
_PROJECTED = "_fasterqk_projected"
# Everything before the first projection (norms, gates) acts on the context. After it only further matrices
# (a low-rank output) and gates do, until another stream is added.
_PROJECTIONS = {F.linear, torch.addmm, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, *PRODUCTS}
# A softmax written out: the exponentials of the scores, divided by their sum before or after.
_EXPONENTIALS = {torch.exp, Tensor.exp, torch.exp_, Tensor.exp_, F.log_softmax, torch.log_softmax}
_EXPONENTIALS |= {Tensor.log_softmax}
_SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_}
_JOINS = {torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack}
_GATES = {torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__}
_MANY_HEADS = 128
_LARGEST = 2**27  # entries of one tensor; half a gigabyte
_PIECES = {Tensor.__getitem__, torch.narrow, Tensor.narrow, torch.as_strided, Tensor.as_strided}


@dataclass(eq=False)
class Signals:
    """One softmax that weighted values, or the exponentials of one that is written out.

    ``products`` are queries times keys, ``weights`` the probabilities as they met the values; ``acting`` are
    the weights and gates that act on a context on its way out. ``head_axes`` are those of the heads in each
    context, empty where that cannot be said.
    """

    probabilities: Tensor
    frames: tuple[Frame, ...]
    queries: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    products: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    contexts: list[Tensor] = field(default_factory=list)
    head_axes: list[tuple[int, ...]] = field(default_factory=list)
    acting: list[Tensor] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether queries met keys before the softmax and values after it."""
        return bool(self.queries and self.contexts)

    @property
    def finite(self) -> bool:
        """Whether every number in it is finite: gradients of others say nothing."""
        tensors = (self.probabilities, *self.queries, *self.keys, *self.weights, *self.contexts)
        return all(bool(tensor.isfinite().all()) for tensor in tensors)


class SignalTrace(TorchFunctionMode):
    """While active, collects in ``found`` every softmax with what is known of it, in order.

    One with queries, keys and contexts is certainly attention. After ``seconds`` the forward pass ends with a
    ``TimeoutError``, at too large a tensor with a ``MemoryError``: a speech model fed noise may generate for
    hours.
    """

    def __init__(self, recorder: Recorder, seconds: float = 30.0) -> None:
        super().__init__()
        self.recorder = recorder
        self.seconds = seconds
        self.deadline = time.thread_time() + seconds
        self.found: list[Signals] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if time.thread_time() > self.deadline:
            raise TimeoutError(f"the probe took more than {self.seconds:g} seconds")
        if func in WRITTEN_OUT:
            with self:
                return WRITTEN_OUT[func](*args, **kwargs)
        tensors = tensors_in(args, kwargs)
        if func is torch.einsum and len(tensors) > 2 and isinstance(args[0], str):
            with self:
                return _in_pairs(args[0], tensors)
        if func in PRODUCTS and _entries(tensors) > _LARGEST:
            raise MemoryError(f"the probe came upon a product of {_entries(tensors)} entries")
        weighting = next((t for t in tensors if hasattr(t, _PROBABILITIES)), None)
        if func in PRODUCTS and weighting is not None and not _mixes_probabilities(args, tensors, weighting):
            output = func(*_cut(args), **kwargs)
            for signals in getattr(weighting, _PROBABILITIES):
                signals.weights.append(weighting)
                signals.contexts.append(output.clone())  # what is added to it in place is not part of it
                signals.head_axes.append(_context_axes(args, tensors, weighting, output))
            setattr(output, _CONTEXT, getattr(weighting, _PROBABILITIES))
            return output
        output = _without_empty_rows(func, args, kwargs) if func in SOFTMAXES else func(*args, **kwargs)
        if func is Tensor.__setitem__:
            output = args[0]  # scores written into a larger tensor, piece by piece
            _carry(func, tensors, output)
            return None
        if not isinstance(output, Tensor):
            return output
        if output.numel() > _LARGEST:
            raise MemoryError(f"the probe came upon a tensor of shape {tuple(output.shape)}")
        if func in SOFTMAXES or (func in _EXPONENTIALS and _are_scores(tensors[0])):
            signals = Signals(output, tuple(self.recorder.frames))
            for query, key, product in getattr(tensors[0], _SCORES, ()):
                # Keys lie along the axis of the softmax.
                pair = (key, query) if _over_rows(output, args, kwargs) else (query, key)
                signals.queries.append(pair[0])
                signals.keys.append(pair[1])
                signals.products.append(product)
            self.found.append(signals)
            setattr(output, _PROBABILITIES, [signals])
            return output
        self._project(func, tensors, output)
        if func in PRODUCTS and len(tensors) >= 2 and weighting is None:
            pair = _query_and_key(func, args, tensors)
            # A product with a weight is a projection; scores come from two activations.
            if not any(isinstance(_source(factor), nn.Parameter) for factor in pair):
                setattr(output, _SCORES, [(*pair, output.clone())])  # masks may be added in place
        else:
            _carry(func, tensors, output)
        return output

    def _project(self, func: Callable[..., Any], tensors: list[Tensor], output: Tensor) -> None:
        """Note what acts on a context, and mark the outputs that still carry it."""
        for operand in tensors:
            before, after = getattr(operand, _CONTEXT, ()), getattr(operand, _PROJECTED, ())
            if not before and not after:
                continue
            if func in _SUMS and _joins_another_stream(tensors):
                continue
            others = [other for other in tensors if other is not operand and other.requires_grad]
            if func in _JOINS or (after and func not in _PROJECTIONS | _GATES):
                others = []
            elif after:
                # A norm or a scale after the projection is another step; a gate depends on the input.
                wide = func in _PROJECTIONS
                others = [x for x in others if (x.dim() > 1 if wide else not isinstance(x, nn.Parameter))]
            for signals in before or after:
                signals.acting += others
            together = func in _JOINS and all(hasattr(other, _CONTEXT) for other in tensors)
            if func in _PROJECTIONS:
                setattr(output, _PROJECTED, before or after)
            elif carries(func, operand, output) or together:
                if before:
                    setattr(output, _CONTEXT, before)
                else:
                    setattr(output, _PROJECTED, after)


def _leading(dimensions: int) -> tuple[int, ...]:
    """The axes of heads before two others: all but that of the batch."""
    return tuple(range(dimensions - 2))[1:] or tuple(range(dimensions - 2))


def _context_axes(
    args: tuple[Any, ...], tensors: list[Tensor], weighting: Tensor, output: Tensor
) -> tuple[int, ...]:
    """The axes of the heads in a context."""
    if not isinstance(args[0], str):
        return _leading(output.dim())
    terms, _, result = args[0].replace(" ", "").partition("->")
    term = terms.split(",")[next(i for i, tensor in enumerate(tensors) if tensor is weighting)]
    letters = [term[axis] for axis in _leading(len(term))]
    known = "." not in terms and all(letter in result for letter in letters)
    return tuple(result.index(letter) for letter in letters) if known else ()


def _in_pairs(equation: str, tensors: list[Tensor]) -> Tensor:
    """An einsum of several operands as products of two, in the order in which attention is meant.

    Probabilities meet the values first, then the weights follow, as an output projection does; of several
    weights after a raw input the first makes the values. Without probabilities every weight is applied to the
    activation before it (or the next one); these then meet.
    """
    terms, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = terms.replace("...", "").replace(",", "")
        result = "..." * ("..." in terms) + "".join(sorted(x for x in letters if letters.count(x) == 1))
    parts = list(zip(terms.split(","), tensors, strict=True))
    while len(parts) > 1:
        first, second = _next_pair([tensor for _, tensor in parts])
        (left, one), (right, other) = parts[first], parts.pop(second)
        later = result + "".join(term for i, (term, _) in enumerate(parts) if i != first - (second < first))
        own = dict.fromkeys((left + right).replace(".", ""))
        kept = "..." * ("..." in left + right) + "".join(letter for letter in own if letter in later)
        kept = result if len(parts) == 1 else kept
        parts[first - (second < first)] = kept, torch.einsum(f"{left},{right}->{kept}", one, other)
    return parts[0][1]


def _next_pair(tensors: list[Tensor]) -> tuple[int, int]:
    """The two operands of an einsum that meet next; the result takes the place of the first."""
    weights = [i for i, one in enumerate(tensors) if isinstance(_source(one), nn.Parameter)]
    others = [i for i in range(len(tensors)) if i not in weights]
    looking = [i for i in others if hasattr(tensors[i], _PROBABILITIES)]
    if looking and len(others) > 1:
        value = next(i for i in others if i != looking[0])
        made = tensors[value].requires_grad or len(weights) < 2
        return (looking[0], value) if made else (value, weights[0])
    if weights and others:
        return max((i for i in others if i < weights[0]), default=others[0]), weights[0]
    return 0, 1


def _entries(tensors: list[Tensor]) -> int:
    """The entries of the product of two matrices or stacks of them; 0 for other products."""
    if len(tensors) != 2 or min(tensor.dim() for tensor in tensors) < 2:
        return 0
    return max(tensor.shape[:-2].numel() for tensor in tensors) * tensors[0].shape[-2] * tensors[1].shape[-1]


def _without_empty_rows(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A softmax that is zero where every score is masked; there its gradient is not a number."""
    output: Tensor = func(*args, **kwargs)
    scores = kwargs["input"] if "input" in kwargs else args[0]
    axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
    empty = None if axis is None or bool(output.isfinite().all()) else (scores == -math.inf).all(axis, True)
    if empty is None or not bool(empty.any()):
        return output
    rest = {name: value for name, value in kwargs.items() if name != "input"}
    return cast(Tensor, func(scores.masked_fill(empty, 0.0), *args[1:], **rest)).masked_fill(empty, 0.0)


def _over_rows(output: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a softmax runs over the last axis but one."""
    axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return output.dim() > 2 and axis in (-2, output.dim() - 2)


def _carry(func: Callable[..., Any], tensors: list[Tensor], output: Tensor) -> None:
    """Pass marks on to outputs that still hold the marked elements: masked, padded, joined, cut out."""
    scores: list[tuple[Tensor, Tensor, Tensor]] = list(getattr(output, _SCORES, ()))
    weights: list[Signals] = list(getattr(output, _PROBABILITIES, ()))
    for operand in tensors:
        if func not in _PIECES and output.numel() < operand.numel():
            continue
        weights += [one for one in getattr(operand, _PROBABILITIES, ()) if one not in weights]
        scores += [pair for pair in getattr(operand, _SCORES, ()) if all(pair is not own for own in scores)]
    if weights:
        setattr(output, _PROBABILITIES, weights)
    if scores and (func not in _PROJECTIONS or _mixes_heads(tensors)):
        setattr(output, _SCORES, scores)


def _are_scores(tensor: Tensor) -> bool:
    """Whether both factors are learned: features of a kernel (q times a random matrix) are not scores."""
    pairs = getattr(tensor, _SCORES, ())
    return bool(pairs) and all(query.requires_grad and key.requires_grad for query, key, _ in pairs)


def _mixes_heads(tensors: list[Tensor]) -> bool:
    """Whether a projection mixes the scores of heads with each other (talking heads)."""
    weights = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.dim() > 1]
    square = len(weights) == 1 and weights[0].shape[0] == weights[0].shape[1] <= _MANY_HEADS
    return square and tensors[0].dim() == 4


def _mixes_probabilities(args: tuple[Any, ...], tensors: list[Tensor], weighting: Tensor) -> bool:
    """Whether a product of probabilities with a weight mixes those of the heads, instead of weighting values.

    An einsum then keeps the axis of the keys; another product takes a square weight of the size of the heads.
    """
    others = [tensor for tensor in tensors if tensor is not weighting]
    if len(others) != 1 or not isinstance(_source(others[0]), nn.Parameter):
        return False
    if isinstance(args[0], str):
        terms, arrow, result = args[0].replace(" ", "").partition("->")
        place = next(i for i, tensor in enumerate(tensors) if tensor is weighting)
        return bool(arrow) and terms.split(",")[place][-1] in result
    formed = getattr(weighting, _PROBABILITIES)[0].probabilities
    return formed.dim() == 4 and others[0].shape[-2:] == (formed.shape[1],) * 2 != (formed.shape[-1],) * 2


def _joins_another_stream(tensors: list[Tensor]) -> bool:
    """Whether a sum adds something other than a context or a bias: the residual stream."""
    marks = (_CONTEXT, _PROJECTED)
    return any(
        not any(hasattr(t, mark) for mark in marks) and not isinstance(_source(t), nn.Parameter)
        for t in tensors
    )


def _source(tensor: Tensor) -> Tensor:
    """The tensor that ``tensor`` is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def _cut(args: tuple[Any, ...]) -> tuple[Any, ...]:
    def cut(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(cut(item) for item in value)
        # Other softmaxes (a gate, a kernel) are not attention and stay in the graph.
        found = getattr(value, _PROBABILITIES, ())
        return value.detach() if any(signals.queries for signals in found) else value

    return tuple(cut(value) for value in args)


def _query_and_key(
    func: Callable[..., Any], args: tuple[Any, ...], tensors: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Of a product that makes scores: the operand with the queries, and the one with the keys (last axis)."""
    left, right = tensors[-2:]
    if func is Tensor.__rmatmul__:
        left, right = right, left
    if func is torch.einsum and isinstance(args[0], str) and "->" in args[0]:
        terms, _, result = args[0].replace(" ", "").partition("->")
        first = terms.split(",")[0]
        if result and result[-1] in first:
            left, right = right, left
    return left, right


# --- Which entries of the parameters the gradients reach ---

# Bits of a code: the entry is reached by the gradient of queries, keys, contexts, probabilities, the output,
# or of what acts on a context. A gradient that is not finite is no answer, neither yes nor no.
QUERY, KEY, CONTEXT, SCORE, OUTPUT, UNKNOWN, ACTING = 1, 2, 4, 8, 16, 32, 64
_STREAM = QUERY | KEY | CONTEXT


def reach_codes(
    parameters: dict[str, nn.Parameter], blocks: list[list[Signals]], outputs: list[Tensor]
) -> dict[str, Tensor]:
    """For every entry of every parameter a code of what reaches it.

    Where a block forms several softmaxes one after the other (all layers of a model in one module), the
    first that reaches an entry decides: later ones reach it through the earlier.
    """
    generator = torch.Generator().manual_seed(1)
    codes = {name: torch.zeros(value.shape, dtype=torch.int8) for name, value in parameters.items()}
    for turn in range(max(map(len, blocks), default=0)):
        found = [signals[turn] for signals in blocks if turn < len(signals)]
        sources = {
            QUERY: [tensor for signals in found for tensor in signals.queries],
            KEY: [tensor for signals in found for tensor in signals.keys],
            # Without known queries the probabilities were not cut out of the context.
            CONTEXT: [tensor for signals in found if signals.queries for tensor in signals.contexts],
            SCORE: [tensor for signals in found for tensor in (signals.probabilities, *signals.weights)],
            ACTING: [tensor for signals in found for tensor in signals.acting],
        }
        for name, code in _codes(sources, parameters, generator).items():
            if turn:
                # What is between two layers of one module makes the states that all of the later one reads.
                code = torch.where((code & _STREAM) == _STREAM, OUTPUT, code)
            codes[name] = torch.where(codes[name] == 0, code, codes[name])
    for name, code in _codes({OUTPUT: outputs}, parameters, generator).items():
        # What the output says counts only where nothing else was seen.
        codes[name] |= torch.where(codes[name] == 0, code, code & OUTPUT)
    return codes


def reached_by(tensor: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """By parameter, which of its entries a gradient of ``tensor`` reaches."""
    found = _gradients([tensor], parameters, torch.Generator().manual_seed(1))
    return {name: gradient.isfinite() & (gradient != 0) for name, gradient in found.items()}


def _codes(
    sources: dict[int, list[Tensor]], parameters: dict[str, nn.Parameter], generator: torch.Generator
) -> dict[str, Tensor]:
    codes: dict[str, Tensor] = {}
    for bit, tensors in sources.items():
        for name, gradient in _gradients(tensors, parameters, generator).items():
            finite = gradient.isfinite()
            own = ((gradient != 0) & finite).to("cpu", torch.int8) * bit
            own += (~finite).to("cpu", torch.int8) * UNKNOWN
            codes[name] = codes[name] | own if name in codes else own
    return codes


def _gradients(
    tensors: list[Tensor], parameters: dict[str, nn.Parameter], generator: torch.Generator
) -> dict[str, Tensor]:
    # Outputs may hold masked scores, which are -inf; 0 * inf must not poison the sum.
    projected = [
        (torch.nan_to_num(tensor) * torch.randn(tensor.shape, generator=generator).to(tensor)).sum()
        for tensor in tensors
        if tensor.requires_grad
    ]
    if not projected or not parameters:
        return {}
    found = torch.autograd.grad(projected, list(parameters.values()), retain_graph=True, allow_unused=True)
    return {name: gradient for name, gradient in zip(parameters, found, strict=True) if gradient is not None}


# --- Heads: which entries one head of the products, or of the contexts, reaches ---

_MOST_HEADS = 256
# (query heads, key heads), and the same of contexts and values
HeadCounts = tuple[int, int, int, int]
# By parameter the axis along which heads follow each other, and the head of every line (None: no single one).
HeadLines = dict[str, tuple[int, tuple[int | None, ...]]]


def heads_of(
    signals: Signals, parameters: dict[str, nn.Parameter], codes: dict[str, Tensor]
) -> tuple[HeadCounts | None, HeadLines]:
    """The numbers of heads of one attention call and the lines of the parameters that belong to each.

    Key heads that serve several query heads serve neighbours; any other order is a ``ValueError``. The
    numbers are None where the axis of the heads is unknown.
    """
    looking = _reached_by_head(signals.products, [_leading(p.dim()) for p in signals.products], parameters)
    saying = _reached_by_head(signals.contexts, signals.head_axes, parameters)
    lines: HeadLines = {}
    serving: dict[str, list[int]] = {"q": [1], "k": [], "v": []}
    for name, code in codes.items():
        for role, (number, reached) in (("q", looking), ("k", looking), ("v", saying)):
            bit = {"q": QUERY, "k": KEY, "v": CONTEXT}[role]
            entries = (code & (QUERY | KEY | CONTEXT)) == bit
            if not number or name not in reached or not bool(entries.any()):
                continue
            groups = _groups(reached[name], entries)
            if code.dim() > 1:
                serving[role].append(groups[1])
            if groups[1] < number:
                _add_lines(lines, name, groups[0] // groups[1], entries)
    numbers = looking[0], saying[0]
    if not all(numbers):
        return None, {}
    keys, values = (
        number // min(serving[role], default=1) for role, number in zip("kv", numbers, strict=True)
    )
    return (numbers[0], keys, numbers[1], values), lines


def _reached_by_head(
    tensors: list[Tensor], axes: list[tuple[int, ...]], parameters: dict[str, nn.Parameter]
) -> tuple[int, dict[str, Tensor]]:
    """The number of heads, and by parameter and entry which of them reach it (heads along the first axis)."""
    sizes = {tuple(tensor.shape[axis] for axis in own) for tensor, own in zip(tensors, axes, strict=True)}
    number = math.prod(next(iter(sizes))) if len(sizes) == 1 else 0
    if not all(axes) or not 0 < number <= _MOST_HEADS:
        return 0, {}
    reached: dict[str, Tensor] = {}
    for head in range(number):
        one_head = [
            tensor.movedim(own, tuple(range(len(own)))).flatten(0, len(own) - 1)[head]
            for tensor, own in zip(tensors, axes, strict=True)
        ]
        for name, gradient in _gradients(one_head, parameters, torch.Generator().manual_seed(1)).items():
            if name not in reached:
                reached[name] = torch.zeros((number, *gradient.shape), dtype=torch.bool)
            reached[name][head] = (gradient != 0).cpu()
    return number, reached


def _groups(reached: Tensor, entries: Tensor) -> tuple[Tensor, int]:
    """By entry the first head that reaches it, and how many do."""
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
    for axis in range(head.dim()) if name not in lines else [lines[name][0]]:
        number = torch.where(entries, head + 1, 0).movedim(axis, 0).flatten(1) if head.dim() > 1 else None
        number = torch.where(entries, head + 1, 0)[:, None] if number is None else number
        top = number.amax(1)
        if bool(((number == top[:, None]) | (number == 0)).all()) and len(top.unique()) > 1:
            before = lines[name][1] if name in lines else (None,) * len(top)
            now = tuple(own if not new else new - 1 for own, new in zip(before, top.tolist(), strict=True))
            lines[name] = axis, now
            return


# --- Roles from codes ---

_ROLES: tuple[Role, ...] = ("q", "k", "v", "o", "shared", "rest")


@dataclass(frozen=True)
class Finding:
    """What the probe saw of one parameter: ``spans`` (start, stop, role) along ``axis``.

    ``axis`` None means that the whole tensor has one role. ``direct``: the parameter acts on a context
    itself, as an output projection does. ``on_scores``: it acts on scores or probabilities, and makes neither
    queries nor keys nor values. ``latent``: values and only one of queries and keys depend on it.
    """

    axis: int | None
    spans: tuple[Span, ...]
    direct: bool = False
    on_scores: bool = False
    latent: bool = False

    @property
    def role(self) -> Role | None:
        """The role of the whole tensor, None where it is split."""
        return self.spans[0][2] if self.axis is None else None


def roles_from_codes(code: Tensor) -> Finding | None:
    """The roles along the axis that explains the codes best; None if nothing was seen or no axis does."""
    if bool((code & UNKNOWN).any()):
        return None
    roles = code.new_zeros(code.shape)
    values = _values(code)
    fused = any(value & (QUERY | KEY | CONTEXT) for value in values)
    for value in values:
        role = _role(value)
        if fused and value == OUTPUT:
            role = "rest"  # feed-forward rows beside queries, keys and values (PaLM)
        if role is not None:
            roles[code == value] = 1 + _ROLES.index(role)
    seen = [number for number in _values(roles) if number]
    if not seen:
        return None
    if len(seen) == 1:
        # Unused rows of a table, dead units: nothing was seen there, and nothing contradicts.
        return Finding(None, ((0, 0, _ROLES[seen[0] - 1]),))
    best = None
    for axis in range(code.dim()):
        lines = roles.movedim(axis, 0).reshape(roles.shape[axis], -1)
        top = lines.amax(1)
        if bool(((lines == top[:, None]) | (lines == 0)).all()):
            spans = _spans([int(number) for number in top])
            if best is None or len(spans) < len(best.spans):
                best = Finding(axis, spans)
    return best


def _values(code: Tensor) -> list[int]:
    """The small numbers that occur, without sorting millions of them."""
    return [int(value) for value in torch.bincount(code.flatten().int()).nonzero()]


def role_of_gradients(keys: list[Tensor], values: list[Tensor], parameter: Any) -> Finding | None:
    """Which rows of ``parameter`` make these keys and values."""
    codes = _codes({KEY: keys, CONTEXT: values}, {"": parameter}, torch.Generator().manual_seed(1))
    return roles_from_codes(codes[""]) if codes else None


_MATRIX_PRODUCT = ("Mm", "Addmm", "Bmm", "Baddbmm", "Linear", "Convolution")
_VIEWS = ("T", "View", "Permute", "Expand", "UnsafeView", "ReshapeAlias", "Select", "Slice", "Split", "Alias")
_FEW = 3  # matrices behind one tensor: a weight, and an adapter's two; a residual stream has more


def matrices_behind(tensor: Tensor) -> list[Tensor]:
    """The weight matrices whose product ``tensor`` is, however it was cut, turned and scaled since.

    Empty for a residual stream, which sums the products of many.
    """
    matrices: dict[int, Tensor] = {}
    nodes, known = [tensor.grad_fn], set()
    while nodes and len(matrices) <= _FEW:
        node = nodes.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if type(node).__name__.startswith("Embedding"):
            return []
        if type(node).__name__.startswith(_MATRIX_PRODUCT):
            leaves = (_leaf(behind) for behind, _ in node.next_functions)
            weights = {id(leaf): leaf for leaf in leaves if leaf is not None and leaf.dim() > 1}
            matrices |= weights
            if weights:
                continue
        nodes += [behind for behind, _ in node.next_functions]
    return list(matrices.values()) if len(matrices) <= _FEW else []


def _leaf(node: Any) -> Tensor | None:
    """The parameter behind views and casts."""
    while node is not None and type(node).__name__.startswith(_VIEWS):
        node = node.next_functions[0][0]
    return getattr(node, "variable", None)


def _role(code: int) -> Role | None:
    looks = code & (QUERY | KEY)
    if code & CONTEXT:
        return "shared" if looks or code & SCORE else "v"
    if looks:
        return "k" if looks == KEY else "q"
    if code & SCORE:
        return "k"
    return "o" if code & (OUTPUT | ACTING) else None


def _spans(numbers: list[int]) -> tuple[Span, ...]:
    """Spans of neighbouring rows of one role; rows where nothing was seen go with those before them."""
    role = _ROLES[next(number for number in numbers if number) - 1]
    blocks = []
    for number in numbers:
        role = _ROLES[number - 1] if number else role
        blocks.append(Block(role, 1))
    return tuple(spans_of(blocks))
