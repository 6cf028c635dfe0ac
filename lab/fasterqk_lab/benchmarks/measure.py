"""`measure` on HateXplain posts against one text at a time, the forward passes it needs, and ferret.

All score the same importance (attention by rollout) with the same k: 10 to 100 percent in tens, rounded down,
without a null. Ferret is timed where it can be imported; it is given the importance, and scores sufficiency,
comprehensiveness, AUPRC, token F1 and token IOU. The others form the attention too.
"""

import json
import lzma
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fasterqk.attention import (
    HuggingFaceClassifier,
    Instance,
    Measurement,
    Nulls,
    Passes,
    Removal,
    TorchClassifier,
    measure,
)
from fasterqk.attention.faithfulness import CONVENTIONS, faithfulness
from fasterqk.attention.instances import Batch, collate, encode_for_classifier, read_example
from fasterqk_lab.benchmarks._plain import Progress, compared, timed
from fasterqk_lab.models import Classifier, ClassifierConfig
from fasterqk_lab.training._steps import one_thread

POSTS = 200
SIZE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
BATCH_SIZES = (8, 16, 32, 64)
_DATA = Path(__file__).parents[3] / "data"
_CLASSES = ("hatespeech", "normal", "offensive")
PERCENTS, ROUNDING = CONVENTIONS["ferret"]
REMOVAL = Removal(percents=PERCENTS, rounding=ROUNDING)


def run_measure(progress: Progress) -> dict[str, Any]:
    """Seconds of every way, their ratios, and the largest difference between their numbers."""
    with one_thread():
        tokenizer, model, instances = _setting()
        _measured(model, instances[:8], 8)  # first calls set things up
        steps = len(BATCH_SIZES) + 2
        seconds, needed = {}, {}
        for step, size in enumerate(BATCH_SIZES):
            measured, seconds[size] = timed(lambda: _measured(model, instances, size))  # noqa: B023
            needed[size] = _forward_passes(model, instances, size)
            progress(step + 1, steps)
        plain, plain_seconds = timed(lambda: _plain(model, instances, measured))
        progress(steps - 1, steps)
        best = min(seconds, key=lambda size: seconds[size])
        scores = measured.faithfulness
        pairs = zip((scores.sufficient, scores.comprehensive), plain, strict=True)
        result = compared(plain_seconds, seconds[best]) | {
            "batch_size": best,
            "needed_seconds": min(needed.values()),
            "over_needed": seconds[best] / min(needed.values()),
            "max_difference": max(float(np.abs(ours - other).max(initial=0)) for ours, other in pairs),
            "posts": len(instances),
            "k": list(PERCENTS),
            "threads": 1,
        }
        result |= _ferret(tokenizer, model, instances, measured, seconds[best])
        progress(steps, steps)
    return result


def _measured(model: HuggingFaceClassifier, instances: list[Instance], size: int) -> Measurement:
    measurement = measure(model, instances, removal=REMOVAL, nulls=Nulls(draws=0), passes=Passes(size))
    measurement.summary()
    return measurement


def _forward_passes(model: HuggingFaceClassifier, instances: list[Instance], size: int) -> float:
    """Seconds of nothing but the passes that ``measure`` asks the model for, and one over the whole texts."""
    asked: list[Batch] = []
    predict = model.predict
    model.predict = lambda batch: asked.append(batch) or predict(batch)  # type: ignore[method-assign, func-returns-value]
    try:
        _measured(model, instances, size)
    finally:
        model.predict = predict  # type: ignore[method-assign]
    order = sorted(instances, key=lambda instance: len(instance.tokens))
    asked += [collate(order[start : start + size]) for start in range(0, len(order), size)]
    return timed(lambda: [model.predict(batch) for batch in asked])[1]


