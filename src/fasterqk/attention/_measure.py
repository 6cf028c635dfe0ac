"""Measure a model on instances, in batches: attention, faithfulness, plausibility, and their nulls.

:func:`measure` runs each batch once, computes the registered scores on the rows that predict and on uniform
attention, and then predicts the texts again with tokens removed. The :class:`Measurement` keeps the numbers
of every instance; its :class:`Summary` has the scores, as JSON or as tables for people.
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
# For instances with several read rows: how many rows are predicted at once with tokens removed. Each has one
# outcome per token of the vocabulary, so more would not fit into memory.
ROWS_AT_ONCE = 256
# Variants (texts with tokens removed) that are collected before they are predicted together.
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
    """Measure the attention of ``model`` on ``instances``, and how faithful and plausible it is.

    The result does not depend on how instances are batched.

    Arguments:
        model: A :class:`Measurable` model: :class:`TorchClassifier`, :class:`HuggingFaceClassifier`,
            :class:`HuggingFaceCausal`, or the ``model`` that :func:`load_model` returns.
        instances: The texts as the model reads them.
        generator: Draws the random rankings that faithfulness and plausibility are compared with. Without it
            and without ``random_rankings`` there is no such comparison.
        draws: How many random rankings to draw per instance.
        scores: Further importances, measured in the same table: the name of a built-in one
            (``"layer:3/head:1"``, ``"integrated_gradients"``, ``"leave_one_out"``, ...), a function of an
            :class:`Instance` that returns one number per token, a mapping from ids to such numbers, a JSON
            lines file, a mapping from names to any of these, or a list of them.
        absolute: Rank by the absolute values of the importances you supply.
        percents: The percentages k of tokens that are kept or removed; if empty, nothing is removed.
        rounding: Whether k% of the tokens is rounded ``"up"``, or ``"down"`` as ferret does.
        aggregation: How layers and heads are combined into one row, or a function that chooses it from the
            patterns of the layers. By default rollout, or the mean over layers for a causal model; see
            :func:`default_aggregation`.
        removal: How tokens are removed.
        rank_by: Rank tokens by aggregated ``"attention"`` or by ``"gradient"`` (gradient x input).
        batch_size: The most instances per batch.
        edges: The edges of the DTAP table.
        side: The side on which batches are padded.
        progress: Called as ``progress(done, total)`` after each batch.
        random_rankings: One random ranking instead of drawn ones: a value per token of each instance (per row
            and token for a model that reads several rows).
        only: The names of the attention scores to compute; by default all.
        by_layer: Also compute the attention scores of each layer alone.
        stronger_nulls: Also compute the nulls of sharp and permuted attention. On short instances they take
            most of the time.
        need_relevance: Raise if the data marks tokens but none of them is relevant.
        max_weights: The most attention weights to hold at once, by smaller batches of long instances; None
            for no limit.

    Returns:
        A :class:`Measurement`: the numbers of every instance, ``summary()`` for the scores over all of them,
        and tables.

    Raises:
        InputError: There are no instances, no token is relevant, an argument is wrong, or the model's
            attention cannot be measured.

    >>> from torch import nn
    >>> from fasterqk.attention import TorchClassifier
    >>> class Tiny(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embedding = nn.Embedding(10, 8)
    ...         self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
    ...         self.head = nn.Linear(8, 2)
    ...     def forward(self, tokens, visible):
    ...         x = self.embedding(tokens)
    ...         return self.head(self.attention(x, x, x, key_padding_mask=~visible)[0][:, 0])
    >>> texts = [np.array([1, 2, 3]), np.array([1, 4, 5, 6])]
    >>> instances = [Instance(text, np.ones(len(text), bool), 1.0 * (text > 2), label=0) for text in texts]
    >>> measurement = measure(TorchClassifier(Tiny(), classes=("no", "yes")), instances)
    >>> summary = measurement.summary()
    >>> summary.n, 0 < summary["mrta"] < 1
    (2, True)
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
    requested = importances(scores, instances, first, absolute)
    random = [] if random_rankings is None else [random_rankings]
    if random_rankings is None and generator is not None:
        random = [[generator.random(len(x.tokens)) for x in instances] for _ in range(draws)]
    hows = [
        aggregation,
        *(importance.aggregation for importance in requested.values() if importance.aggregation),
    ]
    # Every method except rollout needs only the read rows, so nothing else of a layer is kept.
    read_only = all(how.method != "rollout" for how in hows)
    heads_in_memory = max(heads) if read_only else sum(heads)
    lengths = np.array([len(instances[i].tokens) for i in order])
    columns, null_masses = [], []
    ranked: list[tuple[list[Numbers], list[Faithfulness]]] = [([], []) for _ in (*requested, *random)]
    waiting = _Waiting(model, side, batch_size, int(lengths[-1]), tuple(percents), removal, rounding)
    # The share of the work that reading the full texts takes; predicting variants takes the rest.
    reading = 1 / (1 + 2 * len(percents) * len(ranked))
    for start, stop in batches(lengths, batch_size, heads_in_memory, max_weights or np.inf):
        chosen = order[start:stop]
        batch = collate([instances[i] for i in chosen], side)
        rows = _ReadRows.of(model, batch, hows, patterns, read_only)
        columns.append(rows.columns(only, by_layer))
        if stronger_nulls and (only is None or "mrta" in only):
            null_masses += rows.null_masses(chosen, by_layer)
        rankings = [rows.importance(model, importance, chosen, removal) for importance in requested.values()]
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
        rankings=dict(zip(requested, measured, strict=False)),
        random=tuple(measured[len(requested) :]),
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

    An instance holds ``heads`` times its squared length attention weights. A batch takes as many instances as
    fit into ``weights``, and at least one.

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
    """The pattern of each layer on the longest instance, the number of heads of each layer, and whether any
    pattern is guessed from the weights.

    A model that states its pattern has a single one for all layers.
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
    known_patterns = tuple(pattern for pattern in stated if pattern is not None)
    if len(known_patterns) == len(heads):
        return known_patterns, heads, False
    if sum(heads) * batch.tokens.shape[1] ** 2 <= (max_weights or np.inf):
        reading = model.read(batch)  # the more rows, the better the guess
    real = torch.from_numpy(batch.real).to(reading.read.device)
    layers = zip(stated, reading.layers, strict=True)
    return tuple(pattern or find_pattern(layer, real, reading.read) for pattern, layer in layers), heads, True


class _Waiting:
    """Collects the variants of many batches, predicts them together, and scores the rankings they belong to.

    Variants equal to a text that was read are not predicted again. One pass predicts at most as many tokens
    as ``batch_size`` copies of the longest text have.
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
        """Let the next ``ask`` append the faithfulness of ``importance`` ``(batch, token)`` to results."""
        perturbed = perturb(batch, importance, self.percents, self.removal, self.rounding)
        whole = checked_outcomes(whole, batch)
        self.variants.add(batch, whole)
        variant_rows = [[self.variants.add(variant) for variant in variants] for variants in perturbed[:2]]
        self.rankings.append((results, batch, whole, variant_rows, perturbed.skipped))

    def ask(self, progress: Callable[[float], None]) -> None:
        """Predict each distinct variant once, and score the rankings that wait for them."""
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
    """The rows of one batch that predict; ``instance`` says which instance each row belongs to.

    ``weights`` and ``null_weights`` ``(row, key)`` are aggregated; ``attention`` holds the weights of every
    requested aggregation. ``layers`` ``(row, head, key)`` and ``allowed`` ``(row, key)`` have one entry per
    layer. Keys that the model adds come after the tokens.
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
        """Read ``batch`` and aggregate its rows in all ways ``hows``; the scores use the first one."""
        reading = model.read(batch, read_only=read_only)
        layers = list(reading.layers)
        if len(patterns) < len(layers):
            patterns = patterns * len(layers)
        several = reading.read.dim() == 2
        read = reading.read if several else reading.read.unsqueeze(1)
        mask = batch.target_real if several else np.ones((len(batch), 1), dtype=bool)
        keys = torch.from_numpy(batch.real).to(read.device) if reading.keys is None else reading.keys
        chosen = torch.from_numpy(mask).to(read.device)
        # Rows beyond an instance's target are padding, which sees nothing.
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
        """One number per instance, the mean over its rows: the answer, and all scores with their nulls."""
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
        """The mass of each instance under the stronger nulls; ``numbers`` are its places in the data.

        Keys are ``sharp_mass`` and ``permuted_mass``; ``by_layer`` adds those of each layer,
        ``sharp_layer_1_mass`` and so on, and of their mean. Instances without relevant tokens have no keys.
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
        """The relevance of each key of each row, ``(row, key)``; zero for keys that the model adds."""
        relevance = self.each(self.batch.relevance)
        return np.pad(relevance, ((0, 0), (0, self.real.shape[1] - relevance.shape[1])))

    def importance(
        self, model: Measurable, importance: Importance, numbers: NDArray[np.intp], removal: Removal
    ) -> Numbers:
        """The importance of each token to each row, ``(row, token)``; ``numbers`` are places in the data."""
        if importance.aggregation is not None:
            return self.attention[importance.aggregation][:, : self.batch.tokens.shape[1]]
        if importance.values is not None:
            values = self.laid_out([importance.values[number] for number in numbers])
            return np.abs(values) if importance.absolute else values
        if importance.method == "gradient":
            return self.each(model.gradient_times_input(self.batch))
        if self.reading.read.dim() == 2:
            raise InputError(f"{importance.name} is not defined for a model that reads several rows")
        if importance.method == "leave_one_out":
            whole = self.reading.answer.outcomes
            return leave_one_out(model, self.batch, removal, whole, self.batch.follow(whole))
        method = getattr(model, str(importance.method), None)
        if method is None:
            raise InputError(
                f"{type(model).__name__} has no method {importance.method!r}: {METHODS[importance.name]}"
            )
        return np.asarray(method(self.batch))

    def faithfulness(
        self,
        model: Measurable,
        importance: Numbers,
        percents: Sequence[int],
        removal: Removal,
        rounding: Rounding = "up",
    ) -> Faithfulness:
        """Faithfulness of instances with several rows, by the importance of tokens to each row."""
        if rounding == "down":
            raise InputError("rounding 'down' is not defined for a model that reads several rows")
        whole = self.reading.answer.outcomes[self.batch.target_real]
        parts = []
        for start in range(0, len(whole), ROWS_AT_ONCE):
            chunk = slice(start, start + ROWS_AT_ONCE)
            rows_as_instances = self._row_batch(chunk)
            parts.append(
                faithfulness(
                    model.predict, rows_as_instances, importance[chunk], percents, removal, whole[chunk]
                )
            )
        rows = join(parts, np.arange(len(whole)))
        means = [self.mean(values) for values in (rows.whole, rows.sufficient, rows.comprehensive)]
        followed = np.zeros(len(self.batch), dtype=int)
        return Faithfulness(rows.percents, means[0], followed, means[1], means[2])

    def _row_batch(self, chunk: slice) -> Batch:
        """Turn rows into instances: the tokens a row has read, with the token it writes as target.

        The read position is not rankable: without it there would be nothing to predict from.
        """
        batch, instance, read = self.batch, self.instance[chunk], self.position[chunk, None]
        place = np.arange(batch.tokens.shape[1])
        real = batch.real[instance] & (place <= read)
        return Batch(
            tokens=batch.tokens[instance] * real,
            real=real,
            rankable=batch.rankable[instance] & real & (place < read),
            relevance=batch.relevance[instance],
            hidden=batch.hidden[instance],
            label=batch.label[instance],
            target=batch.target[batch.target_real][chunk, None],
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
        # In a causal model, tokens after the read position change nothing.
        length = read - first + 1 if causal else length
        row[first : first + length] = null_row(patterns, how, int(length), int(read - first)).numpy()
    return weights
