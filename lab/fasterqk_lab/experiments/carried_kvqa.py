"""Key-value questions: is the pair found sooner with a faster QK, and is it looked for where it was carried?

`table-kvqa` found less attention of rollout on the asked pairs with a faster query-key circuit, at equal
loss. A decoder of two layers may carry a pair to the position behind it and look for it there. So relevance
is read twice: the asked pairs, and the pairs with the token behind each (*carried*). Heads are read by
themselves too: a mean over heads hides one that looks.

The scores that decide, named before any run: attention of rollout on relevant tokens (MRTA) at equal training
loss, with either relevance, and the steps until the task is learnt (validation exact match of at least .95,
interpolated between evaluations; a cell that never learns is listed). Layers and heads are exploratory; the
best head of a layer is that with the highest score, so that it is above the null by choice alone.
"""

from collections.abc import Sequence
from typing import Any

from fasterqk_lab.compare import Value
from fasterqk_lab.experiments._comparison import Comparison, run_arms, show_comparison
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments.ablation_hatexplain import EQUAL, qk_arm
from fasterqk_lab.experiments.table_kvqa import LEARNT, STEPS, steps_until_learnt
from fasterqk_lab.training import TrainConfig

RATIOS = (2.0, 5.0)
# The questions come from looking at `table-kvqa`, which has seeds 0 to 2; they are answered by others.
FIRST_SEED = 3
# Training ends at this loss: all that is asked happens before.
LOSS = 0.01
EVALUATE_AT_FALL = 0.6
DECIDES = ("mrta", "carried_mrta", STEPS)
LAYERS = (1, 2)
AT = f"exact match {LEARNT:g}"
SCORES = (
    {"mrta": "rollout", "carried_mrta": "rollout, carried"}
    | {f"layer_{n}_mrta": f"layer {n}" for n in LAYERS}
    | {f"carried_layer_{n}_mrta": f"layer {n}, carried" for n in LAYERS}
    | {f"layer_{n}_best_head_mrta": f"layer {n}, best head" for n in LAYERS}
    | {f"carried_layer_{n}_best_head_mrta": f"layer {n}, best head, carried" for n in LAYERS}
    | {"validation_accuracy": "validation exact match", STEPS: STEPS}
)
FOREST = (*DECIDES, "layer_2_best_head_mrta", "carried_layer_2_best_head_mrta")


def carried_kvqa(seeds: int = 10, ratios: Sequence[float] = RATIOS) -> Comparison:
    """Equal rates, and the query-key circuit alone faster by each of ``ratios``.

    >>> list(carried_kvqa().arms)
    ['equal rates', 'QK ×2', 'QK ×5']
    """
    base = TrainConfig(
        "kvqa",
        evaluate_at_fall=EVALUATE_AT_FALL,
        stop_at_loss=LOSS,
        along_subset=128,
        test_subset=128,
        rationale_k=(),
        readings=("heads", "carried"),
    )
    arms = {EQUAL: base} | {qk_arm(ratio): base.replace(qk_ratio=ratio) for ratio in ratios}
    return Comparison(
        "carried-kvqa",
        "Generated key-value questions: when the pairs are found, and where",
        "paper",
        arms,
        tuple(range(FIRST_SEED, FIRST_SEED + seeds)),
        decides=DECIDES,
        scores=SCORES,
        claimed={STEPS: "less"},
        read_at={STEPS: AT},
    )


def run(runner: CellRunner, seeds: int, ratios: list[float]) -> dict[str, Any]:
    outcome = run_arms(carried_kvqa(seeds, ratios), runner)
    steps = {cell: steps_until_learnt(history) for cell, history in outcome.measured.histories.items()}
    learnt = [
        Value(outcome.comparison.key, arm, seed, AT, None, STEPS, value)
        for (arm, seed), value in steps.items()
        if value is not None
    ]
    outcome = outcome.with_values(learnt, runner)
    never = [f"{arm}, seed {seed}" for (arm, seed), value in steps.items() if value is None]
    files = outcome.save(runner.out, forest=FOREST)
    return {**outcome.summary(), "never_learnt": never, "files": files}


def show(summary: dict[str, Any]) -> None:
    show_comparison(summary)
    print(f"never learnt: {'; '.join(summary['never_learnt']) or 'none'}")


EXPERIMENT = Experiment(
    name="carried-kvqa",
    chapter="Carried",
    options=(
        seeds_option(10),
        Option("ratios", float, "multipliers of the QK rate, beside equal rates", default=RATIOS, many=True),
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce carried-kvqa --out out",
        "fasterqk-lab reproduce carried-kvqa --seeds 1 --ratios 5       # a quick look",
        "fasterqk-lab reproduce carried-kvqa --cells lab/paper/cells/carried-kvqa.jsonl.xz",
    ),
)
