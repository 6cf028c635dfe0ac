"""Train one cell to its stop rule, and say what it came to."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.attention import summarize
from fasterqk.console import Progress
from fasterqk_lab.synthetic._cell import (
    SyntheticCell,
    empty_like,
    initial_matrices,
    pack,
    zeros_like,
)
from fasterqk_lab.synthetic._evaluate import attention_mass, covert_channel, evaluate
from fasterqk_lab.synthetic._kernel import (
    Sample,
    Schedule,
    Task,
    make_scratch,
    make_stream,
    no_stream,
    train_epoch,
)
from fasterqk_lab.synthetic._language import Counts, draw_counts

_MATCHED = 1600  # training sequences on which the loss is measured along training, in evaluation mode
_HISTORY_GROWTH = 1.07  # the history is read at epochs that grow by this factor
_LOST = 100.0  # a mean loss this far above chance (ln 50 = 3.9) does not come back


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
            cell.parameterization,
            language.vocabulary,
            cell.qk_init,
            cell.ov_init,
            seed,
            cell.outputs,
        )
        self.weights = pack(self.matrices, language.queries, cell.outputs)
        self.gradients = zeros_like(self.weights)
        moments = zeros_like if cell.optimizer == "adam" else empty_like
        self.moments = moments(self.weights), moments(self.weights)
        support = language.support
        self.work = make_scratch(cell.batch, support, self.weights)
        self.task = Task(support, np.array(cell.labels), cell.score_scale, language.blind)
        self.schedule = Schedule(
            lr=cell.lr,
            qk_ratio=cell.qk_ratio,
            roles=cell.role_ratios,
            ramp_steps=cell.ramp_steps,
            adam=cell.optimizer == "adam",
            decays=(cell.qk_decay, cell.ov_decay),
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
            entry["mrta"] = float(attention_mass(self.cell, self.weights, self.held_out).mean())
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
