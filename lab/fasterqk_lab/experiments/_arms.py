"""Arms of one recipe over several seeds: run, summarise, compare and show them, and what they attend to."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from fasterqk.attention import (
    SCORES,
    dtap_over_seeds,
    interval,
    matched_loss,
    paired_difference,
    place_of,
    score_of,
    table_scores,
)
from fasterqk.console import print_table
from fasterqk.files import plain
from fasterqk_lab.experiments import _arm_tables as tables
from fasterqk_lab.experiments._comparison import BASELINE, FASTER, TRAIN, Comparison, printed_row, two_arms
from fasterqk_lab.experiments._examples import attention_examples
from fasterqk_lab.experiments._registry import CellRunner
from fasterqk_lab.tasks import Task, left_out, load_task
from fasterqk_lab.training import TrainResult
from fasterqk_lab.training._classification import flat

__all__ = ["BASELINE", "FASTER", "TRAIN", "Comparison", "printed_row", "two_arms"]  # of `_comparison`

Record = Mapping[str, Any]
Results = Mapping[tuple[str, int], TrainResult]


def run_comparison(comparison: Comparison, runner: CellRunner) -> dict[str, Any]:
    """Run what is not done yet, write tables and figures of two arms, and return what ``--json`` prints."""
    return save_comparison(comparison, run_arms(comparison, runner), runner)


def run_arms(comparison: Comparison, runner: CellRunner) -> dict[tuple[str, int], TrainResult]:
    """The result of every cell; those that are done already are read, not trained again."""
    if not runner.rebuilds:
        _task(comparison)  # missing or damaged data is an error before any worker starts
    name = comparison.name
    results = runner.run(comparison.cells(), TRAIN, title=name, protocol=comparison.protocol, table=name)
    return {cell: TrainResult.from_json(result) for cell, result in results.items()}


def save_comparison(comparison: Comparison, results: Results, runner: CellRunner) -> dict[str, Any]:
    """Write tables, figures and examples of both arms; returns the summary with their ``files``."""
    summary = summarize_arms(comparison, results)
    files = tables.save_arms(summary, results, runner.out, title=comparison.title)
    diverged = any(result.diverged for result in results.values())
    if not diverged and not runner.rebuilds:  # examples need the weights
        examples = attention_examples(comparison.arms, comparison.seeds[0], runner.out)
        sensitive = _task(comparison).sensitive
        tables.save_arm_examples(summary, examples, runner.out, title=comparison.title, sensitive=sensitive)
    # What the cells left out, which may be more than the task did: prompts too long for the model.
    skipped = next((result.skipped for result in results.values() if result.skipped), {})
    return {**summary, "files": files, "skipped": dict(skipped)}


def _task(comparison: Comparison) -> Task:
    config = next(iter(comparison.arms.values()))
    return load_task(config.task, form=config.data.form, file=config.data.file)


def summarize_arms(comparison: Comparison, results: Results) -> dict[str, Any]:
    """The whole comparison as plain JSON data.

    ``arms`` maps an arm to its metrics at the end of training, each ``{mean, half_width, n, null, ...}``
    with others' printed numbers beside, and to the same ``at_best_validation`` and ``on_validation``;
    ``difference`` is faster QK minus baseline, paired by seed; ``matched`` compares at equal loss.
    """
    ends = {cell: _end_record(result, "test") for cell, result in results.items()}
    names = score_names(ends.values())
    return plain(
        {
            "experiment": comparison.name,
            "protocol": comparison.protocol,
            "seeds": list(comparison.seeds),
            "epochs": next(iter(comparison.arms.values())).optimisation.epochs,
            "arms": {arm: _arm(comparison, results, ends, arm) for arm in comparison.arms},
            "difference": _nested(names, lambda name: _difference(comparison, ends, name)),
            "matched": _matched(comparison, results, [name for name in names if name != "loss"]),
        }
    )


def score_names(records: Iterable[Record]) -> list[str]:
    """The flat names of all scores that any record has, in the order of a table."""
    return table_scores(name for record in records for name in record)


def _arm(comparison: Comparison, results: Results, ends: Mapping[Any, Record], arm: str) -> dict[str, Any]:
    own = [results[arm, seed] for seed in comparison.seeds]
    best = {seed: results[arm, seed].best for seed in comparison.seeds}
    validation = {seed: _end_record(results[arm, seed], "validation") for seed in comparison.seeds}
    at_end = {seed: ends[arm, seed] for seed in comparison.seeds}
    finished = [result for result in own if not result.diverged]
    printed = {source: arms[arm] for source, arms in comparison.printed.items() if arm in arms}
    summary = _table(at_end, printed)
    summary["null"] = {
        name: interval(record.get(f"null_{name}") for record in at_end.values()).mean
        for name in tables.UNIFORM
        if SCORES[name].better
    }
    options = comparison.arms[arm].optimisation
    summary |= {"qk_ratio": options.qk_ratio, "lr": options.lr, "epochs": options.epochs}
    summary["diverged"] = [result.seed for result in own if result.diverged]
    summary["at_best_validation"] = _table(best, {})
    summary["at_best_validation"]["epochs"] = [record.get("epoch") for record in best.values()]
    summary["on_validation"] = _table(validation, {})
    if finished:
        mean, deviation = dtap_over_seeds([result.test["dtap"] for result in finished])
        edges = finished[0].test["dtap_edges"]
        summary["dtap"] = {"mean": mean, "standard_deviation": deviation, "edges": edges}
        summary["majority_accuracy"] = finished[0].test["majority_accuracy"]
        summary["groups"] = _group_table(finished)
    return summary


def _end_record(result: TrainResult, split: str) -> dict[str, Any]:
    """The end of a run as one flat record; attention is that on ``split``; empty when it diverged."""
    if result.diverged:
        return {}
    fit = {
        f"{name}_{score.name}": getattr(result, name)[score.name]
        for score in SCORES.values()
        for name in ("train", "validation", "test")
        if score.by_split and score.name in getattr(result, name)
    }
    scores = {key: value for key, value in getattr(result, split).items() if key not in ("loss", "groups")}
    return {"loss": result.loss, **fit, **flat(scores)}


def _table(records: Mapping[int, Record], printed: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    def cell(name: str) -> dict[str, Any]:
        found = interval(record.get(name) for record in records.values())
        null = interval(record.get(f"null_{name}") for record in records.values())
        entry = {"mean": found.mean, "half_width": found.half_width, "n": found.n, "null": null.mean}
        return entry | {source: numbers[name] for source, numbers in printed.items() if name in numbers}

    return _nested(score_names(records.values()), cell)


def _nested(names: Sequence[str], value: Callable[[str], Any]) -> dict[str, Any]:
    """``{"sufficiency": {"5": ...}}`` from flat names such as ``sufficiency_5``."""
    nested: dict[str, Any] = {}
    for name in names:
        *group, key = place_of(name)
        (nested.setdefault(group[0], {}) if group else nested)[key] = value(name)
    return nested


def _difference(comparison: Comparison, ends: Mapping[Any, Record], name: str) -> Any:
    faster, baseline = (
        [ends[arm, seed].get(name) for seed in comparison.seeds] for arm in (FASTER, BASELINE)
    )
    return paired_difference(faster, baseline)


def _matched(comparison: Comparison, results: Results, names: Sequence[str]) -> list[dict[str, Any]]:
    # A diverged cell has no say in where the others are compared, and is listed as missing there.
    histories: dict[tuple[Hashable, Hashable], Any] = {
        (arm, seed): [] if results[arm, seed].diverged else results[arm, seed].history
        for arm in comparison.arms
        for seed in comparison.seeds
    }
    recorded = [name for name in names if any(name in row for rows in histories.values() for row in rows)]
    return matched_loss(histories, recorded)


def _group_table(finished: Sequence[TrainResult]) -> dict[str, Any]:
    """Accuracy by group (number of attractors, say), with intervals over seeds."""
    first = finished[0].test["groups"]
    return {
        name: {
            value: {
                "n": entry["n"],
                "majority_accuracy": entry["majority_accuracy"],
                "accuracy": interval(result.test["groups"][name][value]["accuracy"] for result in finished),
            }
            for value, entry in values.items()
        }
        for name, values in first.items()
    }


def _shown_at_equal_loss(name: str) -> bool:
    """Whether the terminal shows a score at equal loss; the table that is written has all of them."""
    score = score_of(name)
    if score.per_k or score.better is None or score.group == "plausibility":
        return False
    return not score.by_split or name.startswith("test_")


def show_arms(summary: dict[str, Any]) -> None:
    """Print the table at the end of training and the one at equal loss."""

    def labelled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        keys = tables.column_keys(rows)
        return [{tables.column_label(key): row.get(key) for key in keys} for row in rows]

    print(tables.describe(summary))
    print_table(labelled(tables.end_rows(summary)), title="\nat the end of training (test split)")
    print_table(
        labelled(tables.matched_rows(summary, _shown_at_equal_loss)), title="\nat equal training loss"
    )
    for group in summary["arms"]["baseline"].get("groups") or {}:
        print_table(labelled(tables.group_rows(summary, group)), title=f"\naccuracy by {group}")
    print_diverged(summary)
    if summary.get("skipped"):
        print(f"\nleft out of the data: {left_out(summary['skipped'])}")
    print(f"\nfigures: {summary['files']['dtap']['png']} {summary['files']['loss']['png']}")


def print_diverged(summary: Mapping[str, Any]) -> None:
    """Print which seeds of which arms diverged, if any did."""
    diverged = {arm: entry["diverged"] for arm, entry in summary["arms"].items() if entry["diverged"]}
    if diverged:
        print(f"\ndiverged: {diverged}")
