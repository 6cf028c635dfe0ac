"""Measure a model on instances, in batches: attention, faithfulness, plausibility, and their nulls.

:func:`measure` runs each batch once, computes the registered scores on the rows that predict and on uniform
attention, and then predicts the texts again with tokens removed. The :class:`Measurement` keeps the numbers
of every instance; its :class:`Summary` has the scores, as JSON or as tables for people.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fasterqk.attention._importance import Importance, Source, importances
from fasterqk.attention._loading import Loaded, opened, self_check, unknown_note
from fasterqk.attention._rows import ReadRows
from fasterqk.attention.aggregation import (
    Aggregation,
    Pattern,
    default_aggregation,
    find_patterns,
    visible_pairs,
)
from fasterqk.attention.faithfulness import (
    Faithfulness,
    How,
    Removal,
    Variants,
    join,
)
from fasterqk.attention.instances import Example, Instance, collate
from fasterqk.attention.measurement import Measurement, Ranking, Rowwise
from fasterqk.attention.models import WEIGHTS_IN_MEMORY, Measurable, evaluating
from fasterqk.attention.scores import ScoreName
from fasterqk.attention.statistics import MOST_DRAWS
from fasterqk.errors import InputError

Numbers = NDArray[np.float64]
# Variants (texts with tokens removed) that are collected before they are predicted together.
VARIANTS_IN_MEMORY = 50_000


@dataclass(frozen=True, eq=False)
class Nulls:
    """Random rankings and stronger nulls, with which scores are compared besides uniform attention.

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
class Passes:
    """How the model is run, and how much of its attention is scored.

    Arguments:
        batch_size: The most instances per batch; the result does not depend on it.
        max_weights: The most attention weights to hold at once, or None; long instances get small batches.
        only: The names of the attention scores to compute; by default all.
        by_layer: Also compute the attention scores of each layer alone.
        progress: Called as ``progress(done, total)`` after each batch.

    Raises:
        InputError: ``batch_size`` is not a whole number from 1 on, or ``only`` names an unknown score.
    """

    batch_size: int = 32
    max_weights: int | None = WEIGHTS_IN_MEMORY
    only: Sequence[str] | None = None
    by_layer: bool = False
    progress: Callable[[float, float], None] | None = None

    def __post_init__(self) -> None:
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size!r}; give a whole number from 1 on")
        for name in self.only or ():
            ScoreName.parse(name)  # raises for an unknown name


