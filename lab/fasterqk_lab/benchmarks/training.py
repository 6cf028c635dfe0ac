"""The lab's trainings against plain ones: steps on HateXplain and SQuAD, and on the toy language.

Both ways take the same batches, AdamW with clipping, one after the other in small blocks.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from fasterqk_lab.benchmarks._plain import (
    AttentionModel,
    PlainClassifier,
    PlainGenerator,
    Progress,
    compared,
    race,
    timed,
)
from fasterqk_lab.experiments._synthetic import panels
from fasterqk_lab.experiments.table_squad import SIZES
from fasterqk_lab.synthetic import SyntheticCell
from fasterqk_lab.synthetic._train import Trainer
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._batches import PackedQuestions
from fasterqk_lab.training._classification import Classification
from fasterqk_lab.training._generation import Generation
from fasterqk_lab.training._steps import Steps, build_trainable, one_thread

# --- HateXplain: posts padded to 128 tokens ---
# The plain way computes every position of every post, keeps the whole vocabulary in the optimizer and uses
# torch's defaults.

PADDED_TO = 128
ROUNDS = 7
PLAIN_STEPS, OUR_STEPS = 3, 40


def run_training(progress: Progress) -> dict[str, Any]:
    """Seconds per step of both ways and their ratio."""
    config = TrainConfig("hatexplain", qk_ratio=30)
    trainable = build_trainable(config)
    assert isinstance(trainable, Classification)
    ours = Steps(config, trainable)
    speed = _race_steps(_plain_step(trainable), ours.step, (PLAIN_STEPS, OUR_STEPS), ROUNDS, progress)
    return speed | {"batch_size": config.optimisation.batch_size, "rounds": ROUNDS, "threads": 1}


def _race_steps(
    plain: Callable[[], Any],
    ours: Callable[[], Any],
    counts: tuple[int, int],
    rounds: int,
    progress: Progress,
) -> dict[str, Any]:
    """Seconds of a step of both ways, in rounds of so many steps each."""

    def repeat(step: Callable[[], Any], count: int) -> Callable[[], Any]:
        return lambda: [step() for _ in range(count)]

    with one_thread():
        blocks = race({"plain": repeat(plain, counts[0]), "ours": repeat(ours, counts[1])}, rounds, progress)
    return compared(blocks["plain_seconds"] / counts[0], blocks["seconds"] / counts[1])


def _plain_step(trainable: Classification) -> Callable[[], None]:
    model, train = PlainClassifier(trainable.model), trainable.splits["train"]
    optimizer = _plain_optimizer(model, trainable.config)
    width = min(PADDED_TO, train.tokens.shape[1])
    tokens = pad(train.tokens[:, :width], (0, PADDED_TO - width), value=train.pad)
    read = train.read.clamp_max(PADDED_TO - 1)
    batches = cycle(trainable.batches(0)[:PLAIN_STEPS])

    def step() -> None:
        chosen = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(tokens[chosen], read[chosen]), train.labels[chosen]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _plain_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    options = config.optimisation
    return torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=options.weight_decay)


# --- SQuAD: texts padded to 256 tokens with the head everywhere ---
# The whole vocabulary of GPT-2 is there, as in the paper: 21.7 million parameters. Windows at a random
# offset, then whole paragraphs.

FORMS = {"random": "random-full-vocabulary", "whole": "whole-full-vocabulary"}
BATCH = 16
SQUAD_ROUNDS = 3
SQUAD_STEPS = 1, 2  # plain and ours
IGNORED = -100  # the label of tokens outside answers


def run_squad(progress: Progress) -> dict[str, Any]:
    """Seconds per step of both ways and their ratio."""
    forms: dict[str, dict[str, Any]] = {}
    for number, (name, form) in enumerate(FORMS.items()):
        trainable = build_trainable(squad_config(form))
        assert isinstance(trainable, Generation)

        def report(done: float, total: float, note: str = "", before: int = number) -> None:
            progress(before * total + done, len(FORMS) * total)

        ours = Steps(trainable.config, trainable)
        speed = _race_steps(_plain_squad_step(trainable), ours.step, SQUAD_STEPS, SQUAD_ROUNDS, report)
        forms[name] = speed | {
            "examples_per_second": BATCH / speed["seconds"],
            "plain_examples_per_second": BATCH / speed["plain_seconds"],
            "mean_tokens": float(trainable.train.lengths.double().mean()),
            "parameters": sum(parameter.numel() for parameter in trainable.model.parameters()),
        }
    about = {"batch_size": BATCH, "rounds": SQUAD_ROUNDS, "threads": 1}
    return forms["random"] | {"whole": forms["whole"]} | about


def squad_config(form: str) -> TrainConfig:
    """The paper's model on questions of one form."""
    changes = {"form": form, "batch_size": BATCH, "accumulate": 1, "qk_ratio": 20, "train_limit": 20_000}
    return TrainConfig("squad", **(SIZES["paper"] | changes))


