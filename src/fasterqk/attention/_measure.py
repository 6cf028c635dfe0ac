"""Measure a model on instances, in batches: attention, faithfulness, plausibility, and their nulls.

:func:`measure` reads each batch once, computes the scores of the registry on the rows that predict and on
uniform attention, and asks the model again with tokens removed. The :class:`Measurement` keeps the numbers of
every instance; its :class:`Summary` has the scores, as JSON or as tables for people.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fasterqk.attention._aggregation import (
    Aggregation,
    Pattern,
    aggregate,
    find_pattern,
    in_full_precision,
    null_row,
    read_rows,
    uniform_attention,
)
from fasterqk.attention._faithfulness import (
    Agreement,
    Faithfulness,
    Removal,
    agreement,
    faithfulness,
    join,
    plausibility,
)
from fasterqk.attention._instances import Batch, Instance, Side, collate, pad_rows, unpad_rows
from fasterqk.attention._models import Measurable, Reading, as_array
from fasterqk.attention._nulls import NullMass, null_scores, permuted_mass, sharp_mass
from fasterqk.attention._scores import (
    DTAP_EDGES,
    SCORES,
    STRONGER_NULLS,
    Rows,
    entropy,
    place_of,
    score_of,
    summarize,
)
from fasterqk.errors import InputError

RankBy = Literal["attention", "gradient"]
Numbers = NDArray[np.float64]
# Half a gigabyte in single precision.
WEIGHTS_IN_MEMORY = 2**27
# Where instances have several read rows: how many rows are predicted at once with tokens removed. Each has
# one outcome per token of the vocabulary, so more would fill the memory.
ROWS_AT_ONCE = 256


def measure(
    model: Measurable,
    instances: Sequence[Instance],
    *,
    generator: np.random.Generator | None = None,
    percents: Sequence[int] = (5, 10, 20, 50),
    aggregation: Aggregation = Aggregation(),  # noqa: B008 - frozen
    removal: Removal = Removal(),  # noqa: B008 - frozen
    rank_by: RankBy = "attention",
    batch_size: int = 32,
    edges: Sequence[float] = DTAP_EDGES,
    side: Side = "right",
    progress: Callable[[float, float], None] | None = None,
    random_rankings: Sequence[Numbers] | None = None,
    scores: Sequence[str] | None = None,
    by_layer: bool = False,
    need_relevance: bool = True,
    max_weights: int | None = WEIGHTS_IN_MEMORY,
) -> "Measurement":
    """Measure ``model`` on ``instances``, at most ``batch_size`` at a time.

    Nothing depends on how instances are batched. Long ones are taken fewer at a time, so that no more than
    ``max_weights`` attention weights are held at once (None: no limit). ``generator`` draws the random
    rankings that faithfulness and plausibility are compared with, unless ``random_rankings`` gives them, one
    value per token of each instance (per row and token, where the model reads several rows); with neither
    there is no such comparison. ``percents`` may be empty: then nothing is removed. ``scores`` names those
    that are computed from attention (all, by default); ``by_layer`` adds those of each layer alone. Without
    ``need_relevance`` data where no token is relevant is no error. ``progress(done, total)`` is called after
    each batch.
    """
    if not instances:
        raise InputError("no instance was given; nothing can be measured")
    if need_relevance and not any(instance.relevant for instance in instances):
        raise InputError(f"no token is relevant in any of {len(instances)} instances; nothing can be scored")
    if rank_by not in get_args(RankBy):
        raise InputError(f"unknown ranking {rank_by!r}; choose from {', '.join(get_args(RankBy))}")
    if random_rankings is None and generator is not None:
        random_rankings = [generator.random(len(instance.tokens)) for instance in instances]
    # Neighbours in length share a batch, so that little is spent on padding.
    order = np.argsort([len(instance.tokens) for instance in instances], kind="stable")
    # All but rollout look at the read rows alone, so that no more is kept of any layer.
    read_only = aggregation.method != "rollout"
    patterns, heads = _patterns(model, instances[order[-1]], read_only, max_weights)
    lengths = np.array([len(instances[i].tokens) for i in order])
    columns, null_masses, importances, faithful, random_faithful = [], [], [], [], []
    for start, stop in batches(lengths, batch_size, heads, max_weights or np.inf):
        chosen = order[start:stop]
        batch = collate([instances[i] for i in chosen], side)
        rows = _ReadRows.of(model, batch, aggregation, patterns, read_only)
        columns.append(rows.columns(scores, by_layer))
        if scores is None or "mrta" in scores:
            null_masses += rows.null_masses(chosen, by_layer)
        importance = rows.weights if rank_by == "attention" else rows.each(model.gradient_times_input(batch))
        importances += unpad_rows(rows.mean(importance[:, : batch.tokens.shape[1]]), batch.real)
        faithful.append(rows.faithfulness(model, importance, percents, removal))
        if random_rankings is not None:
            drawn = rows.laid_out([random_rankings[i] for i in chosen])
            random_faithful.append(rows.faithfulness(model, drawn, percents, removal))
        if progress:
            progress(stop, len(order))
    place = np.argsort(order)
    return Measurement(
        instances=tuple(instances),
        columns={name: np.concatenate([part[name] for part in columns])[place] for name in columns[0]},
        null_masses=tuple(null_masses[i] for i in place) if null_masses else None,
        importance=tuple(importances[i] for i in place),
        faithfulness=join(faithful, order),
        random_importance=None
        if random_rankings is None
        else tuple(ranking if ranking.ndim == 1 else ranking.mean(0) for ranking in random_rankings),
        random_faithfulness=None if random_rankings is None else join(random_faithful, order),
        classes=model.classes,
        edges=tuple(edges),
        settings={"aggregation": asdict(aggregation), "removal": asdict(removal), "rank_by": rank_by},
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
    model: Measurable, longest: Instance, read_only: bool, max_weights: int | None
) -> tuple[tuple[Pattern, ...], int]:
    """What each layer lets a row see, found on the longest instance, and how many heads are held at once.

    One pattern stands for all layers where the model states it.
    """
    if model.pattern is not None and max_weights is None:
        return (model.pattern,), 0
    batch = collate([longest])
    reading = model.read(batch, read_only=read_only)
    heads = [layer.shape[1] for layer in reading.layers]
    held = max(heads) if read_only else sum(heads)
    if model.pattern is not None:
        return (model.pattern,), held
    real = torch.from_numpy(batch.real).to(reading.read.device)
    return tuple(find_pattern(layer, real, reading.read) for layer in reading.layers), held


@dataclass(frozen=True, eq=False)
class _ReadRows:
    """The rows of one batch that predict, one after the other, each belonging to an ``instance``.

    ``weights`` and ``null_weights`` ``(row, key)`` are aggregated, ``layers`` ``(row, head, key)`` and
    ``allowed`` ``(row, key)`` are those of every layer. Keys that the model adds stand behind the tokens.
    """

    batch: Batch
    reading: Reading
    instance: NDArray[np.intp]
    position: NDArray[np.int64]
    real: NDArray[np.bool_]
    weights: Numbers
    null_weights: Numbers
    layers: list[Tensor]
    allowed: list[Tensor]

    @classmethod
    def of(
        cls,
        model: Measurable,
        batch: Batch,
        how: Aggregation,
        patterns: tuple[Pattern, ...],
        read_only: bool,
    ) -> "_ReadRows":
        reading = model.read(batch, read_only=read_only)
        layers = list(reading.layers)
        if len(patterns) < len(layers):
            patterns = patterns * len(layers)
        several = reading.read.dim() == 2
        read = reading.read if several else reading.read.unsqueeze(1)
        mask = batch.target_real if several else np.ones((len(batch), 1), dtype=bool)
        keys = torch.from_numpy(batch.real).to(read.device) if reading.keys is None else reading.keys
        seen = {own: own.row(keys, read) if read_only else own.pairs(keys) for own in set(patterns)}
        allowed = [seen[own] for own in patterns]
        instance = np.nonzero(mask)[0]
        position, real = read.cpu().numpy()[mask], keys.cpu().numpy()[instance]
        chosen = torch.from_numpy(mask).to(read.device)
        return cls(
            batch=batch,
            reading=reading,
            instance=instance,
            position=position,
            real=real,
            weights=as_array(aggregate(layers, read, allowed, how)[chosen]),
            null_weights=_null_weights(patterns, how, real, position),
            layers=[read_rows(layer, read).transpose(1, 2)[chosen] for layer in layers],
            allowed=[read_rows(pairs.unsqueeze(1), read).squeeze(1)[chosen] for pairs in allowed],
        )

    def columns(self, names: Sequence[str] | None, by_layer: bool) -> dict[str, Numbers]:
        """Numbers of each instance, the mean over its rows: the answer, and all scores with their nulls."""
        answer = self.reading.answer
        found = {"probability": answer.probability, "correct": answer.correct.astype(float)}
        relevance = self._relevance()
        uniform = [uniform_attention(seen) for seen in self.allowed]
        rows = Rows(self.weights, relevance, self.real, self.layers, self.allowed, self.reading.single)
        null = Rows(self.null_weights, relevance, self.real, uniform, self.allowed, self.reading.single)
        for score in SCORES.values():
            if score.compute and (names is None or score.name in names):
                found[score.column] = self.mean(score.compute(rows))
                found[f"null_{score.column}"] = self.mean(score.compute(null))
        if not by_layer:
            return found
        for number, (layer, seen) in enumerate(zip(self.layers, self.allowed, strict=True), 1):
            name, there = f"layer_{number}", as_array(seen)
            mass = rows.mass(as_array(in_full_precision(layer).mean(1)))
            found[f"{name}_mass"] = self.mean(mass)
            found[f"null_{name}_mass"] = self.mean((there * relevance).sum(1) / there.sum(1))
            found[f"{name}_entropy"] = self.mean(entropy(as_array(layer)).mean(1))
            found[f"null_{name}_entropy"] = self.mean(np.log(there.sum(1)))
        for prefix in ("", "null_"):
            layers = [found[f"{prefix}layer_{n}_mass"] for n in range(1, len(self.layers) + 1)]
            found[f"{prefix}average_mass"] = np.mean(layers, axis=0)
        return found

    def null_masses(self, numbers: NDArray[np.intp], by_layer: bool) -> list[dict[str, NullMass]]:
        """For each instance, by its number in the data, its mass under the stronger nulls.

        Keys are ``sharp_mass`` and ``permuted_mass``; ``by_layer`` adds those of each layer,
        ``sharp_layer_1_mass`` and so on, and of their mean. Instances without relevant tokens have none.
        """
        relevance = self._relevance()
        kinds = {"mass": (self.weights, self.null_weights)}
        if by_layer:
            layers = [as_array(in_full_precision(layer).mean(1)) for layer in self.layers]
            uniform = [as_array(uniform_attention(seen)[:, 0]) for seen in self.allowed]
            kinds["average_mass"] = np.mean(layers, axis=0), np.mean(uniform, axis=0)
            pairs = zip(layers, uniform, strict=True)
            kinds |= {f"layer_{number}_mass": pair for number, pair in enumerate(pairs, 1)}
        found: list[dict[str, NullMass]] = [{} for _ in numbers]
        for own, number in enumerate(numbers.tolist()):
            rows = np.flatnonzero(self.instance == own)
            if not (relevance[rows] > 0).any():
                continue
            for name, (weights, null) in kinds.items():
                sharp = sharp_mass(null[rows], relevance[rows], number)
                permuted = permuted_mass(weights[rows], relevance[rows], null[rows] > 0, number)
                found[own] |= {f"sharp_{name}": sharp, f"permuted_{name}": permuted}
        return found

    def _relevance(self) -> Numbers:
        """The relevance of what each row reads ``(row, key)``; keys that the model adds have none."""
        relevance = self.each(self.batch.relevance)
        return np.pad(relevance, ((0, 0), (0, self.real.shape[1] - relevance.shape[1])))

    def faithfulness(
        self, model: Measurable, importance: Numbers, percents: Sequence[int], removal: Removal
    ) -> Faithfulness:
        """Of each instance, from the ``importance`` ``(row, token)`` of its tokens to each of its rows."""
        importance = importance[:, : self.batch.tokens.shape[1]]
        whole = self.reading.answer.outcomes
        if self.reading.read.dim() == 1:
            return faithfulness(model.predict, self.batch, importance, percents, removal, whole)
        whole = whole[self.batch.target_real]
        parts = []
        for start in range(0, len(whole), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            asked = model.predict, self._row_batch(some), importance[some], percents, removal, whole[some]
            parts.append(faithfulness(*asked))
        rows = join(parts, np.arange(len(whole)))
        means = [self.mean(values) for values in (rows.whole, rows.sufficient, rows.comprehensive)]
        return Faithfulness(rows.percents, means[0], np.zeros(len(self.batch), dtype=int), *means[1:])

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
        rows = [row for own, count in pairs for row in np.broadcast_to(own, (count, own.shape[-1]))]
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


@dataclass(frozen=True, eq=False)
class Measurement:
    """Everything measured, one entry per instance in the order of the data.

    ``columns`` maps a name (``mass``, ``null_mass``, ``probability``, ``correct``, ``entropy``, ...) to its
    values ``(instance,)``; ``null_masses`` has, for each instance with relevant tokens, its mass under the
    stronger nulls (None where mass was not asked for); ``importance`` holds the ranking of each instance's
    tokens, and ``random_importance`` a random one for comparison (None where none was asked for).
    """

    instances: tuple[Instance, ...]
    columns: dict[str, Numbers]
    null_masses: tuple[dict[str, NullMass], ...] | None
    importance: tuple[Numbers, ...]
    faithfulness: Faithfulness
    random_importance: tuple[Numbers, ...] | None
    random_faithfulness: Faithfulness | None
    classes: tuple[str, ...]
    edges: tuple[float, ...]
    settings: dict[str, Any]

    def summary(
        self,
        mass_threshold: float = 0.5,
        probability_threshold: float = 0.5,
        plausibility_sample: int | None = None,
    ) -> "Summary":
        """All scores; see docs/measure.md for what each means.

        Mass and probability are high from the thresholds on. ``plausibility_sample`` takes plausibility from
        about so many instances, evenly over all lengths (0: from none).
        """
        relevant = np.array([instance.relevant for instance in self.instances])
        thresholds = {"mass_threshold": mass_threshold, "probability_threshold": probability_threshold}

        def of_mass(prefix: str = "") -> dict[str, Any]:
            if not relevant.any():
                nothing = dict.fromkeys(("mrta", "ac", "acmc"))
                return {**nothing, "dtap": None, "dtap_edges": None, "null": nothing}
            names = (f"{prefix}mass", "probability", f"null_{prefix}mass")
            own = [self.columns[name][relevant] for name in names]
            found = summarize(*own, edges=self.edges, **thresholds)
            for null in STRONGER_NULLS if self.null_masses else ():
                masses = [one[f"{null}_{prefix}mass"] for one in self.null_masses or () if one]
                found[null] = null_scores(masses, own[1], **thresholds)
            return found

        whole = of_mass()
        found: dict[str, float | None] = {"accuracy": float(self.columns["correct"].mean())}
        null: dict[str, float | None] = {}
        for name, score in SCORES.items():
            if name in whole:
                found[name], null[name] = whole[name], whole["null"][name]
            elif score.column in self.columns and score.compute:
                over = relevant if score.of_relevant else slice(None)
                means = (self.columns[prefix + score.column][over] for prefix in ("", "null_"))
                found[name], null[name] = (float(values.mean()) if values.size else None for values in means)
        found |= _ranking_scores(self.faithfulness, self.agreements(sample=plausibility_sample))
        if self.random_faithfulness is not None:
            agreements = self.agreements(random=True, sample=plausibility_sample)
            null |= _ranking_scores(self.random_faithfulness, agreements)
        layers = [name.split("_")[1] for name in self.columns if re.fullmatch(r"layer_\d+_mass", name)]
        layers = layers if relevant.any() else []
        average = of_mass("average_") if layers else {}
        return Summary(
            n=len(self.instances),
            n_without_relevance=int((~relevant).sum()),
            scores=found,
            null=null,
            dtap=whole["dtap"],
            dtap_edges=whole["dtap_edges"],
            layers={number: self._layer(number, of_mass(f"layer_{number}_")) for number in layers},
            average={name: value for name, value in average.items() if not name.startswith("dtap")},
            stronger_nulls={null: whole[null] for null in STRONGER_NULLS if null in whole},
            measured={**self.settings, "n_truncated": sum(x.truncated for x in self.instances)},
        )

    def _layer(self, number: str, found: dict[str, Any]) -> dict[str, Any]:
        entropies = (self.columns[f"{prefix}layer_{number}_entropy"].mean() for prefix in ("", "null_"))
        own, uniform = map(float, entropies)
        scores = {name: found[name] for name in ("mrta", "ac", "acmc")}
        stronger = {null: found[null] for null in STRONGER_NULLS if null in found}
        return {**scores, "entropy": own, "null": {**found["null"], "entropy": uniform}, **stronger}

    def agreements(self, random: bool = False, sample: int | None = None) -> list[Agreement]:
        """Plausibility of every instance that has a rationale, or of a ``sample`` of them."""
        rankings = self.random_importance if random else self.importance
        if rankings is None or sample == 0:
            return []
        rated = [i for i, instance in enumerate(self.instances) if instance.rationale.any()]
        if sample is not None and rated:
            rated.sort(key=lambda i: len(self.instances[i].tokens))
            rated = rated[:: -(-len(rated) // sample)]
        return [
            agreement(rankings[i][self.instances[i].rankable], self.instances[i].rationale) for i in rated
        ]

    def scores_table(self) -> list[dict[str, Any]]:
        """A tidy table: one row per score, with what uniform attention or a random ranking gives."""
        summary = self.summary()
        rows = []
        for name, value in summary.scores.items():
            score = score_of(name)
            if score.tables:
                k = int(name.rpartition("_")[2]) if score.per_k else None
                text = score.name.replace("aopc_", "aopc ")
                rows.append({"score": text, "k": k, "value": value, "null": summary.null.get(name)})
        return rows

    def instances_table(self) -> list[dict[str, Any]]:
        """A tidy table: one row per instance."""
        rows = []
        for number, instance in enumerate(self.instances):
            row: dict[str, Any] = {
                "id": instance.id,
                "tokens": len(instance.tokens),
                "relevant": instance.relevant,
            }
            row |= {name: float(values[number]) for name, values in self.columns.items()}
            for place, k in enumerate(self.faithfulness.percents):
                row[f"sufficiency_{k}"] = float(self.faithfulness.sufficiency[number, place])
                row[f"comprehensiveness_{k}"] = float(self.faithfulness.comprehensiveness[number, place])
            rows.append(row)
        return rows

    def _repr_html_(self) -> str:
        from fasterqk.attention._export import measurement_html

        return measurement_html(self)


def _ranking_scores(scores: Faithfulness, agreements: list[Agreement]) -> dict[str, float | None]:
    """Faithfulness and plausibility of one ranking, averaged over instances, by flat name."""
    found: dict[str, float | None] = {}
    means = {name: getattr(scores, name).mean(0) for name in ("sufficiency", "comprehensiveness")}
    for name, values in means.items():
        found |= {f"{name}_{k}": float(mean) for k, mean in zip(scores.percents, values, strict=True)}
    if scores.percents:
        found |= {f"aopc_{name}": float(values.mean()) for name, values in means.items()}
    return found | plausibility(agreements)


@dataclass(frozen=True)
class Summary:
    """The scores of a measurement by flat name, such as ``mrta`` or ``sufficiency_5``.

    ``null`` has those of uniform attention or of a random ranking under the same names, ``stronger_nulls``
    those of mass under ``sharp`` and ``permuted`` attention. Where layers were measured, ``layers`` has the
    scores of each alone, counted from "1", and ``average`` those of their mean.

    >>> Summary(2, 0, {"mrta": 0.5, "sufficiency_5": 0.1}, {"mrta": 0.2})["sufficiency_5"]
    0.1
    """

    n: int
    n_without_relevance: int
    scores: Mapping[str, float | None]
    null: Mapping[str, float | None]
    dtap: list[list[float]] | None = None
    dtap_edges: list[float] | None = None
    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    average: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    stronger_nulls: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float | None:
        return self.scores[name]

    def to_json(self) -> dict[str, Any]:
        """The document that ``fasterqk measure --json`` prints."""
        scores = _nested(self.scores)
        concentration = scores.pop("concentration", {})
        before = [name for name in ("accuracy", "mrta", "ac", "acmc") if name in scores]
        random = {name: value for name, value in self.null.items() if score_of(name).null == "random"}
        document: dict[str, Any] = {
            "n": self.n,
            "n_without_relevance": self.n_without_relevance,
            **{name: scores.pop(name) for name in before},
            "dtap": self.dtap,
            "dtap_edges": self.dtap_edges,
            **scores,
            "null": {name: value for name, value in self.null.items() if name not in random},
        }
        if random:
            document["random"] = _nested(random)
        document |= {null: dict(scores) for null, scores in self.stronger_nulls.items()}
        if self.layers:
            document |= {"average": dict(self.average), "layer": dict(self.layers)}
        return {**document, "concentration": concentration, "measured": dict(self.measured)}


def _nested(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Scores by flat name as the JSON document holds them."""
    nested: dict[str, Any] = {}
    for name, value in scores.items():
        *groups, key = place_of(name)
        (nested.setdefault(groups[0], {}) if groups else nested)[key] = value
    return nested
