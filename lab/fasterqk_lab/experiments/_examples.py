"""What needs the weights of trained cells: single test examples with the attention of each arm, and facts."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fasterqk.attention import Aggregation
from fasterqk.attention.aggregation import null_row
from fasterqk_lab.experiments._registry import Cell
from fasterqk_lab.figures import save_examples
from fasterqk_lab.models._classifier import attention_rows, head_rows
from fasterqk_lab.models._generator import GPTAnswerGenerator
from fasterqk_lab.runs import Store
from fasterqk_lab.tasks import LabelledInstances, load_task
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._batches import pack_questions
from fasterqk_lab.training._classification import Classification
from fasterqk_lab.training._generation import (
    ROLLOUT,
    Generation,
    MeasuredGenerator,
    answered_instances,
    generate,
    measure_fit,
    measure_steps,
)
from fasterqk_lab.training._loop import load_trained

if TYPE_CHECKING:
    from fasterqk_lab.experiments._comparison import Outcome

COUNT = 12
READ_POSITION = "[read]"
# Everything that an arm had written before a step.
ANSWER = "[its own answer so far]"


def trained_facts(outcome: "Outcome", compute: Callable[[Any], Any]) -> dict[Cell, Any]:
    """What ``compute`` says of every trained cell: its model and data come from the store, or it is read."""
    runner = outcome.runner
    assert runner is not None

    def fact(cell: TrainConfig) -> Any:
        return compute(load_trained(cell, Store(runner.out).folder(cell)))

    cells = outcome.comparison.cells().items()
    return {(arm, seed): runner.fact(f"{arm} {seed}", partial(fact, cell)) for (arm, seed), cell in cells}


def save_attention(outcome: "Outcome", arms: Mapping[str, TrainConfig], out: Path) -> None:
    """Write single examples with the attention of all ``arms``, for the page."""
    comparison, config = outcome.comparison, next(iter(arms.values()))
    seed = comparison.seeds[0]
    save_examples(
        out,
        comparison.key,
        title=f"{comparison.title}: where it looks",
        caption=f"Seed {seed}. {outcome.setting()}.",
        arms=list(arms),
        examples=attention_examples(arms, seed, out),
        sensitive=load_task(config.task, form=config.data.form, file=config.data.file).sensitive,
    )


def attention_examples(
    arms: Mapping[str, TrainConfig], seed: int, out: Path, count: int = COUNT
) -> list[dict[str, Any]]:
    """Test examples with relevant tokens, as `fasterqk_lab.figures._documents` keeps them.

    Each has its ``tokens`` (the read position last, where it is one of its own), their ``relevance``, the
    ``label`` and, for each of ``arms`` with ``seed``, ``prediction``, ``probability`` of the right answer and
    the weights of each token. The weights of the models come from the store under ``out``.
    """
    cells = {arm: config.replace(seed=seed) for arm, config in arms.items()}
    loaded: dict[str, Any] = {arm: load_trained(cell, Store(out).folder(cell)) for arm, cell in cells.items()}
    first = next(iter(loaded.values()))
    if isinstance(first, Generation):
        return answer_examples(loaded, count)
    task = first.task
    # The position that is read is the last token, or one of its own after it.
    added = 1 if next(iter(cells.values())).model.read == "after" else 0
    chosen = _choose(task.splits["test"], count)
    readings = {arm: _read(workload, chosen) for arm, workload in loaded.items()}
    examples = []
    for place, number in enumerate(chosen):
        example = task.splits["test"][number]
        relevance = np.zeros(len(example.tokens)) if example.relevance is None else example.relevance
        examples.append(
            {
                "tokens": [*(task.vocabulary[token] for token in example.tokens), *[READ_POSITION] * added],
                "relevance": [*relevance.tolist(), *[0.0] * added],
                "read": len(example.tokens) - 1 + added,
                "label": task.classes[example.label],
                "arms": {arm: reading[place] for arm, reading in readings.items()},
            }
        )
    return examples


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
        heads = head_rows(workload.model, tokens, read)
        names = ["attention"] if len(heads) == 1 else [f"layer {k + 1}" for k in range(len(heads))]
        layers = {name: layer[0].mean(0).tolist() for name, layer in zip(names, heads, strict=True)}
        readings.append(
            {
                "prediction": classes[int(probability.argmax())],
                "probability": float(probability[labels[0]]),
                "layers": ({} if len(heads) == 1 else {"rollout": rows[0].tolist()}) | layers,
                "heads": {name: layer[0].tolist() for name, layer in zip(names, heads, strict=True)},
            }
        )
    return readings


def answer_examples(workloads: Mapping[str, Generation], count: int) -> list[dict[str, Any]]:
    """The first test questions, as `fasterqk_lab.figures._documents` keeps them.

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

    def rows(aggregation: Aggregation) -> list[list[float]]:
        measured = measure_steps(reader, instances, aggregation=aggregation)
        prompts = [
            row[: len(prompt)] for row, prompt in zip(measured.importance, questions.prompts, strict=True)
        ]
        return [[*row.tolist(), 1 - float(row.sum())] for row in prompts]

    layers = {"rollout": rows(ROLLOUT)}
    heads: dict[str, list[list[list[float]]]] = {}
    for k in range(len(model.blocks)):
        layers[f"layer {k + 1}"] = rows(Aggregation("layer", k))
        heads[f"layer {k + 1}"] = [
            rows(Aggregation("layer", k, head=head)) for head in range(workload.config.model.heads)
        ]
    return [
        {
            "prediction": task.text([token for token in answer if token != task.end]),
            "probability": float(probability[place]),
            "layers": {name: weights[place] for name, weights in layers.items()},
            "heads": {name: [weights[place] for weights in by_head] for name, by_head in heads.items()},
        }
        for place, answer in enumerate(written)
    ]
