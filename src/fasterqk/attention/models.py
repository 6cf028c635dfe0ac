"""Models that can be measured: the protocol :class:`Measurable`, and any PyTorch classifier."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from fasterqk.attention.aggregation import HALF, Layer, Pattern
from fasterqk.attention.instances import Batch
from fasterqk.errors import InputError
from fasterqk.trace import Captured, capture


@dataclass(frozen=True, eq=False)
class Answer:
    """A model's answer to a batch.

    ``probability`` ``(batch,)`` is the probability of the right answer, ``correct`` ``(batch,)`` whether the
    model gives it. ``outcomes`` has all probabilities ``(batch, outcome)``; for a model that reads several
    rows, ``(batch, row, 1)``, the probability of the token that each row writes.
    """

    probability: NDArray[np.float64]
    correct: NDArray[np.bool_]
    outcomes: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Reading:
    """One pass of a model over a batch: its attention, the rows that predict, and its answer.

    ``layers`` are ``(batch, head, query, key)``, bottom first; a layer may hold the read rows alone,
    ``(batch, head, row, key)``. ``read`` ``(batch,)`` are the positions of the rows that predict. A model
    that writes its answer token by token reads one row per token of ``batch.target``: ``(batch, row)``, of
    which ``batch.target_real`` marks the real ones. ``masks`` ``(batch, query, key)``, one per layer, are
    true where a row may see a key; None where the model does not show it. If the model adds keys after those
    of the batch, ``keys`` ``(batch, key)`` marks the real ones. ``names`` are the modules of the layers.
    ``pooled`` says that the model averages its final states: it reads all rows, ``(batch, row)``, and their
    mean over the real tokens is the row that predicts.
    """

    layers: Sequence[Layer]
    read: Tensor
    answer: Answer
    keys: Tensor | None = None
    # Sum mass in single precision, as training does.
    single: bool = False
    masks: Sequence[Tensor | None] = ()
    names: Sequence[str] = ()
    pooled: bool = False


class Measurable(Protocol):
    """A model that :func:`fasterqk.attention.measure` can measure."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; empty for a model that writes text."""

    @property
    def pattern(self) -> Pattern | None:
        """The pattern of every layer; None to take the masks of ``read``, or to guess it from weights."""

    def read(self, batch: Batch, *, read_only: bool = False) -> Reading:
        """Run the unchanged batch once.

        With ``read_only`` a layer may hold the rows of the read positions alone.
        """

    def predict(self, batch: Batch) -> NDArray[np.float64]:
        """Probabilities ``(batch, outcome)`` of a batch, possibly with tokens removed."""

    def gradient_times_input(self, batch: Batch) -> NDArray[np.float64]:
        """Saliency of each token ``(batch, token)``."""


class Integrated(NamedTuple):
    """Integrated gradients ``(batch, token)``, and their completeness gap ``(batch,)``.

    In theory they sum to the change in log-probability; the gap is the share of it that the sum misses.
    """

    importance: NDArray[np.float64]
    gap: NDArray[np.float64]


Position = Literal["first", "last", "mean"]
# The message for a model that reads neither one end of the text nor all of it.
NO_ROW = (
    "predicts neither from its first or last token nor from the mean of all, so no row of attention makes the"
    " prediction"
)
# Half a gigabyte in single precision.
WEIGHTS_IN_MEMORY = 2**27
# Quadrature nodes of integrated gradients.
INTEGRATION_STEPS = 20


