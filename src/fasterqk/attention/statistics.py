"""Statistics over seeds and over instances.

Arms are compared over seeds by 95% t-intervals, paired differences, Holm's correction, and at equal training
loss. Scores of one model, or of two on the same data, have bootstrap intervals over instances.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, log, nan, sqrt
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fasterqk.attention.scores import ROUNDING, SCORES, ScoreName
from fasterqk.errors import InputError, needs_extra

if TYPE_CHECKING:
    from fasterqk.attention.measurement import Measurement

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A mean over ``n`` seeds and the half width of its 95% t-interval (nan for a single seed)."""

    mean: float
    half_width: float
    n: int

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half_width

    @property
    def p_value(self) -> float:
        """The p-value of the two-sided t-test that the mean is zero: below .05 if the interval excludes zero.

        It is nan for a single seed and for a missing value.

        >>> f"{Interval(2.0, 2.48, 3).p_value:.3f}", Interval(0.1, 0.0, 3).p_value
        ('0.074', 0.0)
        """
        if self.n < 2 or not isfinite(self.mean + self.half_width):
            return nan
        if self.half_width == 0:
            return float(self.mean == 0)
        stdtr, stdtrit = _student()
        t = abs(self.mean) / self.half_width * stdtrit(self.n - 1, 0.975)
        return 2 * float(stdtr(self.n - 1, -t))

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.half_width:.2g}" if self.n > 1 else f"{self.mean:.4g}"


def interval(values: Iterable[float | None]) -> Interval:
    """The mean of ``values`` with its 95% t-interval.

    A missing value (None or nan) makes mean and half width nan: a cell without a number is never silently
    dropped.

    >>> print(interval([1.0, 2.0, 3.0]))
    2 ± 2.5
    """
    array = np.array([nan if value is None else float(value) for value in values])
    if not array.size:
        raise InputError("an interval needs at least one value")
    if array.size == 1:
        return Interval(float(array[0]), nan, 1)
    _, stdtrit = _student()
    half_width = float(stdtrit(array.size - 1, 0.975)) * float(array.std(ddof=1)) / sqrt(array.size)
    return Interval(float(array.mean()), half_width, array.size)


def _student() -> tuple[Any, Any]:
    """The distribution function of Student's t, and its inverse."""
    with needs_extra("theory"):  # scipy.stats has them too, and takes half a second to import
        from scipy.special import stdtr, stdtrit
    return stdtr, stdtrit


def paired_difference(a: Sequence[float | None], b: Sequence[float | None]) -> Interval:
    """The 95% t-interval of the paired differences ``a - b``; both lists have the same order of seeds.

    >>> paired_difference([2.0, 3.0, 4.0], [1.0, 2.0, 3.0])
    Interval(mean=1.0, half_width=0.0, n=3)
    """
    if len(a) != len(b):
        raise InputError(f"{len(a)} values against {len(b)}; paired differences need the same seeds in both")
    pairs = zip(a, b, strict=True)
    return interval(None if x is None or y is None else x - y for x, y in pairs)


Name = TypeVar("Name", bound=Hashable)


def holm(differences: Mapping[Name, Interval | float]) -> dict[Name, float]:
    """Holm's correction (1979) of the p-values of several differences.

    The smallest of m p-values is multiplied by m, the next by m - 1, and so on; none is below the one before
    it. If every difference below .05 is called real, the chance that at least one of them is zero is at most
    5%, however the differences depend on each other.

    Arguments:
        differences: An interval, which is tested against zero, or a p-value, by name.

    Returns:
        The corrected p-value of each name. A difference without a p-value (one seed, a missing value) stays
        nan, and still counts as one of the m.

    >>> differences = {"a": Interval(0.5, 0.1, 5), "b": Interval(0.2, 0.19, 5), "c": Interval(0.0, 0.1, 5)}
    >>> {name: f"{value:.3f}" for name, value in holm(differences).items()}
    {'a': '0.000', 'b': '0.086', 'c': '1.000'}
    """
    values = {
        name: difference.p_value if isinstance(difference, Interval) else float(difference)
        for name, difference in differences.items()
    }
    ordered = sorted((name for name in values if isfinite(values[name])), key=lambda name: values[name])
    corrected = dict.fromkeys(values, nan)
    highest = 0.0
    for place, name in enumerate(ordered):
        highest = max(highest, min(1.0, values[name] * (len(values) - place)))
        corrected[name] = highest
    return corrected


