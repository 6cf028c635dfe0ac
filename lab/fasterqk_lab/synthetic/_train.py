"""Train one cell, epoch by epoch, to its stop rule; say what it came to, and what it does on a sample."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fasterqk.attention.scores import summarize
from fasterqk.console import Progress
from fasterqk_lab.synthetic._cell import (
    Counts,
    SyntheticCell,
    Weights,
    draw_counts,
    factorized_attention,
    initial_matrices,
    pack,
    zeros_like,
)
from fasterqk_lab.synthetic._kernel import (
    Scratch,
    Stream,
    batch_gradient,
    compiled,
    dot,
    draw_batch,
    make_scratch,
    make_stream,
    no_stream,
)

_MATCHED = 1600  # training sequences on which the loss is measured along training, in evaluation mode
_HISTORY_GROWTH = 1.07  # the history is read at epochs that grow by this factor
_LOST = 100.0  # a mean loss this far above chance (ln 50 = 3.9) does not come back
_PARTS, _QK_PARTS = 5, 3  # arrays of `Weights`, and those of the query-key circuit, which come first
_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8  # Adam's usual constants


# --- One epoch: draw or read a batch, take its gradient, update ---


class Sample(NamedTuple):
    """The batches of an epoch: a fixed training sample, or room for one fresh batch."""

    counts: np.ndarray  # (batches, batch, S)
    starts: np.ndarray  # (batches, class + 1)


class Task(NamedTuple):
    """What the language contributes."""

    support: np.ndarray  # (class, S)
    labels: np.ndarray  # (class,)
    score_scale: float
    blind: bool  # all classes have one query: the rows of a query matrix stay equal


class Schedule(NamedTuple):
    """OV learns at ``lr``; QK at ``lr`` times the ratio of :func:`ratio_at`.

    ``roles`` multiplies that for each array of :class:`Weights`, 0 for scores that factors make; ``decays``
    are their weight decays. ``gradient_norm`` is that of either circuit (0: as it is).
    """

    lr: float
    qk_ratio: float
    roles: tuple[float, float, float, float, float]
    ramp_steps: int  # 0: the ratio holds from the first step
    ratio_from: int
    ratio_until: int
    adam: bool
    decays: tuple[float, float, float, float, float]
    gradient_norm: float


@compiled
def train_epoch(
    first_step: int,
    batches: int,
    task: Task,
    sample: Sample,
    stream: Stream,
    schedule: Schedule,
    weights: Weights,
    gradients: Weights,
    first_moments: Weights,
    second_moments: Weights,
    work: Scratch,
) -> float:
    """Train ``batches`` steps in place and return their mean loss.

    ``first_step`` counts the steps taken before. The moments are empty for SGD.
    """
    fresh = stream.state.shape[0] > 0
    loss = 0.0
    for i in range(batches):
        batch = 0 if fresh else i
        if fresh:
            draw_batch(stream, sample.counts[0], sample.starts[0])
        loss += batch_gradient(
            sample.counts[batch],
            sample.starts[batch],
            task.support,
            task.labels,
            task.score_scale,
            weights,
            gradients,
            work,
        )
        if task.blind:
            _share_rows(gradients.scores if weights.keys.shape[0] == 0 else gradients.queries)
        if schedule.gradient_norm > 0:
            _normalize(schedule.gradient_norm, weights, gradients)
        step = first_step + i
        qk_lr = schedule.lr * ratio_at(step, schedule)
        for part in range(_PARTS):
            # Decoupled weight decay, before the step; for SGD it is the same as a decay in the gradient.
            if schedule.decays[part] > 0:
                _scale(weights[part], 1.0 - schedule.lr * schedule.decays[part])
            lr = schedule.roles[part] * (qk_lr if part < _QK_PARTS else schedule.lr)
            if schedule.adam:
                _adapt(step, weights[part], gradients[part], first_moments[part], second_moments[part], lr)
            else:
                descend(weights[part], gradients[part], lr)
    return loss / batches


@compiled
def ratio_at(step: int, schedule: Schedule) -> float:
    """The learning-rate ratio at a step: from 1 linearly to ``qk_ratio`` over ``ramp_steps``, then held.

    It is 1 before ``ratio_from`` and from ``ratio_until`` on.
    """
    if step < schedule.ratio_from or step >= schedule.ratio_until:
        return 1.0
    if step >= schedule.ramp_steps:
        return schedule.qk_ratio
    return 1.0 + (schedule.qk_ratio - 1.0) * step / schedule.ramp_steps


@compiled
def _share_rows(gradient: np.ndarray) -> None:
    """Every row becomes the sum of all: the gradient of one row that all classes use."""
    for o in range(gradient.shape[1]):
        whole = 0.0
        for c in range(gradient.shape[0]):
            whole += gradient[c, o]
        for c in range(gradient.shape[0]):
            gradient[c, o] = whole


@compiled
def _normalize(norm: float, weights: Weights, gradients: Weights) -> None:
    """Scale the gradients of each circuit to ``norm``; one of zero stays."""
    if weights.keys.shape[0] > 0:
        _scale_to(norm, gradients.keys, gradients.queries)
    else:
        _scale_to(norm, gradients.scores, gradients.queries)  # of which there are none
    _scale_to(norm, gradients.table, gradients.output)


@compiled
def _scale_to(norm: float, left: np.ndarray, right: np.ndarray) -> None:
    first, second = left.reshape(left.size), right.reshape(right.size)
    size = np.sqrt(dot(first, first) + dot(second, second))
    if size > 0:
        _scale(left, norm / size)
        _scale(right, norm / size)


@compiled
def _scale(values: np.ndarray, factor: float) -> None:
    """Multiply an array in place; ``values[:] *= factor`` would take seconds more to compile."""
    flat = values.reshape(values.size)
    for i in range(flat.shape[0]):
        flat[i] *= factor


@compiled
def descend(values: np.ndarray, gradient: np.ndarray, lr: float) -> None:
    """One step of gradient descent, in place."""
    flat, slope = values.reshape(values.size), gradient.reshape(values.size)
    for i in range(flat.shape[0]):
        flat[i] -= lr * slope[i]


@compiled
def _adapt(
    step: int, values: np.ndarray, gradient: np.ndarray, first: np.ndarray, second: np.ndarray, lr: float
) -> None:
    flat, slope = values.reshape(values.size), gradient.reshape(values.size)
    mean, square = first.reshape(values.size), second.reshape(values.size)
    rate = lr / (1.0 - _BETA_1 ** (step + 1))
    spread = 1.0 / np.sqrt(1.0 - _BETA_2 ** (step + 1))
    for i in range(flat.shape[0]):
        mean[i] = _BETA_1 * mean[i] + (1.0 - _BETA_1) * slope[i]
        square[i] = _BETA_2 * square[i] + (1.0 - _BETA_2) * slope[i] * slope[i]
        flat[i] -= rate * mean[i] / (np.sqrt(square[i]) * spread + _EPSILON)


# --- A cell from its start to its stop rule ---


class Trainer:
    """A cell in training: call :meth:`epoch` until it is :attr:`finished`.

    >>> trainer = Trainer(SyntheticCell("CACO", batches=2, max_steps=4, lr=0.5))
    >>> trainer.run()["steps"]
    4
    """

    def __init__(self, cell: SyntheticCell) -> None:
        self.cell = cell
        language = cell.language
        seed = cell.seed if cell.init_seed is None else cell.init_seed
        self.matrices = initial_matrices(
            cell.parameterization, language.vocabulary, cell.qk_init, cell.ov_init, seed, cell.outputs
        )
        self.weights = pack(self.matrices, language.queries, cell.outputs)
        self.gradients = zeros_like(self.weights)
        adam, none = cell.optimizer == "adam", Weights(*[np.zeros((0, 0))] * _PARTS)
        self.moments = [zeros_like(self.weights) if adam else none for _ in range(2)]
        support = language.support
        self.work = make_scratch(cell.batch, support, self.weights)
        self.task = Task(support, np.array(cell.labels), cell.score_scale, language.blind)
        q, k, v, o = cell.role_ratios
        scores = 0.0 if factorized_attention(cell.parameterization) else 1.0
        self.schedule = Schedule(
            lr=cell.lr,
            qk_ratio=cell.qk_ratio,
            roles=(scores, k, q, v, o),
            ramp_steps=cell.ramp_steps,
            ratio_from=cell.ratio_from,
            ratio_until=cell.max_steps if cell.ratio_until is None else cell.ratio_until,
            adam=adam,
            decays=(scores * cell.qk_decay, cell.qk_decay, cell.qk_decay, cell.ov_decay, cell.ov_decay),
            gradient_norm=cell.gradient_norm or 0.0,
        )
        self.stream = make_stream(language, cell.seed) if cell.fresh else no_stream()
        self.sample, self.matched = _training_data(cell)
        self.held_out = draw_counts(language, cell.evaluated, np.random.default_rng([cell.seed, 3]))
        self.step = 0
        self.epoch_losses: list[float] = []
        self.history: list[dict[str, float]] = []
        self.reached = False
        self.diverged = False
        self._accumulated = 0.0
        self._next_record = 0
        self._record()

    @property
    def finished(self) -> bool:
        """Whether the stop rule is met, the cap is hit, or the cell has diverged."""
        return self.reached or self.diverged or self.step >= self.cell.max_steps

    def epoch(self) -> float:
        """Train one epoch (or what the cap leaves of it) and return its mean loss."""
        loss = self.advance(min(self.cell.batches, self.cell.max_steps - self.step))
        self.epoch_losses.append(loss)
        self.diverged = not math.isfinite(loss) or loss > _LOST
        self.reached = not self.diverged and self._meets_rule(loss)
        if self.diverged or self.finished or len(self.epoch_losses) >= self._next_record:
            self._record()
        return loss

    def advance(self, batches: int) -> float:
        """Train so many steps (of a fixed sample at most an epoch) and return their mean loss."""
        loss: float = train_epoch(
            self.step,
            batches,
            self.task,
            self.sample,
            self.stream,
            self.schedule,
            self.weights,
            self.gradients,
            *self.moments,
            self.work,
        )
        self.step += batches
        return loss

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Train to the end and return the result."""
        while not self.finished:
            self.epoch()
            if progress is not None:
                progress(self.step, self.cell.max_steps)
        return self.result()

    def result(self) -> dict[str, Any]:
        """Scores on held-out sequences, how training went, and its history. Plain JSON data."""
        about = {
            "steps": self.step,
            "reached": self.reached,
            "diverged": self.diverged,
            "train_loss": None if self.diverged else self.epoch_losses[-1],
            "window_losses": _window_means(self.epoch_losses),
            "history": self.history,
        }
        if self.diverged:
            nothing = dict.fromkeys(("loss", "accuracy", "query_mass", "mrta", "ac", "acmc", "dtap"))
            return about | nothing | {"null": dict.fromkeys(("mrta", "ac", "acmc")), "covert": None}
        scores = evaluate(self.cell, self.weights, self.held_out)
        return about | {
            "loss": float(scores.loss.mean()),
            "accuracy": float(scores.correct.mean()),
            "query_mass": float(scores.query_mass.mean()),
            **summarize(scores.mass, scores.probability, scores.null_mass),
            "covert": covert_channel(
                self.cell, self.weights, self.held_out, np.random.default_rng([self.cell.seed, 4])
            ),
        }

    def _meets_rule(self, loss: float) -> bool:
        if self.cell.stop == "epoch":
            return loss <= self.cell.target_loss
        if self.cell.stop == "never":
            return False
        self._accumulated += loss
        met = self._accumulated <= self.cell.target_loss
        if len(self.epoch_losses) % 100 == 0:
            self._accumulated = 0.0
        return met

    def _record(self) -> None:
        """Read loss (training subset) and attention (held-out) off the weights as they are now."""
        epoch = len(self.epoch_losses)
        self._next_record = max(epoch + 1, math.ceil(epoch * _HISTORY_GROWTH))
        entry = {"step": self.step, "loss": math.nan, "mrta": math.nan}
        if not self.diverged:
            entry["loss"] = float(evaluate(self.cell, self.weights, self.matched).loss.mean())
            shares = [share for _, share in attended(self.cell, self.weights, self.held_out)]
            common = self.cell.language.common
            entry["mrta"] = float(np.concatenate([share[:, common:].sum(1) for share in shares]).mean())
        self.history.append(entry)


