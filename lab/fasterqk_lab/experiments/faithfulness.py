"""Faithfulness against its own chance: what random rankings score along training, taken off at equal loss.

Comprehensiveness is what a prediction loses without the most attended tokens. A model that reads fewer tokens
may lose more without any tokens, also random ones, so that an arm may gain without ranking them any better.
Here every evaluation also ranks tokens at random, and the difference to that is compared.

The score that decides, named before any run: AOPC comprehensiveness minus that of random rankings, at the
lowest training loss that all cells reach. All others are exploratory.
"""

from collections.abc import Mapping
from typing import Any

from fasterqk_lab.experiments._arm_tables import ARM_NAMES
from fasterqk_lab.experiments._arms import Comparison, print_diverged, run_arms, two_arms
from fasterqk_lab.experiments._equal_loss import (
    compare_at_equal_loss,
    histories_of,
    per_seed_at,
    save_panels,
    save_rows,
    show_rows,
)
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
NULLS = {AOPC[0]: f"null_{AOPC[0]}", AOPC[1]: f"null_{AOPC[1]}", "mrta": "null_mrta"}
PANELS = tuple(SCORES[name] for name in (*DECIDES, AOPC[0], f"null_{AOPC[0]}", f"{AOPC[1]}{ABOVE}"))


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
    seeds_chosen = range(FIRST_SEED, FIRST_SEED + seeds)
    title = f"{table.title}: faithfulness against its own chance"
    return two_arms(f"faithfulness-{data}", title, base, ratio, seeds_chosen)


def above_random(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with comprehensiveness and sufficiency minus those of random rankings.

    >>> above_random({"aopc_sufficiency": 0.5, "null_aopc_sufficiency": 0.25})
    {'aopc_sufficiency': 0.5, 'null_aopc_sufficiency': 0.25, 'aopc_sufficiency_above_random': 0.25}
    """
    known = [name for name in AOPC if name in record and f"null_{name}" in record]
    return dict(record) | {f"{name}{ABOVE}": record[name] - record[f"null_{name}"] for name in known}


def run(runner: CellRunner, data: str, seeds: int) -> dict[str, Any]:
    comparison = faithfulness(data, seeds)
    results = run_arms(comparison, runner)
    histories = {
        (ARM_NAMES[arm], seed): [above_random(record) for record in history]
        for (arm, seed), history in histories_of(results).items()
    }
    found = compare_at_equal_loss(histories, SCORES, decides=DECIDES, nulls=NULLS)
    derived = [f"{name}{ABOVE}" for name in AOPC]
    levels = list(dict.fromkeys(row["loss"] for row in found["rows"]))
    own = {"protocol": comparison.protocol, "table": comparison.name}
    runner.add_per_seed(per_seed_at(histories, derived, levels), **own)
    setting = f"{comparison.name}: both arms, {seeds} seeds, at least {EVALUATIONS} evaluations"
    caption = f"Test split, mean and 95% interval over seeds; differences paired by seed. {setting}."
    shared = {"title": comparison.title, "caption": caption}
    files = {
        "table": save_rows(found["rows"], runner.out, comparison.name, **shared),
        "figure": save_panels(
            found["rows"],
            PANELS,
            runner.out,
            comparison.name,
            **shared,
            see="The first panel decides: both arms minus what random rankings score in the same model.",
        ),
    }
    diverged = {arm: {"diverged": _diverged(comparison, results, arm)} for arm in comparison.arms}
    about = {"experiment": comparison.name, "protocol": comparison.protocol, "seeds": list(comparison.seeds)}
    return {**about, **found, "arms": diverged, "files": files}


def _diverged(comparison: Comparison, results: Mapping[Any, Any], arm: str) -> list[int]:
    return [seed for seed in comparison.seeds if results[arm, seed].diverged]


def show(summary: dict[str, Any]) -> None:
    print(f"{summary['experiment']}: {len(summary['seeds'])} seeds")
    show_rows(summary)
    print_diverged(summary)
    print(f"\nfigure: {summary['files']['figure']['png']}")


EXPERIMENT = Experiment(
    name="faithfulness",
    chapter="Faithfulness",
    options=(
        Option("data", str, "which data set", default="hatexplain", choices=DATA),
        seeds_option(5),
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce faithfulness --out out",
        "fasterqk-lab reproduce faithfulness --data sva-whole --seeds 3 --json",
        "fasterqk-lab reproduce faithfulness --cells lab/paper/cells/faithfulness-hatexplain.jsonl.xz",
    ),
    needs_data=True,
)