def _plain_squad_step(trainable: Generation) -> Callable[[], None]:
    config, options = trainable.config, trainable.config.optimisation
    model = PlainGenerator(trainable.model, config.model.dropout).train()
    optimizer = _plain_optimizer(model, config)
    batches = cycle(trainable.batches(0))

    def step() -> None:
        tokens, labels = padded(trainable.train, next(batches), config.model.context)
        optimizer.zero_grad()
        cross_entropy(
            model(tokens).flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED,
            label_smoothing=options.label_smoothing,
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip or torch.inf)
        optimizer.step()

    return step


def padded(split: PackedQuestions, chosen: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Texts padded to ``context`` and the label of every position, both ``(batch, context)``."""
    tokens = torch.zeros(len(chosen), context, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORED)
    for row, number in enumerate(chosen.tolist()):
        start, prompt, length = (
            int(column[number]) for column in (split.start, split.prompts, split.lengths)
        )
        text = split.tokens[start : start + length]
        tokens[row, :length] = text
        labels[row, prompt - 1 : length - 1] = text[prompt:]
    return tokens, labels


# --- The toy language: a plain PyTorch loop against the compiled engine, per step ---
# Plain is what a researcher writes first: 32 calls of ``numpy.random.Generator.choice`` per batch, one-hot
# vectors, a module, autograd, SGD; one training on one thread. Ours trains the 40 cells of figure 2 (eight
# panels, five seeds) in two threads of one process. Both draw new sequences for every step, and neither is
# evaluated along the way.

PANELS = list("abcdefgh")
SEEDS, THREADS = 5, 2
TOY_ROUNDS, TOY_PLAIN_STEPS, TOY_STEPS = 5, 60, 1000


def run_synthetic(progress: Progress) -> dict[str, Any]:
    """Time both, several rounds in turn; the shortest time of each counts, other work only adds to it."""
    cells = [replace(panel.cell, fresh=True, stop="never") for panel in panels("literal", PANELS)]
    progress(0, TOY_ROUNDS + 1, "compiling")
    _, compile_seconds = timed(Trainer(replace(cells[0], batches=1)).epoch)
    trainers = [Trainer(replace(cell, seed=seed)) for cell in cells for seed in range(SEEDS)]
    plain_times, our_times = [], []
    for done in range(TOY_ROUNDS):
        progress(done + 1, TOY_ROUNDS + 1, "plain loop and engine")
        with one_thread():
            plain_times.append(float(np.mean([plain_step_seconds(cell) for cell in cells])))
        _, seconds = timed(lambda: advance_all(trainers))
        our_times.append(seconds / (len(trainers) * TOY_STEPS))
    about = {"cells": len(trainers), "threads": THREADS, "compile_seconds": compile_seconds}
    return compared(min(plain_times), min(our_times)) | about


def advance_all(trainers: list[Trainer]) -> None:
    """Our way: so many steps of all cells together."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda trainer: trainer.advance(TOY_STEPS), trainers))


def plain_step_seconds(cell: SyntheticCell, steps: int = TOY_PLAIN_STEPS) -> float:
    """The plain way: seconds per step of one training."""
    language = cell.language
    generator = np.random.default_rng(cell.seed)
    model = AttentionModel(cell.parameterization, language.vocabulary)
    qk = [value for name, value in model.named_parameters() if name.startswith(("key", "query"))]
    ov = [value for name, value in model.named_parameters() if not name.startswith(("key", "query"))]
    optimizer = torch.optim.SGD(
        [{"params": qk, "lr": cell.lr * cell.qk_ratio}, {"params": ov, "lr": cell.lr}]
    )
    support, probabilities = language.support, language.probabilities
    begin = 0.0
    for step in range(steps + 5):
        if step == 5:  # the first steps allocate
            begin = time.perf_counter()
        rows, labels = [], []
        for _ in range(cell.batch):
            c = int(generator.integers(language.classes))
            context = generator.choice(support[c], size=language.context, p=probabilities)
            rows.append(np.append(context, language.queries[c]))
            labels.append(language.next_tokens[c])
        optimizer.zero_grad()
        loss = cross_entropy(model(torch.tensor(np.array(rows))), torch.tensor(labels))
        loss.backward()
        optimizer.step()
        loss.item()
    return (time.perf_counter() - begin) / steps
