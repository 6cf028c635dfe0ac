"""Ratio or rate: is it the ratio of the two circuits' rates that sharpens attention, or the QK rate itself?

One-layer HateXplain over base rates and ratios. Rates and ratios step by about the same factor, so that one
QK rate (base rate times ratio) occurs with several ratios. One more arm slows everything but the query-key
circuit: it has the ratio of the faster arm and the QK rate of the baseline, and trains as much longer.

The score that decides, named before any run: attention on relevant tokens (MRTA) at the lowest training loss
that all arms reach. All other scores are exploratory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fasterqk.attention import holm, interval, matched_loss, paired_difference, title_of
from fasterqk.console import mean_of, print_table
from fasterqk.files import plain
from fasterqk_lab.experiments._arms import Comparison, Results, print_diverged, run_arms
from fasterqk_lab.experiments._registry import EPOCHS_OPTION, CellRunner, Experiment, seeds_option
from fasterqk_lab.experiments.ablation_hatexplain import EPOCHS, EVALUATE_AT_FALL, METRICS
from fasterqk_lab.experiments.table_hatexplain import FIRST_SEED
from fasterqk_lab.figures import HEATMAP, plotting, save_figure, save_table
from fasterqk_lab.training import TrainConfig

RATES = (5e-5, 1.5e-4, 5e-4, 1.5e-3)
RATIOS = (1, 3, 10, 30, 100)
# What the slowed arm divides every rate but that of the query-key circuit by, and multiplies its epochs by.
SLOWED = 30
SLOWED_ARM = f"all but QK ÷{SLOWED}"
# As many evaluations of the slowed arm as the others make at the ends of their epochs, and those on the way.
SLOWED_EVALUATIONS = 12
DECIDES = "mrta"
# The name under which the slopes of the whole map stand in the per-seed values.
MAP = "the map"


def ratio_or_rate(seeds: int = 3, epochs: int = EPOCHS) -> Comparison:
    """All arms; the slowed one last.

    >>> comparison = ratio_or_rate()
    >>> len(comparison.arms), list(comparison.arms)[0], list(comparison.arms)[-1]
    (21, 'rate 5e-05, ratio 1', 'all but QK ÷30')
    """
    base = TrainConfig("hatexplain", epochs=epochs, schedule="constant", evaluate_at_fall=EVALUATE_AT_FALL)
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
    chosen = tuple(range(FIRST_SEED, FIRST_SEED + seeds))
    return Comparison("ratio-or-rate", "HateXplain, one layer: ratio or rate", "paper", arms, chosen)


def arm_name(rate: float, ratio: float) -> str:
    """The name of a point of the map."""
    return f"rate {rate:g}, ratio {ratio:g}"


def summarize_map(comparison: Comparison, results: Results) -> dict[str, Any]:
    """Every arm at equal loss, how `DECIDES` grows per decade of ratio and of base rate, and two questions.

    ``corrected`` has the p-value of every arm's difference to the first, corrected for their number (Holm).
    ``slopes`` fits ``mrta = c + a log10(ratio) + b log10(base rate)`` to the map of every seed. If the ratio
    alone decided, b would be 0; if the QK rate alone did, a and b would be equal. ``same_qk_rate`` and
    ``same_ratio`` are the differences that ask the same of single arms, paired by seed.
    """
    histories: dict[tuple[Any, Any], Sequence[Mapping[str, Any]]] = {
        cell: [] if result.diverged else result.history for cell, result in results.items()
    }
    matched = matched_loss(histories, METRICS)
    value = _values(histories, comparison, matched[0]["loss"]) if matched else {}
    fits = _slopes(value, comparison.seeds)

    def difference(one: str, other: str) -> Any:
        ones, others = ([value.get((arm, seed)) for seed in comparison.seeds] for arm in (one, other))
        return paired_difference(ones, others)

    slowest, fastest = RATES[0], RATES[-1]
    qk_rate = arm_name(slowest, 30), arm_name(fastest, 1)
    validation = {
        arm: interval(_best_validation(results[arm, seed]) for seed in comparison.seeds)
        for arm in comparison.arms
    }
    last = next((history[-1] for history in histories.values() if history), {})
    return plain(
        {
            "experiment": comparison.name,
            "protocol": comparison.protocol,
            "seeds": list(comparison.seeds),
            "epochs": next(iter(comparison.arms.values())).optimisation.epochs,
            "decides": DECIDES,
            "null": {name: number for name, number in last.items() if name.startswith("null_")},
            "matched": matched,
            "corrected": holm({arm: found[DECIDES] for arm, found in matched[0]["difference"].items()})
            if matched
            else {},
            "slopes": {
                name: interval(fit[name] for fit in fits.values())
                for name in ("per_decade_of_ratio", "per_decade_of_base_rate", "ratio_minus_base_rate")
            },
            "slopes_per_seed": fits,
            "same_qk_rate": {
                f"{qk_rate[0]} minus {qk_rate[1]}": difference(*qk_rate),
                f"{SLOWED_ARM} minus {arm_name(slowest, 1)}": difference(SLOWED_ARM, arm_name(slowest, 1)),
            },
            "same_ratio": {
                f"{arm_name(fastest, 1)} minus {arm_name(slowest, 1)}": difference(
                    arm_name(fastest, 1), arm_name(slowest, 1)
                ),
                f"{arm_name(slowest, SLOWED)} minus {SLOWED_ARM}": difference(
                    arm_name(slowest, SLOWED), SLOWED_ARM
                ),
            },
            "best_validation_accuracy": validation,
            "arms": {
                arm: {"diverged": [seed for seed in comparison.seeds if results[arm, seed].diverged]}
                for arm in comparison.arms
            },
        }
    )


def _values(
    histories: Mapping[tuple[Any, Any], Sequence[Mapping[str, Any]]], comparison: Comparison, level: float
) -> dict[tuple[str, int], float | None]:
    """`DECIDES` of every cell where its loss first falls to ``level``; None where it never does."""
    values: dict[tuple[str, int], float | None] = {}
    for seed in comparison.seeds:
        own: dict[tuple[Any, Any], Any] = {(arm, seed): histories[arm, seed] for arm in comparison.arms}
        [found] = matched_loss(own, [DECIDES], [level])
        values |= {(arm, seed): scores[DECIDES].mean for arm, scores in found["arms"].items() if scores}
    return values


def _best_validation(result: Any) -> float | None:
    return None if result.diverged else max(record["validation_accuracy"] for record in result.history)


def _slopes(
    value: Mapping[tuple[str, int], float | None], seeds: Sequence[int]
) -> dict[int, dict[str, float]]:
    """The slopes of the plane through the map of every seed, per decade, and of its line at every ratio.

    Cells that never reached the loss are left out.
    """
    fits = {}
    for seed in seeds:
        points = {
            (rate, ratio): found
            for rate in RATES
            for ratio in RATIOS
            if (found := value.get((arm_name(rate, ratio), seed))) is not None and np.isfinite(found)
        }
        plane = _fit([(np.log10(ratio), np.log10(rate), found) for (rate, ratio), found in points.items()], 2)
        fits[seed] = {
            "per_decade_of_ratio": plane[0],
            "per_decade_of_base_rate": plane[1],
            "ratio_minus_base_rate": plane[0] - plane[1],
        }
        for ratio in RATIOS:
            line = [(np.log10(rate), found) for (rate, at), found in points.items() if at == ratio]
            fits[seed][per_decade_at(ratio)] = _fit(line, 1)[0]
    return fits


def per_decade_at(ratio: float) -> str:
    """The name of the growth with the base rate at one ratio.

    >>> per_decade_at(30)
    'per_decade_of_base_rate_at_ratio_30'
    """
    return f"per_decade_of_base_rate_at_ratio_{ratio:g}"


def _fit(points: Sequence[tuple[float, ...]], slopes: int) -> list[float]:
    """The slopes of the plane through ``points`` by least squares, the last entry of each its height."""
    table = np.array(points, dtype=float).reshape(-1, slopes + 1)
    if len(table) <= slopes + 1:
        return [np.nan] * slopes
    terms = np.column_stack([np.ones(len(table)), table[:, :-1]])
    return [float(slope) for slope in np.linalg.lstsq(terms, table[:, -1])[0][1:]]


def save_map(summary: Mapping[str, Any], runner: CellRunner, *, title: str) -> dict[str, dict[str, str]]:
    """Write the table and the map; returns their paths."""
    name, setting = summary["experiment"], describe(summary)
    rows = [
        {"arm": arm, "loss": level["loss"], **scores}
        | {"difference": level["difference"].get(arm, {}).get(DECIDES)}
        | {"p": summary["corrected"].get(arm) if level is summary["matched"][0] else None}
        for level in summary["matched"]
        for arm, scores in level["arms"].items()
    ]
    columns = [{"key": key, "label": key} for key in ("arm", "loss")] + [
        {"key": key, "label": title_of(key)} for key in METRICS
    ]
    columns += [
        {"key": "difference", "label": f"{title_of(DECIDES)}, minus the first arm"},
        {"key": "p", "label": "p, corrected (Holm)"},
    ]
    caption = f"Test split, mean and 95% interval over seeds, at equal training loss. {setting}."
    table = save_table(runner.out, name, title=title, caption=caption, columns=columns, rows=rows)
    level = summary["matched"][0] if summary["matched"] else {"loss": None, "arms": {}}
    points = [
        {"rate": rate, "ratio": ratio, "loss": level["loss"]}
        | {key: mean_of(level["arms"][arm_name(rate, ratio)][key]) for key in (DECIDES, "test_accuracy")}
        for rate in RATES
        for ratio in RATIOS
        if arm_name(rate, ratio) in level["arms"]
    ]
    with plotting() as plt:
        figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.3))
        for axis, key in zip(axes, (DECIDES, "test_accuracy"), strict=True):
            _draw_map(axis, points, key)
        at = f" where its training loss first falls to {level['loss']:.3f}" if level["loss"] else ""
        figure_paths = save_figure(
            figure,
            runner.out,
            name,
            title=title,
            caption=f"Every arm{at}, mean over seeds; the table has the intervals. On a dotted line the rate "
            f"of the query-key circuit is the same. {setting}.",
            rows=points,
        )
    return {"table": table, "figure": figure_paths}


def _draw_map(axis: Any, points: Sequence[Mapping[str, Any]], key: str) -> None:
    grid = np.full((len(RATES), len(RATIOS)), np.nan)
    for point in points:
        grid[RATES.index(point["rate"]), RATIOS.index(point["ratio"])] = point[key]
    low, high = np.nanmin(grid), np.nanmax(grid)
    axis.imshow(grid, cmap=HEATMAP, origin="lower", aspect="auto", vmin=low, vmax=high)
    axis.grid(visible=False)
    for row, column in np.ndindex(grid.shape):
        share = (grid[row, column] - low) / ((high - low) or 1)
        color = "black" if share > 0.55 else "white"
        axis.text(column, row, f"{grid[row, column]:.3f}", ha="center", va="center", fontsize=8, color=color)
    for start in range(1, len(RATES) + len(RATIOS) - 2):
        axis.plot(
            [start - len(RATES) + 0.5, start + 0.5], [len(RATES) - 0.5, -0.5], ":", color="0.5", linewidth=0.7
        )
    axis.set(
        xticks=range(len(RATIOS)),
        xticklabels=[f"{ratio:g}" for ratio in RATIOS],
        yticks=range(len(RATES)),
        yticklabels=[f"{rate:g}" for rate in RATES],
        xlim=(-0.5, len(RATIOS) - 0.5),
        ylim=(-0.5, len(RATES) - 0.5),
        xlabel="ratio (QK rate divided by base rate)",
        ylabel="base rate",
        title=title_of(key),
    )


def describe(summary: Mapping[str, Any]) -> str:
    """What was run, in a few words."""
    return (
        f"{summary['experiment']}: {len(RATES)} base rates × {len(RATIOS)} ratios and one slowed arm, "
        f"{summary['epochs']} epochs at a constant rate, {len(summary['seeds'])} seeds"
    )


def run(runner: CellRunner, seeds: int, epochs: int | None) -> dict[str, Any]:
    comparison = ratio_or_rate(seeds, epochs or EPOCHS)
    summary = summarize_map(comparison, run_arms(comparison, runner))
    at = f"training loss {summary['matched'][0]['loss']:.6g}" if summary["matched"] else ""
    slopes = [
        {"arm": MAP, "seed": seed, "at": at, "score": name, "value": value}
        for seed, fit in summary.pop("slopes_per_seed").items()
        for name, value in fit.items()
    ]
    runner.add_per_seed(slopes, protocol=comparison.protocol)
    return {**summary, "files": save_map(summary, runner, title=comparison.title)}


def show(summary: dict[str, Any]) -> None:
    print(describe(summary))
    if summary["matched"]:
        level = summary["matched"][0]
        rows = [
            {"arm": arm}
            | {title_of(key): scores[key] for key in ("test_accuracy", DECIDES, "ac")}
            | {"p, corrected (Holm)": summary["corrected"].get(arm)}
            for arm, scores in level["arms"].items()
        ]
        print_table(rows, title=f"\nat equal training loss {level['loss']:.3f} (test split)")
        asked = {"same QK rate": "same_qk_rate", "same ratio": "same_ratio"}
        pairs = [
            {"question": question, "arms": arms, f"{title_of(DECIDES)}, difference": found}
            for question, key in asked.items()
            for arms, found in summary[key].items()
        ]
        print_table(pairs, title="\nwhat single arms say")
        slopes = [
            {"slope": name.replace("_", " "), "MRTA": found} for name, found in summary["slopes"].items()
        ]
        print_table(slopes, title="\nthe plane through the map")
    print_diverged(summary)
    print(f"\nfigure: {summary['files']['figure']['png']}")


EXPERIMENT = Experiment(
    name="ratio-or-rate",
    chapter="Ratio",
    options=(seeds_option(3), EPOCHS_OPTION),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce ratio-or-rate --out out",
        "fasterqk-lab reproduce ratio-or-rate --seeds 1 --epochs 1       # a quick look",
        "fasterqk-lab reproduce ratio-or-rate --cells lab/paper/cells/ratio-or-rate.jsonl.xz",
    ),
    needs_data=True,
)
