"""Is it the ratio of the two circuits' rates, or the QK rate itself, that sharpens attention?

One-layer HateXplain over base rates and ratios. These step by about the same factor, so that one QK rate
(base rate times ratio) occurs with several ratios. One more arm slows everything but the query-key circuit:
it has the ratio of the faster arm and the QK rate of the baseline, and trains as much longer. An arm is
compared with ratio 1 at its base rate; arms of different base rates, and the plane through the map, are read
at the lowest training loss that all arms reach.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.attention.scores import title_of
from fasterqk.errors import InputError
from fasterqk_lab.compare import LOSS, Claimed, Effect, Measured, Value, above, compare, correct
from fasterqk_lab.experiments._comparison import Comparison, Outcome, of_arms, seeds_from
from fasterqk_lab.experiments.ablation_hatexplain import EPOCHS, SCORES, constant_rate
from fasterqk_lab.figures import Grid, effect_record, save_grids

RATES = (5e-5, 1.5e-4, 5e-4, 1.5e-3)
RATIOS = (1, 3, 10, 30, 100)
# The slowed arm divides every rate except that of the query-key circuit by this, and multiplies its epochs.
SLOWED = 30
SLOWED_ARM = f"all but QK ÷{SLOWED}"
# Evaluations of the slowed arm: as many as the others have, at the ends of epochs and on the way.
SLOWED_EVALUATIONS = 12
DECIDES = "mrta"
# The arm that has the slopes of the whole map in the table of results.
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
        answers=answers,
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


def ratio_effects(table: Measured) -> list[Effect]:
    """Slopes and pairs of arms that distinguish ratio from rate, corrected for their number."""
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


def answers(outcome: Outcome) -> dict[str, Any]:
    """The effects that distinguish ratio from rate, each with the claim that holds if the ratio decides."""
    effects = ratio_effects(outcome.measured)
    return {"ratio_or_rate": [effect_record(e) | {"if_the_ratio_decides": e.claimed} for e in effects]}


EXPERIMENT = of_arms(
    "ratio-or-rate",
    ratio_or_rate,
    examples=("--seeds 1 --epochs 1 # a quick look", "--cells lab/paper/cells/ratio-or-rate.jsonl.xz"),
)
