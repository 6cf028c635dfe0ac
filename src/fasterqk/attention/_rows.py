"""The rows of one batch that predict: their scores with nulls, and the importance of tokens to them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fasterqk.attention._importance import METHODS, Importance, leave_one_out
from fasterqk.attention.aggregation import (
    Aggregation,
    NullMass,
    Pattern,
    aggregate,
    aggregate_null,
    in_full_precision,
    permuted_mass,
    read_rows,
    sharp_mass,
    uniform_attention,
    visible_pairs,
)
from fasterqk.attention.faithfulness import Faithfulness, Removal, faithfulness, join
from fasterqk.attention.instances import Batch, padded
from fasterqk.attention.measurement import Rowwise
from fasterqk.attention.models import Integrated, Measurable, Reading, as_array
from fasterqk.attention.scores import SCORES, Rows, among, entropy
from fasterqk.errors import InputError

Numbers = NDArray[np.float64]
# For instances with several read rows: how many rows are predicted at once with tokens removed. Each has one
# outcome per token of the vocabulary, so more would not fit into memory.
ROWS_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class ReadRows:
    """The rows of one batch that predict: the model's, and the ``null`` of uniform attention.

    ``instance`` is the place in the batch of the instance that each row belongs to, and ``position`` the
    token at which it is read. ``attention`` has the weights ``(row, key)`` of every requested aggregation.
    Keys that the model adds come after the tokens.
    """

    batch: Batch
    reading: Reading
    instance: NDArray[np.intp]
    position: NDArray[np.int64]
    words_alone: bool
    attention: dict[Aggregation, Numbers]
    rows: Rows
    null: Rows

    @classmethod
    def of(
        cls,
        model: Measurable,
        batch: Batch,
        hows: Sequence[Aggregation],
        patterns: Sequence[Pattern | None],
        read_only: bool,
        causal: bool,
    ) -> "ReadRows":
        """Read ``batch`` and aggregate its rows in all ways ``hows``; the scores use the first one.

        The first token of a ``causal`` model, where attention sinks gather, is not among the words. The rows
        of a model that averages its tokens are averaged, so that each instance has one.
        """
        reading = model.read(batch, read_only=read_only)
        layers = list(reading.layers)
        several = reading.read.dim() == 2
        read = reading.read if several else reading.read.unsqueeze(1)
        mask = batch.target_real if several else np.ones((len(batch), 1), dtype=bool)
        if reading.pooled:
            mask, reading = batch.real, replace(reading, read=reading.read[:, 0])
        keys = torch.from_numpy(batch.real).to(read.device) if reading.keys is None else reading.keys
        chosen = torch.from_numpy(mask).to(read.device)
        many = patterns if len(patterns) == len(layers) else [*patterns] * len(layers)
        allowed = visible_pairs(reading.masks or [None] * len(layers), many, keys)
        if read_only:
            # Rows beyond an instance's target are padding, which sees nothing. Equal masks stay one tensor.
            used = chosen.unsqueeze(2)
            seen = {id(pairs): read_rows(pairs.unsqueeze(1), read)[:, 0] & used for pairs in allowed}
            allowed = [seen[id(pairs)] for pairs in allowed]
        instance = np.arange(len(batch)) if reading.pooled else np.nonzero(mask)[0]
        position, real = read.cpu().numpy()[mask], keys.cpu().numpy()[instance]

        def taken(rows: Tensor) -> Tensor:
            """The rows that predict ``(row, ...)`` of all that were read ``(batch, row, ...)``."""
            if not reading.pooled:
                return rows[chosen]
            return torch.stack([of_text[real].mean(0) for of_text, real in zip(rows, chosen, strict=True)])

        attention = {how: as_array(taken(aggregate(layers, read, allowed, how))) for how in hows}
        null_weights = as_array(taken(aggregate_null(allowed, len(layers), read, hows[0])))
        added = (0, 0), (0, real.shape[1] - batch.tokens.shape[1])
        relevance = np.pad(batch.relevance[instance], added)
        rankable = np.pad(batch.rankable[instance], added)
        words = rankable & (np.arange(real.shape[1]) != real.argmax(1)[:, None]) if causal else rankable
        words = np.where(words.any(1, keepdims=True), words, rankable)  # a text of one word keeps it
        for how in hows:
            if how.among == "words":
                attention[how] = among(attention[how], words)
        words_alone = hows[0].among == "words"
        visible = [read_rows(pairs.unsqueeze(1), read).squeeze(1) for pairs in allowed]
        rows = Rows(
            attention[hows[0]],
            relevance,
            real,
            rankable,
            words,
            layers=[taken(read_rows(layer, read).transpose(1, 2)) for layer in layers],
            allowed=[taken(pairs.float()) > 0 for pairs in visible],
            single=reading.single,
        )
        uniform = [taken(uniform_attention(pairs).transpose(1, 2)) for pairs in visible]
        null_weights = among(null_weights, words) if words_alone else null_weights
        null = replace(rows, weights=null_weights, layers=uniform)
        return cls(batch, reading, instance, position, words_alone, attention, rows, null)

    @property
    def sees(self) -> NDArray[np.bool_]:
        """The tokens that the one row of each instance sees in every layer, ``(batch, token)``."""
        return torch.stack([*self.rows.allowed]).all(0).cpu().numpy()[:, : self.batch.tokens.shape[1]]

    def parts(
        self, numbers: NDArray[np.intp], only: Sequence[str] | None, by_layer: bool, stronger: bool
    ) -> list[Rowwise]:
        """The numbers of the aggregated rows and, if asked for, of every layer and of the mean over layers.

        ``numbers`` are the places of the instances in the data. A number of an instance is the mean over its
        rows.
        """
        parts = [
            Rowwise(self._columns(only), self._nulls(self.rows.weights, self.null.weights, numbers, stronger))
        ]
        if not by_layer:
            return parts
        words, relevance = self.rows.words, self.rows.relevance
        layers = [as_array(in_full_precision(layer).mean(1)) for layer in self.rows.layers]
        uniform = [as_array(layer[:, 0]) for layer in self.null.layers]
        if self.words_alone:
            layers, uniform = ([among(rows, words) for rows in kind] for kind in (layers, uniform))
        masses: dict[str, list[Numbers]] = {"mass": [], "null_mass": []}
        pairs = zip(layers, uniform, self.rows.layers, self.rows.allowed, strict=True)
        for weights, null, layer, visible in pairs:
            visible_keys = as_array(visible) * (words if self.words_alone else 1)
            masses["mass"].append(self.mean(self.rows.mass(weights)))
            null_mass = (visible_keys * relevance).sum(1) / visible_keys.sum(1)
            if self.reading.pooled:  # averaged over rows that may see different keys
                null_mass = self.rows.mass(null)
            masses["null_mass"].append(self.mean(null_mass))
            columns = {name: values[-1] for name, values in masses.items()}
            heads = among(as_array(layer), words[:, None]) if self.words_alone else as_array(layer)
            columns["entropy"] = self.mean(entropy(heads).mean(1))
            null_entropy = entropy(null) if self.reading.pooled else np.log(visible_keys.sum(1))
            columns["null_entropy"] = self.mean(null_entropy)
            parts.append(Rowwise(columns, self._nulls(weights, null, numbers, stronger)))
        average = {name: np.mean(values, axis=0) for name, values in masses.items()}
        weights, null = np.mean(layers, axis=0), np.mean(uniform, axis=0)
        return [*parts, Rowwise(average, self._nulls(weights, null, numbers, stronger))]

    def _columns(self, only: Sequence[str] | None) -> dict[str, Numbers]:
        """The answer, and all scores of the aggregated rows with their nulls."""
        answer = self.reading.answer
        columns = {"probability": answer.probability, "correct": answer.correct.astype(float)}
        for score in SCORES.values():
            if score.compute and (only is None or score.name in only):
                columns[score.column] = self.mean(score.compute(self.rows))
                columns[f"null_{score.column}"] = self.mean(score.compute(self.null))
        if only is None:
            columns["heads"] = self._heads()
        return columns

    def _heads(self) -> Numbers:
        """Mass and entropy of every head and of uniform attention, ``(batch, 2, layer, head + 1)``.

        They are nan where a layer has fewer heads than another.
        """
        layers = self.rows.layers
        most = max(layer.shape[1] for layer in layers)
        values = np.full((len(self.instance), 2, len(layers), most + 1), np.nan)
        for number, layer_and_null in enumerate(zip(layers, self.null.layers, strict=True)):
            rows = np.concatenate([as_array(rows) for rows in layer_and_null], 1)
            rows = among(rows, self.rows.words[:, None]) if self.words_alone else rows
            places = [*range(rows.shape[1] - 1), most]
            values[:, 0, number, places] = (rows * self.rows.relevance[:, None]).sum(-1)
            values[:, 1, number, places] = entropy(rows)
        return self.mean(values)

    def _nulls(
        self, weights: Numbers, null: Numbers, numbers: NDArray[np.intp], stronger: bool
    ) -> tuple[dict[str, NullMass], ...]:
        """The mass of each instance under the stronger nulls; empty for instances without relevant tokens."""
        masses: list[dict[str, NullMass]] = [{} for _ in numbers]
        for place, number in enumerate(numbers.tolist() if stronger else ()):
            rows = np.flatnonzero(self.instance == place)
            relevance = self.rows.relevance[rows]
            if (relevance > 0).any():
                masses[place] = {
                    "sharp": sharp_mass(null[rows], relevance, number),
                    "permuted": permuted_mass(weights[rows], relevance, null[rows] > 0, number),
                }
        return tuple(masses)

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
            return self.laid_out([importance.values[number] for number in numbers])
        if importance.method == "gradient":
            return model.gradient_times_input(self.batch)[self.instance]
        if self.reading.read.dim() == 2:
            raise InputError(f"{importance.name} is not defined for a model that reads several rows")
        if importance.method == "leave_one_out":
            whole = self.reading.answer.outcomes
            return leave_one_out(model, self.batch, removal, whole, self.batch.follow(whole), self.sees)
        name = str(importance.method)
        if not hasattr(model, name):
            raise InputError(f"{type(model).__name__} has no method {name!r}: {METHODS[name]}")
        result = getattr(model, name)(self.batch)
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
        return padded(rows, float)[1]
