"""The paper's main table: every data set with both arms, nulls, effects, and the paper's numbers."""

from collections.abc import Mapping
from dataclasses import replace
from math import nan
from typing import Any

from fasterqk.attention.scores import title_of
from fasterqk.attention.statistics import Interval
from fasterqk.errors import InputError
from fasterqk_lab.compare import BEST, END, Effect, margin_of
from fasterqk_lab.experiments._comparison import (
    ARM_NAMES,
    AT_TEXTS,
    BASELINE,
    COLUMNS,
    FASTER,
    SOURCES,
    Comparison,
    Outcome,
    run_arms,
)
from fasterqk_lab.experiments._registry import (
    EPOCHS_OPTION,
    PROTOCOL_OPTION,
    CellRunner,
    Experiment,
    Option,
    seeds_option,
)
from fasterqk_lab.experiments.table_hatexplain import table_hatexplain
from fasterqk_lab.experiments.table_squad import PAPER, SIZES, table_squad
from fasterqk_lab.experiments.table_sva import choose_arms
from fasterqk_lab.figures import save_forest, save_table, wide_rows

# The columns of the paper's Table 1, and those of the figure.
METRICS = (
    *("train_accuracy", "test_accuracy", "train_f1", "test_f1", "ac", "acmc", "mrta"),
    *("sufficiency_5", "comprehensiveness_5", "sharp_ac", "permuted_ac", "permuted_mrta"),
)
SHOWN = ("mrta", "ac", "test_accuracy", "sufficiency_5", "comprehensiveness_5", "test_f1")
TITLE = "Faster query-key learning on real data"
MEASURED = (
    "Both arms at equal training loss, then at the end; differences paired by seed. Null: uniform attention, "
    "the most frequent class, or tokens ranked by chance."
)


def main_rows(outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    """One row per data set, moment and score of the paper's table: both arms, difference, null, paper.

    Moments are equal loss and the end of training.
    """
    rows = [
        row | {"data set": dataset, "arm": ARM_NAMES[row["arm"]]}
        for dataset, outcome in outcomes.items()
        for row in outcome.rows
        if row["name"] in METRICS and row["at"] != AT_TEXTS[BEST]
    ]
    columns = {key: COLUMNS[key] for key in ("at", "loss", "score", *COLUMNS)} | SOURCES
    wide, labels = wide_rows(rows, {"data set": "data set", **columns}, joined=("data set", "at", "score"))
    return [{label: row.get(key) for key, label in labels.items()} for row in wide]


def _papers(dataset: str) -> str:
    return f"{dataset}, the paper"


def main_effects(outcomes: Mapping[str, Outcome]) -> list[Effect]:
    """Every effect under the name of its data set, and below it the difference that the paper prints."""
    effects = []
    for dataset, outcome in outcomes.items():
        measured = [effect for effect in (*outcome.effects, *outcome.explored) if effect.score in SHOWN]
        effects += [replace(effect, label=dataset) for effect in measured]
        printed = outcome.comparison.printed.get("paper", {})
        for score in SHOWN:
            if all(score in printed.get(arm, {}) for arm in (BASELINE, FASTER)):
                first, second = (Interval(printed[arm][score], nan, 0) for arm in (FASTER, BASELINE))
                difference = Interval(first.mean - second.mean, nan, 0)
                label, margin = _papers(dataset), margin_of(score)
                effects.append(Effect(label, score, "more", difference, first, second, END, margin=margin))
    return effects


def comparisons(
    runner: CellRunner, protocol: str, seeds: int, squad: str | None, squad_seeds: int, epochs: int | None
) -> dict[str, Comparison]:
    """The two arms of every data set; the base rate of agreement is searched where it is not known yet."""
    sva, _ = choose_arms(runner, protocol, "whole", seeds, epochs)
    tables = {"SVA": sva, "HateXplain": table_hatexplain(protocol, seeds, epochs)}
    if squad:
        protocols = table_squad(squad, seeds=squad_seeds, epochs=epochs)
        if protocol not in protocols:
            raise InputError(f"--squad {squad} has no protocol {protocol!r}; choose --squad paper")
        tables[f"SQuAD, {squad}"] = replace(
            protocols[protocol], printed={"paper": PAPER, **protocols[protocol].printed}
        )
    return tables


def run(
    runner: CellRunner, protocol: str, seeds: int, squad: str | None, squad_seeds: int, epochs: int | None
) -> dict[str, Any]:
    tables = comparisons(runner, protocol, seeds, squad, squad_seeds, epochs)
    outcomes = {dataset: run_arms(comparison, runner) for dataset, comparison in tables.items()}
    rows, effects, name = main_rows(outcomes), main_effects(outcomes), f"table-main-{protocol}"
    caption = f"{MEASURED} {'; '.join(outcome.setting() for outcome in outcomes.values())}."
    if squad:
        caption += " Of SQuAD accuracy is exact match, and AC and ACMC count from .1 on, not from .5."
    printed = {f"{source}, {arm}" for source in SOURCES.values() for arm in ARM_NAMES.values()}
    columns = [
        {"key": key, "label": key} | ({"source": "paper"} if key in printed else {})
        for key in dict.fromkeys(key for row in rows for key in row)
    ]
    names = {_papers(f"SQuAD, {size}"): _papers("SQuAD") for size in SIZES}
    titles = {score: title_of(score) for score in SHOWN if any(effect.score == score for effect in effects)}
    files = {
        "table": save_table(runner.out, name, title=TITLE, caption=caption, columns=columns, rows=rows),
        "forest": save_forest(effects, titles, runner.out, name, title=TITLE, caption=caption, names=names),
    }
    return {"experiment": "table-main", "protocol": protocol, "rows": rows, "files": files}


EXPERIMENT = Experiment(
    "table-main",
    run,
    options=(
        PROTOCOL_OPTION,
        seeds_option(5),
        Option("squad", str, "SQuAD too, in this size (accuracy is exact match)", choices=tuple(SIZES)),
        Option("squad_seeds", int, "how many of SQuAD", default=1, most=1000),
        EPOCHS_OPTION,
    ),
    examples=("--squad small # with SQuAD, in a size for one core", "--protocol released --json"),
    needs_data=True,
)
