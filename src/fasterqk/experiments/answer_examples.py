"""Single questions with the attention that both arms pay to their prompt while they answer."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fasterqk.models.generator import GPTAnswerGenerator
from fasterqk.training.answer_batches import pack_questions
from fasterqk.training.answer_measure import answered, generate, measure_fit, null_rows, step_attention
from fasterqk.training.generation import Generation

# Stands for all that an arm had written before a step.
ANSWER = "[its own answer so far]"


def answer_examples(workloads: Mapping[str, Generation], count: int) -> list[dict[str, Any]]:
    """The first test questions, as `fasterqk.report.examples` keeps them.

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
    rows = null_rows(len(model.blocks), model.config.context)
    steps = rows[len(prompt) - 1 : len(prompt) - 1 + len(answer), : len(prompt)]
    return float((steps.double() @ torch.from_numpy(relevance)).mean())


def _readings(workload: Generation, questions: Any) -> list[dict[str, Any]]:
    model, task = workload.model, workload.task
    packed = pack_questions(questions)
    written = generate(model, packed, task.end, workload.config.answer_tokens)
    probability = measure_fit(model, packed).mean
    steps = pack_questions(answered(questions, written))
    found = []
    for place, answer in enumerate(written):
        rows = step_attention(model, steps.batch(torch.tensor([place])))
        weights = rows.rollout.double().mean(0)[: len(questions.prompts[place])]
        found.append(
            {
                "prediction": task.text([token for token in answer if token != task.end]),
                "probability": float(probability[place]),
                "layers": {"rollout": [*weights.tolist(), 1 - float(weights.sum())]},
            }
        )
    return found
