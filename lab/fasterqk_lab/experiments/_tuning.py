"""The paper's search: the base rate by validation accuracy, then the multiplier of the query-key rate.

Attention plays no part: the runs of a search do not measure it (their evaluation is ``fit``).

Two things make it cheap. A run ends when its validation accuracy has not risen for a few epochs, and
counts as the best accuracy it reached. And every value is tried with one seed first; only the best few
are tried with more, and the mean over these decides between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from fasterqk.attention.statistics import interval
from fasterqk.errors import InputError
from fasterqk.files import plain
from fasterqk_lab.compare import BEST, Value, write_values
from fasterqk_lab.experiments._registry import CellRunner
from fasterqk_lab.figures import save_table
from fasterqk_lab.tasks import load_task
from fasterqk_lab.training import TrainConfig

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
    """What is tried: ``base`` with every rate, then the chosen rate with every ratio.

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
    judge = _Judge(search, validation, runner)
    rates = judge.stage("lr", search.rates)
    lr = _chosen(rates)
    ratios = judge.stage("qk_ratio", search.ratios, lr=lr)
    return plain(
        {
            "task": base.task,
            "lr": lr,
            "qk_ratio": _chosen(ratios),
            # Both at the chosen base rate: with equal rates (from the first stage) and with the chosen ratio.
            "accuracy": {"equal_rates": _row(rates)["accuracy"], "faster_qk": _row(ratios)["accuracy"]},
            "epochs": base.optimisation.epochs,
            "patience": base.evaluation.patience,
            "seeds": search.seeds,
            "validation_examples": validation,
            "stages": {"lr": rates, "qk_ratio": ratios},
            "runs": judge.runs,
        }
    )


class _Judge:
    """Runs the cells of a search and compares them."""

    def __init__(self, search: Search, validation: int, runner: CellRunner) -> None:
        self.search = search
        self.validation = validation
        self.runner = runner
        self.runs = 0

    def stage(self, name: str, values: Sequence[float], **fixed: float) -> dict[str, Any]:
        """Try all ``values`` of one field with one seed, the best with all seeds, and choose among these."""
        configs = {value: self.search.base.replace(**{**fixed, name: value}) for value in values}
        first = self.search.base.seed
        results = {(value, first): result for value, result in self._run(configs, first).items()}
        ranked = sorted(values, key=lambda value: (-_best(results[value, first]), value))
        finalists = [v for v in ranked if not results[v, first]["diverged"]][: self.search.finalists]
        if not finalists:
            raise InputError(f"every run diverged at {name} {', '.join(f'{v:g}' for v in values)}")
        for seed in range(first + 1, first + self.search.seeds):
            more = self._run({value: configs[value] for value in finalists}, seed)
            results |= {(value, seed): result for value, result in more.items()}
        return _compared(name, values, finalists, results, self.validation)

    def _run(self, configs: Mapping[float, TrainConfig], seed: int) -> dict[float, dict[str, Any]]:
        cells = {value: config.replace(seed=seed) for value, config in configs.items()}
        self.runs += len(cells)
        title = f"tune {self.search.base.task}"
        return self.runner.run(cells, "fasterqk_lab.training:train", title=title, arm=str)


def _compared(
    name: str,
    values: Sequence[float],
    finalists: Sequence[float],
    results: Mapping[tuple[float, int], Mapping[str, Any]],
    validation: int,
) -> dict[str, Any]:
    by_value = {value: [result for (at, _), result in results.items() if at == value] for value in values}
    means = {value: interval(_best(result) for result in by_value[value]).mean for value in finalists}
    # Equal means: the smaller value, which changes less.
    chosen = min(finalists, key=lambda value: (-means[value], value))
    error = sqrt(means[chosen] * (1 - means[chosen]) / validation)
    rows = [
        {
            name: value,
            "accuracy": interval(_best(result) for result in by_value[value]),
            "of_seeds": {
                seed: _best(result)
                for (at, seed), result in results.items()
                if at == value and not result["diverged"]
            },
            "epoch": [result["best"] and result["best"]["epoch"] for result in by_value[value]],
            "diverged": any(result["diverged"] for result in by_value[value]),
            "finalist": value in finalists,
            "chosen": value == chosen,
        }
        for value in values
    ]
    near = [v for v in finalists if v != chosen and means[chosen] - means[v] <= error]
    return {"field": name, "tried": rows, "standard_error": error, "not_told_apart": sorted(near)}


def _best(result: Mapping[str, Any]) -> float:
    """What counts for a run: its best validation accuracy; nothing when it diverged."""
    return 0.0 if result["diverged"] else float(result["best"]["validation_accuracy"])


def _row(stage: Mapping[str, Any]) -> dict[str, Any]:
    return next(row for row in stage["tried"] if row["chosen"])


def _chosen(stage: Mapping[str, Any]) -> float:
    return float(_row(stage)[stage["field"]])


TITLES = {"lr": "base rate", "qk_ratio": "multiplier of QK"}
ACCURACY = "validation accuracy"
Document = Mapping[str, Any]


def save_tuning(outcome: Document, out: Path) -> dict[str, dict[str, str]]:
    """Write the tables of what :func:`tune` found; returns their paths."""
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
    """What was chosen in a stage and why, in a sentence or two."""
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
