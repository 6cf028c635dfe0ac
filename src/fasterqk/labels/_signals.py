"""Attention calls as the probe sees them, and what their gradients show about the parameters.

1. ``ProbeTrace`` keeps the queries, keys, probabilities and contexts that a model forms. It detaches the
   probabilities where they weight values, so that a context depends on values alone.
2. ``reach_codes`` sends gradients back from these, and gives every entry of every parameter a code of those
   that reach it.
3. ``finding_from_codes`` turns the codes of one parameter into slices along an axis.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fasterqk.labels.slices import Part, Role, Slice, whole_slice
from fasterqk.trace.calls import (
    PROBABILITIES,
    PRODUCTS,
    SCORES,
    SOFTMAXES,
    AttentionCall,
    AttentionTrace,
    Frame,
    Operation,
    carries,
    is_parameter,
)

# --- Queries, keys, probabilities and contexts of every attention call ---

_CONTEXT, _PROJECTED = "_fasterqk_context", "_fasterqk_projected"
# Everything before the first projection (norms, gates) acts on the context. Behind it, only further matrices
# (a low-rank output) and gates do, until another stream is added.
_PROJECTIONS = {F.linear, torch.addmm, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, *PRODUCTS}
# A softmax written out: the exponentials of the scores, divided by their sum before or after.
_EXPONENTIALS = {torch.exp, Tensor.exp, torch.exp_, Tensor.exp_, F.log_softmax, torch.log_softmax}
_EXPONENTIALS |= {Tensor.log_softmax}
_SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_}
_JOINS = {torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack}
_GATES = {torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__}
_PIECES = {Tensor.__getitem__, torch.narrow, Tensor.narrow, torch.as_strided, Tensor.as_strided}
_MANY_HEADS = 128
_LARGEST = 2**27  # entries of one tensor; half a gigabyte


class Product(NamedTuple):
    """Queries times keys."""

    query: Tensor
    key: Tensor
    scores: Tensor


@dataclass(eq=False)
class ProbedCall(AttentionCall):
    """An attention call with the tensors that gradients start from.

    ``weights`` are the probabilities as they met values, ``contexts`` the results; code may use a softmax
    several times. ``acting`` are the weights and gates that act on a context on its way out. ``head_axes``
    are the head axes of each context, empty if unknown. ``keys_in_rows``: the softmax runs over the second to
    last axis, so the two factors of its products change places.
    """

    weights: list[Tensor] = field(default_factory=list)
    contexts: list[Tensor] = field(default_factory=list)
    acting: list[Tensor] = field(default_factory=list)
    head_axes: list[tuple[int, ...]] = field(default_factory=list)
    keys_in_rows: bool = False

    def factors(self, which: int) -> list[Tensor]:
        """The queries (0) or the keys (1) of all products."""
        return [product[1 - which if self.keys_in_rows else which] for product in self.products]

    def scores(self) -> list[Tensor]:
        """The products of queries and keys."""
        return [product.scores for product in self.products]

    @property
    def complete(self) -> bool:
        """Whether queries met keys before the softmax and values after it, which only attention does."""
        return bool(self.products and self.contexts)

    @property
    def finite(self) -> bool:
        """Whether every number in it is finite; otherwise gradients are meaningless."""
        tensors = (self.probabilities, *self.factors(0), *self.factors(1), *self.weights, *self.contexts)
        return all(bool(cast(Tensor, tensor).isfinite().all()) for tensor in tensors)


class ProbeTrace(AttentionTrace):
    """Collect every softmax in ``calls``, in order, while active.

    The forward pass ends with a ``TimeoutError`` after ``seconds``, and with a ``MemoryError`` at too large a
    tensor: a speech model that is fed noise may generate for hours.
    """

    while_probing = True

    def __init__(self, frames: list[Frame], seconds: float = 30.0) -> None:
        super().__init__(frames)
        self.seconds = seconds
        self.deadline = time.thread_time() + seconds
        self.calls: list[ProbedCall] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if time.thread_time() > self.deadline:
            raise TimeoutError(f"the probe took more than {self.seconds:g} seconds")
        output = super().__torch_function__(func, types, args, kwargs)
        if isinstance(output, Tensor) and output.numel() > _LARGEST:
            raise MemoryError(f"the probe came upon a tensor of shape {tuple(output.shape)}")
        return output

    def product(self, operation: Operation) -> Any:
        """A product, in pairs if it has more than two operands; an error if it would not fit into memory."""
        if operation.equation and len(operation.tensors) > 2:
            with self:
                return einsum_in_pairs(operation.equation, operation.tensors)
        entries = _entries(operation.tensors)
        if entries > _LARGEST:
            raise MemoryError(f"the probe came upon a product of {entries} entries")
        output = super().product(operation)
        if not hasattr(output, _CONTEXT):
            self._project(operation, output)
        return output

    def scored(self, operation: Operation, scores: Tensor) -> Product:
        """The queries, the keys, and a copy of the scores: masks may be added in place."""
        return Product(*operation.factors(), scores.clone())

    def is_softmax(self, operation: Operation) -> bool:
        """Any softmax, and the exponentials of learned scores.

        Features of a kernel (queries times a random matrix) are not scores: both factors must be learned.
        """
        if operation.func not in _EXPONENTIALS:
            return operation.func in SOFTMAXES
        products: list[Product] = getattr(operation.tensors[0], SCORES, [])
        return bool(products) and all(p.query.requires_grad and p.key.requires_grad for p in products)

    def softmax(self, operation: Operation) -> Tensor:
        """The probabilities, tagged with a call that keeps all tensors."""
        output = _without_empty_rows(operation)
        products = list(getattr(operation.tensors[0], SCORES, ()))
        call = ProbedCall(tuple(self.frames), tuple(output.shape), output, products)
        call.keys_in_rows = output.dim() > 2 and operation.axis == -2
        self.calls.append(call)
        setattr(output, PROBABILITIES, [call])
        return output

    def weigh(self, operation: Operation, weights: Tensor) -> Any:
        """The context, which does not depend on the probabilities of attention."""
        calls = getattr(weights, PROBABILITIES)
        arguments = tree_map_only(Tensor, _detached_probabilities, operation.args)
        output = operation.func(*arguments, **operation.kwargs)
        for call in calls:
            call.weights.append(weights)
            call.contexts.append(output.clone())  # what is added to it in place is not part of it
            call.head_axes.append(_context_axes(operation, weights, output))
        setattr(output, _CONTEXT, calls)
        return output

    def other(self, operation: Operation) -> Any:
        """Any other function: tags pass to tensors that still hold the tagged elements, or now hold them."""
        output = operation.run()
        if operation.func is Tensor.__setitem__:
            self.carry(operation, operation.args[0])  # scores are written into a larger tensor in pieces
        elif isinstance(output, Tensor):
            self._project(operation, output)
            self.carry(operation, output)
        return output

    def carry(self, operation: Operation, output: Any) -> None:
        """Pass tags to outputs that still hold the tagged elements: masked, padded, joined or cut out."""
        func, tensors = operation.func, operation.tensors
        held = [tensor for tensor in tensors if func in _PIECES or output.numel() >= tensor.numel()]
        for tag in (SCORES, PROBABILITIES):
            if tag == SCORES and func in _PROJECTIONS and not _mixes_scores(tensors):
                continue
            contents = [content for tensor in (output, *held) for content in getattr(tensor, tag, ())]
            if contents:
                setattr(output, tag, list({id(content): content for content in contents}.values()))

    def _project(self, operation: Operation, output: Tensor) -> None:
        """Record what acts on a context, and tag the outputs that still carry it."""
        func, tensors = operation.func, operation.tensors
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
                # A norm or a scale behind the projection is another step; a gate depends on the input.
                wide = func in _PROJECTIONS
                others = [x for x in others if (x.dim() > 1 if wide else not isinstance(x, nn.Parameter))]
            for call in before or after:
                call.acting += others
            together = func in _JOINS and all(hasattr(other, _CONTEXT) for other in tensors)
            if func in _PROJECTIONS:
                setattr(output, _PROJECTED, before or after)
            elif carries(func, operand, output) or together:
                setattr(output, _CONTEXT if before else _PROJECTED, before or after)


def leading_axes(dimensions: int) -> tuple[int, ...]:
    """The axes of heads in front of the last two: all but the batch axis."""
    return tuple(range(dimensions - 2))[1:] or tuple(range(dimensions - 2))


def _context_axes(operation: Operation, weights: Tensor, output: Tensor) -> tuple[int, ...]:
    """The axes of the heads in a context."""
    if not operation.equation:
        return leading_axes(output.dim())
    term, result = operation.term(weights)
    letters = [term[axis] for axis in leading_axes(len(term))]
    known = "." not in operation.equation and all(letter in result for letter in letters)
    return tuple(result.index(letter) for letter in letters) if known else ()


def einsum_in_pairs(equation: str, tensors: list[Tensor]) -> Tensor:
    """An einsum of several operands as products of two, in the order of attention.

    Probabilities meet the values first; weights such as the output projection follow. The first of several
    weights behind a raw input makes the values. Without probabilities, every weight is applied to the
    activation in front of it (or the next one), and the results meet.
    """
    terms, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = terms.replace("...", "").replace(",", "")
        result = "..." * ("..." in terms) + "".join(sorted(x for x in letters if letters.count(x) == 1))
    operands = list(zip(terms.split(","), tensors, strict=True))
    while len(operands) > 1:
        first, second = _next_pair([tensor for _, tensor in operands])
        (left, factor), (right, other) = operands[first], operands.pop(second)
        place = first - (second < first)
        later = result + "".join(term for i, (term, _) in enumerate(operands) if i != place)
        letters = "".join(dict.fromkeys((left + right).replace(".", "")))
        term = "..." * ("..." in left + right) + "".join(letter for letter in letters if letter in later)
        term = result if len(operands) == 1 else term
        operands[place] = term, torch.einsum(f"{left},{right}->{term}", factor, other)
    return operands[0][1]


def _next_pair(tensors: list[Tensor]) -> tuple[int, int]:
    """The two operands of an einsum that meet next; the result takes the place of the first."""
    weights = [i for i, tensor in enumerate(tensors) if is_parameter(tensor)]
    others = [i for i in range(len(tensors)) if i not in weights]
    looking = [i for i in others if hasattr(tensors[i], PROBABILITIES)]
    if looking and len(others) > 1:
        value = next(i for i in others if i != looking[0])
        is_ready = tensors[value].requires_grad or len(weights) < 2
        return (looking[0], value) if is_ready else (value, weights[0])
    if weights and others:
        return max((i for i in others if i < weights[0]), default=others[0]), weights[0]
    return 0, 1


def _entries(tensors: list[Tensor]) -> int:
    """The entries of the product of two matrices or stacks of them; 0 for other products."""
    if len(tensors) != 2 or min(tensor.dim() for tensor in tensors) < 2:
        return 0
    return max(tensor.shape[:-2].numel() for tensor in tensors) * tensors[0].shape[-2] * tensors[1].shape[-1]


def _without_empty_rows(operation: Operation) -> Tensor:
    """A softmax that is zero in rows where every score is masked, instead of nan."""
    output: Tensor = operation.run()
    scores, axis = operation.tensors[0], operation.axis
    if operation.func not in SOFTMAXES or axis is None or bool(output.isfinite().all()):
        return output
    empty = (scores == -math.inf).all(axis, True)
    return scores.masked_fill(empty, 0.0).softmax(axis).masked_fill(empty, 0.0).to(output)


def _mixes_scores(tensors: list[Tensor]) -> bool:
    """Whether a projection mixes the scores of heads with each other (talking heads)."""
    weights = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.dim() > 1]
    square = len(weights) == 1 and weights[0].shape[0] == weights[0].shape[1] <= _MANY_HEADS
    return square and tensors[0].dim() == 4


def _joins_another_stream(tensors: list[Tensor]) -> bool:
    """Whether a sum adds something other than a context or a bias: the residual stream."""
    tags = (_CONTEXT, _PROJECTED)
    return any(not any(hasattr(t, tag) for tag in tags) and not is_parameter(t) for t in tensors)


def _detached_probabilities(tensor: Tensor) -> Tensor:
    """``tensor``, detached if it holds probabilities of attention, not of a gate or a kernel."""
    calls = getattr(tensor, PROBABILITIES, ())
    return tensor.detach() if any(call.products for call in calls) else tensor


# --- Which entries of the parameters the gradients reach ---

# Bits of a code: the entry is reached by the gradient of queries, keys, contexts, probabilities, the output,
# or something that acts on a context. UNKNOWN: the gradient is not finite.
QUERY, KEY, CONTEXT, SCORE, OUTPUT, UNKNOWN, ACTING = 1, 2, 4, 8, 16, 32, 64
STREAM = QUERY | KEY | CONTEXT


def reach_codes(
    parameters: dict[str, nn.Parameter], blocks: list[list[ProbedCall]], outputs: list[Tensor]
) -> dict[str, Tensor]:
    """For every entry of every parameter the code of what reaches it.

    If a block forms several softmaxes in sequence (all layers of a model in one module), the first that
    reaches an entry decides, because later ones also reach it through the earlier ones.
    """
    generator = torch.Generator().manual_seed(1)
    codes = {name: torch.zeros(value.shape, dtype=torch.int8) for name, value in parameters.items()}
    for turn in range(max(map(len, blocks), default=0)):
        calls = [block[turn] for block in blocks if turn < len(block)]
        sources: dict[int, list[Tensor]] = {
            QUERY: [tensor for call in calls for tensor in call.factors(0)],
            KEY: [tensor for call in calls for tensor in call.factors(1)],
            # Without known queries the probabilities were not cut out of the context.
            CONTEXT: [tensor for call in calls if call.products for tensor in call.contexts],
            SCORE: [cast(Tensor, tensor) for call in calls for tensor in (call.probabilities, *call.weights)],
            ACTING: [tensor for call in calls for tensor in call.acting],
        }
        for name, code in _codes(sources, parameters, generator).items():
            if turn:
                # A parameter between two layers of one module makes the states that the later layer reads.
                code = torch.where((code & STREAM) == STREAM, OUTPUT, code)
            codes[name] = torch.where(codes[name] == 0, code, codes[name])
    for name, code in _codes({OUTPUT: outputs}, parameters, generator).items():
        # The output counts only where nothing else was seen.
        codes[name] |= torch.where(codes[name] == 0, code, code & OUTPUT)
    return codes


def reached_by(call: ProbedCall, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """By parameter, which of its entries a gradient of the probabilities reaches."""
    gradients = gradients_of([cast(Tensor, call.probabilities)], parameters, torch.Generator().manual_seed(1))
    return {name: gradient.isfinite() & (gradient != 0) for name, gradient in gradients.items()}


def _codes(
    sources: dict[int, list[Tensor]], parameters: dict[str, nn.Parameter], generator: torch.Generator
) -> dict[str, Tensor]:
    codes: dict[str, Tensor] = {}
    for bit, tensors in sources.items():
        for name, gradient in gradients_of(tensors, parameters, generator).items():
            finite = gradient.isfinite()
            code = ((gradient != 0) & finite).to("cpu", torch.int8) * bit
            code += (~finite).to("cpu", torch.int8) * UNKNOWN
            codes[name] = codes[name] | code if name in codes else code
    return codes


def gradients_of(
    tensors: list[Tensor], parameters: dict[str, nn.Parameter], generator: torch.Generator
) -> dict[str, Tensor]:
    """By parameter the gradient of random projections of ``tensors``, if there is one."""
    # Outputs may hold masked scores of -inf, and 0 * inf would spoil the sum.
    projected = [
        (torch.nan_to_num(tensor) * torch.randn(tensor.shape, generator=generator).to(tensor)).sum()
        for tensor in tensors
        if tensor.requires_grad
    ]
    if not projected or not parameters:
        return {}
    leaves = list(parameters.values())
    gradients = torch.autograd.grad(projected, leaves, retain_graph=True, allow_unused=True)
    return {name: value for name, value in zip(parameters, gradients, strict=True) if value is not None}


# --- Slices from codes ---

_ROLES: tuple[Role, ...] = ("q", "k", "v", "o", "shared", "rest")


@dataclass(frozen=True)
class Finding:
    """The slices of one parameter, as the probe saw them.

    ``direct``: the parameter acts on a context itself, as an output projection does. ``on_scores``: it acts
    on scores or probabilities, and makes neither queries nor keys nor values. ``latent``: values depend on
    it, and only one of queries and keys.
    """

    slices: tuple[Slice, ...]
    direct: bool = False
    on_scores: bool = False
    latent: bool = False

    @property
    def role(self) -> Role | None:
        """The role of the whole tensor, None where it is split."""
        return self.slices[0].role if self.slices[0].axis is None else None

    @property
    def roles(self) -> set[Role]:
        """The roles of its slices."""
        return {part.role for part in self.slices}


def finding_from_codes(name: str, code: Tensor, complete: bool = True) -> Finding | None:
    """The slices along the axis that explains the codes best; None if nothing was seen or no axis does.

    ``complete``: queries were seen; otherwise the probe takes them for scores.
    """
    if bool((code & UNKNOWN).any()):
        return None
    numbers = code.new_zeros(code.shape)  # of the role, from 1
    values = _values(code)
    fused = any(value & STREAM for value in values)
    for value in values:
        role = _role(value)
        if fused and value == OUTPUT:
            role = "rest"  # feed-forward rows beside queries, keys and values (PaLM)
        if role is not None:
            numbers[code == value] = 1 + _ROLES.index(role)
    slices = _slices(name, numbers)
    if slices is None:
        return None
    streams = {value & STREAM for value in values}
    on_scores = complete and any(value & SCORE for value in values) and streams == {0}
    latent = bool(streams & {KEY | CONTEXT, QUERY | CONTEXT})
    return Finding(slices, any(value & ACTING for value in values), on_scores, latent)


def _slices(name: str, numbers: Tensor) -> tuple[Slice, ...] | None:
    """Slices along the axis that needs fewest; unseen entries (0) fit anywhere."""
    whole = whole_slice(name, numbers.numel())
    roles = [_ROLES[number - 1] for number in _values(numbers) if number]
    if len(roles) < 2:
        return (replace(whole, role=roles[0], decided_by="probe"),) if roles else None
    best: tuple[Slice, ...] = ()
    for axis in range(numbers.dim()):
        lines = numbers.movedim(axis, 0).reshape(numbers.shape[axis], -1)
        top = lines.amax(1)
        if bool(((lines == top[:, None]) | (lines == 0)).all()):
            slices = whole.split(axis, _parts(top.tolist()), "probe")
            best = slices if not best or len(slices) < len(best) else best
    return best or None


def _parts(numbers: list[int]) -> list[Part]:
    """Neighbouring lines of one role; unseen lines (0) join those before them."""
    role = next(number for number in numbers if number)
    roles = [role := number or role for number in numbers]
    return [(_ROLES[number - 1], len(list(lines)), None) for number, lines in groupby(roles)]


def _values(code: Tensor) -> list[int]:
    """The distinct small numbers in ``code``, without sorting millions of them."""
    return [int(value) for value in torch.bincount(code.flatten().int()).nonzero()]


def _role(code: int) -> Role | None:
    looks = code & (QUERY | KEY)
    if code & CONTEXT:
        return "shared" if looks or code & SCORE else "v"
    if looks:
        return "k" if looks == KEY else "q"
    if code & SCORE:
        return "k"
    return "o" if code & (OUTPUT | ACTING) else None


# --- Tensors that are made outside the block that they enter ---

_MATRIX_PRODUCT = ("Mm", "Addmm", "Bmm", "Baddbmm", "Linear", "Convolution")
_VIEWS = ("T", "View", "Permute", "Expand", "UnsafeView", "ReshapeAlias", "Select", "Slice", "Split", "Alias")
_FEW = 3  # matrices behind one tensor: a weight, and an adapter's two; a residual stream has more


def finding_from_gradients(
    name: str, parameter: Any, keys: list[Tensor], values: list[Tensor]
) -> Finding | None:
    """Which rows of ``parameter`` make these keys and values."""
    codes = _codes({KEY: keys, CONTEXT: values}, {name: parameter}, torch.Generator().manual_seed(1))
    return finding_from_codes(name, codes[name]) if codes else None


def matrices_behind(tensor: Tensor) -> list[Tensor]:
    """The weight matrices whose product ``tensor`` is, even if it was sliced, permuted or scaled since.

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
