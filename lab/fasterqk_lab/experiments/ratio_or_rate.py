"""Base rates and ratios: which of them sharpens attention, and both arms with what is best for them.

`ratio-or-rate`: is it the ratio of the two circuits' rates, or the QK rate itself? One-layer HateXplain over
base rates and ratios. These step by about the same factor, so that one QK rate (base rate times ratio) occurs
with several ratios. One more arm slows everything but the query-key circuit: it has the ratio of the faster
arm and the QK rate of the baseline, and trains as much longer. An arm is compared with ratio 1 at its base
rate; arms of different base rates, and the plane through the map, are read at the lowest training loss that
all arms reach.

`tuned`: the paper multiplies the query-key rate of a baseline and leaves all else. Here both arms get what is
best for them: base rate and ratio are chosen on validation data among the same base rates, with ratio 1 for
the baseline and any larger ratio for the faster arm. Attention plays no part in the choice. The chosen pair
is then trained with more seeds and compared on test data at each arm's best validation epoch.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fasterqk.attention.scores import title_of
from fasterqk.attention.statistics import Interval, interval
from fasterqk.errors import InputError
from fasterqk.files import plain
from fasterqk_lab.compare import (
    BEST,
    LOSS,
    Claimed,
    Effect,
    Measured,
    Value,
    above,
    compare,
    correct,
    measured,
)
from fasterqk_lab.experiments._comparison import (
    BASELINE,
    FASTER,
    TRAIN,
    Comparison,
    Outcome,
    run_arms,
    run_comparison,
    seeds_from,
)
from fasterqk_lab.experiments._registry import EPOCHS_OPTION, CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments.ablation_hatexplain import EPOCHS, SCORES, constant_rate
from fasterqk_lab.experiments.table_squad import table_squad
from fasterqk_lab.experiments.table_sva import TITLES as SVA_TITLES
from fasterqk_lab.experiments.table_sva import table_sva
from fasterqk_lab.figures import Grid, effect_record, save_grids
from fasterqk_lab.training import TrainConfig

RATES = (5e-5, 1.5e-4, 5e-4, 1.5e-3)
RATIOS = (1, 3, 10, 30, 100)
# What the slowed arm divides every rate but that of the query-key circuit by, and multiplies its epochs by.
SLOWED = 30
SLOWED_ARM = f"all but QK ÷{SLOWED}"
# As many evaluations of the slowed arm as the others make at the ends of their epochs, and those on the way.
SLOWED_EVALUATIONS = 12
DECIDES = "mrta"
# The name under which the slopes of the whole map stand in the table of results.
MAP = "the map"
PER_RATIO, PER_RATE = "per_decade_of_ratio", "per_decade_of_base_rate"


def arm_name(rate: float, ratio: float) -> str:
    """The name of a point of the map."""
    return f"rate {rate:g}, ratio {ratio:g}"


def per_decade_at(ratio: float) -> str:
    """The name of the growth with the base rate at one ratio.

    >>> per_decade_at(30)
    'per_decade_of_base_rate_at_ratio_30'
    """
    return f"{PER_RATE}_at_ratio_{ratio:g}"


def ratio_or_rate(seeds: int = 3, epochs: int | None = None) -> Comparison:
    """All arms; the slowed one last.

    >>> comparison = ratio_or_rate()
    >>> len(comparison.arms), list(comparison.arms)[0], list(comparison.arms)[-1]
    (21, 'rate 5e-05, ratio 1', 'all but QK ÷30')
    """
    epochs = epochs or EPOCHS
    base = constant_rate(epochs)
    arms = {
        arm_name(rate, ratio): base.replace(lr=rate, qk_ratio=ratio) for rate in RATES for ratio in RATIOS
    }
    # Weight decay acts per step, so thirty times the steps would decay thirty times as much: none here.
    arms[SLOWED_ARM] = base.replace(
        lr=RATES[0] / SLOWED,
        qk_ratio=SLOWED,
        weight_decay=0,
        epochs=epochs * SLOWED,
        evaluations=SLOWED_EVALUATIONS,
    )
    return Comparison(
        "ratio-or-rate",
        "HateXplain, one layer: ratio or rate",
        "paper",
        arms,
        seeds_from(seeds),
        scores=SCORES,
        baselines={arm_name(rate, ratio): arm_name(rate, 1) for rate in RATES for ratio in RATIOS}
        | {SLOWED_ARM: arm_name(RATES[0], 1)},
        more=slopes_of,
        figure=save_map,
    )


def slopes_of(outcome: Outcome) -> list[Value]:
    """How `DECIDES` grows per decade at the lowest common loss, for every seed.

    The plane ``mrta = c + a log10(ratio) + b log10(base rate)`` is fitted to the map, and a line to every
    ratio. If the ratio alone decided, b would be 0; if the QK rate alone did, a and b would be equal.
    """
    table = outcome.measured
    loss = next(iter(table.losses(LOSS, arm_name(RATES[0], 1), DECIDES)), None)
    points: dict[int, list[tuple[float, float, float]]] = {}
    for rate in RATES:
        for ratio in RATIOS:
            for seed, mass in table.of(arm_name(rate, ratio), DECIDES, LOSS, loss).items():
                points.setdefault(seed, []).append((np.log10(ratio), np.log10(rate), mass))
    values = []
    for seed, map_points in points.items():
        per_ratio, per_rate = _fit(map_points, 2)
        slopes = {PER_RATIO: per_ratio, PER_RATE: per_rate, "ratio_minus_base_rate": per_ratio - per_rate}
        for ratio in RATIOS:
            line = [(rate, mass) for log_ratio, rate, mass in map_points if log_ratio == np.log10(ratio)]
            slopes[per_decade_at(ratio)] = _fit(line, 1)[0]
        values += [
            Value(table.name, MAP, seed, LOSS, loss, name, slope)
            for name, slope in slopes.items()
            if np.isfinite(slope)
        ]
    return values


def _fit(points: Sequence[tuple[float, ...]], slopes: int) -> list[float]:
    """The slopes of the plane through ``points`` by least squares, the last entry of each its height."""
    table = np.array(points, dtype=float).reshape(-1, slopes + 1)
    if len(table) <= slopes + 1:
        return [np.nan] * slopes
    terms = np.column_stack([np.ones(len(table)), table[:, :-1]])
    return [float(slope) for slope in np.linalg.lstsq(terms, table[:, -1])[0][1:]]


def answers(table: Measured) -> list[Effect]:
    """Slopes and single pairs of arms that tell ratio and rate apart, corrected for their number."""
    base, fast = arm_name(RATES[0], 1), arm_name(RATES[-1], 1)
    faster = arm_name(RATES[0], SLOWED)
    slopes: dict[str, tuple[str, Claimed]] = {
        "growth per decade of the ratio": (PER_RATIO, "more"),
        "growth per decade of the base rate": (PER_RATE, "equal"),
    }
    pairs: dict[tuple[str, str], Claimed] = {
        (faster, fast): "more",  # the same QK rate
        (SLOWED_ARM, base): "more",
        (fast, base): "equal",  # the same ratio
        (faster, SLOWED_ARM): "equal",
    }
    effects = []
    for label, (slope, claimed) in slopes.items():
        with suppress(InputError):  # too many arms diverged
            effects.append(above(table, MAP, slope, 0.0, claimed, at=LOSS, label=label))
    for pair, claimed in pairs.items():
        with suppress(InputError):
            effects.append(compare(table, pair, DECIDES, claimed, at=LOSS))
    return correct(effects)


def save_map(outcome: Outcome, out: Path) -> dict[str, str]:
    """Draw attention and accuracy over base rate and ratio; returns the paths."""
    _, loss = outcome.shared_moment()
    grids = []
    for score in (DECIDES, "test_accuracy"):
        means = outcome.means(score)
        cells = [[means.get(arm_name(rate, ratio), np.nan) for ratio in RATIOS] for rate in RATES]
        names = [f"{rate:g}" for rate in RATES], [f"{ratio:g}" for ratio in RATIOS]
        grids.append(Grid(title_of(score), *names, cells))
    return save_grids(
        grids,
        ("ratio (QK rate divided by base rate)", "base rate"),
        out,
        outcome.comparison.name,
        title=outcome.comparison.title,
        caption=f"Every arm where its training loss first falls to {loss or np.nan:.3f}, mean over seeds;"
        " the table has the intervals. From a cell to the one below it on its right the rate of the"
        f" query-key circuit is the same. {outcome.setting()}.",
    )


def run(runner: CellRunner, seeds: int, epochs: int | None) -> dict[str, Any]:
    outcome = run_arms(ratio_or_rate(seeds, epochs), runner)
    effects = answers(outcome.measured)
    decided = [effect_record(effect) | {"if_the_ratio_decides": effect.claimed} for effect in effects]
    return {**outcome.summary(), "ratio_or_rate": decided, "files": outcome.save(runner.out)}


EXPERIMENT = Experiment(
    "ratio-or-rate",
    run,
    options=(seeds_option(3), EPOCHS_OPTION),
    examples=("--seeds 1 --epochs 1 # a quick look", "--cells lab/paper/cells/ratio-or-rate.jsonl.xz"),
    needs_data=True,
)

# --- Tuned against tuned ---

TUNED_DATA = ("hatexplain", "sva-whole", "sva-prefix", "squad")
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
    for form, title in SVA_TITLES.items():
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
        examples=True,
    )


def run_tuned(runner: CellRunner, data: str | None, seeds: int | None) -> dict[str, Any]:
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
        tables[name] = plain(run_comparison(comparison, runner) | {"search": about})
    return {"experiment": "tuned", "protocol": "paper", "data": tables}


TUNED = Experiment(
    "tuned",
    run_tuned,
    options=(
        Option("data", str, "one data set (default: all, which takes hours)", choices=TUNED_DATA),
        seeds_option(None, "of the final comparison (default: 5; SQuAD: 3)"),
    ),
    examples=("--data hatexplain --out out",),
    needs_data=True,
)