class TorchClassifier:
    """Any PyTorch module that returns class logits, ready to be measured.

    Arguments:
        model: The module. It runs in evaluation mode and is given back as it was.
        classes: The names of its classes.
        inputs: Makes the module's arguments (a mapping, a tuple or a tensor) from a :class:`Batch`; by
            default token ids and the mask of visible tokens.
        logits: Extracts the logits ``(batch, class)`` from the module's output; by default the output itself
            or its ``logits``.
        read: The position that makes the prediction, the ``"first"`` or the ``"last"`` token, by default
            found by a gradient; or ``"mean"`` for a module that averages over all tokens, whose row is the
            mean of all rows. The gradient also checks ``read``, but not that the average has equal weights.
        embedding: The module whose output is the input of gradient x input.
        multi_label: Whether every class has its own probability, the sigmoid of its logit; it is predicted
            from one half on.

    Raises:
        InputError: Two classes have the same name, or ``read`` is unknown.

    >>> class Bag(nn.Module):
    ...     def forward(self, tokens, visible):
    ...         ones = (tokens * visible).sum(1, keepdim=True).float()
    ...         return torch.cat([ones, -ones], 1)
    >>> from fasterqk.attention.instances import Instance, collate
    >>> instance = Instance(np.array([1, 0]), np.ones(2, bool), np.array([1.0, 0.0]), label=0)
    >>> TorchClassifier(Bag(), classes=("many", "few")).predict(collate([instance])).round(2).tolist()
    [[0.88, 0.12]]
    """

    pattern: Pattern | None = None
    # Take answers from a plain pass, because the pass that shows attention gives others.
    answers_plainly = False

    def __init__(
        self,
        model: nn.Module,
        *,
        classes: Sequence[str],
        inputs: Callable[[Batch], Any] | None = None,
        logits: Callable[[Any], Tensor] | None = None,
        read: Position | None = None,
        embedding: nn.Module | None = None,
        multi_label: bool = False,
    ) -> None:
        self.multi_label = multi_label
        self.model = model
        self.classes = tuple(classes)
        for name in self.classes:
            if self.classes.count(name) > 1:
                raise InputError(
                    f"the class name {name!r} stands for {self.classes.count(name)} classes; give each its"
                    " own (id2label in config.json)"
                )
        if read not in (None, *get_args(Position)):
            raise InputError(f"read is {read!r}; choose from {', '.join(get_args(Position))}")
        self.inputs = inputs or self._tokens_and_mask
        self.logits = logits or _as_they_are
        self.reads: Position = read or "first"
        self.read_is_given = read is not None
        self.embedding = embedding

    def read_position(self, batch: Batch) -> NDArray[np.intp]:
        """The position that makes each prediction, ``(batch,)``; of a mean all, ``(batch, row)``."""
        if self.reads == "mean":
            return np.indices(batch.tokens.shape)[1]
        return batch.first if self.reads == "first" else batch.last

    def read(self, batch: Batch, *, read_only: bool = False) -> Reading:
        read, pooled = on_device_of(self.model, self.read_position(batch)), self.reads == "mean"
        read_only = read_only and not pooled
        rows, lazy = read if read_only else None, is_long(self.model, batch, read_only)
        layers = self_attention(capture(self.model, self.inputs(batch), rows=rows, masks=True, lazy=lazy))
        check_layers(layers, batch, self.model)
        outcomes = self._outcomes(batch, layers.outputs)
        answer = class_answer(outcomes, batch, self.multi_label)
        return Reading(layers, read, answer, masks=layers.masks, names=layers.names, pooled=pooled)

    def check(self, batch: Batch) -> list[str]:
        """Find or check the read position: the row of the last attention that reaches the logits.

        Returns a note if that is not possible.
        """
        if hasattr(self.model, "_orig_mod"):
            return []  # hooks do not run in compiled code
        inputs, name = self.inputs(batch), type(self.model).__name__
        rows = on_device_of(self.model, batch.first)
        last_attention = self_attention(capture(self.model, inputs, rows=rows)).names[-1]
        with leaf_embedding(self.model.get_submodule(last_attention)) as leaves:
            logits = self.logits(capture(self.model, inputs, rows=rows, differentiable=True).outputs)
        states = leaves[-1] if leaves and logits.requires_grad else None
        unknown = [f"the read position of {name}, its {self.reads} token, could not be checked"]
        if states is None or states.dim() != 3:
            return unknown
        turned = states.shape[:2] != batch.tokens.shape  # (token, batch, width), as torch had it first
        if turned and (states.shape[1], states.shape[0]) != batch.tokens.shape:
            return unknown
        gradient = gradient_of(logits, states)
        if gradient is None:
            return unknown
        used = (gradient.transpose(1, 0, 2) if turned else gradient).any(-1) & batch.real
        if not used.any():
            return unknown
        positions = positions_of(used, batch)
        if not positions:
            raise InputError(f"{name} {NO_ROW}")
        if positions == ["mean"] and self.reads != "mean":
            raise InputError(
                f"{name} predicts from all its tokens; if it averages over them, measure TorchClassifier(...,"
                " read='mean'); otherwise no row of attention makes the prediction"
            )
        if not self.read_is_given:
            self.reads = positions[0]
        elif self.reads not in positions:
            raise InputError(f"{name} predicts from its {positions[0]} token, not from read={self.reads!r}")
        return []

    def _outcomes(self, batch: Batch, outputs: Any) -> NDArray[np.float64]:
        """Probabilities of a batch from the ``outputs`` of the pass that captured its attention.

        Kernels that expose attention round differently. In half precision the error exceeds a small
        difference between texts, so the answer is taken from a plain pass, as for texts with tokens removed.
        """
        logits = self.logits(outputs)
        plain = self.answers_plainly or logits.dtype in HALF
        return self.predict(batch) if plain else self._probabilities(logits)

    def _probabilities(self, logits: Tensor) -> NDArray[np.float64]:
        logits = logits.detach().cpu().double()
        if logits.dim() != 2:
            raise InputError(
                f"the logits have shape {tuple(logits.shape)}; logits=... must give (batch, class)"
            )
        if logits.shape[-1] != len(self.classes):
            raise InputError(
                f"{len(self.classes)} class names for {logits.shape[-1]} logits: classes={self.classes!r}"
            )
        return (logits.sigmoid() if self.multi_label else logits.softmax(-1)).numpy()

    def predict(self, batch: Batch) -> NDArray[np.float64]:
        with torch.no_grad():
            return self._probabilities(self._logits(batch))

    def gradient_times_input(self, batch: Batch) -> NDArray[np.float64]:
        return self._gradient(batch, batch.follow(self.predict(batch)))[0]

    def integrated_gradients(self, batch: Batch) -> Integrated:
        """Gradient x input, averaged along the path from zero embeddings to those of the batch."""
        chosen = batch.follow(self.predict(batch))
        return integrated(lambda share: self._gradient(batch, chosen, share))

    def _gradient(
        self, batch: Batch, chosen: NDArray[np.intp], share: float = 1.0
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Gradient x input of the ``chosen`` log-probability at ``share`` times the input, and its value."""
        with leaf_embedding(self.embedding, share) as leaves:
            logits = self._logits(batch)
            logarithm = logsigmoid(logits) if self.multi_label else logits.log_softmax(-1)
            score = logarithm.gather(1, torch.from_numpy(chosen)[:, None].to(logarithm.device))
        return saliency(score, leaves, share), as_array(score[:, 0])

    def _logits(self, batch: Batch) -> Tensor:
        inputs = self.inputs(batch)
        with evaluating(self):
            if isinstance(inputs, Mapping):
                return self.logits(self.model(**inputs))
            return self.logits(self.model(*(inputs if isinstance(inputs, tuple) else (inputs,))))

    def _tokens_and_mask(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return on_device_of(self.model, batch.tokens), on_device_of(self.model, batch.visible)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put the module of ``model``, if it has one, into evaluation mode; restore all modes on exit."""
    module = getattr(model, "model", None)
    parts = module.modules() if isinstance(module, nn.Module) else ()
    training = [part for part in parts if part.training]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True


def self_attention(captured: Captured) -> Captured:
    """The layers of self-attention, each once.

    Differential attention multiplies the same probabilities by two halves of the values, so they are captured
    twice, one after the other.
    """
    layers = captured.select("self")
    fresh = [
        not number
        or name != layers.names[number - 1]
        or not isinstance(layers[number], Tensor)
        or not torch.equal(layers[number], layers[number - 1])
        for number, name in enumerate(layers.names)
    ]
    fields = ("probabilities", "names", "kinds", "masks")
    return replace(layers, **{name: tuple(compress(getattr(layers, name), fresh)) for name in fields})


def gradient_of(logits: Tensor, states: Tensor) -> NDArray[np.float64] | None:
    """A gradient of the logits by ``states`` ``(batch, token, width)``; None if these do not matter."""
    # Unequal weights, because equal ones cancel if the classes are mirror images.
    score = (logits * torch.arange(1, logits.shape[-1] + 1).to(logits)).sum()
    (gradient,) = torch.autograd.grad(score, states, allow_unused=True)
    return None if gradient is None else as_array(gradient)


def positions_of(used: NDArray[np.bool_], batch: Batch) -> list[Position]:
    """The positions that explain which tokens ``(batch, token)`` a model uses."""
    place = np.arange(batch.tokens.shape[1])
    candidates: dict[Position, NDArray[np.bool_]] = {
        "first": place == batch.first[:, None],
        "last": place == batch.last[:, None],
        "mean": batch.real,
    }
    return [position for position, tokens in candidates.items() if (used == tokens).all()]


def class_answer(outcomes: NDArray[np.float64], batch: Batch, multi_label: bool = False) -> Answer:
    """The answer of a classifier with probabilities ``outcomes`` ``(batch, class)``.

    It is correct if the label is the likeliest class or, for a ``multi_label`` model, reaches one half.
    """
    wrong = (batch.label < 0) | (batch.label >= outcomes.shape[1])
    if wrong.any():
        label = int(batch.label[wrong][0])
        fault = "no label" if label < 0 else f"the label {label}"
        raise InputError(
            f"an instance has {fault}; a classifier of {outcomes.shape[1]} classes needs"
            f" label=0 to label={outcomes.shape[1] - 1}"
        )
    probability = outcomes[np.arange(len(batch)), batch.label]
    right = probability >= 0.5 if multi_label else outcomes.argmax(1) == batch.label
    return Answer(probability, right, outcomes)


def integrated(gradient: Callable[[float], tuple[NDArray[np.float64], NDArray[np.float64]]]) -> Integrated:
    """The mean over shares 0..1 of the first part of ``gradient(share)``, by Gauss-Legendre quadrature.

    The second part, the score ``(batch,)`` at that share, says what the importances should sum to.
    """
    places, weights = np.polynomial.legendre.leggauss(INTEGRATION_STEPS)
    parts = [weight / 2 * gradient((place + 1) / 2)[0] for place, weight in zip(places, weights, strict=True)]
    importance, change = np.sum(parts, axis=0), gradient(1.0)[1] - gradient(0.0)[1]
    return Integrated(importance, np.abs(importance.sum(1) - change) / np.maximum(np.abs(change), 1e-12))


@contextmanager
def leaf_embedding(embedding: nn.Module | None, share: float = 1.0) -> Iterator[list[Tensor]]:
    """Yield a list that collects the outputs of ``embedding``, times ``share``, as leaves of autograd."""
    if embedding is None:
        raise InputError("gradient x input needs to know the model's embedding module; give embedding=...")
    leaves: list[Tensor] = []

    def cut(module: nn.Module, arguments: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        leaves.append((share * first.detach()).requires_grad_())
        # A copy, because some models scale their embeddings in place.
        copy = leaves[-1].clone()
        return (copy, *output[1:]) if isinstance(output, tuple) else copy

    handle = embedding.register_forward_hook(cut)
    try:
        with torch.enable_grad():
            yield leaves
    finally:
        handle.remove()


def saliency(score: Tensor, leaves: Sequence[Tensor], share: float = 1.0) -> NDArray[np.float64]:
    """Gradient of the sum of ``score`` times the embedded input, summed over features: ``(batch, token)``.

    The leaves are ``share`` times the embedded input.
    """
    if not leaves:
        raise InputError("the embedding module was not called, so gradient x input is not defined")
    gradients = torch.autograd.grad(score.sum(), leaves[0])[0]
    return as_array((gradients * leaves[0].detach()).sum(-1)) / (share or 1.0)


def is_long(model: nn.Module, batch: Batch, read_only: bool) -> bool:
    """Whether the attention of a Hugging Face model on ``batch``, or of one layer, is too much to hold."""
    config: Any = getattr(model, "config", None)
    heads, layers = (getattr(config, name, 0) for name in ("num_attention_heads", "num_hidden_layers"))
    if not isinstance(heads, int) or not isinstance(layers, int):
        return False  # they differ from layer to layer
    weights = heads * batch.tokens.size * batch.tokens.shape[1]
    return (weights if read_only else weights * layers) > WEIGHTS_IN_MEMORY


def check_layers(layers: Sequence[Layer], batch: Batch, model: nn.Module) -> None:
    """Raise unless every layer attends from the tokens of ``batch`` to the tokens of ``batch``."""
    count, width = batch.tokens.shape
    for number, layer in enumerate(layers):
        if layer.shape[0] != count or layer.shape[3] != width or layer.shape[2] not in (1, width):
            raise InputError(
                f"attention of layer {number} of {type(model).__name__} has shape {tuple(layer.shape)} for"
                f" {count} texts of {width} tokens: it does not attend from token to token, so tokens have no"
                " weight of their own"
            )


def on_device_of(model: nn.Module, array: NDArray[Any]) -> Tensor:
    """The array as a tensor where the model is."""
    device = next((parameter.device for parameter in model.parameters()), None)
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def as_array(values: Tensor) -> NDArray[np.float64]:
    """A tensor as double-precision numpy."""
    return np.asarray(values.detach().cpu().double().numpy())


def _as_they_are(outputs: Any) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if logits is None:
        raise InputError(
            f"the model returns a {type(outputs).__name__}; say where its logits are, such as"
            " TorchClassifier(..., logits=lambda outputs: outputs[0])"
        )
    return logits