# --- Compare arms at equal training loss, so that a better fit is not mistaken for sharper attention ---

Cell = tuple[Hashable, Hashable]
History = Sequence[Mapping[str, Any]]
# A loss of exactly zero has no logarithm; this stands in for it.
_SMALLEST_LOSS = 1e-300


def matched_loss(
    histories: Mapping[Cell, History], metrics: Sequence[str], levels: int | Sequence[float] = 3
) -> list[dict[str, Any]]:
    """Compare the metrics of several arms at equal training loss.

    A metric at a loss level is interpolated in log loss between the two records around the first crossing.

    Arguments:
        histories: Records along training by ``(arm, seed)``, each with ``loss`` and the ``metrics``.
        metrics: The names of the metrics to compare.
        levels: The losses to compare at, or how many of them to choose. The first chosen level is the lowest
            loss that every cell reaches; the others lie evenly in log loss between it and the highest loss
            that all cells share. A cell without any finite loss does not take part in this choice.

    Returns:
        One dictionary per level: ``loss``; ``arms`` as ``{arm: {metric: Interval}}`` over seeds;
        ``difference`` as ``{arm: {metric: Interval}}``, that arm minus the first one, paired by seed; and
        ``missing``, the cells ``[arm, seed]`` that never cross the level.

    Raises:
        InputError: No history is given, or a loss is missing or negative.

    >>> slow = [{"loss": 1.0, "ac": 0.0}, {"loss": 0.01, "ac": 20.0}]
    >>> fast = [{"loss": 1.0, "ac": 0.0}, {"loss": 0.1, "ac": 50.0}]
    >>> lowest = matched_loss({("r=1", 0): slow, ("r=10", 0): fast}, ["ac"])[0]
    >>> lowest["loss"], lowest["arms"]["r=1"]["ac"].mean, lowest["difference"]["r=10"]["ac"].mean
    (0.1, 10.0, 40.0)
    """
    if not histories:
        raise InputError("no history was given; nothing can be compared at matched loss")
    arms = list(dict.fromkeys(arm for arm, _ in histories))
    losses = common_levels(histories, levels) if isinstance(levels, int) else [float(x) for x in levels]
    return [_compare_at(level, histories, arms, metrics) for level in losses]


def common_levels(histories: Mapping[Cell, History], count: int = 3) -> list[float]:
    """The lowest loss that every cell reaches, and higher ones below the highest loss that all share.

    Only the lowest is returned if the cells share no range of losses. Cells without a finite loss are
    ignored; if none is left the list is empty.
    """
    finite = [[loss for loss in map(_loss, records) if isfinite(loss)] for records in histories.values()]
    finite = [losses for losses in finite if losses]
    if not finite or count < 1:
        return []
    lowest = max(min(losses) for losses in finite)
    highest = min(losses[0] for losses in finite)
    if highest <= lowest:
        return [lowest]
    steps = np.arange(count) / count * log(highest / lowest)
    return [lowest * float(factor) for factor in np.exp(steps)]


def _compare_at(
    level: float, histories: Mapping[Cell, History], arms: Sequence[Hashable], metrics: Sequence[str]
) -> dict[str, Any]:
    reached: dict[Hashable, dict[Hashable, dict[str, float]]] = {arm: {} for arm in arms}
    missing: list[list[Hashable]] = []
    for (arm, seed), history in histories.items():
        values = _values_at(level, history, metrics)
        if values is None:
            missing.append([arm, seed])
        else:
            reached[arm][seed] = values
    first = reached[arms[0]]
    shared = {arm: [seed for seed in first if seed in reached[arm]] for arm in arms[1:]}
    difference = {
        arm: {name: interval(reached[arm][s][name] - first[s][name] for s in seeds) for name in metrics}
        for arm, seeds in shared.items()
        if seeds
    }
    return {
        "loss": level,
        "arms": {
            arm: {name: interval(values[name] for values in seeds.values()) for name in metrics}
            for arm, seeds in reached.items()
            if seeds
        },
        "difference": difference,
        "missing": missing,
    }


