"""SQuAD training steps of the paper's model: ours against texts padded to 256 with the head everywhere.

Both take the same questions in batches of 16, AdamW with clipping and label smoothing, one after the other
in small blocks, so that whatever else the machine does meets both. The whole vocabulary of GPT-2 is there,
as in the paper: 21.7 million parameters. Windows at a random offset, then whole paragraphs.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fasterqk_lab.benchmarks._plain import PlainGenerator
from fasterqk_lab.experiments.table_squad import SIZES
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._batches import PackedQuestions
from fasterqk_lab.training._generation import Generation
from fasterqk_lab.training._steps import Steps, build_trainable

FORMS = {"random": "random-full-vocabulary", "whole": "whole-full-vocabulary"}
BATCH = 16
ROUNDS = 3
OUR_STEPS = 2
# Questions for the evaluation that shows the model at work, and the label of tokens outside answers.
EVALUATED = 16
IGNORED = -100


def run(progress: Callable[..., None]) -> dict[str, Any]:
    """Seconds per step of both ways (median over rounds) and their ratio, with one evaluation."""
    found: dict[str, Any] = {}
    for number, (name, form) in enumerate(FORMS.items()):
        trainable = build_trainable(_config(form))
        timed = _timed_steps(trainable, progress, number * ROUNDS)
        if name == "random":
            found |= timed | {
                "parameters": sum(parameter.numel() for parameter in trainable.model.parameters()),
                "evaluation": {
                    key: value
                    for key, value in trainable.evaluate().items()
                    if key in ("loss", "validation_loss", "test_accuracy", "test_f1", "mrta", "null_mrta")
                },
            }
        else:
            found[name] = timed
    return found | {"batch_size": BATCH, "threads": torch.get_num_threads(), "rounds": ROUNDS}


def _config(form: str) -> TrainConfig:
    subsets = {"train_limit": 20_000, "train_subset": EVALUATED, "along_subset": EVALUATED}
    changes = {"form": form, "batch_size": BATCH, "accumulate": 1, "qk_ratio": 20, "answer_tokens": 8}
    return TrainConfig("squad", **(SIZES["paper"] | changes | subsets))


def _timed_steps(trainable: Generation, progress: Callable[..., None], before: int) -> dict[str, float]:
    config = trainable.config
    batches = trainable.batches(0)
    plain = _plain_step(trainable)
    ours = Steps(config, trainable)
    ours.step()
    plain(batches[0])
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    losses = []
    for number in range(ROUNDS):
        start = time.perf_counter()
        plain(batches[1 + number])
        seconds["plain"].append(time.perf_counter() - start)
        start = time.perf_counter()
        losses += [ours.step() for _ in range(OUR_STEPS)]
        seconds["ours"].append((time.perf_counter() - start) / OUR_STEPS)
        progress(before + number + 1, len(FORMS) * ROUNDS)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "speedup": middle["plain"] / middle["ours"],
        "plain_seconds": middle["plain"],
        "seconds": middle["ours"],
        "plain_examples_per_second": config.optimisation.batch_size / middle["plain"],
        "examples_per_second": config.optimisation.batch_size / middle["ours"],
        "mean_tokens": float(trainable.train.lengths.double().mean()),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _plain_step(trainable: Generation) -> Callable[[Tensor], None]:
    """The plain way, as a function that takes a step on a batch."""
    config = trainable.config
    model = PlainGenerator(trainable.model, config.model.dropout).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimisation.lr, weight_decay=config.optimisation.weight_decay
    )

    def step(chosen: Tensor) -> None:
        tokens, labels = padded(trainable.train, chosen, config.model.context)
        optimizer.zero_grad()
        loss = cross_entropy(
            model(tokens).flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED,
            label_smoothing=config.optimisation.label_smoothing,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimisation.clip or torch.inf)
        optimizer.step()

    return step


def padded(split: PackedQuestions, chosen: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Texts padded to ``context`` and the label of every position, both ``(batch, context)``."""
    tokens = torch.zeros(len(chosen), context, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORED)
    for row, number in enumerate(chosen.tolist()):
        start, prompt, length = (int(each[number]) for each in (split.start, split.prompts, split.lengths))
        text = split.tokens[start : start + length]
        tokens[row, :length] = text
        labels[row, prompt - 1 : length - 1] = text[prompt:]
    return tokens, labels
