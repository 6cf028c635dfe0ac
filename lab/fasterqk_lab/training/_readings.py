"""More readings of a deeper model than rollout and whole layers, for those who ask for them.

- ``heads``: every head by itself, and the best one of a layer and of the model. The best is chosen by the
  score itself, in every arm alike; its null is that of any head, uniform attention.
- ``plain``: rollout without a residual, layers multiplied as they are; ``residual``: rollout of (A + I)/2.
- ``carried``: the token behind every relevant one counts as relevant too. A first layer may carry a token to
  the position behind it, where the next layer then finds it. The null rises with what counts as relevant.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fasterqk.attention import Aggregation, Instance, Measurable, Measurement, measure

ROLLOUTS = {"plain": Aggregation("rollout", residual=0.0), "residual": Aggregation("rollout", residual=0.5)}
# What is kept of each reading.
_SCORES = ("mrta", "ac")


def more_readings(
    model: Measurable,
    instances: Sequence[Instance],
    asked: Sequence[str],
    *,
    layers: int,
    heads: int,
    aggregation: Aggregation,
    batch_size: int,
) -> dict[str, float | None]:
    """The scores of the readings that are ``asked`` for, by flat name.

    Names are ``layer_1_head_2_mrta``, ``layer_1_best_head_mrta``, ``best_head_mrta``, ``plain_mrta``,
    ``residual_mrta`` and, with ``carried_`` before them, those of rollout, layers and heads. A null is called
    ``plain_null_mrta``.
    """
    names = [f"layer:{layer}/head:{head}" for layer in range(layers) for head in range(heads)]
    shared: dict[str, Any] = {
        "percents": (),
        "only": ("mrta",),
        "batch_size": batch_size,
        "max_weights": None,
    }
    shared |= {"stronger_nulls": False, "need_relevance": False}
    found: dict[str, float | None] = {}
    for name in (name for name in ROLLOUTS if name in asked):
        rollout = measure(model, instances, aggregation=ROLLOUTS[name], **shared)
        found |= _of(rollout, f"{name}_", by_layer=False)
    for prefix, own in (("", instances), ("carried_", carried(instances))):
        if (prefix and "carried" not in asked) or (not prefix and "heads" not in asked):
            continue
        scores = names if "heads" in asked else None
        whole = measure(model, own, aggregation=aggregation, by_layer=True, scores=scores, **shared)
        if prefix:
            found |= _of(whole, prefix, by_layer=True)
        if scores:
            found |= {f"{prefix}{name}": value for name, value in _of_heads(whole, layers, heads).items()}
    return found


def carried(instances: Sequence[Instance]) -> list[Instance]:
    """The instances with the token behind every relevant one made as relevant.

    >>> tokens, relevance = np.arange(4), np.array([0.0, 1.0, 0.0, 0.0])
    >>> carried([Instance(tokens, np.ones(4, dtype=bool), relevance)])[0].relevance.tolist()
    [0.0, 1.0, 1.0, 0.0]
    """
    return [
        replace(one, relevance=np.maximum(one.relevance, np.pad(one.relevance, (1, 0))[:-1]))
        for one in instances
    ]


def _of(found: Measurement, prefix: str, by_layer: bool) -> dict[str, float | None]:
    """Rollout, and every layer, with their nulls."""
    document = found.summary(plausibility_sample=0).to_json()
    parts = {"": document}
    if by_layer:
        parts |= {f"layer_{number}_": layer for number, layer in document.get("layer", {}).items()}
    scores: dict[str, float | None] = {}
    for part, numbers in parts.items():
        scores |= {f"{prefix}{part}{name}": numbers[name] for name in _SCORES}
        scores |= {f"{prefix}{part}null_{name}": numbers["null"][name] for name in _SCORES}
    return scores


def _of_heads(found: Measurement, layers: int, heads: int) -> dict[str, float | None]:
    """Mass of every head and of the best ones, with the null of the layer, which all its heads share."""
    relevant = [i for i, one in enumerate(found.instances) if one.relevant]
    scores: dict[str, float | None] = {}
    best: list[float] = []
    for layer in range(layers):
        own = []
        for head in range(heads):
            weights = found.rankings[f"layer:{layer}/head:{head}"].importance
            masses = [float(weights[i] @ found.instances[i].relevance) for i in relevant]
            own.append(float(np.mean(masses)))
            scores[f"layer_{layer + 1}_head_{head + 1}_mrta"] = own[-1]
        name = f"layer_{layer + 1}_best_head_"
        null = float(found.columns[f"null_layer_{layer + 1}_mass"][relevant].mean())
        scores |= {f"{name}mrta": max(own), f"{name}null_mrta": null}
        best.append(max(own))
    return scores | {"best_head_mrta": max(best), "best_head_null_mrta": null}