def measure(
    model: Measurable | Loaded | nn.Module | str | PathLike[str],
    examples: str | PathLike[str] | Sequence[Instance | Example | Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    aggregation: Aggregation | str | Callable[[bool], Aggregation] | None = None,
    scores: Source | Sequence[Source] | None = None,
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
        scores: Importances beside attention, measured in the same table: the name of a built-in one
            (``"layer:3/head:1"``, ``"integrated_gradients"``, ``"leave_one_out"``, ...), a function of an
            :class:`Instance` that returns one number per token, a mapping from ids to such numbers, a JSON
            lines file, a mapping from names to any of these, or a list of them.
        removal: How tokens are removed, and how many: ``"delete"``, ``"mask"``, ``"attention"`` or a
            :class:`Removal`; of several, scores use the first, and ``removals_table`` shows all.
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
    for option, kind in ((nulls, Nulls), (passes, Passes)):
        if not isinstance(option, kind):
            name = kind.__name__
            raise InputError(f"{name.lower()} is {option!r}; give fasterqk.attention.{name}(...)")
    opened_model, instances, tokenizer = opened(model, examples, tokenizer)
    listed = [removal] if isinstance(removal, str | Removal) else removal
    removals = [Removal.of(how, tokenizer) for how in listed]
    if len({how.how for how in removals}) < max(1, len(removals)):
        raise InputError(f"removal is {[how.how for how in removals]}; give one, or several different ones")
    if isinstance(aggregation, str):
        aggregation = Aggregation.parse(aggregation)
    with evaluating(opened_model):
        notes = unknown_note(instances, tokenizer)
        more_notes, batched = self_check(opened_model, instances)
        passes = passes if batched else replace(passes, batch_size=1)
        return _measured(
            opened_model, instances, aggregation, scores, removals, nulls, passes, notes + more_notes
        )


def _measured(
    model: Measurable,
    instances: Sequence[Instance],
    aggregation: Aggregation | Callable[[bool], Aggregation] | None,
    scores: Source | Sequence[Source] | None,
    removals: Sequence[Removal],
    nulls: Nulls,
    passes: Passes,
    notes: list[str],
) -> Measurement:
    # Texts of similar length share a batch, which keeps padding short.
    order = np.argsort([len(instance.tokens) for instance in instances], kind="stable")
    lengths = np.array([len(instances[i].tokens) for i in order])
    patterns, heads, causal = _patterns(model, instances[order[-1]], passes.max_weights)
    guessed = model.pattern is None and any(patterns)
    if guessed:
        notes.append("what each row may see was guessed from its weights: the model shows no mask")
    lost = sum(bool(x.relevance[0]) and int(x.rankable.sum()) > 1 for x in instances) if causal else 0
    if lost:
        notes.append(
            f"in {lost} of {len(instances)} instances the first token is relevant, which is not among words"
        )
    if not isinstance(aggregation, Aggregation):
        aggregation = (aggregation or default_aggregation)(causal)
    by_attention = Importance(aggregation.name, aggregation)
    requested = importances(() if scores is None else scores, instances, by_attention)
    random = nulls.drawn(instances)
    hows = [aggregation, *(x.aggregation for x in requested.values() if x.aggregation)]
    # Rollout needs all rows of a layer, and so does a model that averages its tokens.
    read_only = getattr(model, "reads", "") != "mean" and all(how.method != "rollout" for how in hows)
    heads_in_memory = max(heads) if read_only else sum(heads)
    stronger = nulls.stronger and (passes.only is None or "mrta" in passes.only)
    parts: list[list[Rowwise]] = []
    by_instance: list[list[Numbers]] = [[] for _ in (*requested, *random)]
    faithful: list[list[list[Faithfulness]]] = [[[] for _ in by_instance] for _ in removals]
    variants = Variants()
    # The lists that wait for faithfulness, with the functions that compute it from all outcomes.
    waiting: list[tuple[list[Faithfulness], Callable[[Numbers], Faithfulness]]] = []
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
        rows = ReadRows.of(model, batch, hows, patterns, read_only, causal)
        parts.append(rows.parts(chosen, passes.only, passes.by_layer, stronger))
        values = [rows.importance(model, x, chosen, removals[0], gaps) for x in requested.values()]
        values += [rows.laid_out([drawn[i] for i in chosen]) for drawn in random]
        for number, importance in enumerate(values):
            pairs = zip(rows.mean(importance), batch.real, strict=True)
            by_instance[number] += [of_tokens[real] for of_tokens, real in pairs]
            for removal, results in zip(removals, faithful, strict=True):
                if rows.reading.read.dim() == 1:
                    whole = rows.reading.answer.outcomes
                    rank = variants.rank(batch, importance, removal, whole, rows.sees)
                    waiting.append((results[number], rank))
                else:
                    results[number].append(rows.faithfulness(model, importance, removal))
        if waiting and (len(variants) > VARIANTS_IN_MEMORY or stop == len(order)):
            outcomes = variants.ask(
                model.predict,
                passes.batch_size * int(lengths[-1]) if passes.batch_size > 1 else 0,
                lambda share: tell(stop, predicted + share * (stop - predicted)),  # noqa: B023
            )
            for scored, rank in waiting:
                scored.append(rank(outcomes))
            variants, waiting, predicted = Variants(), [], stop
        tell(stop, predicted if waiting else stop)
    if gaps:
        gap = np.concatenate(gaps)
        notes.append(
            "integrated gradients miss the change in log-probability, their sum in theory, by"
            f" {np.median(gap):.2%} on the median text, by {gap.max():.2%} at most"
        )
    place = np.argsort(order)
    in_order = [tuple(values[i] for i in place) for values in by_instance]
    aggregated, *layers = [Rowwise.join(of_batches, place) for of_batches in zip(*parts, strict=True)]
    heads_of_layers = aggregated.columns.pop("heads", None)
    settings = {
        "aggregation": asdict(aggregation),
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
    """The pattern (None if the model shows its mask) and number of heads of each layer; are all causal?

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
