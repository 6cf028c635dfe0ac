"""Single examples with the attention that both arms pay to them, from the weights in the store."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fasterqk.experiments.answer_examples import answer_examples
from fasterqk.experiments.arms import Experiment
from fasterqk.runs import Store
from fasterqk.tasks import Examples
from fasterqk.tasks.answers import ANSWER_TASKS
from fasterqk.training.classification import Classification
from fasterqk.training.measure import attention_rows
from fasterqk.training.trained import trained

COUNT = 12
READ_POSITION = "[read]"


def attention_examples(experiment: Experiment, out: Path, count: int = COUNT) -> list[dict[str, Any]]:
    """Test examples with relevant tokens, as `fasterqk.report.examples` keeps them.

    Each has its ``tokens`` (the read position last, where it is one of its own), their ``relevance``, the
    ``label`` and, for both arms of the first seed, ``prediction``, ``probability`` of the right answer and
    the weights of each token.
    """
    store = Store(out)
    seed = experiment.seeds[0]
    cells = {arm: config.replace(seed=seed) for arm, config in experiment.arms.items()}
    loaded: dict[str, Any] = {arm: trained(config, store.folder(config)) for arm, config in cells.items()}
    if next(iter(cells.values())).task in ANSWER_TASKS:
        return answer_examples(loaded, count)
    workloads: dict[str, Classification] = loaded
    task = next(iter(workloads.values())).task
    # The position that is read is the last token, or one of its own after it.
    added = 1 if next(iter(cells.values())).read == "after" else 0
    chosen = _choose(task.splits["test"], count)
    readings = {arm: _read(workload, chosen) for arm, workload in workloads.items()}
    found = []
    for place, number in enumerate(chosen):
        example = task.splits["test"][number]
        relevance = np.zeros(len(example.tokens)) if example.relevance is None else example.relevance
        found.append(
            {
                "tokens": [*(task.vocabulary[token] for token in example.tokens), *[READ_POSITION] * added],
                "relevance": [*relevance.tolist(), *[0.0] * added],
                "read": len(example.tokens) - 1 + added,
                "label": task.classes[example.label],
                "arms": {arm: reading[place] for arm, reading in readings.items()},
            }
        )
    return found


def _choose(test: Examples, count: int) -> list[int]:
    """Rated examples: as many of each group (number of attractors, say) as there are to go round."""
    rated = np.flatnonzero(test.rated)
    groups = next(iter(test.groups.values()), np.zeros(len(test), dtype=np.int64))
    values = np.unique(groups[rated])
    queues = [list(rated[groups[rated] == value]) for value in values]
    chosen: list[int] = []
    while len(chosen) < count and any(queues):
        chosen += [int(queue.pop(0)) for queue in queues if queue]
    return chosen[:count]


def _read(workload: Classification, chosen: Sequence[int]) -> list[dict[str, Any]]:
    split, classes = workload.splits["test"], workload.task.classes
    readings = []
    for number in chosen:
        tokens, read, labels = split.batch(torch.tensor([number]))
        logits, rows, _ = attention_rows(workload.model, tokens, read)
        probability = logits.double().softmax(1)[0]
        weights = rows[0].tolist()
        readings.append(
            {
                "prediction": classes[int(probability.argmax())],
                "probability": float(probability[labels[0]]),
                "layers": {"attention" if len(workload.model.blocks) == 1 else "rollout": weights},
            }
        )
    return readings
