"""Single examples with the attention that each arm pays to them: texts classified, questions answered."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fasterqk.attention import null_row
from fasterqk.lab.models._generator import GPTAnswerGenerator
from fasterqk.lab.runs import Store
from fasterqk.lab.tasks import LabelledInstances
from fasterqk.lab.training import TrainConfig
from fasterqk.lab.training._answer_measure import (
    ROLLOUT,
    MeasuredGenerator,
    answered_instances,
    generate,
    measure_fit,
    measure_steps,
)
from fasterqk.lab.training._batches import pack_questions
from fasterqk.lab.training._classification import Classification
from fasterqk.lab.training._generation import Generation
from fasterqk.lab.training._loop import load_trained
from fasterqk.lab.training._measure import attention_rows

COUNT = 12
READ_POSITION = "[read]"
# Stands for all that an arm had written before a step.
ANSWER = "[its own answer so far]"


def attention_examples(
    arms: Mapping[str, TrainConfig], seed: int, out: Path, count: int = COUNT
) -> list[dict[str, Any]]:
    """Test examples with relevant tokens, as `fasterqk.lab.report._records` keeps them.

    Each has its ``tokens`` (the read position last, where it is one of its own), their ``relevance``, the
    ``label`` and, for each of ``arms`` with ``seed``, ``prediction``, ``probability`` of the right answer and
    the weights of each token. The weights of the models come from the store under ``out``.
    """
    store = Store(out)
    cells = {arm: config.replace(seed=seed) for arm, config in arms.items()}
    loaded: dict[str, Any] = {
        arm: load_trained(config, store.folder(config)) for arm, config in cells.items()
    }
    if isinstance(next(iter(loaded.values())), Generation):
        return answer_examples(loaded, count)
    workloads: dict[str, Classification] = loaded
    task = next(iter(workloads.values())).task
    # The position that is read is the last token, or one of its own after it.
    added = 1 if next(iter(cells.values())).model.read == "after" else 0
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


def _choose(test: LabelledInstances, count: int) -> list[int]:
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


def answer_examples(workloads: Mapping[str, Generation], count: int) -> list[dict[str, Any]]:
    """The first test questions, as `fasterqk.lab.report._records` keeps them.

    The weights of an arm are its rollout over the prompt, averaged over the steps of its own answer, and
    last what it has on the answer itself.
    """
    first = next(iter(workloads.values()))
    questions = first.at_end["test"].questions
    shown = questions.take(np.arange(min(count, len(questions))))
    readings = {arm: _readings(workload, shown) for arm, workload in workloads.items()}
    return [
        {
            "tokens": [*_words([first.task.vocabulary[token] for token in prompt]), ANSWER],
            "relevance": [*shown.relevance[place].tolist(), 0],
            "null": _null(first.model, prompt, shown.answers[place], shown.relevance[place]),
            "read": len(prompt) - 1,
            "label": " / ".join(dict.fromkeys(shown.gold[place])),
            "arms": {arm: reading[place] for arm, reading in readings.items()},
        }
        for place, prompt in enumerate(shown.prompts)
    ]


def _words(tokens: Sequence[str]) -> list[str]:
    """Tokens as the page shows them: a part of a word begins with ``##``, if blanks begin the others.

    >>> _words(["Q:", " Who", "ever"]), _words(["Q:", "k01"])
    (['Q:', 'Who', '##ever'], ['Q:', 'k01'])
    """
    if not any(token.startswith(" ") for token in tokens):
        return list(tokens)
    return [
        token[1:] if token.startswith(" ") else f"##{token}" if place else token
        for place, token in enumerate(tokens)
    ]


def _null(model: GPTAnswerGenerator, prompt: Any, answer: Any, relevance: Any) -> float:
    """What rollout of uniform attention puts on the relevant tokens, mean over the gold answer's steps."""
    patterns = (MeasuredGenerator.pattern,) * len(model.blocks)
    lengths = range(len(prompt), len(prompt) + len(answer))
    rows = [null_row(patterns, ROLLOUT, length, length - 1)[: len(prompt)] for length in lengths]
    return float((torch.stack(rows).double() @ torch.from_numpy(relevance)).mean())


def _readings(workload: Generation, questions: Any) -> list[dict[str, Any]]:
    model, task = workload.model, workload.task
    packed = pack_questions(questions)
    written = generate(model, packed, task.end, workload.config.evaluation.answer_tokens)
    probability = measure_fit(model, packed).mean
    reader = MeasuredGenerator(model, probability, np.zeros(len(written), dtype=bool))
    instances = answered_instances(questions, written)
    measured = measure_steps(reader, instances, percents=(), need_relevance=False)
    found = []
    for place, answer in enumerate(written):
        weights = measured.importance[place][: len(questions.prompts[place])]
        found.append(
            {
                "prediction": task.text([token for token in answer if token != task.end]),
                "probability": float(probability[place]),
                "layers": {"rollout": [*weights.tolist(), 1 - float(weights.sum())]},
            }
        )
    return found
