"""The result of ``measure``: a :class:`Measurement` with numbers of every instance, and its :class:`Summary`.

A :class:`Ranking` is one importance of the tokens with its faithfulness. A measurement has at least one, and
random rankings to compare with.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from json import dumps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.attention._faithfulness import Agreement, Faithfulness, agreement, plausibility
from fasterqk.attention._importance import kendall_tau
from fasterqk.attention._instances import Instance
from fasterqk.attention._nulls import NullMass, null_scores
from fasterqk.attention._scores import SCORES, STRONGER_NULLS, place_of, score_of, summarize

Numbers = NDArray[np.float64]
LEAVE_ONE_OUT = "leave_one_out"
TAU = "tau_leave_one_out"


@dataclass(frozen=True, eq=False)
class Ranking:
    """The ``importance`` of each instance's tokens, and the ``faithfulness`` of that ranking."""

    importance: tuple[Numbers, ...]
    faithfulness: Faithfulness


@dataclass(frozen=True, eq=False)
class Measurement:
    """Everything measured, one entry per instance in the order of the data.

    ``columns`` maps a name (``mass``, ``null_mass``, ``probability``, ``correct``, ``entropy``, ...) to its
    values ``(instance,)``. ``null_masses`` has the mass of each instance with relevant tokens under the
    stronger nulls; it is None if mass was not measured. ``rankings`` holds every importance by name, the
    model's attention (or gradient) first; ``random`` holds the random rankings, if any were drawn.
    """

    instances: tuple[Instance, ...]
    columns: dict[str, Numbers]
    null_masses: tuple[dict[str, NullMass], ...] | None
    rankings: dict[str, Ranking]
    random: tuple[Ranking, ...]
    classes: tuple[str, ...]
    edges: tuple[float, ...]
    settings: dict[str, Any]

    @property
    def importance(self) -> tuple[Numbers, ...]:
        """The importance of each instance's tokens in the first ranking."""
        return next(iter(self.rankings.values())).importance

    @property
    def faithfulness(self) -> Faithfulness:
        """The faithfulness of the first ranking."""
        return next(iter(self.rankings.values())).faithfulness

    @property
    def random_importance(self) -> tuple[Numbers, ...] | None:
        """The first random ranking."""
        return self.random[0].importance if self.random else None

    @property
    def random_faithfulness(self) -> Faithfulness | None:
        """The faithfulness of the first random ranking."""
        return self.random[0].faithfulness if self.random else None

    def summary(
        self,
        mass_threshold: float = 0.5,
        probability_threshold: float = 0.5,
        plausibility_sample: int | None = None,
    ) -> "Summary":
        """All scores over all instances; docs/measure.md explains them.

        Arguments:
            mass_threshold: The mass from which on attention counts as confident (AC, ACMC).
            probability_threshold: The probability from which on an answer counts as confident (ACMC).
            plausibility_sample: Compute plausibility on about this many instances, evenly over all lengths;
                by default on all, with 0 on none.

        Returns:
            A :class:`Summary`.
        """
        relevant = self._relevant
        thresholds = {"mass_threshold": mass_threshold, "probability_threshold": probability_threshold}

        def mass_scores(prefix: str = "") -> dict[str, Any]:
            if not relevant.any():
                undefined = dict.fromkeys(("mrta", "ac", "acmc"))
                return {**undefined, "dtap": None, "dtap_edges": None, "null": undefined}
            names = (f"{prefix}mass", "probability", f"null_{prefix}mass")
            columns = [self.columns[name][relevant] for name in names]
            scores = summarize(*columns, edges=self.edges, **thresholds)
            for null in STRONGER_NULLS if self.null_masses else ():
                masses = [nulls[f"{null}_{prefix}mass"] for nulls in self.null_masses or () if nulls]
                scores[null] = null_scores(masses, columns[1], **thresholds)
            return scores

        aggregated = mass_scores()
        scores: dict[str, float | None] = {"accuracy": float(self.columns["correct"].mean())}
        null: dict[str, float | None] = {}
        for name, score in SCORES.items():
            if name in aggregated:
                scores[name], null[name] = aggregated[name], aggregated["null"][name]
            elif score.column in self.columns and score.compute:
                over = relevant if score.of_relevant else slice(None)
                means = (self.columns[prefix + score.column][over] for prefix in ("", "null_"))
                scores[name], null[name] = (float(values.mean()) if values.size else None for values in means)
        rankings = {
            name: self.ranking_scores(ranking, plausibility_sample) for name, ranking in self.rankings.items()
        }
        scores |= next(iter(rankings.values()))
        random = [self.ranking_scores(ranking, plausibility_sample) for ranking in self.random]
        null |= {name: _mean([draw[name] for draw in random]) for name in (random[0] if random else ())}
        layers = [name.split("_")[1] for name in self.columns if re.fullmatch(r"layer_\d+_mass", name)]
        layers = layers if relevant.any() else []
        average = mass_scores("average_") if layers else {}
        return Summary(
            n=len(self.instances),
            n_without_relevance=int((~relevant).sum()),
            scores=scores,
            null=null,
            dtap=aggregated["dtap"],
            dtap_edges=aggregated["dtap_edges"],
            layers={number: self._layer(number, mass_scores(f"layer_{number}_")) for number in layers},
            average={name: value for name, value in average.items() if not name.startswith("dtap")},
            stronger_nulls={null: aggregated[null] for null in STRONGER_NULLS if null in aggregated},
            rankings=rankings,
            null_error=_standard_errors(random),
            measured={
                **self.settings,
                **({"draws": len(self.random)} if len(self.random) > 1 else {}),
                "n_truncated": sum(x.truncated for x in self.instances),
                "n_relevance_cut": sum(x.relevance_cut for x in self.instances),
            },
        )

    @cached_property
    def _summary(self) -> "Summary":
        """The summary with default thresholds, which tables show."""
        return self.summary()

    @property
    def _relevant(self) -> NDArray[np.bool_]:
        return np.array([instance.relevant for instance in self.instances])

    def _layer(self, number: str, mass_scores: dict[str, Any]) -> dict[str, Any]:
        entropies = (self.columns[f"{prefix}layer_{number}_entropy"].mean() for prefix in ("", "null_"))
        entropy, uniform = map(float, entropies)
        scores = {name: mass_scores[name] for name in ("mrta", "ac", "acmc")}
        stronger = {null: mass_scores[null] for null in STRONGER_NULLS if null in mass_scores}
        return {**scores, "entropy": entropy, "null": {**mass_scores["null"], "entropy": uniform}, **stronger}

    def ranking_scores(self, ranking: Ranking, sample: int | None = None) -> dict[str, float | None]:
        """Faithfulness and plausibility of one ranking, averaged over instances, by flat name."""
        averages: dict[str, float | None] = {}
        faithfulness = ranking.faithfulness
        by_name = {name: getattr(faithfulness, name) for name in ("sufficiency", "comprehensiveness")}
        for name, values in by_name.items():
            averages |= {f"{name}_{k}": _mean_of(values[:, i]) for i, k in enumerate(faithfulness.percents)}
        if faithfulness.percents:
            averages |= {f"aopc_{name}": _aopc(values) for name, values in by_name.items()}
        averages |= plausibility(list(self._agreements(ranking.importance, sample).values()))
        if LEAVE_ONE_OUT in self.rankings and ranking is not self.rankings[LEAVE_ONE_OUT]:
            taus = self._taus(ranking)
            averages[TAU] = None if np.isnan(taus).all() else float(np.nanmean(taus))
        return averages

    def _taus(self, ranking: Ranking) -> Numbers:
        """Each instance's rank correlation with leaving tokens out; nan if either ranking is constant."""
        left_out = self.rankings[LEAVE_ONE_OUT].importance
        pairs = zip(self.instances, ranking.importance, left_out, strict=True)
        taus = [kendall_tau(importance[x.rankable], losses[x.rankable]) for x, importance, losses in pairs]
        return np.array([np.nan if tau is None else tau for tau in taus])

    def agreements(self, random: bool = False, sample: int | None = None) -> list[Agreement]:
        """Plausibility of every instance that has a rationale, or of a ``sample`` of them."""
        rankings = self.random_importance if random else self.importance
        return [] if rankings is None else list(self._agreements(rankings, sample).values())

    def _agreements(self, importance: Sequence[Numbers], sample: int | None = None) -> dict[int, Agreement]:
        """The plausibility of each instance, by its number."""
        if sample == 0:
            return {}
        rated = [i for i, instance in enumerate(self.instances) if instance.rationale.any()]
        if sample is not None and rated:
            rated.sort(key=lambda i: len(self.instances[i].tokens))
            rated = rated[:: -(-len(rated) // sample)]
        return {
            i: agreement(importance[i][self.instances[i].rankable], self.instances[i].rationale)
            for i in rated
        }

    # --- Instance by instance ---

    def instance_scores(
        self, name: str | None = None, mass_threshold: float = 0.5, probability_threshold: float = 0.5
    ) -> dict[str, Numbers]:
        """Every score of every instance ``(instance,)`` by flat name, nan where it is not defined.

        A score of the summary is the mean over the instances that define it. ``name`` selects a ranking, by
        default the first. ``iou_f1`` is not a mean over instances; ``span_precision`` and ``span_recall``
        take its place.
        """
        relevant = self._relevant
        by_name = {"accuracy": self.columns["correct"]}
        if "mass" in self.columns:
            reached = self.columns["mass"] >= mass_threshold
            confident = reached & (self.columns["probability"] >= probability_threshold)
            by_name["ac"], by_name["acmc"] = (
                np.where(relevant, 100.0 * x, np.nan) for x in (reached, confident)
            )
        for score in SCORES.values():
            if score.compute and score.column in self.columns:
                values = self.columns[score.column]
                by_name[score.name] = np.where(relevant, values, np.nan) if score.of_relevant else values
        return by_name | self.instance_ranking_scores(name)

    def instance_ranking_scores(self, name: str | None = None) -> dict[str, Numbers]:
        """The scores of one ranking for every instance, as in :meth:`instance_scores`."""
        ranking = self.rankings[name] if name else next(iter(self.rankings.values()))
        by_name: dict[str, Numbers] = {}
        faithfulness = ranking.faithfulness
        for kind in ("sufficiency", "comprehensiveness"):
            values = getattr(faithfulness, kind)
            by_name |= {f"{kind}_{k}": values[:, place] for place, k in enumerate(faithfulness.percents)}
            if faithfulness.percents:
                by_name[f"aopc_{kind}"] = _defined_mean(values)
        agreements = self._agreements(ranking.importance)
        if agreements:
            for part in ("auprc", "token_f1", "token_iou", "span_precision", "span_recall"):
                values = np.full(len(self.instances), np.nan)
                values[list(agreements)] = [getattr(agreement, part) for agreement in agreements.values()]
                by_name[part] = values
        if LEAVE_ONE_OUT in self.rankings and ranking is not self.rankings[LEAVE_ONE_OUT]:
            by_name[TAU] = self._taus(ranking)
        return by_name

    def outcomes(self) -> tuple[str, ...]:
        """The names of the model's outcomes: its classes, or ``target`` for a causal model."""
        return self.classes or ("target",)

    # --- Tables ---

    def scores_table(self, intervals: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """A tidy table: one row per score, with its null (uniform attention or a random ranking).

        ``intervals``, from :func:`score_intervals`, add both ends of each score's interval.
        """
        summary = self._summary
        rows = []
        for name, value in summary.scores.items():
            score = score_of(name)
            if score.tables and value is not None:
                k = int(name.rpartition("_")[2]) if score.per_k else None
                text = score.name.replace("aopc_", "aopc ")
                row: dict[str, Any] = {"score": text, "k": k, "value": value}
                if intervals is not None:
                    bounds = intervals.get(name)
                    row |= {"low": bounds and bounds.low, "high": bounds and bounds.high}
                row["null"] = summary.null.get(name)
                row |= {null: scores.get(name) for null, scores in summary.stronger_nulls.items()}
                if summary.null_error:
                    row["null error"] = summary.null_error.get(name)
                rows.append(row)
        return rows

    def rankings_table(self) -> list[dict[str, Any]]:
        """A tidy table: one row per score, one column per ranking and one for random rankings."""
        summary = self._summary
        names = dict.fromkeys(name for scores in summary.rankings.values() for name in scores)
        rows = []
        for name in names:
            values = {ranking: scores.get(name) for ranking, scores in summary.rankings.items()}
            if any(value is not None for value in values.values()):
                score = score_of(name)
                k = int(name.rpartition("_")[2]) if score.per_k else None
                row = {"score": score.name.replace("aopc_", "aopc "), "k": k, **values}
                rows.append(row | ({"random": summary.null.get(name)} if self.random else {}))
        return rows

    def instances_table(self) -> list[dict[str, Any]]:
        """A tidy table: one row per instance, with every score and the importance of every token.

        ``token_texts``, ``relevance`` and the importances, one per ranking, are lists in JSON.
        """
        rankings = {name: self.instance_ranking_scores(name) for name in self.rankings}
        first, instance_scores = next(iter(rankings)), self.instance_scores()
        outcomes = self.outcomes()
        rows = []
        for number, instance in enumerate(self.instances):
            row: dict[str, Any] = {
                "id": instance.id,
                "tokens": len(instance.tokens),
                "relevant": instance.relevant,
                "label": None if instance.label is None or not self.classes else self.classes[instance.label],
                "predicted": outcomes[int(self.faithfulness.whole[number].argmax())],
            }
            row |= {name: float(values[number]) for name, values in self.columns.items()}
            for name in ("ac", "acmc"):
                if name in instance_scores:
                    row[name] = _defined(instance_scores[name][number])
            for ranking_name, scores in rankings.items():
                prefix = "" if ranking_name == first else f"{ranking_name} "
                row |= {prefix + name: _defined(values[number]) for name, values in scores.items()}
            texts = instance.pieces or tuple(str(token) for token in instance.tokens)
            row |= {"token_texts": dumps(texts), "relevance": dumps(instance.relevance.tolist())}
            for ranking_name, ranking in self.rankings.items():
                values = [float(f"{value:.6g}") for value in ranking.importance[number]]
                column = "importance" if ranking_name == first else f"{ranking_name} importance"
                row[column] = dumps(values)
            rows.append(row)
        return rows

    def _repr_html_(self) -> str:
        from fasterqk.attention._shown import measurement_html

        return measurement_html(self)


def _mean_of(values: Numbers) -> float | None:
    """The mean over the instances with a value; None if there are none."""
    defined = values[~np.isnan(values)] if np.isnan(values).any() else values
    return float(defined.mean()) if defined.size else None


def _defined_mean(values: Numbers) -> Numbers:
    """The mean of each instance over the k that count; nan if none does."""
    if not np.isnan(values).any():
        return np.asarray(values.mean(1))
    defined = ~np.isnan(values)
    sums, counts = np.where(defined, values, 0).sum(1), defined.sum(1)
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def _aopc(values: Numbers) -> float | None:
    """The mean over k and instances of values ``(instance, k)``; if some do not count, over k first."""
    if not np.isnan(values).any():
        return float(values.mean(0).mean())
    return _mean_of(_defined_mean(values))


def _defined(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None


def _standard_errors(draws: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The standard error of the mean over several draws of each score; nothing for a single draw."""
    if len(draws) < 2:
        return {}
    errors: dict[str, float | None] = {}
    for name, value in draws[0].items():
        values = [draw[name] for draw in draws]
        error = None if value is None else np.std(np.array(values, dtype=float), ddof=1) / len(values) ** 0.5
        errors[name] = None if error is None else float(error)
    return errors


@dataclass(frozen=True)
class Summary:
    """The scores of a measurement by flat name, such as ``mrta`` or ``sufficiency_5``.

    ``null`` has the scores of uniform attention or of random rankings under the same names; ``null_error``
    the standard errors over several random rankings; ``stronger_nulls`` the scores of mass under ``sharp``
    and ``permuted`` attention; ``rankings`` the scores of every measured importance. If layers were measured,
    ``layers`` has the scores of each, counted from "1", and ``average`` those of their mean.

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
    rankings: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    null_error: Mapping[str, float | None] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float | None:
        return self.scores[name]

    def to_json(self) -> dict[str, Any]:
        """The document that ``fasterqk measure --json`` prints."""
        scores = nested(self.scores)
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
            document["random"] = nested(random)
        if self.null_error:
            document["random_error"] = nested(self.null_error)
        document |= {null: dict(scores) for null, scores in self.stronger_nulls.items()}
        if len(self.rankings) > 1:
            document["importance"] = {name: nested(scores) for name, scores in self.rankings.items()}
        if self.layers:
            document |= {"average": dict(self.average), "layer": dict(self.layers)}
        return {**document, "concentration": concentration, "measured": dict(self.measured)}


def nested(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Scores by flat name, nested as in the JSON document."""
    document: dict[str, Any] = {}
    for name, value in scores.items():
        *groups, key = place_of(name)
        (document.setdefault(groups[0], {}) if groups else document)[key] = value
    return document
