"""Single questions with the attention that both arms pay to their prompt while they answer."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fasterqk.training.answer_batches import pack_questions
from fasterqk.training.answer_measure import answered, generate, measure_fit, step_attention
from fasterqk.training.generation import Generation


def answer_examples(workloads: Mapping[str, Generation], count: int) -> list[dict[str, Any]]:
    """The first test questions, as `fasterqk.report.examples` keeps them.

    The weights of an arm are its rollout over the prompt, averaged over the steps of its own answer.
    """
    first = next(iter(workloads.values()))
    questions = first.at_end["test"].questions
    shown = questions.take(np.arange(min(count, len(questions))))
    readings = {arm: _readings(workload, shown) for arm, workload in workloads.items()}
    return [
        {
            "tokens": [first.task.vocabulary[token].replace("Ġ", "") or "·" for token in prompt],
            "relevance": shown.relevance[place].tolist(),
            "read": len(prompt) - 1,
            "label": " / ".join(dict.fromkeys(shown.gold[place])),
            "arms": {arm: reading[place] for arm, reading in readings.items()},
        }
        for place, prompt in enumerate(shown.prompts)
    ]


def _readings(workload: Generation, questions: Any) -> list[dict[str, Any]]:
    model, task = workload.model, workload.task
    packed = pack_questions(questions)
    written = generate(model, packed, task.end, workload.config.answer_tokens)
    probability = measure_fit(model, packed).mean
    steps = pack_questions(answered(questions, written))
    found = []
    for place, answer in enumerate(written):
        rows = step_attention(model, steps.batch(torch.tensor([place])))
        prompt = len(questions.prompts[place])
        found.append(
            {
                "prediction": task.text([token for token in answer if token != task.end]),
                "probability": float(probability[place]),
                "layers": {"rollout": rows.rollout.mean(0)[:prompt].tolist()},
            }
        )
    return found
