"""Searches: base rate and ratio chosen on validation data, where attention plays no part.

The command `tune` is the paper's search: the base rate by validation accuracy, then the multiplier of the
query-key rate. Two things make it cheap. A run ends when its validation accuracy has not risen for a few
epochs, and counts as the best accuracy it reached. And every value is tried with one seed first; only the
best few are tried with more, and the mean over these decides between them.

The paper multiplies the query-key rate of a baseline and leaves all else. In `tuned` both arms get what is
best for them: base rate and ratio are chosen among the same base rates, with ratio 1 for the baseline and any
larger ratio for the faster arm. The chosen pair is then trained with more seeds and compared on test data at
each arm's best validation epoch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, NamedTuple

from fasterqk.attention.statistics import Interval, interval
from fasterqk.errors import InputError
from fasterqk.files import plain
from fasterqk_lab.compare import BEST, Value, measured, write_values
from fasterqk_lab.experiments import ratio_or_rate as rate_map
from fasterqk_lab.experiments._comparison import (
    BASELINE,
    FASTER,
    TRAIN,
    Comparison,
    run_comparison,
    seeds_from,
)
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option
from fasterqk_lab.experiments.ratio_or_rate import arm_name
from fasterqk_lab.experiments.table_main import TITLES as SVA_TITLES
from fasterqk_lab.experiments.table_main import table_squad, table_sva
from fasterqk_lab.figures import save_table
from fasterqk_lab.tasks import load_task
from fasterqk_lab.training import TrainConfig

# --- The search of the command `tune` ---

# 1, 2 and 5 in every decade of the paper's range, [1e-6, 1e-2].
RATES = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
LOWEST, HIGHEST = RATES[0], RATES[-1]
RATIOS = (5.0, 10.0, 20.0, 30.0, 100.0)
EPOCHS = 12
PATIENCE = 3
SEEDS = 3
FINALISTS = 3


@dataclass(frozen=True)
class Search:
    """A search: ``base`` with every rate, then the chosen rate with every ratio.

    The first of ``seeds`` judges all values, all of them the ``finalists`` best ones.
    """

    base: TrainConfig
    rates: tuple[float, ...] = RATES
    ratios: tuple[float, ...] = RATIOS
    seeds: int = SEEDS
    finalists: int = FINALISTS

    def __post_init__(self) -> None:
        for name, values in (("rates", self.rates), ("ratios", self.ratios)):
            if len(set(values)) < len(values) or not values:
                raise InputError(f"{name} {list(values)}: give one value or more, each once")
        for rate in self.rates:
            if not LOWEST <= rate <= HIGHEST:
                raise InputError(f"rate {rate:g} lies outside the range of the search, 1e-06 to 0.01")


def search_of(
    base: TrainConfig, epochs: int | None = None, patience: int = PATIENCE, **options: Any
) -> Search:
    """A search around ``base``, whose runs measure accuracy alone and end when it stops rising.

    >>> search_of(TrainConfig("hatexplain")).base.optimisation.epochs
    12
    """
    shorter = epochs or min(base.optimisation.epochs, EPOCHS)
    return Search(base.replace(epochs=shorter, patience=patience, protocol="fit", qk_ratio=1), **options)


def tune(search: Search, runner: CellRunner) -> dict[str, Any]:
    """Run the search on the store under ``runner.out``, where what is done already is not done again.

    Returns plain JSON data: ``lr`` and ``qk_ratio``, both ``stages`` with every value tried (its
    ``accuracy`` on validation, the ``epoch`` of it, whether it is ``chosen`` and why), and ``runs``.
    """
    base = search.base
    # Missing or damaged data is an error before any worker starts.
    validation = len(load_task(base.task, form=base.data.form, file=base.data.file).splits["validation"])
    stages: dict[str, dict[str, Any]] = {}
    for name, values in (("lr", search.rates), ("qk_ratio", search.ratios)):
        fixed = {done: _chosen(stage) for done, stage in stages.items()}
        configs = {value: base.replace(**fixed | {name: value}) for value in values}
        stages[name] = _compared(name, *_try(search, name, configs, runner), validation)
    return plain(
        {
            "task": base.task,
            **{name: _chosen(stage) for name, stage in stages.items()},
            # Both at the chosen base rate: with equal rates (from the first stage) and with the chosen ratio.
            "accuracy": {
                arm: _row(stage)["accuracy"]
                for arm, stage in zip(("equal_rates", FASTER), stages.values(), strict=True)
            },
            "epochs": base.optimisation.epochs,
            "patience": base.evaluation.patience,
            "seeds": search.seeds,
            "validation_examples": validation,
            "stages": stages,
            "runs": sum(len(row["epoch"]) for stage in stages.values() for row in stage["tried"]),
        }
    )


def _try(
    search: Search, name: str, configs: Mapping[float, TrainConfig], runner: CellRunner
) -> tuple[list[float], dict[float, dict[int, dict[str, Any]]]]:
    """The best few values, and the results of every value by seed: all with one seed, the best with more."""
    first = search.base.seed
    results: dict[float, dict[int, dict[str, Any]]] = {value: {} for value in configs}
    finalists = list(configs)
    for seed in range(first, first + search.seeds):
        cells = {(str(value), seed): configs[value].replace(seed=seed) for value in finalists}
        done = runner.run(cells, TRAIN, title=f"tune {search.base.task}")
        for value, result in zip(finalists, done.values(), strict=True):
            results[value][seed] = result
        if seed == first:
            ranked = sorted(configs, key=lambda value: (-_best(results[value][first]), value))
            finalists = [v for v in ranked if not results[v][first]["diverged"]][: search.finalists]
            if not finalists:
                raise InputError(f"every run diverged at {name} {', '.join(f'{v:g}' for v in configs)}")
    return finalists, results


def _compared(
    name: str,
    finalists: Sequence[float],
    results: Mapping[float, Mapping[int, Mapping[str, Any]]],
    validation: int,
) -> dict[str, Any]:
    means = {value: interval(map(_best, results[value].values())).mean for value in finalists}
    # Equal means: the smaller value, which changes less.
    chosen = min(finalists, key=lambda value: (-means[value], value))
    error = sqrt(means[chosen] * (1 - means[chosen]) / validation)
    rows = [
        {
            name: value,
            "accuracy": interval(map(_best, by_seed.values())),
            "of_seeds": {seed: _best(run) for seed, run in by_seed.items() if not run["diverged"]},
            "epoch": [run["best"] and run["best"]["epoch"] for run in by_seed.values()],
            "diverged": any(run["diverged"] for run in by_seed.values()),
            "finalist": value in finalists,
            "chosen": value == chosen,
        }
        for value, by_seed in results.items()
    ]
    near = [v for v in finalists if v != chosen and means[chosen] - means[v] <= error]
    return {"field": name, "tried": rows, "standard_error": error, "not_told_apart": sorted(near)}


def _best(result: Mapping[str, Any]) -> float:
    """The best validation accuracy of a run; 0 if it diverged."""
    return 0.0 if result["diverged"] else float(result["best"]["validation_accuracy"])


def _row(stage: Mapping[str, Any]) -> dict[str, Any]:
    return next(row for row in stage["tried"] if row["chosen"])


def _chosen(stage: Mapping[str, Any]) -> float:
    return float(_row(stage)[stage["field"]])


TITLES = {"lr": "base rate", "qk_ratio": "multiplier of QK"}
ACCURACY = "validation accuracy"
Document = Mapping[str, Any]


def save_tuning(outcome: Document, out: Path) -> dict[str, dict[str, str]]:
    """Write the tables of a search by :func:`tune`; returns their paths."""
    name, title = f"tune-{outcome['task']}", f"Search for rates: {outcome['task']}"
    why = " ".join(reason(outcome, stage) for stage in outcome["stages"].values())
    caption = (
        f"Best validation accuracy of runs of at most {outcome['epochs']} epochs that end when it no longer "
        f"rises (patience {outcome['patience']}); {outcome['seeds']} seeds for the best values, one for the "
        f"others. {why}"
    )
    table = save_table(out, name, title=title, caption=caption, rows=tuning_rows(outcome))
    results = write_values(out / "results" / f"{name}.csv", _values(outcome, name))
    return {"table": table, "results": {"csv": str(results)}}


def tuning_rows(outcome: Document) -> list[dict[str, Any]]:
    """One row per value that was tried, in the order of the stages."""
    return [
        {
            "stage": TITLES[name],
            "value": row[name],
            ACCURACY: None if row["diverged"] else row["accuracy"],
            "at epoch": ", ".join("–" if epoch is None else f"{epoch:g}" for epoch in row["epoch"]),
            "note": _note(row),
        }
        for name, stage in outcome["stages"].items()
        for row in stage["tried"]
    ]


def _values(outcome: Document, search: str) -> list[Value]:
    return [
        Value(search, f"{TITLES[name]} {row[name]:g}", int(seed), BEST, None, "validation_accuracy", value)
        for name, stage in outcome["stages"].items()
        for row in stage["tried"]
        for seed, value in row["of_seeds"].items()
    ]


def reason(outcome: Document, stage: Mapping[str, Any]) -> str:
    """The value that a stage chose and why, in a sentence or two."""
    name = stage["field"]
    best = _row(stage)
    seeds = best["accuracy"]["n"]
    text = (
        f"Chosen: {TITLES[name]} {best[name]:g}, the highest validation accuracy "
        f"({best['accuracy']['mean']:.4f}, mean of {seeds} seed{'s' if seeds > 1 else ''})."
    )
    if stage["not_told_apart"]:
        others = ", ".join(f"{value:g}" for value in stage["not_told_apart"])
        text += (
            f" Within one standard error of it ({stage['standard_error']:.4f} on "
            f"{outcome['validation_examples']} examples): {others}."
        )
    if name == "qk_ratio":
        equal = outcome["accuracy"]["equal_rates"]["mean"]
        text += f" With equal rates: {equal:.4f}."
    return text


def _note(row: Mapping[str, Any]) -> str:
    if row["diverged"]:
        return "diverged"
    return "chosen" if row["chosen"] else "finalist" if row["finalist"] else ""


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
_SQUAD_FINAL: dict[str, Any] = {"evaluations_per_epoch": 4, "along_subset": 256, "best_by": "validation_loss"}


class Point(NamedTuple):
    """A point of the grid with the score that judges it, over the seeds of the search."""

    lr: float
    qk_ratio: float
    judge: Interval


class Searched(NamedTuple):
    """The points that a search tried, the score and seeds that judged them, and its choice for each arm.

    ``edges`` names, by arm, the values chosen at the edge of the grid: a value beyond it may be better.
    """

    by: str
    seeds: list[int]
    tried: list[Point]
    chosen: dict[str, Point]
    edges: dict[str, list[str]]


@dataclass(frozen=True)
class Tuning:
    """A grid of rates and ratios, judged over ``search_seeds``; the best are trained with ``seeds``.

    ``base`` configures the final trainings, and those of the search unless it has shorter ones (``search``).
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
    hatexplain = rate_map.ratio_or_rate().arms[arm_name(rate_map.RATES[0], 1)]
    searches = {
        "hatexplain": Tuning(
            "HateXplain, one layer", hatexplain, rate_map.RATES, rate_map.RATIOS, search_seeds=3, seeds=5
        )
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
    tried = [Point(*point, interval(judged[arm_name(*point), seed] for seed in seeds)) for point in grid]
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


def run(runner: CellRunner, data: str | None = None, seeds: int | None = None) -> dict[str, Any]:
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


EXPERIMENT = Experiment(
    "tuned",
    run,
    (
        Option("data", str, "one data set (default: all, which takes hours)", choices=TUNED_DATA),
        Option("seeds", int, "of the final comparison (default: 5; SQuAD: 3)", most=1000),
    ),
    examples=("--data hatexplain --out out",),
    needs_data=True,
)