def _values_at(level: float, history: History, metrics: Sequence[str]) -> dict[str, float] | None:
    before: tuple[float, dict[str, float]] | None = None
    for record in history:
        loss = _loss(record)
        if not isfinite(loss):
            return None  # the training diverged before
        below = {name: nan if record.get(name) is None else float(record[name]) for name in metrics}
        if loss == level:
            return below
        if loss < level:
            if before is None:
                return None
            high, above = before
            share = (high - log(max(level, _SMALLEST_LOSS))) / (high - log(loss))
            return {name: (1 - share) * above[name] + share * below[name] for name in metrics}
        before = log(loss), below
    return None


def _loss(record: Mapping[str, Any]) -> float:
    if "loss" not in record:
        raise InputError(f"a record has {', '.join(map(repr, record)) or 'nothing'} but no 'loss'")
    value = record["loss"]
    if value is None:
        return nan
    if value < 0:
        raise InputError(f"a loss of {value} is negative; matched loss works with log loss")
    return max(float(value), _SMALLEST_LOSS) if isfinite(value) else float(value)


# --- Bootstrap intervals of scores over instances, for one model or for the difference of two ---
# Each resample draws as many instances as there are, with replacement; the interval holds the middle 95% of
# the scores over resamples. Two models on the same data share the resamples, so instances that are easy or
# hard for both cancel in their difference. These intervals cover the uncertainty of the data alone. Trainings
# with other seeds differ too; compare those with `paired_difference`.

RESAMPLES = 1000
# The most resamples of the instances, and random rankings of each; more would take gigabytes.
MOST_RESAMPLES, MOST_DRAWS = 100_000, 1000
# The most counts (resamples times instances) held at once.
_AT_ONCE = 2**22
SPANS = ("span_precision", "span_recall")


@dataclass(frozen=True)
class Bounds:
    """A score and the two ends of its 95% bootstrap interval.

    ``apart`` says of a difference that it is larger than rounding (``scores.ROUNDING``) and not zero, at 95%
    for all scores of the tables together; it is False for scores that are in no table.
    """

    value: float
    low: float
    high: float
    apart: bool = False


def score_intervals(
    measurement: "Measurement",
    generator: np.random.Generator,
    *,
    name: str | None = None,
    resamples: int = RESAMPLES,
) -> dict[str, Bounds]:
    """Every score of ``measurement`` with its bootstrap interval over instances.

    Arguments:
        measurement: The result of :func:`measure`.
        generator: Draws the resamples.
        name: The ranking whose faithfulness and plausibility are taken; by default the first.
        resamples: How many resamples to draw.

    Returns:
        The :class:`Bounds` of each score, by flat name.

    Raises:
        InputError: ``resamples`` is not a whole number of at least 1.
    """
    values = measurement.instance_scores(name)
    return _bounds(_means(values), *_resampled([values], generator, resamples))


