"""Tuned against tuned: both arms with the base rate and the ratio that validation prefers for them.

The paper multiplies the query-key rate of a baseline and leaves all else. Here both arms get what is best for
them: base rate and ratio are chosen on validation data among the same base rates, with ratio 1 for the
baseline and any larger ratio for the faster arm. Attention plays no part in the choice. The chosen pair is
then trained with more seeds and compared on test data: at each arm's best validation epoch, which is what
people use, and at equal training loss.

The score that decides, named before any run: attention on relevant tokens (MRTA) at the best validation
epoch.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

from fasterqk.attention.statistics import Interval, interval
from fasterqk.errors import InputError
from fasterqk.files import plain
from fasterqk_lab.compare import BEST, Value, measured
from fasterqk_lab.experiments._comparison import (
    BASELINE,
    FASTER,
    TRAIN,
    Comparison,
    run_comparison,
    seeds_from,
)
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments.ratio_or_rate import RATES, RATIOS, arm_name, ratio_or_rate
from fasterqk_lab.experiments.table_squad import table_squad
from fasterqk_lab.experiments.table_sva import TITLES, table_sva
from fasterqk_lab.training import TrainConfig

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


class Point(NamedTuple):
    """A point of the grid with what it was judged by, over the seeds of the search."""

    lr: float
    qk_ratio: float
    judge: Interval


class Searched(NamedTuple):
    """What a search tried, by which score, over which seeds, and what it chose for each arm.

    ``edges`` names what was chosen at the edge of the grid, by arm: a value beyond it may be better.
    """

    by: str
    seeds: list[int]
    tried: list[Point]
    chosen: dict[str, Point]
    edges: dict[str, list[str]]


@dataclass(frozen=True)
class Tuning:
    """What is searched: every rate and ratio, judged over ``search_seeds``, then ``seeds`` of the best.

    ``base`` are the final trainings, and those of the search where these are not shorter ones (``search``).
    Of the final seeds the first ``planned`` decide.
    """

    title: str
    base: TrainConfig
    rates: tuple[float, ...]
    ratios: tuple[float, ...]
    search_seeds: int
    seeds: int
    search: TrainConfig | None = None
    planned: int | None = None

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
    searches = {
        "hatexplain": Tuning("HateXplain, one layer", hatexplain, RATES, RATIOS, search_seeds=3, seeds=5)
    }
    for form, title in TITLES.items():
        base = table_sva("paper", form).arms[BASELINE]
        searches[f"sva-{form}"] = Tuning(title, base, SVA_RATES, SVA_RATIOS, search_seeds=1, seeds=5)
    base = table_squad("small")["paper"].arms[BASELINE]
    final, search = base.replace(**_SQUAD_FINAL), base.replace(**_SQUAD_SEARCH)
    searches["squad"] = Tuning(
        "SQuAD, small", final, SQUAD_RATES, SQUAD_RATIOS, search_seeds=1, seeds=3, search=search, planned=2
    )
    return searches


def choose(tuning: Tuning, name: str, runner: CellRunner) -> Searched:
    """Every point of the grid with its judge over the seeds of the search, and the best of both arms."""
    seeds = seeds_from(tuning.search_seeds)
    grid, table = tuning.grid(), f"tuned-{name}-search"
    cells = {
        (arm_name(rate, ratio), seed): config.replace(seed=seed)
        for seed in seeds
        for (rate, ratio), config in grid.items()
    }
    results = runner.run(cells, TRAIN, title=f"tuned {name}: search", table=table)
    judged = {cell: _judged(result, tuning.judge) for cell, result in results.items()}
    values = [
        Value(table, arm, seed, "best along the search", None, tuning.judge, value)
        for (arm, seed), value in judged.items()
        if value is not None
    ]
    equal = {arm_name(rate, ratio): arm_name(rate, 1) for rate, ratio in grid}
    runner.add(measured(table, results, baselines=equal, more=values).values)
    tried = [
        Point(rate, ratio, interval(judged[arm_name(rate, ratio), seed] for seed in seeds))
        for rate, ratio in grid
    ]
    sign = -1 if tuning.judge.endswith("loss") else 1

    def best(points: list[Point]) -> Point:
        finished = [point for point in points if isfinite(point.judge.mean)]
        if not finished:
            raise InputError(f"tuned {name}: training diverged at every base rate and ratio of an arm")
        return max(finished, key=lambda point: (sign * point.judge.mean, -point.qk_ratio, -point.lr))

    chosen = {
        BASELINE: best([point for point in tried if point.qk_ratio == 1]),
        FASTER: best([point for point in tried if point.qk_ratio > 1]),
    }
    ratios = sorted(ratio for ratio in tuning.ratios if ratio > 1)
    edges = {
        arm: ["base rate"] * (point.lr in (min(tuning.rates), max(tuning.rates)))
        + ["ratio"] * (arm == FASTER and point.qk_ratio in (ratios[0], ratios[-1]))
        for arm, point in chosen.items()
    }
    return Searched(tuning.judge, list(seeds), tried, chosen, edges)


def _judged(result: dict[str, Any], judge: str) -> float | None:
    """The best value of the judge along a training."""
    values = [record[judge] for record in result["history"] if record.get(judge) is not None]
    if result["diverged"] or not values:
        return None
    return min(values) if judge.endswith("loss") else max(values)


def tuned_arms(tuning: Tuning, name: str, chosen: dict[str, Point], seeds: int) -> Comparison:
    """The final comparison: each arm with what was chosen for it."""
    return Comparison(
        f"tuned-{name}",
        f"{tuning.title}: tuned against tuned",
        "paper",
        {arm: tuning.base.replace(lr=point.lr, qk_ratio=point.qk_ratio) for arm, point in chosen.items()},
        seeds_from(seeds),
        planned=tuning.planned,
        at=BEST,
    )


def run(runner: CellRunner, data: str | None, seeds: int | None) -> dict[str, Any]:
    known = tunings()
    tables = {}
    for name in [data] if data else known:
        search = choose(known[name], name, runner)
        comparison = tuned_arms(known[name], name, search.chosen, seeds or known[name].seeds)
        tried = [
            point._asdict()
            | {"chosen": ", ".join(arm for arm, best in search.chosen.items() if best == point)}
            for point in search.tried
        ]
        edges = {arm: ", ".join(names) or "nothing" for arm, names in search.edges.items()}
        about = search._asdict() | {"tried": tried, "edges": edges}
        about["chosen"] = {arm: point._asdict() for arm, point in search.chosen.items()}
        tables[name] = plain(run_comparison(comparison, runner, examples=True) | {"search": about})
    return {"experiment": "tuned", "protocol": "paper", "data": tables}


EXPERIMENT = Experiment(
    "tuned",
    run,
    options=(
        Option(
            "data",
            str,
            "one data set (default: all, which takes hours)",
            choices=("hatexplain", "sva-whole", "sva-prefix", "squad"),
        ),
        seeds_option(None, "of the final comparison (default: 5; SQuAD: 3)"),
    ),
    examples=(
        "fasterqk-lab reproduce tuned --data hatexplain --out out",
        "fasterqk-lab reproduce tuned --data sva-whole --out out",
        "fasterqk-lab reproduce tuned --out out       # everything; continues where it was stopped",
    ),
    needs_data=True,
)
