"""Two arms of one recipe over several seeds: run them, summarise each, compare them at equal loss."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasterqk.attention import dtap_over_seeds, interval, matched_loss, paired_difference
from fasterqk.files import plain
from fasterqk.lab.runs import sweep
from fasterqk.lab.training import TrainConfig
from fasterqk.lab.training._classification import flat

BASELINE, FASTER = "baseline", "faster_qk"
FITS = ("accuracy", "f1")
FIT = ("loss", *(f"{split}_{fit}" for fit in FITS for split in ("train", "validation", "test")))
# Of single numbers and of groups of them, as the evaluations name them.
SCORES = ("mrta", "ac", "acmc", "entropy")
GROUPS = {
    "sufficiency": ("sufficiency_",),
    "comprehensiveness": ("comprehensiveness_",),
    "aopc": ("aopc_",),
    "plausibility": ("auprc", "token_f1", "iou_f1"),
}

Record = Mapping[str, Any]
Results = Mapping[tuple[str, int], Mapping[str, Any]]


@dataclass(frozen=True)
class Experiment:
    """A table with two arms: their configurations (the seed is filled in), and others' numbers to match.

    ``printed`` maps a source (``paper``, ``released``) to arms to metrics to a number.
    """

    name: str
    title: str
    protocol: str
    arms: Mapping[str, TrainConfig]
    seeds: tuple[int, ...]
    printed: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)

    def cells(self) -> dict[tuple[str, int], TrainConfig]:
        """All cells, seed by seed, so that a run that is stopped early has whole comparisons."""
        return {
            (arm, seed): config.replace(seed=seed) for seed in self.seeds for arm, config in self.arms.items()
        }


def run_arms(
    experiment: Experiment,
    out: Path,
    *,
    workers: int = 2,
    force: bool = False,
    progress: Callable[..., None] | None = None,
) -> dict[tuple[str, int], dict[str, Any]]:
    """The result of every cell; those that are done already are read from the store under ``out``."""
    cells = experiment.cells()
    results = sweep(
        cells.values(), "fasterqk.lab.training:train", out, workers=workers, force=force, progress=progress
    )
    return dict(zip(cells, results, strict=True))


def summarize_arms(experiment: Experiment, results: Results) -> dict[str, Any]:
    """The whole comparison as plain JSON data.

    ``arms`` maps an arm to its metrics at the end of training, each ``{mean, half_width, n, null, ...}``
    with others' printed numbers beside, and to the same ``at_best_validation`` and ``on_validation``;
    ``difference`` is faster QK minus baseline, paired by seed; ``matched`` compares at equal loss.
    """
    ends = {cell: _end_record(result, "test") for cell, result in results.items()}
    names = metric_names(ends.values())
    return plain(
        {
            "experiment": experiment.name,
            "protocol": experiment.protocol,
            "seeds": list(experiment.seeds),
            "epochs": next(iter(experiment.arms.values())).optimisation.epochs,
            "arms": {arm: _arm(experiment, results, ends, arm) for arm in experiment.arms},
            "difference": _nested(names, lambda name: _difference(experiment, ends, name)),
            "matched": _matched(experiment, results, [name for name in names if name != "loss"]),
        }
    )


def metric_names(records: Any) -> list[str]:
    """The flat names of all metrics that any record has, in the order of a table."""
    present = list(dict.fromkeys(name for record in records for name in record))
    grouped = [name for prefixes in GROUPS.values() for name in present if name.startswith(prefixes)]
    return [name for name in (*FIT, *SCORES) if name in present] + grouped


def _arm(experiment: Experiment, results: Results, ends: Mapping[Any, Record], arm: str) -> dict[str, Any]:
    own = [results[arm, seed] for seed in experiment.seeds]
    best = {seed: results[arm, seed]["best"] or {} for seed in experiment.seeds}
    validation = {seed: _end_record(results[arm, seed], "validation") for seed in experiment.seeds}
    at_end = {seed: ends[arm, seed] for seed in experiment.seeds}
    finished = [result for result in own if not result["diverged"]]
    summary = _table(at_end, _printed(experiment, arm))
    summary["null"] = {
        name: interval(record.get(f"null_{name}") for record in at_end.values()).mean for name in SCORES[:3]
    }
    options = experiment.arms[arm].optimisation
    summary |= {"qk_ratio": options.qk_ratio, "lr": options.lr, "epochs": options.epochs}
    summary["diverged"] = [result["seed"] for result in own if result["diverged"]]
    summary["at_best_validation"] = _table(best, {})
    summary["at_best_validation"]["epochs"] = [record.get("epoch") for record in best.values()]
    summary["on_validation"] = _table(validation, {})
    if finished:
        mean, deviation = dtap_over_seeds([result["test"]["dtap"] for result in finished])
        edges = finished[0]["test"]["dtap_edges"]
        summary["dtap"] = {"mean": mean, "standard_deviation": deviation, "edges": edges}
        summary["majority_accuracy"] = finished[0]["test"]["majority_accuracy"]
        summary["groups"] = _group_table(finished)
    return summary


def _end_record(result: Mapping[str, Any], split: str) -> dict[str, Any]:
    """The end of a run as one flat record; attention is that on ``split``; empty when it diverged."""
    if result["diverged"]:
        return {}
    fit = {
        f"{name}_{fit}": result[name][fit]
        for fit in FITS
        for name in ("train", "validation", "test")
        if fit in result[name]
    }
    scores = {key: value for key, value in result[split].items() if key not in ("loss", "groups")}
    return {"loss": result["loss"], **fit, **flat(scores)}


def _table(records: Mapping[int, Record], printed: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    def cell(name: str) -> dict[str, Any]:
        found = interval(record.get(name) for record in records.values())
        null = interval(record.get(f"null_{name}") for record in records.values())
        entry = {"mean": found.mean, "half_width": found.half_width, "n": found.n, "null": null.mean}
        return entry | {source: numbers[name] for source, numbers in printed.items() if name in numbers}

    return _nested(metric_names(records.values()), cell)


def _nested(names: Sequence[str], value: Callable[[str], Any]) -> dict[str, Any]:
    """``{"sufficiency": {"5": ...}}`` from flat names such as ``sufficiency_5``."""
    nested: dict[str, Any] = {}
    for name in names:
        group = next((group for group, prefixes in GROUPS.items() if name.startswith(prefixes)), None)
        if group is None:
            nested[name] = value(name)
        else:
            nested.setdefault(group, {})[name.removeprefix(f"{group}_")] = value(name)
    return nested


def _difference(experiment: Experiment, ends: Mapping[Any, Record], name: str) -> Any:
    faster, baseline = (
        [ends[arm, seed].get(name) for seed in experiment.seeds] for arm in (FASTER, BASELINE)
    )
    return paired_difference(faster, baseline)


def _matched(experiment: Experiment, results: Results, names: Sequence[str]) -> list[dict[str, Any]]:
    # A diverged cell has no say in where the others are compared, and is listed as missing there.
    histories: dict[tuple[Hashable, Hashable], Any] = {
        (arm, seed): [] if results[arm, seed]["diverged"] else results[arm, seed]["history"]
        for arm in experiment.arms
        for seed in experiment.seeds
    }
    recorded = [name for name in names if any(name in row for rows in histories.values() for row in rows)]
    return matched_loss(histories, recorded)


def _group_table(finished: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy by group (number of attractors, say), with intervals over seeds."""
    first = finished[0]["test"]["groups"]
    return {
        name: {
            value: {
                "n": entry["n"],
                "majority_accuracy": entry["majority_accuracy"],
                "accuracy": interval(
                    result["test"]["groups"][name][value]["accuracy"] for result in finished
                ),
            }
            for value, entry in values.items()
        }
        for name, values in first.items()
    }


def _printed(experiment: Experiment, arm: str) -> dict[str, Mapping[str, float]]:
    return {source: arms[arm] for source, arms in experiment.printed.items() if arm in arms}