def train(
    cell: SyntheticCell, *, folder: Path | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Train ``cell`` to its end; see :meth:`Trainer.result`. Made to be called by a sweep."""
    return Trainer(cell).run(progress)


def _training_data(cell: SyntheticCell) -> tuple[Sample, Counts]:
    """The batches of an epoch, and the subset on which the matched loss is measured."""
    language, generator = cell.language, np.random.default_rng([cell.seed, 1])
    if cell.fresh:
        room = Sample(
            np.zeros((1, cell.batch, language.support.shape[1])),
            np.zeros((1, language.classes + 1), np.int64),
        )
        return room, draw_counts(language, _MATCHED, generator)
    drawn = [draw_counts(language, cell.batch, generator) for _ in range(cell.batches)]
    sample = Sample(np.stack([batch.counts for batch in drawn]), np.stack([batch.starts for batch in drawn]))
    return sample, _join(drawn[: max(1, _MATCHED // cell.batch)])


def _join(batches: list[Counts]) -> Counts:
    """Many sorted batches as one."""
    classes = range(len(batches[0].starts) - 1)
    groups = [
        np.concatenate([batch.counts[batch.starts[c] : batch.starts[c + 1]] for batch in batches])
        for c in classes
    ]
    return Counts(np.concatenate(groups), np.cumsum([0, *(len(group) for group in groups)]))


def _window_means(losses: list[float], window: int = 100) -> list[float]:
    """The mean loss of each ``window`` epochs in a row: what the released notebooks print."""
    return [float(np.mean(losses[i : i + window])) for i in range(0, len(losses) - window + 1, window)]


# --- What a cell does on a sample: loss, probability, attention, and its covert channel ---
# The covert channel: common tokens are drawn alike for all classes, so which of them are in a sequence says
# nothing. A query that names the class lets a model look at another common token for each class, and read
# the class off there.

_SHUFFLES = 20


class Evaluation(NamedTuple):
    """One number per sequence, in the order of the counts."""

    loss: np.ndarray
    probability: np.ndarray  # of the right next token
    correct: np.ndarray  # whether it is the likeliest one
    mass: np.ndarray  # attention on distinct tokens
    null_mass: np.ndarray  # the same for uniform attention over the positions that can be attended
    query_mass: np.ndarray  # attention on the query's own token (the position itself and its copies)


def evaluate(cell: SyntheticCell, weights: Weights, sample: Counts) -> Evaluation:
    """What ``cell`` with ``weights`` does on ``sample``, in plain numpy."""
    language = cell.language
    parts: list[list[np.ndarray]] = []
    for c, (counts, attention) in enumerate(attended(cell, weights, sample)):
        logits = attention @ weights.table[language.support[c]]
        if weights.output.shape[0]:
            logits = logits @ weights.output
        logits -= logits.max(1, keepdims=True)
        label = logits[:, cell.labels[c]]
        log_probability = label - np.log(np.exp(logits).sum(1))
        parts.append(
            [
                -log_probability,
                np.exp(log_probability),
                label == 0,
                attention[:, language.common :].sum(1),
                counts[:, language.common :].sum(1) / counts.sum(1),
                attention[:, language.queries[c]],
            ]
        )
    return Evaluation(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def attended(
    cell: SyntheticCell, weights: Weights, sample: Counts
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each class the counts of its sequences, and the attention on all occurrences of each token."""
    for c, tokens in enumerate(cell.language.support):
        counts = sample.counts[sample.starts[c] : sample.starts[c + 1]]
        if weights.keys.shape[0]:
            scores = cell.score_scale * (weights.keys[tokens] @ weights.queries[c])
        else:
            scores = cell.score_scale * weights.scores[c, tokens]
        attention = counts * np.exp(scores - scores.max())
        yield counts, attention / attention.sum(1, keepdims=True)


def covert_channel(
    cell: SyntheticCell, weights: Weights, sample: Counts, generator: np.random.Generator
) -> dict[str, Any]:
    """What the attended common tokens of ``sample`` say about the class.

    - ``bits``: mutual information between the class and a common token drawn with the model's attention
      among the common tokens (0 to log2 of the number of classes), as estimated from the sample;
    - ``null_bits``: the same with the classes shuffled over the sequences, mean of 20: what the estimate
      gives when there is nothing, since it is biased upward;
    - ``common_accuracy``: how often the model is right when it can attend to common tokens only;
    - ``distinct_accuracy``: how often when it can attend to distinct tokens only.
    """
    common = cell.language.common
    shares, classes = [], []
    parts: dict[str, list[np.ndarray]] = {"common": [], "distinct": []}
    for c, (_, attention) in enumerate(attended(cell, weights, sample)):
        values = weights.table[cell.language.support[c]]
        for name, columns in (("common", slice(0, common)), ("distinct", slice(common, None))):
            # The scale of logits does not change which is largest.
            logits = attention[:, columns] @ values[columns]
            if weights.output.shape[0]:
                logits = logits @ weights.output
            parts[name].append(logits.argmax(axis=1) == cell.labels[c])
        shares.append(attention[:, :common] / np.maximum(attention[:, :common].sum(1, keepdims=True), 1e-300))
        classes.append(np.full(len(attention), c))
    share, label = np.concatenate(shares), np.concatenate(classes)
    shuffled = [mutual_bits(share, generator.permutation(label)) for _ in range(_SHUFFLES)]
    return {
        "bits": mutual_bits(share, label),
        "null_bits": float(np.mean(shuffled)),
        **{f"{name}_accuracy": float(np.concatenate(part).mean()) for name, part in parts.items()},
    }


def mutual_bits(share: np.ndarray, label: np.ndarray) -> float:
    """Mutual information in bits between ``label`` and a column drawn from the rows of ``share``.

    >>> mutual_bits(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0, 1]))
    1.0
    """
    joint = np.stack([share[label == c].sum(axis=0) for c in np.unique(label)]) / len(share)
    apart = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
    held = joint > 0
    return float((joint[held] * np.log2(joint[held] / apart[held])).sum())
