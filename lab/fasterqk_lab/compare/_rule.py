"""The rule: where arms are compared, when a difference is an effect, and what becomes of a claim.

*Level.* Arms are read at the mean training loss at which the baseline has its best validation loss: where a
person would stop. The baseline alone fixes it. If a cell never reaches it, the lowest loss that all cells of
the comparison reach decides instead, and the effect says so.

*Effect.* The difference of two arms, paired by seed, with its 95% t-interval. Beside it stand the null, how
far each arm was in its training, and the share of all levels, evenly spaced over the losses that both arms
pass, at which the interval excludes zero on the same side.

*Standing* of an effect on a claim of more or less: it ``supports`` the claim if its interval lies on the
claimed side of zero and its mean is beyond the margin; it is ``against`` it in the mirror image; it is
``small`` if the interval lies within the margin, and ``open`` otherwise. A claim of equality is supported by
an interval within the margin and contradicted by one outside; a claim of no loss by an interval above minus
the margin, or wholly below it. One seed leaves everything open.

*Verdict.* P-values are corrected for the number of effects of a claim (Holm, 5%); an effect that does not
pass counts as open. See :func:`verdict`.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite, nan
from statistics import fmean
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fasterqk.attention.statistics import Interval, holm, interval, paired_difference
from fasterqk.errors import InputError
from fasterqk_lab.compare._results import END, LEVEL, LOSS, History, Measured, value_at

Claimed = Literal["more", "less", "equal", "not less"]
Standing = Literal["supports", "against", "small", "open"]
# The possible values of `Effect.stands`.
STANDS = ("more", "less", "too small to matter", "open")
SIGNIFICANT = 0.05
LEVELS = 25

# The smallest difference that matters: of masses, accuracies, F1, AUPRC, sufficiency and comprehensiveness;
# of AC and ACMC, in points; of a loss and of its sensitivity; of steps, as a share of the baseline's.
MARGIN, POINTS_MARGIN, LOSS_MARGIN, STEPS_MARGIN = 0.02, 2.0, 0.01, 0.05


def margin_of(score: str, baseline: float = nan) -> float:
    """The smallest difference in ``score`` that matters; ``baseline`` is the value it is compared with.

    >>> margin_of("mrta"), margin_of("permuted_ac"), margin_of("validation_loss"), margin_of("steps", 1000)
    (0.02, 2.0, 0.01, 50.0)
    """
    if score.startswith("steps"):
        return STEPS_MARGIN * baseline
    kind = score.rpartition("_")[2]
    return (
        LOSS_MARGIN
        if kind in ("loss", "sensitivity")
        else POINTS_MARGIN
        if kind in ("ac", "acmc")
        else MARGIN
    )


@dataclass(frozen=True)
class Effect:
    """The difference of two arms in one score, or of one arm from a number or from its own null.

    ``first`` and ``second`` are the values of both, ``permuted`` is that of the first with its weights in
    random order. ``progress`` is how far each arm was in its training, as a share. ``curve`` is the
    difference at every level. ``lowest`` says that the lowest common loss decided because a cell never
    reached the level; ``missing`` names those cells.
    """

    label: str
    score: str
    claimed: Claimed
    value: Interval
    first: Interval
    second: Interval
    at: str
    loss: float | None = None
    null: float | None = None
    permuted: float | None = None
    margin: float = MARGIN
    progress: tuple[float, float] | None = None
    curve: tuple[tuple[float, Interval], ...] = ()
    lowest: bool = False
    missing: tuple[str, ...] = ()
    p: float = nan  # of its claim, corrected for the number of effects that it stands beside
    p_of_difference: float = nan  # the same of the test that the difference is zero
    exact: bool = False  # computed, not sampled: it needs no interval

    @property
    def standing(self) -> Standing:
        """Its standing on its claim, uncorrected."""
        mean, half, margin = self.value.mean, self.value.half_width, self.margin
        if not isfinite(mean) or (not self.exact and (self.value.n < 2 or not isfinite(half))):
            return "open"
        half = 0.0 if self.exact else half
        if self.claimed == "equal":
            if abs(mean) + half <= margin:
                return "supports"
            return "against" if abs(mean) - half > margin else "open"
        if self.claimed == "not less":
            return "supports" if mean - half > -margin else "against" if mean + half < -margin else "open"
        signed = -mean if self.claimed == "less" else mean
        if signed - half > 0 and signed > margin:
            return "supports"
        if signed + half < 0 and signed < -margin:
            return "against"
        return "small" if abs(mean) + half <= margin else "open"

    @property
    def corrected(self) -> Standing:
        """Its standing after correction for the number of effects of its claim."""
        decided = self.standing in ("supports", "against")
        return "open" if decided and not self.exact and not self.p < SIGNIFICANT else self.standing

    @property
    def stands(self) -> str:
        """The direction of the difference, corrected, whatever is claimed: one of ``STANDS``."""
        standings = ("supports", "against", "small", "open")
        return STANDS[standings.index(replace(self, claimed="more", p=self.p_of_difference).corrected)]

    @property
    def p_value(self) -> float:
        """The p-value of its claim, by the test that its interval stands for, uncorrected."""
        mean, half, n, margin = self.value.mean, self.value.half_width, self.value.n, self.margin
        if self.claimed == "equal":
            if abs(mean) > margin:  # beyond the nearer margin
                return Interval(abs(mean) - margin, half, n).p_value
            ends = (Interval(margin - mean, half, n), Interval(margin + mean, half, n))
            return max(end.p_value for end in ends)
        return Interval(mean + (margin if self.claimed == "not less" else 0.0), half, n).p_value

    @property
    def agreement(self) -> float | None:
        """The share of levels at which the interval excludes zero on the side of the mean."""
        if not self.curve:
            return None
        sign = 1 if self.value.mean > 0 else -1
        return fmean(sign * value.mean - value.half_width > 0 for _, value in self.curve)


def compare(
    measured: Measured,
    arms: tuple[str, str],
    score: str,
    claimed: Claimed = "more",
    *,
    at: str = LEVEL,
    loss: float | None = None,
    label: str = "",
    seeds: int | None = None,
) -> Effect:
    """The first of two ``arms`` minus the second, paired by seed.

    ``at`` is the deciding level, the lowest common loss (``loss``, or the one that is given), or another
    moment. Only the first ``seeds`` decide.
    """
    planned = measured.first(seeds)
    at, loss, lowest = _place(planned, arms, score, at, loss)
    first, second = (planned.of(arm, score, at, loss) for arm in arms)
    if first.keys().isdisjoint(second):
        raise InputError(f"{measured.name} has no {score!r} of {arms[0]!r} and {arms[1]!r} at {at!r}")
    effect = _paired(label or f"{arms[0]} minus {arms[1]}", score, claimed, first, second)
    return replace(
        effect,
        at=at,
        loss=loss,
        null=planned.null(arms[1], score, at, loss),
        permuted=planned.null(arms[0], score, at, loss, "permuted"),
        progress=_progress(planned, arms, loss),
        curve=_curve(planned, arms, score) if loss is not None else (),
        lowest=lowest,
        missing=_missing(planned, arms) if lowest else (),
    )


def _paired(
    label: str, score: str, claimed: Claimed, first: Mapping[int, float], second: Mapping[int, float]
) -> Effect:
    """The difference of two values over the seeds that have both."""
    seeds = sorted(first.keys() & second.keys())
    ones, others = ([values[seed] for seed in seeds] for values in (first, second))
    values = paired_difference(ones, others), interval(ones), interval(others)
    return Effect(label, score, claimed, *values, at="", margin=margin_of(score, values[2].mean))


def compare_arms(
    measured: Measured,
    moments: Mapping[str, str],
    arms: Iterable[str] = (),
    *,
    claimed: Mapping[str, Claimed] | None = None,
    seeds: int | None = None,
) -> list[Effect]:
    """Every arm minus its baseline in every score that was measured in both; uncorrected.

    ``moments`` maps a score to where it is read, ``claimed`` to its direction (``more`` unless named). All
    arms are compared, or ``arms`` in this order.
    """
    effects = []
    for arm in arms or measured.arms:
        baseline = measured.baseline_of(arm)
        for score, at in moments.items() if arm != baseline else ():
            says = (claimed or {}).get(score, "more")
            with suppress(InputError):  # it was not measured in both
                effects.append(compare(measured, (arm, baseline), score, says, at=at, label=arm, seeds=seeds))
    return effects


def above(
    measured: Measured,
    arm: str,
    score: str,
    other: str | float,
    claimed: Claimed = "more",
    *,
    at: str = LEVEL,
    label: str = "",
    seeds: int | None = None,
) -> Effect:
    """A score of one arm minus another score of its own (a null, say), or minus a number."""
    planned = measured.first(seeds)
    at, loss, lowest = _place(planned, (arm,), score, at)
    first = planned.of(arm, score, at, loss)
    second = planned.of(arm, other, at, loss) if isinstance(other, str) else dict.fromkeys(first, other)
    if first.keys().isdisjoint(second):
        raise InputError(f"{measured.name} has no {score!r} and {other!r} of {arm!r} at {at!r}")
    effect = _paired(label or f"{arm} minus {other}", score, claimed, first, second)
    null, missing = planned.null(arm, score, at, loss), _missing(planned, (arm,)) if lowest else ()
    return replace(effect, at=at, loss=loss, null=null, lowest=lowest, missing=missing)


def _place(
    measured: Measured, arms: Sequence[str], score: str, at: str, loss: float | None = None
) -> tuple[str, float | None, bool]:
    """Where ``arms`` are read: the moment, its loss, and whether the lowest common loss stands in."""

    def lowest_shared(moment: str) -> float | None:
        levels = set.intersection(*(set(measured.losses(moment, arm, score)) for arm in arms))
        # A lower one that only some cells reach would leave the others out.
        whole = {
            level for level in levels if all(_whole(measured, arm, score, moment, level) for arm in arms)
        }
        return min(whole or levels, default=None)

    if at not in (LEVEL, LOSS) or loss is not None:
        return at, loss, False
    level = lowest_shared(at)
    if at == LOSS or (level is not None and not _missing(measured, arms)):
        return at, level, False
    return LOSS, lowest_shared(LOSS), True


def _whole(measured: Measured, arm: str, score: str, at: str, loss: float) -> bool:
    """Whether every seed that finished has a value there."""
    return set(measured.of(arm, score, at, loss)) >= set(measured.of(arm, "loss", END))


def _missing(measured: Measured, arms: Sequence[str]) -> tuple[str, ...]:
    """Cells of ``arms`` that never reach the deciding level."""
    reached = {(value.arm, value.seed) for value in measured.values if value.at == LEVEL}
    if not any(arm in arms for arm, _ in reached):
        return ()
    cells = {cell for cell in measured.histories if cell[0] in arms} or {
        (value.arm, value.seed) for value in measured.values if value.at == END and value.arm in arms
    }
    return tuple(f"{arm}, seed {seed}" for arm, seed in sorted(cells - reached))


def _progress(measured: Measured, arms: tuple[str, str], loss: float | None) -> tuple[float, float] | None:
    """The share of its steps that each arm had taken where its training loss first falls to ``loss``."""
    if loss is None:
        return None
    shares: dict[str, list[float]] = {arm: [] for arm in arms}
    for (arm, _), history in measured.histories.items():
        if arm in shares and history and history[-1].get("step"):
            reached = value_at(history, loss, ["step"])
            shares[arm] += [step / history[-1]["step"] for step in reached.values()]
    first, second = (fmean(shares[arm]) if shares[arm] else None for arm in arms)
    return None if first is None or second is None else (first, second)


def _curve(measured: Measured, arms: tuple[str, str], score: str) -> tuple[tuple[float, Interval], ...]:
    """The difference at `LEVELS` training losses, evenly spaced in log loss, that all cells of both pass."""
    histories = {cell: history for cell, history in measured.histories.items() if cell[0] in arms and history}
    losses = [[record["loss"] for record in history if record["loss"]] for history in histories.values()]
    if len({arm for arm, _ in histories}) < 2 or not all(losses):
        return ()
    low, high = max(map(min, losses)), min(of_cell[0] for of_cell in losses)
    if not 0 < low < high:
        return ()
    levels = np.geomspace(high, low, LEVELS)[::-1]
    values = {cell: crossings(history, score, levels) for cell, history in histories.items()}
    seeds = sorted({seed for _, seed in values})
    paired = [seed for seed in seeds if all((arm, seed) in values for arm in arms)]
    if not paired:
        return ()
    differences = np.array([values[arms[0], seed] - values[arms[1], seed] for seed in paired])
    curve = ((float(level), interval(column)) for level, column in zip(levels, differences.T, strict=True))
    return tuple((level, value) for level, value in curve if isfinite(value.mean))


def crossings(history: History, score: str, levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """``score`` where the training loss first falls to each of ``levels``, as `matched_loss` reads it.

    A level above the first loss, or below all, has none (nan).
    """
    losses = np.array([record["loss"] for record in history], dtype=float)
    values = np.array([record.get(score, nan) for record in history], dtype=float)
    # The first record at or below a level: the lowest loss so far only falls.
    after = np.searchsorted(-np.minimum.accumulate(losses), -levels)
    read = np.full(len(levels), nan)
    inside = (after > 0) & (after < len(losses))
    place = after[inside]
    above, below, level = np.log(losses[place - 1]), np.log(losses[place]), np.log(levels[inside])
    share = (above - level) / (above - below)
    read[inside] = (1 - share) * values[place - 1] + share * values[place]
    exact = (after < len(losses)) & (losses[np.minimum(after, len(losses) - 1)] == levels)
    read[exact] = values[after[exact]]
    return read


# --- Claims ---

CONFIRMED, DEPENDS, INCONCLUSIVE = "confirmed", "depends on the setting", "inconclusive"
CONTRADICTED, DIFFERS, NOT_RUN = "contradicted", "text differs from code", "not run"
VERDICTS = (CONFIRMED, DEPENDS, INCONCLUSIVE, CONTRADICTED, DIFFERS, NOT_RUN)


def correct(effects: Sequence[Effect]) -> list[Effect]:
    """The effects with p-values that are corrected for their number (Holm)."""
    claims = holm({place: effect.p_value for place, effect in enumerate(effects)})
    differences = holm({place: effect.value for place, effect in enumerate(effects)})
    return [
        replace(effect, p=claims[place], p_of_difference=differences[place])
        for place, effect in enumerate(effects)
    ]


def verdict(effects: Sequence[Effect], *, large: bool = False) -> str:
    """The verdict on a claim with corrected effects; ``large`` if it claims a large effect.

    *confirmed* if all effects support it, each at half of its levels or more; *contradicted* if all are
    against it, or small where it claims a large one; *inconclusive* if none supports it and some are open;
    *depends on the setting* otherwise.

    >>> more, open_ = Interval(0.3, 0.1, 5), Interval(0.3, 0.5, 5)
    >>> effects = [Effect("a", "mrta", "more", value, value, value, "end") for value in (more, open_)]
    >>> verdict(correct(effects[:1])), verdict(correct(effects)), verdict(correct(effects[1:])), verdict([])
    ('confirmed', 'depends on the setting', 'inconclusive', 'not run')
    """
    standings = [effect.corrected for effect in effects]
    if not standings:
        return NOT_RUN
    if all(standing == "supports" for standing in standings):
        return CONFIRMED if all(_holds_at_half_of_levels(effect) for effect in effects) else DEPENDS
    if "supports" in standings:
        return DEPENDS
    if "open" in standings:
        return INCONCLUSIVE
    return DEPENDS if "small" in standings and not large else CONTRADICTED


def _holds_at_half_of_levels(effect: Effect) -> bool:
    agreement = effect.agreement
    return agreement is None or effect.claimed in ("equal", "not less") or agreement >= 0.5
