"""Ratio or rate: is it the ratio of the two circuits' rates that sharpens attention, or the QK rate itself?

One-layer HateXplain over base rates and ratios. Rates and ratios step by about the same factor, so that one
QK rate (base rate times ratio) occurs with several ratios. One more arm slows everything but the query-key
circuit: it has the ratio of the faster arm and the QK rate of the baseline, and trains as much longer.

The score that decides, named before any run: attention on relevant tokens (MRTA) at equal training loss. An
arm is compared with ratio 1 at its base rate; arms of different base rates, and the plane through the map,
are read at the lowest training loss that all arms reach. All other scores are exploratory.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from fasterqk.attention.scores import title_of
from fasterqk.errors import InputError
from fasterqk_lab.compare import LOSS, Claimed, Effect, Measured, Value, above, compare, correct
from fasterqk_lab.experiments._comparison import Comparison, Outcome, run_arms, seeds_from
from fasterqk_lab.experiments._registry import EPOCHS_OPTION, CellRunner, Experiment, seeds_option
from fasterqk_lab.experiments.ablation_hatexplain import EPOCHS, SCORES, constant_rate
from fasterqk_lab.figures import Grid, effect_record, save_grids

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


def ratio_or_rate(seeds: int = 3, epochs: int = EPOCHS) -> Comparison:
    """All arms; the slowed one last.

    >>> comparison = ratio_or_rate()
    >>> len(comparison.arms), list(comparison.arms)[0], list(comparison.arms)[-1]
    (21, 'rate 5e-05, ratio 1', 'all but QK ÷30')
    """
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
    )


def slopes_of(outcome: Outcome) -> list[Value]:
    """How `DECIDES` grows per decade at the lowest common loss, for every seed.

    The plane ``mrta = c + a log10(ratio) + b log10(base rate)`` is fitted to the map, and a line to every
    ratio. If the ratio alone decided, b would be 0; if the QK rate alone did, a and b would be equal.
    """
    measured = outcome.measured
    loss = next(iter(measured.losses(LOSS, arm_name(RATES[0], 1), DECIDES)), None)
    points: dict[int, list[tuple[float, float, float]]] = {}
    for rate in RATES:
        for ratio in RATIOS:
            for seed, mass in measured.of(arm_name(rate, ratio), DECIDES, LOSS, loss).items():
                points.setdefault(seed, []).append((np.log10(ratio), np.log10(rate), mass))
    values = []
    for seed, table in points.items():
        per_ratio, per_rate = _fit(table, 2)
        slopes = {PER_RATIO: per_ratio, PER_RATE: per_rate, "ratio_minus_base_rate": per_ratio - per_rate}
        for ratio in RATIOS:
            line = [(rate, mass) for log_ratio, rate, mass in table if log_ratio == np.log10(ratio)]
            slopes[per_decade_at(ratio)] = _fit(line, 1)[0]
        values += [
            Value(measured.name, MAP, seed, LOSS, loss, name, slope)
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


def answers(measured: Measured) -> list[Effect]:
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
            effects.append(above(measured, MAP, slope, 0.0, claimed, at=LOSS, label=label))
    for pair, claimed in pairs.items():
        with suppress(InputError):
            effects.append(compare(measured, pair, DECIDES, claimed, at=LOSS))
    return correct(effects)


def save_map(outcome: Outcome, runner: CellRunner) -> dict[str, str]:
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
        runner.out,
        outcome.comparison.name,
        title=outcome.comparison.title,
        caption=f"Every arm where its training loss first falls to {loss or np.nan:.3f}, mean over seeds;"
        " the table has the intervals. From a cell to the one below it on its right the rate of the"
        f" query-key circuit is the same. {outcome.setting()}.",
    )


def run(runner: CellRunner, seeds: int, epochs: int | None) -> dict[str, Any]:
    outcome = run_arms(ratio_or_rate(seeds, epochs or EPOCHS), runner, more=slopes_of)
    files = {**outcome.save(runner.out), "map": save_map(outcome, runner)}
    effects = answers(outcome.measured)
    decided = [effect_record(effect) | {"if_the_ratio_decides": effect.claimed} for effect in effects]
    return {**outcome.summary(), "ratio_or_rate": decided, "files": files}


EXPERIMENT = Experiment(
    "ratio-or-rate",
    run,
    options=(seeds_option(3), EPOCHS_OPTION),
    examples=(
        "fasterqk-lab reproduce ratio-or-rate --out out",
        "fasterqk-lab reproduce ratio-or-rate --seeds 1 --epochs 1       # a quick look",
        "fasterqk-lab reproduce ratio-or-rate --cells lab/paper/cells/ratio-or-rate.jsonl.xz",
    ),
    needs_data=True,
)
