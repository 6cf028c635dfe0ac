"""Measure a model on instances, in batches: attention, faithfulness, plausibility, and their nulls.

:func:`measure` runs each batch once, computes the registered scores on the rows that predict and on uniform
attention, and then predicts the texts again with tokens removed. The :class:`Measurement` keeps the numbers
of every instance; its :class:`Summary` has the scores, as JSON or as tables for people.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fasterqk.attention._importance import (
    METHODS,
    Importance,
    Source,
    aggregation_name,
    importances,
    leave_one_out,
)
from fasterqk.attention._loading import Loaded, opened
from fasterqk.attention._selfcheck import self_check
from fasterqk.attention.aggregation import (
    Aggregation,
    NullMass,
    Pattern,
    aggregate,
    aggregate_null,
    default_aggregation,
    find_patterns,
    in_full_precision,
    permuted_mass,
    read_rows,
    sharp_mass,
    uniform_attention,
    visible_pairs,
)
from fasterqk.attention.faithfulness import (
    Faithfulness,
    How,
    Removal,
    Variants,
    checked_outcomes,
    faithfulness,
    faithfulness_of,
    join,
    perturb,
)
from fasterqk.attention.instances import Batch, Example, Instance, collate, pad_rows, unpad_rows
from fasterqk.attention.measurement import Measurement, Ranking, Rowwise
from fasterqk.attention.models import Integrated, Measurable, Reading, as_array, evaluating
from fasterqk.attention.scores import SCORES, Rows, among, entropy
from fasterqk.attention.statistics import MOST_DRAWS
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


@dataclass(frozen=True, eq=False)
class Nulls:
    """What the scores are compared with, besides uniform attention.

    Arguments:
        draws: How many random rankings to draw per instance; faithfulness and plausibility of attention are
            compared with theirs. 0 for none.
        seed: Seeds these draws: a number, or a generator that continues.
        rankings: One random ranking instead of drawn ones: a value per token of each instance (per row and
            token for a model that reads several rows).
        stronger: Also compute the nulls of sharp and permuted attention. On short instances they take most of
            the time.

    Raises:
        InputError: ``draws`` is not a whole number from 0 to 1000.

    >>> Nulls(draws=10).draws
    10
    """

    draws: int = 1
    seed: int | np.random.Generator = 0
    rankings: Sequence[Numbers] | None = None
    stronger: bool = True

    def __post_init__(self) -> None:
        if type(self.draws) is not int or not 0 <= self.draws <= MOST_DRAWS:
            raise InputError(
                f"draws is {self.draws!r}; give a whole number up to {MOST_DRAWS}, or 0 for no random ranking"
            )

    def drawn(self, instances: Sequence[Instance]) -> list[Sequence[Numbers]]:
        """The random rankings of all instances."""
        if self.rankings is not None:
            return [self.rankings]
        generator = np.random.default_rng(self.seed)
        return [[generator.random(len(x.tokens)) for x in instances] for _ in range(self.draws)]


@dataclass(frozen=True, eq=False)
class Rankings:
    """Which importances rank the tokens.

    Arguments:
        scores: Importances beside attention, measured in the same table: the name of a built-in one
            (``"layer:3/head:1"``, ``"integrated_gradients"``, ``"leave_one_out"``, ...), a function of an
            :class:`Instance` that returns one number per token, a mapping from ids to such numbers, a JSON
            lines file, a mapping from names to any of these, or a list of them.
        rank_by: What ranks tokens first: aggregated ``"attention"``, or ``"gradient"`` (gradient x input).
        absolute: Rank by the absolute values of the importances you supply.

    Raises:
        InputError: ``rank_by`` is neither.

    >>> Rankings(["gradient", "leave_one_out"], absolute=True).rank_by
    'attention'
    """

    scores: Source | Sequence[Source] | None = None
    rank_by: RankBy = "attention"
    absolute: bool = False

    def __post_init__(self) -> None:
        if self.rank_by not in get_args(RankBy):
            raise InputError(f"unknown ranking {self.rank_by!r}; choose from {', '.join(get_args(RankBy))}")


@dataclass(frozen=True, eq=False)
class Passes:
    """How the model is run, and how much of its attention is scored.

    Arguments:
        batch_size: The most instances per batch; the result does not depend on it.
        max_weights: The most attention weights to hold at once, by smaller batches of long instances; None
            for no limit.
        only: The names of the attention scores to compute; by default all.
        by_layer: Also compute the attention scores of each layer alone.
        progress: Called as ``progress(done, total)`` after each batch.

    >>> Passes(batch_size=8, by_layer=True).batch_size
    8
    """

    batch_size: int = 32
    max_weights: int | None = WEIGHTS_IN_MEMORY
    only: Sequence[str] | None = None
    by_layer: bool = False
    progress: Callable[[float, float], None] | None = None


def measure(
    model: Measurable | Loaded | nn.Module | str | PathLike[str],
    examples: str | PathLike[str] | Sequence[Instance | Example | Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    aggregation: Aggregation | str | Callable[[bool], Aggregation] | None = None,
    scores: Rankings | Source | Sequence[Source] | None = None,
    removal: Removal | How | Sequence[Removal | How] = "delete",
    nulls: Nulls = Nulls(),  # noqa: B008 - frozen
    passes: Passes = Passes(),  # noqa: B008 - frozen
) -> Measurement:
    """Measure the attention of ``model`` on ``examples``, and how faithful and plausible it is.

    ``measure("my-classifier", "test.jsonl")`` computes what ``fasterqk measure`` prints.

    Arguments:
        model: A model folder; a classifier or causal language model of Hugging Face transformers; any other
            module wrapped in :class:`TorchClassifier`; or what :func:`load_model` returns.
        examples: A JSON lines file, its rows as mappings, what :func:`read_examples` returns, or
            :class:`Instance` objects, which are measured as they are.
        tokenizer: Encodes the examples, unless the model's folder has a tokenizer or they are instances.
        aggregation: How layers and heads are combined into one row: ``"rollout"``, ``"mean"``, ``"layer:3"``,
            ..., an :class:`Aggregation`, or a function that chooses one for a model that is causal or not. By
            default rollout, or the mean over layers for a causal model.
        scores: Importances beside attention, such as ``["gradient", "lime.jsonl"]``; :class:`Rankings` says
            what they can be and has more options.
        removal: How tokens are removed, and how many: ``"delete"``, ``"mask"``, ``"attention"`` or a
            :class:`Removal`; of several the scores have the first, and ``removals_table`` has all.
        nulls: What the scores are compared with.
        passes: How the model is run: batches, progress, single layers.

    Returns:
        A :class:`Measurement`: the numbers of every instance, ``summary()`` for the scores over all of them,
        and tables.

    Raises:
        InputError: There are no examples, one of them is wrong, no token is relevant although the data marks
            some, an argument is wrong, or the model's attention cannot be measured.

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
    >>> measurement = measure(TorchClassifier(Tiny(), classes=("no", "yes")), instances, aggregation="mean")
    >>> summary = measurement.summary()
    >>> summary.n, 0 < summary["mrta"] < 1
    (2, True)
    """
    opened_model, instances, tokenizer = opened(model, examples, tokenizer)
    listed = [removal] if isinstance(removal, str | Removal) else removal
    removals = [Removal.of(how, tokenizer) for how in listed]
    if len({how.how for how in removals}) < max(1, len(removals)):
        raise InputError(f"removal is {removal!r}; give one, or several different ones")
    rankings = scores if isinstance(scores, Rankings) else Rankings(scores)
    if isinstance(aggregation, str):
        aggregation = Aggregation.parse(aggregation)
    with evaluating(opened_model):
        notes, batched = self_check(opened_model, instances)
        passes = passes if batched else replace(passes, batch_size=1)
        return _measured(opened_model, instances, aggregation, rankings, removals, nulls, passes, notes)


def _measured(
    model: Measurable,
    instances: Sequence[Instance],
    aggregation: Aggregation | Callable[[bool], Aggregation] | None,
    rankings: Rankings,
    removals: Sequence[Removal],
    nulls: Nulls,
    passes: Passes,
    notes: list[str],
) -> Measurement:
    # Neighbours in length share a batch, so that little is spent on padding.
    order = np.argsort([len(instance.tokens) for instance in instances], kind="stable")
    lengths = np.array([len(instances[i].tokens) for i in order])
    patterns, heads, causal = _patterns(model, instances[order[-1]], passes.max_weights)
    guessed = model.pattern is None and any(patterns)
    if guessed:
        notes.append("what each row may see was guessed from its weights: the model shows no mask")
    if not isinstance(aggregation, Aggregation):
        aggregation = (aggregation or default_aggregation)(causal)
    by_attention = Importance(aggregation_name(aggregation), aggregation)
    first = by_attention if rankings.rank_by == "attention" else Importance("gradient", method="gradient")
    requested = importances(rankings.scores, instances, first, rankings.absolute)
    random = nulls.drawn(instances)
    hows = [aggregation, *(x.aggregation for x in requested.values() if x.aggregation)]
    # Every method except rollout needs only the read rows, so nothing else of a layer is kept.
    read_only = all(how.method != "rollout" for how in hows)
    heads_in_memory = max(heads) if read_only else sum(heads)
    stronger = nulls.stronger and (passes.only is None or "mrta" in passes.only)
    parts: list[list[_Part]] = []
    by_instance: list[list[Numbers]] = [[] for _ in (*requested, *random)]
    faithful: list[list[list[Faithfulness]]] = [[[] for _ in by_instance] for _ in removals]
    waiting = _Waiting(model, passes, int(lengths[-1]))
    # The share of the work that reading the full texts takes; predicting variants takes the rest.
    reading = 1 / (1 + 2 * sum(len(removal.percents) for removal in removals) * len(by_instance))

    def tell(read: int, predicted: float) -> None:
        if passes.progress:
            passes.progress(reading * read + (1 - reading) * predicted, len(order))

    predicted = 0
    gaps: list[Numbers] = []
    for start, stop in batches(lengths, passes.batch_size, heads_in_memory, passes.max_weights or np.inf):
        chosen = order[start:stop]
        batch = collate([instances[i] for i in chosen])
        rows = _ReadRows.of(model, batch, hows, patterns, read_only)
        parts.append(rows.parts(passes, chosen, stronger))
        values = [rows.importance(model, x, chosen, removals[0], gaps) for x in requested.values()]
        values += [rows.laid_out([drawn[i] for i in chosen]) for drawn in random]
        for number, importance in enumerate(values):
            by_instance[number] += unpad_rows(rows.mean(importance), batch.real)
            for removal, results in zip(removals, faithful, strict=True):
                if rows.reading.read.dim() == 1:
                    waiting.add(results[number], rows, importance, removal)
                else:
                    results[number].append(rows.faithfulness(model, importance, removal))
        if len(waiting) > VARIANTS_IN_MEMORY or stop == len(order):
            before = predicted
            waiting.ask(lambda share: tell(stop, before + share * (stop - before)))  # noqa: B023
            predicted = stop
        tell(stop, predicted)
    if gaps:
        gap = np.concatenate(gaps)
        notes.append(
            "integrated gradients miss the change in log-probability, their sum in theory, by"
            f" {gap.mean():.2%} on average, by {gap.max():.2%} at most"
        )
    place = np.argsort(order)
    in_order = [tuple(values[i] for i in place) for values in by_instance]
    aggregated, *layers = [_joined(of_batches, place) for of_batches in zip(*parts, strict=True)]
    heads_of_layers = aggregated.columns.pop("heads", None)
    settings = {
        "aggregation": asdict(aggregation),
        "rank_by": rankings.rank_by,
        "mask": "guessed from the weights" if guessed else "of the model",
        "notes": notes,
    }
    measured = []
    for removal, results in zip(removals, faithful, strict=True):
        ranked = [Ranking(x, join(y, order)) for x, y in zip(in_order, results, strict=True)]
        how = {"removal": {"how": removal.how, "mask_token": removal.mask_token}}
        rounding = {"rounding": removal.rounding} if removal.rounding != "up" else {}
        measurement = Measurement(
            columns=aggregated.columns,
            nulls=aggregated.nulls,
            instances=tuple(instances),
            rankings=dict(zip(requested, ranked, strict=False)),
            random=tuple(ranked[len(requested) :]),
            classes=model.classes,
            settings=settings | how | rounding,
            layers=tuple(layers[:-1]),
            average=layers[-1] if layers else None,
            heads=heads_of_layers,
        )
        measured.append(measurement)
    return replace(measured[0], others=tuple(measured[1:]))


class _Part(NamedTuple):
    """What one batch contributes to a :class:`Rowwise`: columns, and the stronger nulls of each instance."""

    columns: dict[str, Numbers]
    nulls: list[dict[str, NullMass]]


def _joined(parts: Sequence[_Part], place: NDArray[np.intp]) -> Rowwise:
    """Join the batches; entry ``place[i]`` of the joined batches is instance i."""
    columns = {
        name: np.concatenate([part.columns[name] for part in parts])[place] for name in parts[0].columns
    }
    by_instance = [nulls for part in parts for nulls in part.nulls]
    in_order = [by_instance[i] for i in place if by_instance[i]]
    names = in_order[0] if in_order else ()
    return Rowwise(columns, {name: tuple(nulls[name] for nulls in in_order) for name in names})


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
) -> tuple[list[Pattern | None], list[int], bool]:
    """Of each layer, the pattern (None if the model shows its mask) and the number of heads; and whether all
    layers are causal.

    A model that states its pattern has it in all layers. A pattern that neither states nor shows is guessed
    from the weights on the longest instance.
    """
    if model.pattern is not None and max_weights is None:
        return [model.pattern], [0], model.pattern.causal
    batch = collate([longest])
    reading = model.read(batch, read_only=True)
    heads = [layer.shape[1] for layer in reading.layers]
    if model.pattern is not None:
        return [model.pattern], heads, model.pattern.causal
    masks = reading.masks or [None] * len(heads)
    if None in masks and sum(heads) * batch.tokens.shape[1] ** 2 <= (max_weights or np.inf):
        reading = model.read(batch)  # the more rows, the better the guess
    real = torch.from_numpy(batch.real).to(reading.read.device)
    patterns = find_patterns(reading.layers, masks, real, reading.read)
    causal = not any(pairs.triu(1).any() for pairs in visible_pairs(masks, patterns, real))
    return patterns, heads, causal


class _Waiting:
    """Collects the variants of many batches, predicts them together, and scores the rankings they belong to.

    Variants equal to a text that was read are not predicted again. One pass predicts at most as many tokens
    as ``batch_size`` copies of the longest text have.
    """

    def __init__(self, model: Measurable, passes: Passes, longest: int) -> None:
        self.model = model
        self.tokens, self.single = passes.batch_size * longest, passes.batch_size == 1
        self._empty()

    def __len__(self) -> int:
        return len(self.variants)

    def add(
        self, results: list[Faithfulness], rows: "_ReadRows", importance: Numbers, removal: Removal
    ) -> None:
        """Let the next ``ask`` append the faithfulness of ``importance`` ``(batch, token)`` to results."""
        batch = rows.batch
        perturbed = perturb(batch, importance, removal, rows.sees)
        whole = checked_outcomes(rows.reading.answer.outcomes, batch)
        self.variants.add(batch, whole)
        variant_rows = [[self.variants.add(variant) for variant in variants] for variants in perturbed[:2]]
        self.rankings.append((results, batch, removal, whole, variant_rows, perturbed.skipped))

    def ask(self, progress: Callable[[float], None]) -> None:
        """Predict each distinct variant once, and score the rankings that wait for them."""
        if self.rankings:
            outcomes = self.variants.ask(self.model.predict, self.tokens, self.single, progress)
        for results, batch, removal, whole, variant_rows, skipped in self.rankings:
            alone, without = (
                [outcomes[rows] for rows in rows_by_percent] for rows_by_percent in variant_rows
            )
            results.append(faithfulness_of(batch, removal, whole, alone, without, skipped))
        self._empty()

    def _empty(self) -> None:
        self.variants = Variants()
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
    rankable: NDArray[np.bool_]
    words_alone: bool
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
        patterns: Sequence[Pattern | None],
        read_only: bool,
    ) -> "_ReadRows":
        """Read ``batch`` and aggregate its rows in all ways ``hows``; the scores use the first one."""
        reading = model.read(batch, read_only=read_only)
        layers = list(reading.layers)
        several = reading.read.dim() == 2
        read = reading.read if several else reading.read.unsqueeze(1)
        mask = batch.target_real if several else np.ones((len(batch), 1), dtype=bool)
        keys = torch.from_numpy(batch.real).to(read.device) if reading.keys is None else reading.keys
        chosen = torch.from_numpy(mask).to(read.device)
        many = patterns if len(patterns) == len(layers) else [*patterns] * len(layers)
        allowed = visible_pairs(reading.masks or [None] * len(layers), many, keys)
        if read_only:
            # Rows beyond an instance's target are padding, which sees nothing.
            used = chosen.unsqueeze(2)
            rows = {id(pairs): read_rows(pairs.unsqueeze(1), read)[:, 0] & used for pairs in allowed}
            allowed = [rows[id(pairs)] for pairs in allowed]
        instance = np.nonzero(mask)[0]
        position, real = read.cpu().numpy()[mask], keys.cpu().numpy()[instance]
        first = keys.int().argmax(1)
        attention = {how: as_array(aggregate(layers, read, allowed, how, first)[chosen]) for how in hows}
        null_weights = as_array(aggregate_null(allowed, len(layers), read, hows[0], first)[chosen])
        rankable = np.pad(batch.rankable[instance], ((0, 0), (0, real.shape[1] - batch.tokens.shape[1])))
        for how in hows:
            if how.among == "words":
                attention[how] = among(attention[how], rankable)
        return cls(
            batch=batch,
            reading=reading,
            instance=instance,
            position=position,
            real=real,
            attention=attention,
            rankable=rankable,
            words_alone=hows[0].among == "words",
            weights=attention[hows[0]],
            null_weights=among(null_weights, rankable) if hows[0].among == "words" else null_weights,
            layers=[read_rows(layer, read).transpose(1, 2)[chosen] for layer in layers],
            allowed=[read_rows(pairs.unsqueeze(1), read).squeeze(1)[chosen] for pairs in allowed],
        )

    @property
    def sees(self) -> NDArray[np.bool_]:
        """The tokens that the one row of each instance sees in every layer, ``(batch, token)``."""
        return torch.stack(self.allowed).all(0).cpu().numpy()[:, : self.batch.tokens.shape[1]]

    def parts(self, passes: Passes, numbers: NDArray[np.intp], stronger: bool) -> list[_Part]:
        """The numbers of the aggregated rows and, if asked for, of every layer and of the mean over layers.

        ``numbers`` are the places of the instances in the data. A number of an instance is the mean over its
        rows.
        """
        relevance = self._relevance()
        columns = self._columns(relevance, passes.only)
        parts = [_Part(columns, self._nulls(self.weights, self.null_weights, relevance, numbers, stronger))]
        if not passes.by_layer:
            return parts
        layers = [as_array(in_full_precision(layer).mean(1)) for layer in self.layers]
        uniform = [as_array(uniform_attention(visible)[:, 0]) for visible in self.allowed]
        if self.words_alone:
            layers, uniform = ([among(rows, self.rankable) for rows in kind] for kind in (layers, uniform))
        masses: dict[str, list[Numbers]] = {"mass": [], "null_mass": []}
        rows = Rows(self.weights, relevance, self.real, self.rankable, (), (), self.reading.single)
        for weights, null, layer, visible in zip(layers, uniform, self.layers, self.allowed, strict=True):
            visible_keys = as_array(visible) * (self.rankable if self.words_alone else 1)
            masses["mass"].append(self.mean(rows.mass(weights)))
            masses["null_mass"].append(self.mean((visible_keys * relevance).sum(1) / visible_keys.sum(1)))
            columns = {name: values[-1] for name, values in masses.items()}
            columns["entropy"] = self.mean(entropy(as_array(layer)).mean(1))
            columns["null_entropy"] = self.mean(np.log(visible_keys.sum(1)))
            parts.append(_Part(columns, self._nulls(weights, null, relevance, numbers, stronger)))
        average = {name: np.mean(values, axis=0) for name, values in masses.items()}
        weights, null = np.mean(layers, axis=0), np.mean(uniform, axis=0)
        return [*parts, _Part(average, self._nulls(weights, null, relevance, numbers, stronger))]

    def _columns(self, relevance: Numbers, only: Sequence[str] | None) -> dict[str, Numbers]:
        """The answer, and all scores of the aggregated rows with their nulls."""
        answer = self.reading.answer
        columns = {"probability": answer.probability, "correct": answer.correct.astype(float)}
        uniform = [uniform_attention(visible) for visible in self.allowed]
        keys = relevance, self.real, self.rankable
        rows = Rows(self.weights, *keys, self.layers, self.allowed, self.reading.single)
        null = Rows(self.null_weights, *keys, uniform, self.allowed, self.reading.single)
        for score in SCORES.values():
            if score.compute and (only is None or score.name in only):
                columns[score.column] = self.mean(score.compute(rows))
                columns[f"null_{score.column}"] = self.mean(score.compute(null))
        if only is None:
            columns["heads"] = self._heads(relevance)
        return columns

    def _heads(self, relevance: Numbers) -> Numbers:
        """Mass and entropy of every head and of uniform attention, ``(batch, 2, layer, head + 1)``.

        They are nan where a layer has fewer heads than another.
        """
        most = max(layer.shape[1] for layer in self.layers)
        values = np.full((len(relevance), 2, len(self.layers), most + 1), np.nan)
        for number, (layer, visible) in enumerate(zip(self.layers, self.allowed, strict=True)):
            rows = np.concatenate([as_array(layer), as_array(uniform_attention(visible))], 1)
            rows = among(rows, self.rankable[:, None]) if self.words_alone else rows
            places = [*range(layer.shape[1]), most]
            values[:, 0, number, places] = (rows * relevance[:, None]).sum(-1)
            values[:, 1, number, places] = entropy(rows)
        return self.mean(values)

    def _nulls(
        self, weights: Numbers, null: Numbers, relevance: Numbers, numbers: NDArray[np.intp], stronger: bool
    ) -> list[dict[str, NullMass]]:
        """The mass of each instance under the stronger nulls; empty for instances without relevant tokens."""
        masses: list[dict[str, NullMass]] = [{} for _ in numbers]
        for place, number in enumerate(numbers.tolist() if stronger else ()):
            rows = np.flatnonzero(self.instance == place)
            if (relevance[rows] > 0).any():
                masses[place] = {
                    "sharp": sharp_mass(null[rows], relevance[rows], number),
                    "permuted": permuted_mass(weights[rows], relevance[rows], null[rows] > 0, number),
                }
        return masses

    def _relevance(self) -> Numbers:
        """The relevance of each key of each row, ``(row, key)``; zero for keys that the model adds."""
        relevance = self.each(self.batch.relevance)
        return np.pad(relevance, ((0, 0), (0, self.real.shape[1] - relevance.shape[1])))

    def importance(
        self,
        model: Measurable,
        importance: Importance,
        numbers: NDArray[np.intp],
        removal: Removal,
        gaps: list[Numbers],
    ) -> Numbers:
        """The importance of each token to each row, ``(row, token)``; ``numbers`` are places in the data.

        The completeness gaps of integrated gradients are added to ``gaps``.
        """
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
            return leave_one_out(model, self.batch, removal, whole, self.batch.follow(whole), self.sees)
        method = getattr(model, str(importance.method), None)
        if method is None:
            raise InputError(
                f"{type(model).__name__} has no method {importance.method!r}: {METHODS[importance.name]}"
            )
        result = method(self.batch)
        if isinstance(result, Integrated):
            gaps.append(result.gap)
        return np.asarray(result[0] if isinstance(result, Integrated) else result)

    def faithfulness(self, model: Measurable, importance: Numbers, removal: Removal) -> Faithfulness:
        """Faithfulness of instances with several rows, by the importance of tokens to each row."""
        if removal.rounding == "down":
            raise InputError("rounding 'down' is not defined for a model that reads several rows")
        whole = self.reading.answer.outcomes[self.batch.target_real]
        parts = []
        for start in range(0, len(whole), ROWS_AT_ONCE):
            chunk = slice(start, start + ROWS_AT_ONCE)
            rows = self._row_batch(chunk)
            parts.append(faithfulness(model.predict, rows, importance[chunk], removal, whole[chunk]))
        joined = join(parts, np.arange(len(whole)))
        means = [self.mean(values) for values in (joined.whole, joined.sufficient, joined.comprehensive)]
        followed = np.zeros(len(self.batch), dtype=int)
        return Faithfulness(joined.percents, means[0], followed, means[1], means[2])

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
