"""Training steps of the paper's models on HateXplain and SQuAD: ours against plain full-sequence modules.

Both ways take the same batches, AdamW with clipping, one after the other in small blocks.
"""

import statistics
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from fasterqk_lab.benchmarks._plain import PlainClassifier, PlainGenerator, Progress, compared, take_turns
from fasterqk_lab.experiments.table_squad import SIZES
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._batches import PackedQuestions
from fasterqk_lab.training._classification import Classification
from fasterqk_lab.training._generation import Generation
from fasterqk_lab.training._steps import Steps, build_trainable


def _step_seconds(
    plain: Callable[[], None],
    ours: Callable[[], Any],
    counts: tuple[int, int],
    rounds: int,
    progress: Progress,
) -> tuple[float, float]:
    """Seconds of a step of both ways, the median over rounds of so many steps each."""

    def repeat(step: Callable[[], Any], count: int) -> Callable[[], None]:
        return lambda: [step() for _ in range(count)] and None

    ways = {"plain": repeat(plain, counts[0]), "ours": repeat(ours, counts[1])}
    seconds = take_turns(ways, rounds, progress)
    plain_seconds, our_seconds = (
        statistics.median(values) / count for values, count in zip(seconds.values(), counts, strict=True)
    )
    return plain_seconds, our_seconds


def _plain_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    options = config.optimisation
    return torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=options.weight_decay)


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
    ours = Steps(config, trainable)
    steps = PLAIN_STEPS, OUR_STEPS
    plain_seconds, seconds = _step_seconds(_plain_step(trainable, config), ours.step, steps, ROUNDS, progress)
    return compared(plain_seconds, seconds) | {
        "plain_steps_per_second": 1 / plain_seconds,
        "steps_per_second": 1 / seconds,
        "batch_size": config.optimisation.batch_size,
        "threads": torch.get_num_threads(),
        "rounds": ROUNDS,
    }


def _plain_step(trainable: Classification, config: TrainConfig) -> Callable[[], None]:
    model, train = PlainClassifier(trainable.model), trainable.splits["train"]
    optimizer = _plain_optimizer(model, config)
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


# --- SQuAD: texts padded to 256 tokens with the head everywhere ---
# The whole vocabulary of GPT-2 is there, as in the paper: 21.7 million parameters. Windows at a random
# offset, then whole paragraphs.

FORMS = {"random": "random-full-vocabulary", "whole": "whole-full-vocabulary"}
BATCH = 16
SQUAD_ROUNDS = 3
SQUAD_STEPS = 1, 2  # plain and ours
# Questions for the evaluation that shows the model at work, and the label of tokens outside answers.
EVALUATED = 16
IGNORED = -100


def run_squad(progress: Progress) -> dict[str, Any]:
    """Seconds per step of both ways and their ratio, with one evaluation."""
    forms: dict[str, dict[str, Any]] = {}
    for number, (name, form) in enumerate(FORMS.items()):
        trainable = build_trainable(_squad_config(form))

        def report(done: int, total: int, before: int = number) -> None:
            progress(before * total + done, len(FORMS) * total)

        forms[name] = _squad_seconds(trainable, report)
        if name == "random":
            shown = ("loss", "validation_loss", "test_accuracy", "test_f1", "mrta", "null_mrta")
            scores = trainable.evaluate()
            forms[name] |= {
                "parameters": sum(parameter.numel() for parameter in trainable.model.parameters()),
                "evaluation": {key: scores[key] for key in scores if key in shown},
            }
    about = {"batch_size": BATCH, "threads": torch.get_num_threads(), "rounds": SQUAD_ROUNDS}
    return forms["random"] | {"whole": forms["whole"]} | about


def _squad_config(form: str) -> TrainConfig:
    subsets = {"train_limit": 20_000, "train_subset": EVALUATED, "along_subset": EVALUATED}
    changes = {"form": form, "batch_size": BATCH, "accumulate": 1, "qk_ratio": 20, "answer_tokens": 8}
    return TrainConfig("squad", **(SIZES["paper"] | changes | subsets))


def _squad_seconds(trainable: Generation, progress: Progress) -> dict[str, float]:
    ours, losses = Steps(trainable.config, trainable), []
    plain_seconds, seconds = _step_seconds(
        _plain_squad_step(trainable), lambda: losses.append(ours.step()), SQUAD_STEPS, SQUAD_ROUNDS, progress
    )
    size = trainable.config.optimisation.batch_size
    return compared(plain_seconds, seconds) | {
        "plain_examples_per_second": size / plain_seconds,
        "examples_per_second": size / seconds,
        "mean_tokens": float(trainable.train.lengths.double().mean()),
        "first_loss": losses[SQUAD_STEPS[1]],
        "last_loss": losses[-1],
    }


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