def paired_scores(
    first: "Measurement", second: "Measurement", generator: np.random.Generator, *, resamples: int = RESAMPLES
) -> dict[str, Bounds]:
    """The scores of ``second`` minus those of ``first``, with bootstrap intervals.

    Arguments:
        first: A measurement of one model.
        second: A measurement of another model on the same instances: the same ids in the same order. The
            tokens may differ.
        generator: Draws the resamples.
        resamples: How many resamples to draw.

    Returns:
        The :class:`Bounds` of each difference, by flat name. Each interval holds for its own score; ``apart``
        holds for all scores of the tables together. Classes with other names are compared by their numbers.

    Raises:
        InputError: The instances differ, the models number the same classes differently, or ``resamples`` is
            not a whole number of at least 1.
    """
    if [x.id for x in first.instances] != [x.id for x in second.instances]:
        raise InputError(
            f"two measurements of {len(first.instances)} and {len(second.instances)} instances with other ids"
            " cannot be compared; measure both models on the same data"
        )
    # Two models may number the same classes differently, but a text is in one class.
    names = [[m.classes[x.label or 0] for x in m.instances if m.classes] for m in (first, second)]
    if set(first.classes) == set(second.classes) and names[0] != names[1]:
        raise InputError(
            f"the models number their classes differently: {', '.join(first.classes)} and"
            f" {', '.join(second.classes)}; give labels by name in the data, or the same id2label in both"
        )
    first_scores, second_scores = first.instance_scores(), second.instance_scores()
    shared = [name for name in first_scores if name in second_scores]
    pair = [{name: table[name] for name in shared} for table in (first_scores, second_scores)]
    first_means, second_means = (_means(table) for table in pair)
    difference = {name: second_means[name] - first_means[name] for name in first_means}
    before, after = _resampled(pair, generator, resamples)
    drawn = {name: after[name] - before[name] for name in before}
    bounds = _bounds(difference, drawn)
    # The largest deviation of any score, in units of its spread: what 95% of the resamples stay below holds
    # for all scores at once, however they depend on each other.
    spread = {name: float(np.nanstd(drawn[name])) for name in bounds if ScoreName.parse(name).score.tables}
    varying = [np.abs(drawn[name] - drawn[name].mean()) / x for name, x in spread.items() if x > 0]
    limit = float(np.nanquantile(np.nanmax(varying, axis=0), 0.95)) if varying else 0.0
    # Rounding has a sign that may be the same on every text, so that resampling does not see it.
    apart = {name: abs(bounds[name].value) > max(limit * x, ROUNDING) for name, x in spread.items()}
    return {name: replace(x, apart=apart.get(name, False)) for name, x in bounds.items()}


def _resampled(
    tables: list[dict[str, Numbers]], generator: np.random.Generator, resamples: int
) -> list[dict[str, Numbers]]:
    """The scores of each table of instance values on every resample; all tables share the resamples."""
    if type(resamples) is not int or not 1 <= resamples <= MOST_RESAMPLES:
        raise InputError(f"resamples is {resamples!r}; give a whole number from 1 to {MOST_RESAMPLES}")
    names = list(tables[0])
    count = len(tables[0][names[0]])
    stacked = [np.stack([table[name] for name in names], 1) for table in tables]
    drawn: list[list[Numbers]] = [[] for _ in tables]
    step = max(1, _AT_ONCE // count)
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        counts = generator.multinomial(count, np.full(count, 1 / count), size).astype(float)
        for place, values in enumerate(stacked):
            defined = ~np.isnan(values)
            with np.errstate(invalid="ignore"):
                drawn[place].append((counts @ np.where(defined, values, 0)) / (counts @ defined))
    means = [np.concatenate(chunks) for chunks in drawn]  # one array (draw, score) per table
    return [with_iou_f1(dict(zip(names, columns.T, strict=True))) for columns in means]


def _means(table: Mapping[str, Numbers]) -> dict[str, float]:
    """The mean of each score over instances; a score that no instance has is left out."""
    means = {name: float(np.nanmean(values)) for name, values in table.items() if not np.isnan(values).all()}
    return {name: float(value) for name, value in with_iou_f1(means).items()}


def with_iou_f1(means: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the averages of span precision and recall by ``iou_f1``, their F1, in registry order."""
    scores = {name: value for name, value in means.items() if name not in SPANS}
    if all(name in means for name in SPANS):
        precision, recall = (np.asarray(means[name], dtype=float) for name in SPANS)
        total = precision + recall
        scores["iou_f1"] = np.divide(2 * precision * recall, total, out=np.zeros_like(total), where=total > 0)
    registered = list(SCORES)
    in_order = sorted(scores, key=lambda name: registered.index(ScoreName.parse(name).score.name))
    return {name: scores[name] for name in in_order}


def _bounds(values: Mapping[str, float], drawn: Mapping[str, Numbers]) -> dict[str, Bounds]:
    bounds = {}
    for name, value in values.items():
        defined = drawn[name][~np.isnan(drawn[name])]
        if defined.size:
            low, high = np.quantile(defined, (0.025, 0.975))
            bounds[name] = Bounds(float(value), float(low), float(high))
    return bounds
