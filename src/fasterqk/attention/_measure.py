"""Measure a model on instances, in batches: attention, faithfulness, plausibility, and their nulls.

:func:`measure` reads each batch once, computes the scores of the registry on the rows that predict and on
uniform attention, and asks the model again with tokens removed. The :class:`Measurement` keeps the numbers of
every instance; its :class:`Summary` has the scores, as JSON or as tables for people.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fasterqk.attention._aggregation import (
    Aggregation,
    Pattern,
    aggregate,
    default_aggregation,
    find_pattern,
    in_full_precision,
    null_row,
    read_rows,
    uniform_attention,
)
from fasterqk.attention._faithfulness import (
    Faithfulness,
    Removal,
    Rounding,
    checked_outcomes,
    faithfulness,
    faithfulness_of,
    join,
    perturb,
)
from fasterqk.attention._importance import (
    METHODS,
    Importance,
    Source,
    aggregation_name,
    importances,
    leave_one_out,
)
from fasterqk.attention._instances import Batch, Instance, Side, collate, pad_rows, unpad_rows
from fasterqk.attention._measurement import Measurement, Ranking
from fasterqk.attention._models import Measurable, Reading, as_array
from fasterqk.attention._nulls import NullMass, permuted_mass, sharp_mass
from fasterqk.attention._scores import DTAP_EDGES, SCORES, Rows, entropy
from fasterqk.attention._variants import Variants
from fasterqk.errors import InputError

RankBy = Literal["attention", "gradient"]
Numbers = NDArray[np.float64]
# Half a gigabyte in single precision.
WEIGHTS_IN_MEMORY = 2**27
# Where instances have several read rows: how many rows are predicted at once with tokens removed. Each has
# one outcome per token of the vocabulary, so more would fill the memory.
ROWS_AT_ONCE = 256
# Texts without some tokens that wait to be predicted together.
VARIANTS_IN_MEMORY = 50_000


def measure(
    model: Measurable,
    instances: Sequence[Instance],
    *,
    generator: np.random.Generator | None = None,
    draws: int = 1,
    scores: Source | Sequence[Source] | None = None,
    absolute: bool = False,
    percents: Sequence[int] = (5, 10, 20, 50),
    rounding: Rounding = "up",
    aggregation: Aggregation | Callable[[Sequence[Pattern]], Aggregation] = default_aggregation,
    removal: Removal = Removal(),  # noqa: B008 - frozen
    rank_by: RankBy = "attention",
    batch_size: int = 32,
    edges: Sequence[float] = DTAP_EDGES,
    side: Side = "right",
    progress: Callable[[float, float], None] | None = None,
    random_rankings: Sequence[Numbers] | None = None,
    only: Sequence[str] | None = None,
    by_layer: bool = False,
    stronger_nulls: bool = True,
    need_relevance: bool = True,
    max_weights: int | None = WEIGHTS_IN_MEMORY,
) -> "Measurement":
    """Measure ``model`` on ``instances``, at most ``batch_size`` at a time.

    Nothing depends on how instances are batched. Long ones are taken fewer at a time, so that no more than
    ``max_weights`` attention weights are held at once (None: no limit).

    ``aggregation`` says how layers and heads become one row, or chooses that from what the layers may see; by
    default rollout, or the mean over layers of a causal model (:func:`default_aggregation` says why).

    Tokens are ranked by the aggregated attention, or by gradient x input with ``rank_by="gradient"``.
    ``scores`` adds importances from anywhere, which are measured beside it in one table: names of what is
    built in (``"layer:3/head:1"``, ``"integrated_gradients"``, ``"leave_one_out"``, ...), a function of an
    :class:`Instance` that returns one number per token, a mapping from ids to such numbers, a JSON lines
    file, a mapping from names to any of these, or a list. ``absolute`` ranks your own by their size.

    ``generator`` draws the random rankings that faithfulness and plausibility are compared with, ``draws`` of
    them for each instance, unless ``random_rankings`` gives one, a value per token of each instance (per row
    and token, where the model reads several rows); with neither there is no such comparison. ``percents`` may
    be empty: then nothing is removed. A percentage of tokens is rounded ``up``, or ``down`` as ferret does.
    ``only`` names the scores that are computed from attention (all, by default); ``by_layer`` adds those of
    each layer alone. ``stronger_nulls`` are sharp and permuted attention, which take most of the time where
    instances are short. Without ``need_relevance`` data where no token is relevant is no error.
    ``progress(done, total)`` is called after each batch.
    """
    if not instances:
        raise InputError("no instance was given; nothing can be measured")
    unrated = not any(instance.rated for instance in instances)
    if need_relevance and not unrated and not any(instance.relevant for instance in instances):
        cut = sum(instance.relevance_cut for instance in instances)
        lost = f" (in {cut} all that was relevant lies behind the end that the model reads)" if cut else ""
        raise InputError(
            f"no token is relevant in any of {len(instances)} instances{lost}; nothing can be scored"
        )
    if rank_by not in get_args(RankBy):
        raise InputError(f"unknown ranking {rank_by!r}; choose from {', '.join(get_args(RankBy))}")
    if type(draws) is not int or draws < 1:
        raise InputError(f"draws is {draws!r}; give a whole number of at least 1, or no generator")
    # Neighbours in length share a batch, so that little is spent on padding.
    order = np.argsort([len(instance.tokens) for instance in instances], kind="stable")
    patterns, heads, guessed = _patterns(model, instances[order[-1]], max_weights)
    if not isinstance(aggregation, Aggregation):
        aggregation = aggregation(patterns)
    by_attention = Importance(aggregation_name(aggregation), aggregation)
    first = by_attention if rank_by == "attention" else Importance("gradient", method="gradient")
    asked = importances(scores, instances, first, absolute)
    random = [] if random_rankings is None else [random_rankings]
    if random_rankings is None and generator is not None:
        random = [[generator.random(len(x.tokens)) for x in instances] for _ in range(draws)]
    hows = [aggregation, *(importance.aggregation for importance in asked.values() if importance.aggregation)]
    # All but rollout look at the read rows alone, so that no more is kept of any layer.
    read_only = all(how.method != "rollout" for how in hows)
    held = max(heads) if read_only else sum(heads)
    lengths = np.array([len(instances[i].tokens) for i in order])
    columns, null_masses = [], []
    ranked: list[tuple[list[Numbers], list[Faithfulness]]] = [([], []) for _ in (*asked, *random)]
    waiting = _Waiting(model, side, batch_size, int(lengths[-1]), tuple(percents), removal, rounding)
    # The share of all predictions that reading the whole texts is.
    reading = 1 / (1 + 2 * len(percents) * len(ranked))
    for start, stop in batches(lengths, batch_size, held, max_weights or np.inf):
        chosen = order[start:stop]
        batch = collate([instances[i] for i in chosen], side)
        rows = _ReadRows.of(model, batch, hows, patterns, read_only)
        columns.append(rows.columns(only, by_layer))
        if stronger_nulls and (only is None or "mrta" in only):
            null_masses += rows.null_masses(chosen, by_layer)
        rankings = [rows.importance(model, importance, chosen, removal) for importance in asked.values()]
        rankings += [rows.laid_out([drawn[i] for i in chosen]) for drawn in random]
        for (values, faithful), importance in zip(ranked, rankings, strict=True):
            values += unpad_rows(rows.mean(importance), batch.real)
            if rows.reading.read.dim() == 1:
                waiting.add(faithful, batch, importance, rows.reading.answer.outcomes)
            else:
                faithful.append(rows.faithfulness(model, importance, percents, removal, rounding))
        asked_before = waiting.start
        if len(waiting) > VARIANTS_IN_MEMORY or stop == len(order):

            def tell(share: float, stop: int = stop, before: int = asked_before) -> None:
                if progress:
                    done = before + share * (stop - before)
                    progress(reading * stop + (1 - reading) * done, len(order))

            waiting.ask(tell)
            waiting.start = stop
        if progress:
            done = reading * stop + (1 - reading) * waiting.start
            progress(len(order) if stop == len(order) else done, len(order))
    place = np.argsort(order)
    measured = [
        Ranking(tuple(values[i] for i in place), join(faithful, order)) for values, faithful in ranked
    ]
    return Measurement(
        instances=tuple(instances),
        columns={name: np.concatenate([part[name] for part in columns])[place] for name in columns[0]},
        null_masses=tuple(null_masses[i] for i in place) if null_masses else None,
        rankings=dict(zip(asked, measured, strict=False)),
        random=tuple(measured[len(asked) :]),
        classes=model.classes,
        edges=tuple(edges),
        settings={
            "aggregation": asdict(aggregation),
            "removal": asdict(removal),
            "rank_by": rank_by,
            "mask": "guessed from the weights" if guessed else "of the model",
        }
        | ({"rounding": rounding} if rounding != "up" else {}),
    )


def batches(
    lengths: NDArray[np.int64], batch_size: int, heads: int, weights: float = WEIGHTS_IN_MEMORY
) -> Iterator[tuple[int, int]]:
    """Slices ``start, stop`` of ascending ``lengths``: at most ``batch_size`` instances, fewer if long.

    ``heads`` times length squared weights per instance are held at once; a batch takes no more instances
    than fit into ``weights`` of them, and at least one.

    >>> list(batches(np.array([5, 5, 10, 100]), batch_size=3, heads=2, weights=600))
    [(0, 3), (3, 4)]
    """
    start = 0
    while start < len(lengths):
        stop = min(start + batch_size, len(lengths))
        while stop > start + 1 and (stop - start) * heads * int(lengths[stop - 1]) ** 2 > weights:
            stop -= 1
        yield start, stop
        start = stop


def _patterns(
    model: Measurable, longest: Instance, max_weights: int | None
) -> tuple[tuple[Pattern, ...], list[int], bool]:
    """What each layer lets a row see, found on the longest instance, how many heads each layer has, and
    whether some pattern is guessed from the weights.

    One pattern stands for all layers where the model states it.
    """
    if model.pattern is not None and max_weights is None:
        return (model.pattern,), [0], False
    batch = collate([longest])
    reading = model.read(batch, read_only=True)
    heads = [layer.shape[1] for layer in reading.layers]
    if model.pattern is not None:
        return (model.pattern,), heads, False
    stated: Sequence[Pattern | None] = model.patterns(batch) if hasattr(model, "patterns") else ()
    if len(stated) != len(heads):
        stated = [None] * len(heads)
    known = tuple(pattern for pattern in stated if pattern is not None)
    if len(known) == len(heads):
        return known, heads, False
    if sum(heads) * batch.tokens.shape[1] ** 2 <= (max_weights or np.inf):
        reading = model.read(batch)  # many rows tell more than one
    real = torch.from_numpy(batch.real).to(reading.read.device)
    layers = zip(stated, reading.layers, strict=True)
    return tuple(pattern or find_pattern(layer, real, reading.read) for pattern, layer in layers), heads, True


class _Waiting:
    """Rankings whose faithfulness waits until the variants of many batches are predicted together.

    A text that was read is known, so that no variant equal to it is predicted. As many tokens are predicted
    at a time as ``batch_size`` of the longest text have.
    """

    def __init__(
        self,
        model: Measurable,
        side: Side,
        batch_size: int,
        longest: int,
        percents: tuple[int, ...],
        removal: Removal,
        rounding: Rounding,
    ) -> None:
        self.model, self.side, self.percents = model, side, percents
        self.removal, self.rounding = removal, rounding
        self.tokens, self.single = batch_size * longest, batch_size == 1
        self.start = 0
        self._empty()

    def __len__(self) -> int:
        return len(self.variants)

    def add(self, results: list[Faithfulness], batch: Batch, importance: Numbers, whole: Numbers) -> None:
        """Put the faithfulness of ``importance`` ``(batch, token)`` into ``results`` at the next ``ask``."""
        perturbed = perturb(batch, importance, self.percents, self.removal, self.rounding)
        whole = checked_outcomes(whole, batch)
        self.variants.add(batch, whole)
        variant_rows = [[self.variants.add(variant) for variant in variants] for variants in perturbed[:2]]
        self.rankings.append((results, batch, whole, variant_rows, perturbed.skipped))

    def ask(self, progress: Callable[[float], None]) -> None:
        """Predict all variants, each distinct one once, and score the rankings that wait for them."""
        if self.rankings:
            outcomes = self.variants.ask(self.model.predict, self.tokens, self.single, progress)
        for results, batch, whole, variant_rows, skipped in self.rankings:
            alone, without = (
                [outcomes[rows] for rows in rows_by_percent] for rows_by_percent in variant_rows
            )
            results.append(faithfulness_of(batch, self.percents, whole, alone, without, skipped))
        self._empty()

    def _empty(self) -> None:
        self.variants = Variants(self.side)
        self.rankings: list[tuple[Any, ...]] = []


@dataclass(frozen=True, eq=False)
class _ReadRows:
    """The rows of one batch that predict, one after the other, each belonging to an ``instance``.

    ``weights`` and ``null_weights`` ``(row, key)`` are aggregated, ``attention`` holds the weights of every
    aggregation that was asked for; ``layers`` ``(row, head, key)`` and ``allowed`` ``(row, key)`` are those
    of every layer. Keys that the model adds stand behind the tokens.
    """

    batch: Batch
    reading: Reading
    instance: NDArray[np.intp]
    position: NDArray[np.int64]
    real: NDArray[np.bool_]
    attention: dict[Aggregation, Numbers]
    weights: Numbers
    null_weights: Numbers
    layers: list[Tensor]
    allowed: list[Tensor]

    @classmethod
    def of(
        cls,
        model: Measurable,
        batch: Batch,
        hows: Sequence[Aggregation],
        patterns: tuple[Pattern, ...],
        read_only: bool,
    ) -> "_ReadRows":
        """The rows of ``batch``, aggregated as ``hows`` say; the scores are those of the first."""
        reading = model.read(batch, read_only=read_only)
        layers = list(reading.layers)
        if len(patterns) < len(layers):
            patterns = patterns * len(layers)
        several = reading.read.dim() == 2
        read = reading.read if several else reading.read.unsqueeze(1)
        mask = batch.target_real if several else np.ones((len(batch), 1), dtype=bool)
        keys = torch.from_numpy(batch.real).to(read.device) if reading.keys is None else reading.keys
        chosen = torch.from_numpy(mask).to(read.device)
        # A row beyond the target of its instance stands on padding, which sees nothing.
        rows = chosen.unsqueeze(2)
        visible = {
            pattern: pattern.row(keys, read) & rows if read_only else pattern.pairs(keys)
            for pattern in set(patterns)
        }
        allowed = [visible[pattern] for pattern in patterns]
        instance = np.nonzero(mask)[0]
        position, real = read.cpu().numpy()[mask], keys.cpu().numpy()[instance]
        first = keys.int().argmax(1)
        attention = {how: as_array(aggregate(layers, read, allowed, how, first)[chosen]) for how in hows}
        return cls(
            batch=batch,
            reading=reading,
            instance=instance,
            position=position,
            real=real,
            attention=attention,
            weights=attention[hows[0]],
            null_weights=_null_weights(patterns, hows[0], real, position),
            layers=[read_rows(layer, read).transpose(1, 2)[chosen] for layer in layers],
            allowed=[read_rows(pairs.unsqueeze(1), read).squeeze(1)[chosen] for pairs in allowed],
        )

    def columns(self, names: Sequence[str] | None, by_layer: bool) -> dict[str, Numbers]:
        """Numbers of each instance, the mean over its rows: the answer, and all scores with their nulls."""
        answer = self.reading.answer
        columns = {"probability": answer.probability, "correct": answer.correct.astype(float)}
        relevance = self._relevance()
        uniform = [uniform_attention(visible) for visible in self.allowed]
        rows = Rows(self.weights, relevance, self.real, self.layers, self.allowed, self.reading.single)
        null = Rows(self.null_weights, relevance, self.real, uniform, self.allowed, self.reading.single)
        for score in SCORES.values():
            if score.compute and (names is None or score.name in names):
                columns[score.column] = self.mean(score.compute(rows))
                columns[f"null_{score.column}"] = self.mean(score.compute(null))
        if not by_layer:
            return columns
        for number, (layer, visible) in enumerate(zip(self.layers, self.allowed, strict=True), 1):
            name, visible_keys = f"layer_{number}", as_array(visible)
            mass = rows.mass(as_array(in_full_precision(layer).mean(1)))
            columns[f"{name}_mass"] = self.mean(mass)
            columns[f"null_{name}_mass"] = self.mean((visible_keys * relevance).sum(1) / visible_keys.sum(1))
            columns[f"{name}_entropy"] = self.mean(entropy(as_array(layer)).mean(1))
            columns[f"null_{name}_entropy"] = self.mean(np.log(visible_keys.sum(1)))
        for prefix in ("", "null_"):
            layers = [columns[f"{prefix}layer_{n}_mass"] for n in range(1, len(self.layers) + 1)]
            columns[f"{prefix}average_mass"] = np.mean(layers, axis=0)
        return columns

    def null_masses(self, numbers: NDArray[np.intp], by_layer: bool) -> list[dict[str, NullMass]]:
        """For each instance, by its number in the data, its mass under the stronger nulls.

        Keys are ``sharp_mass`` and ``permuted_mass``; ``by_layer`` adds those of each layer,
        ``sharp_layer_1_mass`` and so on, and of their mean. Instances without relevant tokens have none.
        """
        relevance = self._relevance()
        kinds = {"mass": (self.weights, self.null_weights)}
        if by_layer:
            layers = [as_array(in_full_precision(layer).mean(1)) for layer in self.layers]
            uniform = [as_array(uniform_attention(visible)[:, 0]) for visible in self.allowed]
            kinds["average_mass"] = np.mean(layers, axis=0), np.mean(uniform, axis=0)
            pairs = zip(layers, uniform, strict=True)
            kinds |= {f"layer_{number}_mass": pair for number, pair in enumerate(pairs, 1)}
        masses: list[dict[str, NullMass]] = [{} for _ in numbers]
        for place, number in enumerate(numbers.tolist()):
            rows = np.flatnonzero(self.instance == place)
            if not (relevance[rows] > 0).any():
                continue
            for name, (weights, null) in kinds.items():
                sharp = sharp_mass(null[rows], relevance[rows], number)
                permuted = permuted_mass(weights[rows], relevance[rows], null[rows] > 0, number)
                masses[place] |= {f"sharp_{name}": sharp, f"permuted_{name}": permuted}
        return masses

    def _relevance(self) -> Numbers:
        """The relevance of what each row reads ``(row, key)``; keys that the model adds have none."""
        relevance = self.each(self.batch.relevance)
        return np.pad(relevance, ((0, 0), (0, self.real.shape[1] - relevance.shape[1])))

    def importance(
        self, model: Measurable, asked: Importance, numbers: NDArray[np.intp], removal: Removal
    ) -> Numbers:
        """The importance of each token to each row, ``(row, token)``; ``numbers`` are those in the data."""
        if asked.aggregation is not None:
            return self.attention[asked.aggregation][:, : self.batch.tokens.shape[1]]
        if asked.values is not None:
            values = self.laid_out([asked.values[number] for number in numbers])
            return np.abs(values) if asked.absolute else values
        if asked.method == "gradient":
            return self.each(model.gradient_times_input(self.batch))
        if self.reading.read.dim() == 2:
            raise InputError(f"{asked.name} is not defined for a model that reads several rows")
        if asked.method == "leave_one_out":
            whole = self.reading.answer.outcomes
            return leave_one_out(model, self.batch, removal, whole, self.batch.follow(whole))
        method = getattr(model, str(asked.method), None)
        if method is None:
            raise InputError(f"{type(model).__name__} has no method {asked.method!r}: {METHODS[asked.name]}")
        return np.asarray(method(self.batch))

    def faithfulness(
        self,
        model: Measurable,
        importance: Numbers,
        percents: Sequence[int],
        removal: Removal,
        rounding: Rounding = "up",
    ) -> Faithfulness:
        """Of instances of several rows, from the ``importance`` ``(row, token)`` of tokens to each row."""
        if rounding == "down":
            raise InputError("rounding 'down' is not defined for a model that reads several rows")
        whole = self.reading.answer.outcomes[self.batch.target_real]
        parts = []
        for start in range(0, len(whole), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            asked = model.predict, self._row_batch(some), importance[some], percents, removal, whole[some]
            parts.append(faithfulness(*asked))
        rows = join(parts, np.arange(len(whole)))
        means = [self.mean(values) for values in (rows.whole, rows.sufficient, rows.comprehensive)]
        followed = np.zeros(len(self.batch), dtype=int)
        return Faithfulness(rows.percents, means[0], followed, means[1], means[2])

    def _row_batch(self, some: slice) -> Batch:
        """What some rows have read, each as an instance of its own whose target is the token it writes.

        The position that is read stays, as there would be none to predict from.
        """
        batch, instance, read = self.batch, self.instance[some], self.position[some, None]
        place = np.arange(batch.tokens.shape[1])
        real = batch.real[instance] & (place <= read)
        return Batch(
            tokens=batch.tokens[instance] * real,
            real=real,
            rankable=batch.rankable[instance] & real & (place < read),
            relevance=batch.relevance[instance],
            hidden=batch.hidden[instance],
            label=batch.label[instance],
            target=batch.target[batch.target_real][some, None],
            target_real=np.ones((len(instance), 1), dtype=bool),
            side=batch.side,
        )

    def each(self, values: Numbers) -> Numbers:
        """Values of the instances, repeated for each of their rows."""
        return values[self.instance]

    def mean(self, values: Numbers) -> Numbers:
        """Values of the rows, averaged over those of each instance."""
        sums = np.zeros((len(self.batch), *values.shape[1:]))
        np.add.at(sums, self.instance, values)
        return np.asarray(sums / np.bincount(self.instance).reshape(-1, *[1] * (values.ndim - 1)))

    def laid_out(self, rankings: Sequence[Numbers]) -> Numbers:
        """One ranking per instance ``(token,)`` or ``(row, token)`` as ``(row, token)``, zero on padding."""
        pairs = zip(rankings, np.bincount(self.instance), strict=True)
        rows = [
            row for ranking, count in pairs for row in np.broadcast_to(ranking, (count, ranking.shape[-1]))
        ]
        return pad_rows(rows, self.batch.real[self.instance])


def _null_weights(
    patterns: tuple[Pattern, ...], how: Aggregation, real: NDArray[np.bool_], position: NDArray[np.int64]
) -> Numbers:
    """The null ``(row, key)`` of rows that are read at ``position``, where ``real`` keys are there."""
    causal = all(pattern.causal for pattern in patterns)
    weights = np.zeros(real.shape)
    for row, first, length, read in zip(weights, real.argmax(1), real.sum(1), position, strict=True):
        # What comes behind the read position of a causal model changes nothing.
        length = read - first + 1 if causal else length
        row[first : first + length] = null_row(patterns, how, int(length), int(read - first)).numpy()
    return weights
