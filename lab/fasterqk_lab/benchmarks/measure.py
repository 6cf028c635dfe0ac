"""`measure` on HateXplain posts against one text at a time, the forward passes it needs, and ferret.

All score the same importance (attention by rollout) with the same k: 10 to 100 percent in tens, rounded down,
without a null. Ferret is timed where it can be imported; it is given the importance, and scores sufficiency,
comprehensiveness, AUPRC, token F1 and token IOU. The others form the attention too.
"""

import json
import lzma
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fasterqk.attention import (
    CONVENTIONS,
    Batch,
    HuggingFaceClassifier,
    Instance,
    Measurement,
    collate,
    encode_for_classifier,
    faithfulness,
    measure,
    read_example,
)

POSTS = 200
SIZE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
BATCH_SIZES = (8, 16, 32, 64)
_DATA = Path(__file__).parents[3] / "data"
_CLASSES = ("hatespeech", "normal", "offensive")
PERCENTS, ROUNDING = CONVENTIONS["ferret"]


def run(progress: Callable[[float, float], None]) -> dict[str, Any]:
    """Seconds of every way, their ratios, and the largest difference between their numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tokenizer, model, instances = _setting()
        _measured(model, instances[:8], 8)  # first calls set things up
        steps = len(BATCH_SIZES) + 2
        seconds, needed = {}, {}
        for step, size in enumerate(BATCH_SIZES):
            start = time.perf_counter()
            found = _measured(model, instances, size)
            seconds[size] = time.perf_counter() - start
            needed[size] = _forward_passes(model, instances, size)
            progress(step + 1, steps)
        start = time.perf_counter()
        plain = _plain(model, instances, found)
        plain_seconds = time.perf_counter() - start
        progress(steps - 1, steps)
        best = min(seconds, key=lambda size: seconds[size])
        own = found.faithfulness
        result: dict[str, Any] = {
            "speedup": plain_seconds / seconds[best],
            "plain_seconds": plain_seconds,
            "seconds": seconds[best],
            "batch_size": best,
            "needed_seconds": min(needed.values()),
            "over_needed": seconds[best] / min(needed.values()),
            "max_difference": float(np.abs(own.sufficient - plain[0]).max(initial=0)),
            "posts": len(instances),
            "k": list(PERCENTS),
            "threads": 1,
        }
        result["max_difference"] = max(
            result["max_difference"], float(np.abs(own.comprehensive - plain[1]).max(initial=0))
        )
        result |= _ferret(tokenizer, model, instances, found, seconds[best])
        progress(steps, steps)
    finally:
        torch.set_num_threads(threads)
    return result


def _measured(model: HuggingFaceClassifier, instances: list[Instance], size: int) -> Measurement:
    found = measure(model, instances, percents=PERCENTS, rounding=ROUNDING, batch_size=size)
    found.summary()
    return found


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
    start = time.perf_counter()
    for batch in asked:
        model.predict(batch)
    return time.perf_counter() - start


def _plain(
    model: HuggingFaceClassifier, instances: list[Instance], found: Measurement
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """One text and one k at a time, attention included: the outcomes on the top k% alone and without them."""
    parts = []
    for instance, importance in zip(instances, found.importance, strict=True):
        batch = collate([instance])
        whole = model.read(batch).answer.outcomes
        options = {"percents": PERCENTS, "rounding": ROUNDING, "whole": whole}
        parts.append(faithfulness(model.predict, batch, importance[None], **options))  # type: ignore[arg-type]
    alone, without = ([getattr(one, name) for one in parts] for name in ("sufficient", "comprehensive"))
    return np.concatenate(alone), np.concatenate(without)


def _ferret(
    tokenizer: Any, model: HuggingFaceClassifier, instances: list[Instance], found: Measurement, ours: float
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
        target = int(found.faithfulness.predicted[number])
        rationale = np.zeros(len(instance.tokens), dtype=int)
        rationale[instance.rankable] = instance.rationale
        given = ExplanationWithRationale(
            instance.texts[0],
            list(instance.pieces),
            found.importance[number],
            "attention",
            target,
            rationale.tolist(),
        )
        for evaluator in evaluators if rationale.any() else evaluators[:2]:
            scored = evaluator.compute_evaluation(given, target, top_k_rationale=int(rationale.sum()))
            scores[evaluator.SHORT_NAME].append(float(np.mean(scored.score)))
    taken = time.perf_counter() - start
    summary = found.summary()
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
            rated = [[int(mark) for mark in own] for own in record.get("rationales") or []]
            if record["split"] != "test" or record["label"] not in _CLASSES:
                continue
            if any(len(own) != len(words) for own in rated):
                continue
            relevance = np.mean(rated, 0).tolist() if rated else [0] * len(words)
            line = {"tokens": words, "relevance": relevance, "label": record["label"], "id": record["id"]}
            examples.append(read_example(line, record["id"]))
    return examples