def _plain(
    model: HuggingFaceClassifier, instances: list[Instance], measurement: Measurement
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """One text and one k at a time, attention included: the outcomes on the top k% alone and without them."""
    parts = []
    for instance, importance in zip(instances, measurement.importance, strict=True):
        batch = collate([instance])
        whole = model.read(batch).answer.outcomes
        parts.append(faithfulness(model.predict, batch, importance[None], REMOVAL, whole))
    alone, without = ([getattr(part, name) for part in parts] for name in ("sufficient", "comprehensive"))
    return np.concatenate(alone), np.concatenate(without)


def _ferret(
    tokenizer: Any,
    model: HuggingFaceClassifier,
    instances: list[Instance],
    measurement: Measurement,
    ours: float,
) -> dict[str, Any]:
    if find_spec("ferret") is None:
        return {"ferret_seconds": None, "ferret_ratio": None}
    from ferret import (
        AOPC_Comprehensiveness_Evaluation,
        AOPC_Sufficiency_Evaluation,
        AUPRC_PlausibilityEvaluation,
        Tokenf1_PlausibilityEvaluation,
        TokenIOU_PlausibilityEvaluation,
    )
    from ferret.explainers.explanation import ExplanationWithRationale

    kinds = (AOPC_Comprehensiveness_Evaluation, AOPC_Sufficiency_Evaluation, AUPRC_PlausibilityEvaluation)
    kinds += (Tokenf1_PlausibilityEvaluation, TokenIOU_PlausibilityEvaluation)
    evaluators = [kind(model.model, tokenizer) for kind in kinds]
    scores: dict[str, list[float]] = {kind.SHORT_NAME: [] for kind in kinds}
    start = time.perf_counter()
    for number, instance in enumerate(instances):
        target = int(measurement.faithfulness.predicted[number])
        rationale = np.zeros(len(instance.tokens), dtype=int)
        rationale[instance.rankable] = instance.rationale
        explanation = ExplanationWithRationale(
            instance.texts[0],
            list(instance.pieces),
            measurement.importance[number],
            "attention",
            target,
            rationale.tolist(),
        )
        for evaluator in evaluators if rationale.any() else evaluators[:2]:
            scored = evaluator.compute_evaluation(explanation, target, top_k_rationale=int(rationale.sum()))
            scores[evaluator.SHORT_NAME].append(float(np.mean(scored.score)))
    taken = time.perf_counter() - start
    summary = measurement.summary()
    pairs = (("aopc_compr", "aopc_comprehensiveness"), ("aopc_suff", "aopc_sufficiency"))
    pairs += (("auprc_plau", "auprc"),)
    return {
        "ferret_seconds": taken,
        "ferret_ratio": taken / ours,
        **{f"ferret_{name}": float(np.mean(scores[short])) for short, name in pairs},
        **{name: summary[name] for _, name in pairs},
    }


def _setting() -> tuple[Any, HuggingFaceClassifier, list[Instance]]:
    """A BERT of random weights, always the same, its tokenizer, and the first test posts of HateXplain."""
    import transformers

    vocabulary = _DATA / "tokenizers" / "bert-base-uncased" / "vocab.txt"
    names = vocabulary.read_text(encoding="utf-8").splitlines()
    tokenizer = transformers.BertTokenizerFast(vocab={name: number for number, name in enumerate(names)})
    torch.manual_seed(0)
    labels = dict(enumerate(_CLASSES))
    config = transformers.BertConfig(vocab_size=len(names), initializer_range=0.1, id2label=labels, **SIZE)
    model = HuggingFaceClassifier(transformers.BertForSequenceClassification(config))
    return tokenizer, model, encode_for_classifier(_examples(), tokenizer, _CLASSES, 128)


def _examples() -> list[Any]:
    examples: list[Any] = []
    with lzma.open(_DATA / "hatexplain" / "hatexplain.jsonl.xz", "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            if len(examples) == POSTS:
                break
            words = record["text"].split()
            rated = [[int(mark) for mark in marks] for marks in record.get("rationales") or []]
            if record["split"] != "test" or record["label"] not in _CLASSES:
                continue
            if any(len(marks) != len(words) for marks in rated):
                continue
            relevance = np.mean(rated, 0).tolist() if rated else [0] * len(words)
            line = {"tokens": words, "relevance": relevance, "label": record["label"], "id": record["id"]}
            examples.append(read_example(line, record["id"]))
    return examples


# --- Attention and faithfulness in batches against the same code one instance at a time, on one thread ---

INSTANCES = 1000
TOKENS = 28  # as long as a HateXplain post
ATTENTION_PERCENTS = (5, 10, 20, 50)
BATCH = 64
_VOCABULARY = 2000
_TURN = 256


def run_attention(progress: Progress) -> dict[str, Any]:
    """Seconds for both ways, their ratio, and the largest difference between their numbers."""
    with one_thread():
        config = ClassifierConfig(
            vocabulary_size=_VOCABULARY, classes=3, layers=2, width=64, heads=4, head_width=16, init_scale=0.1
        )
        model = Classifier(config, torch.Generator().manual_seed(0))
        wrapped = TorchClassifier(model, classes=("a", "b", "c"), inputs=_inputs, read="last")
        instances = _instances(np.random.default_rng(0))
        _timed_measure(wrapped, instances[:BATCH], BATCH)  # first calls set things up
        seconds, plain_seconds, difference = 0.0, 0.0, 0.0
        # The two take turns, so that whatever else the machine does falls on both.
        for start in range(0, INSTANCES, _TURN):
            some = instances[start : start + _TURN]
            batched, batched_seconds = _timed_measure(wrapped, some, BATCH)
            single, single_seconds = _timed_measure(wrapped, some, 1)
            seconds, plain_seconds = seconds + batched_seconds, plain_seconds + single_seconds
            difference = max(difference, _difference(batched, single))
            progress(start + len(some), INSTANCES)
    return compared(plain_seconds, seconds) | {
        "max_difference": difference,
        "instances": INSTANCES,
        "tokens": TOKENS,
        "k": list(ATTENTION_PERCENTS),
        "batch_size": BATCH,
        "threads": 1,
    }


def _timed_measure(
    model: TorchClassifier, instances: list[Instance], batch_size: int
) -> tuple[Measurement, float]:
    removal, passes = Removal(percents=ATTENTION_PERCENTS), Passes(batch_size)
    return timed(lambda: measure(model, instances, removal=removal, passes=passes))


def _inputs(batch: Batch) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(batch.tokens), torch.from_numpy(batch.last)


def _instances(generator: np.random.Generator) -> list[Instance]:
    return [
        Instance(
            tokens=generator.integers(1, _VOCABULARY, TOKENS),
            rankable=np.ones(TOKENS, dtype=bool),
            relevance=(generator.random(TOKENS) < 0.2) | (np.arange(TOKENS) == 3),
            label=int(generator.integers(3)),
        )
        for _ in range(INSTANCES)
    ]


def _difference(left: Measurement, right: Measurement) -> float:
    pairs = [(left.columns[name], right.columns[name]) for name in left.columns]
    pairs.append((left.faithfulness.sufficient, right.faithfulness.sufficient))
    pairs.append((left.faithfulness.comprehensive, right.faithfulness.comprehensive))
    return max(float(np.abs(a - b).max()) for a, b in pairs)
