"""Tuned against tuned: both arms with the base rate and the ratio that validation prefers for them.

The paper multiplies the query-key rate of a baseline and leaves all else. Here both arms get what is best for
them: base rate and ratio are chosen on validation data among the same base rates, with ratio 1 for the
baseline and any larger ratio for the faster arm. Attention plays no part in the choice. The chosen pair is
then trained with more seeds and compared on test data: at each arm's best validation epoch, which is what
people use, and at equal training loss.

The score that decides, named before any run: attention on relevant tokens (MRTA) at the best validation
epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fasterqk.attention import interval
from fasterqk.console import print_table
from fasterqk.errors import InputError
from fasterqk.files import plain
from fasterqk_lab.experiments._arms import (
    BASELINE,
    FASTER,
    TRAIN,
    Comparison,
    run_comparison,
    show_arms,
)
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments.ratio_or_rate import RATES, RATIOS, arm_name, ratio_or_rate
from fasterqk_lab.experiments.table_hatexplain import FIRST_SEED
from fasterqk_lab.experiments.table_squad import table_squad
from fasterqk_lab.experiments.table_sva import TITLES, table_sva
from fasterqk_lab.training import TrainConfig, TrainResult

SVA_RATES, SVA_RATIOS = (1e-3, 3e-3, 1e-2), (1, 10, 30, 100)
SQUAD_RATES, SQUAD_RATIOS = (1e-4, 3e-4, 1e-3, 3e-3), (1, 3, 10, 20)
# The rates of SQuAD are chosen after a quarter of the 76,410 questions. No attention is measured in the
# search: it plays no part, and would take as long as the training.
_SQUAD_SEARCH: dict[str, Any] = {
    "train_limit": 19_100,
    "epochs": 1,
    "evaluations_per_epoch": 1,
    "protocol": "fit",
    "along_subset": 512,
    "test_subset": 512,
}
# The best epoch is that of the lowest validation loss: exact match is rare in a model of this size.
_SQUAD_FINAL: dict[str, Any] = {
    "evaluations_per_epoch": 4,
    "along_subset": 256,
    "best_by": "validation_loss",
}


@dataclass(frozen=True)
class Tuning:
    """What is searched: every rate and ratio, judged over ``search_seeds``, then ``seeds`` of the best.

    ``base`` are the final trainings, and those of the search where these are not shorter ones (``search``).
    """

    title: str
    base: TrainConfig
    rates: tuple[float, ...]
    ratios: tuple[float, ...]
    search_seeds: int
    seeds: int
    search: TrainConfig | None = None

    @property
    def judge(self) -> str:
        """The score that chooses rates, ratios and epochs: the highest wins, or the lowest of a loss."""
        return self.base.evaluation.best_by

    def grid(self) -> dict[tuple[float, float], TrainConfig]:
        """The configuration of every base rate and ratio in the search."""
        base = self.search or self.base
        return {
            (rate, ratio): base.replace(lr=rate, qk_ratio=ratio)
            for rate in self.rates
            for ratio in self.ratios
        }


def tunings() -> dict[str, Tuning]:
    """The search of every data set.

    >>> {name: len(tuning.grid()) for name, tuning in tunings().items()}
    {'hatexplain': 20, 'sva-whole': 12, 'sva-prefix': 12, 'squad': 16}
    """
    # The cells of ratio-or-rate, which are in the store already where it ran.
    hatexplain = ratio_or_rate().arms[arm_name(RATES[0], 1)]
    found = {
        "hatexplain": Tuning("HateXplain, one layer", hatexplain, RATES, RATIOS, search_seeds=3, seeds=5)
    }
    for form, title in TITLES.items():
        base = table_sva("paper", form).arms[BASELINE]
        found[f"sva-{form}"] = Tuning(title, base, SVA_RATES, SVA_RATIOS, search_seeds=1, seeds=5)
    base = table_squad("small")["paper"].arms[BASELINE]
    final, search = base.replace(**_SQUAD_FINAL), base.replace(**_SQUAD_SEARCH)
    found["squad"] = Tuning(
        "SQuAD, small", final, SQUAD_RATES, SQUAD_RATIOS, search_seeds=1, seeds=3, search=search
    )
    return found


def choose(tuning: Tuning, name: str, runner: CellRunner) -> dict[str, Any]:
    """Every point of the grid with its judge over the seeds of the search, and the best of both arms."""
    seeds = range(FIRST_SEED, FIRST_SEED + tuning.search_seeds)
    grid = tuning.grid()
    cells = {
        (arm_name(rate, ratio), seed): config.replace(seed=seed)
        for seed in seeds
        for (rate, ratio), config in grid.items()
    }
    found = runner.run(cells, TRAIN, title=f"tuned {name}: search", table=f"tuned-{name}-search")
    results = {key: TrainResult.from_json(result) for key, result in found.items()}
    judged = {key: _judged(result, tuning) for key, result in results.items()}
    rows = [
        {"arm": arm, "seed": seed, "at": "best along the search", "score": tuning.judge, "value": value}
        for (arm, seed), value in judged.items()
        if value is not None
    ]
    runner.add_per_seed(rows, table=f"tuned-{name}-search")
    table: list[dict[str, Any]] = [
        {"lr": rate, "qk_ratio": ratio}
        | {"judge": interval(judged[arm_name(rate, ratio), seed] for seed in seeds)}
        for rate, ratio in grid
    ]

    def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
        finished = [row for row in rows if row["judge"].mean == row["judge"].mean]
        if not finished:
            raise InputError(f"tuned {name}: training diverged at every base rate and ratio of an arm")
        sign = -1 if tuning.judge.endswith("loss") else 1
        return max(finished, key=lambda row: (sign * row["judge"].mean, -row["qk_ratio"], -row["lr"]))

    chosen = {
        BASELINE: best([row for row in table if row["qk_ratio"] == 1]),
        FASTER: best([row for row in table if row["qk_ratio"] > 1]),
    }
    edges = _edges(tuning, chosen)
    return {"by": tuning.judge, "seeds": list(seeds), "tried": table, "chosen": chosen, "edges": edges}


def _edges(tuning: Tuning, chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """What was chosen at the edge of the grid, by arm: a value beyond it may be better."""
    faster = sorted(ratio for ratio in tuning.ratios if ratio > 1)
    return {
        arm: ["base rate"] * (best["lr"] in (min(tuning.rates), max(tuning.rates)))
        + ["ratio"] * (arm == FASTER and best["qk_ratio"] in (faster[0], faster[-1]))
        for arm, best in chosen.items()
    }


def _judged(result: TrainResult, tuning: Tuning) -> float | None:
    """The best value of the judge along a training."""
    values = [record.get(tuning.judge) for record in result.history]
    known = [value for value in values if value is not None]
    if result.diverged or not known:
        return None
    return min(known) if tuning.judge.endswith("loss") else max(known)


def tuned_arms(tuning: Tuning, name: str, chosen: Mapping[str, Mapping[str, Any]], seeds: int) -> Comparison:
    """The final comparison: each arm with what was chosen for it."""
    arms = {
        arm: tuning.base.replace(lr=chosen[arm]["lr"], qk_ratio=chosen[arm]["qk_ratio"])
        for arm in (BASELINE, FASTER)
    }
    numbers = tuple(range(FIRST_SEED, FIRST_SEED + seeds))
    return Comparison(f"tuned-{name}", f"{tuning.title}: tuned against tuned", "paper", arms, numbers)


def run(runner: CellRunner, data: str | None, seeds: int | None) -> dict[str, Any]:
    known = tunings()
    found = {}
    for name in [data] if data else known:
        searched = choose(known[name], name, runner)
        comparison = tuned_arms(known[name], name, searched["chosen"], seeds or known[name].seeds)
        found[name] = plain({**run_comparison(comparison, runner), "search": searched})
    return {"experiment": "tuned", "protocol": "paper", "data": found}


def show(summary: dict[str, Any]) -> None:
    for table in summary["data"].values():
        search = table["search"]
        rows = [
            {"base rate": row["lr"], "ratio": row["qk_ratio"], search["by"].replace("_", " "): row["judge"]}
            | {"chosen": ", ".join(arm for arm, best in search["chosen"].items() if _same(row, best))}
            for row in search["tried"]
        ]
        seeds = len(search["seeds"])
        print_table(rows, title=f"{table['experiment']}: the search, {seeds} seed{'s' * (seeds > 1)}")
        for arm, names in search["edges"].items():
            for name in names:
                print(f"{arm}: the {name} is at the edge of the grid; one beyond it may be better")
        show_arms(table)


def _same(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool((row["lr"], row["qk_ratio"]) == (other["lr"], other["qk_ratio"]))


EXPERIMENT = Experiment(
    name="tuned",
    chapter="Tuned",
    options=(
        Option(
            "data",
            str,
            "one data set (default: all, which takes hours)",
            choices=("hatexplain", "sva-whole", "sva-prefix", "squad"),
        ),
        seeds_option(None, "of the final comparison (default: 5; SQuAD: 3)"),
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce tuned --data hatexplain --out out",
        "fasterqk-lab reproduce tuned --data sva-whole --out out",
        "fasterqk-lab reproduce tuned --out out       # everything; continues where it was stopped",
    ),
    needs_data=True,
)
