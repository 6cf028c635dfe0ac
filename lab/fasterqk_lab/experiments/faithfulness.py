"""Faithfulness against its own chance: what random rankings score along training, taken off at equal loss.

Comprehensiveness is what a prediction loses without the most attended tokens. A model that reads fewer tokens
may lose more without any tokens, also random ones, so that an arm may gain without ranking them any better.
Here every evaluation also ranks tokens at random, and the difference to that is compared.

The score that decides, named before any run: AOPC comprehensiveness minus that of random rankings, at equal
training loss. All others are exploratory.
"""

from collections.abc import Mapping
from typing import Any

from fasterqk_lab.experiments._comparison import ARM_NAMES as ARM_NAMES
from fasterqk_lab.experiments._comparison import Comparison, run_arms, show_comparison, two_arms
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments.table_hatexplain import FIRST_SEED, table_hatexplain
from fasterqk_lab.experiments.table_sva import FOUND_RATES, table_sva

DATA = ("hatexplain", "sva-whole")
# Random rankings double what an evaluation costs, so there are fewer of them than in the tables.
EVALUATIONS = 10
ABOVE = "_above_random"
AOPC = ("aopc_comprehensiveness", "aopc_sufficiency")
DECIDES = (f"{AOPC[0]}{ABOVE}",)
SCORES = {
    f"{AOPC[0]}{ABOVE}": "comprehensiveness (AOPC) − random",
    f"{AOPC[1]}{ABOVE}": "sufficiency (AOPC) − random",
    AOPC[0]: "comprehensiveness (AOPC)",
    AOPC[1]: "sufficiency (AOPC)",
    f"null_{AOPC[0]}": "comprehensiveness (AOPC), random rankings",
    f"null_{AOPC[1]}": "sufficiency (AOPC), random rankings",
    "mrta": "MRTA",
    "test_accuracy": "test accuracy",
}
FOREST = (*DECIDES, AOPC[0], f"null_{AOPC[0]}", f"{AOPC[1]}{ABOVE}")


def faithfulness(data: str = "hatexplain", seeds: int = 5) -> Comparison:
    """Both arms as in the paper's tables, with random rankings along training.

    >>> faithfulness().arms["baseline"].evaluation.random_along
    True
    """
    if data == "hatexplain":
        table = table_hatexplain(seeds=seeds)
    else:
        table = table_sva("paper", "whole", seeds, lr=FOUND_RATES["whole"])
    changes: dict[str, Any] = {"random_along": True, "evaluations": EVALUATIONS}
    base, faster = (arm.replace(**changes) for arm in table.arms.values())
    ratio = faster.optimisation.qk_ratio
    chosen = range(FIRST_SEED, FIRST_SEED + seeds)
    title = f"{table.title}: faithfulness against its own chance"
    options: dict[str, Any] = {"decides": DECIDES, "scores": SCORES, "derive": above_random}
    return two_arms(f"faithfulness-{data}", title, base, ratio, chosen, **options)


def above_random(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with comprehensiveness and sufficiency minus those of random rankings.

    >>> above_random({"aopc_sufficiency": 0.5, "null_aopc_sufficiency": 0.25})
    {'aopc_sufficiency': 0.5, 'null_aopc_sufficiency': 0.25, 'aopc_sufficiency_above_random': 0.25}
    """
    known = [name for name in AOPC if name in record and f"null_{name}" in record]
    return dict(record) | {f"{name}{ABOVE}": record[name] - record[f"null_{name}"] for name in known}


def run(runner: CellRunner, data: str, seeds: int) -> dict[str, Any]:
    outcome = run_arms(faithfulness(data, seeds), runner)
    return {**outcome.summary(), "files": outcome.save(runner.out, forest=FOREST)}


EXPERIMENT = Experiment(
    name="faithfulness",
    chapter="Faithfulness",
    options=(
        Option("data", str, "which data set", default="hatexplain", choices=DATA),
        seeds_option(5),
    ),
    run=run,
    show=show_comparison,
    examples=(
        "fasterqk-lab reproduce faithfulness --out out",
        "fasterqk-lab reproduce faithfulness --data sva-whole --seeds 3 --json",
        "fasterqk-lab reproduce faithfulness --cells lab/paper/cells/faithfulness-hatexplain.jsonl.xz",
    ),
    needs_data=True,
)
