"""Generated data, no file needed: agreement, key-value questions, and where the pairs of these are carried.

In `table-kvqa` a faster query-key circuit has less rollout attention on the asked pairs, at equal loss. A
decoder of two layers may carry a pair to the position behind it and look for it there. `carried-kvqa` reads
relevance twice: the asked pairs, and the pairs with the token behind each (*carried*). Single heads are read
too, because a mean over heads hides one that looks. The best head of a layer is the one with the highest
score, so choice alone lifts it above the null.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from fasterqk_lab.compare import Value
from fasterqk_lab.experiments._comparison import (
    Comparison,
    Outcome,
    of_arms,
    ratio_arms,
    seeds_from,
    two_arms,
)
from fasterqk_lab.training import TrainConfig

# --- Subject-verb agreement ---

AGREEMENT_RATIO = 30


def table_agreement(seeds: int = 3, epochs: int | None = None) -> Comparison:
    """Both arms differ in the rate of the query-key circuit and in nothing else."""
    # The loss falls within a fraction of an epoch; comparing at equal loss needs points on the way.
    base = TrainConfig("agreement", evaluate_at_fall=0.6, **({"epochs": epochs} if epochs else {}))
    title = "Generated subject-verb agreement, one layer"
    return two_arms("table-agreement", title, base, AGREEMENT_RATIO, range(seeds), examples=True)


EXPERIMENT = of_arms("table-agreement", table_agreement, needs_data=False)

# --- Key-value questions ---

# Five times the base rate is 5e-3: at 1e-2 attention hardens before it has found the pairs.
KVQA_RATIO = 5
# The task counts as learnt from this exact match on validation questions on.
LEARNT = 0.95
LEARNT_AT, STEPS = f"exact match {LEARNT:g}", "steps until learnt"


def table_kvqa(seeds: int = 1, epochs: int | None = None) -> Comparison:
    """Both arms differ in the rate of the query-key circuit and in nothing else."""
    options = {"epochs": epochs} if epochs else {}
    base = TrainConfig("kvqa", evaluate_at_fall=0.5, along_subset=128, **options)
    title = "Generated key-value questions (accuracy is exact match)"
    more = learnt_values
    return two_arms("table-kvqa", title, base, KVQA_RATIO, range(seeds), more=more, examples=True)


def steps_until_learnt(history: Sequence[Mapping[str, Any]]) -> float | None:
    """The step at which exact match on validation first reaches `LEARNT`, interpolated; None if never.

    >>> steps_until_learnt([{"step": n, "validation_accuracy": n / 100} for n in (0, 100)])
    95.0
    """
    points = [(record["step"], record.get("validation_accuracy")) for record in history]
    known = [(step, value) for step, value in points if value is not None]
    for (step, value), (later, higher) in pairwise([*known[:1], *known]):
        if higher >= LEARNT:
            share = (LEARNT - value) / (higher - value) if higher > value else 0.0
            return float(step + share * (later - step))
    return None


def learnt_values(outcome: Outcome) -> list[Value]:
    """The step at which every cell has learnt the task; a cell that never learns it has no value."""
    steps = {cell: steps_until_learnt(history) for cell, history in outcome.measured.histories.items()}
    return [
        Value(outcome.comparison.key, arm, seed, LEARNT_AT, None, STEPS, step)
        for (arm, seed), step in steps.items()
        if step is not None
    ]


KVQA = of_arms("table-kvqa", table_kvqa, examples=("--seeds 3 --out out --json",), needs_data=False)

# --- Carried pairs ---

RATIOS = (2.0, 5.0)
DECIDES = ("mrta", "carried_mrta", STEPS)
SCORES = (
    {"mrta": "rollout", "carried_mrta": "rollout, carried"}
    | {f"layer_{n}_mrta": f"layer {n}" for n in (1, 2)}
    | {f"carried_layer_{n}_mrta": f"layer {n}, carried" for n in (1, 2)}
    | {f"layer_{n}_best_head_mrta": f"layer {n}, best head" for n in (1, 2)}
    | {f"carried_layer_{n}_best_head_mrta": f"layer {n}, best head, carried" for n in (1, 2)}
    | {"validation_accuracy": "validation exact match", STEPS: STEPS}
)
FOREST = (*DECIDES, "layer_2_best_head_mrta", "carried_layer_2_best_head_mrta")


def carried_kvqa(seeds: int = 10) -> Comparison:
    """Equal rates, and the query-key circuit alone faster by each of `RATIOS`.

    >>> list(carried_kvqa().arms)
    ['equal rates', 'QK ×2', 'QK ×5']
    """
    base = TrainConfig(
        "kvqa",
        evaluate_at_fall=0.6,
        stop_at_loss=0.01,  # everything that is measured happens before
        along_subset=128,
        test_subset=128,
        rationale_k=(),
        readings=("heads", "carried"),
    )
    return Comparison(
        "carried-kvqa",
        "Generated key-value questions: when the pairs are found, and where",
        "paper",
        ratio_arms(base, RATIOS),
        # The questions come from looking at `table-kvqa`, which has seeds 0 to 2; others answer them.
        seeds_from(seeds, first=3),
        decides=DECIDES,
        scores=SCORES,
        claimed={STEPS: "less"},
        read_at={STEPS: LEARNT_AT},
        more=learnt_values,
        forest=FOREST,
    )


CARRIED = of_arms("carried-kvqa", carried_kvqa, needs_data=False)
