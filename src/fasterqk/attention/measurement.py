"""The result of ``measure``: a :class:`Measurement` with numbers of every instance, and its :class:`Summary`.

A :class:`Ranking` is one importance of the tokens with its faithfulness. A measurement has at least one, and
random rankings to compare with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fasterqk.attention._importance import kendall_tau
from fasterqk.attention.aggregation import NullMass, null_scores
from fasterqk.attention.faithfulness import Agreement, Faithfulness, agreement
from fasterqk.attention.instances import Instance
from fasterqk.attention.scores import (
    DTAP_EDGES,
    ROUNDING,
    SCORES,
    STRONGER_NULLS,
    ScoreName,
    dtap_lines,
    summarize,
)
from fasterqk.attention.statistics import SPANS, with_iou_f1
from fasterqk.errors import InputError

Numbers = NDArray[np.float64]
LEAVE_ONE_OUT = "leave_one_out"
TAU = "tau_leave_one_out"
_PLAUSIBILITY = ("auprc", "token_f1", "token_iou")
KINDS = ("sufficiency", "comprehensiveness")
# The tables, as the terminal and the page call them.
_TITLES = {
    "scores": "every score beside its null",
    "importances": "every importance of the tokens (random: a random ranking)",
    "removals": "by how tokens are removed (wins: the share of random rankings that it beats, text by text)",
    "groups": "right and wrong answers, and classes",
    "heads": "attention on relevant tokens of every head, or its entropy where none is relevant",
    "dtap": "DTAP, percent of instances: attention on relevant tokens to the right, probability upwards",
}
# From this share on, the first token counts as having nearly all of a row.
_COLLAPSED = 0.9
# The scores of right and wrong answers and of classes.
_GROUPED = ("accuracy", "mrta", "null_mrta", "mrta_among_words", "auprc", *(f"aopc_{kind}" for kind in KINDS))


@dataclass(frozen=True, eq=False)
class Ranking:
    """The ``importance`` of each instance's tokens, and the ``faithfulness`` of that ranking."""

    importance: tuple[Numbers, ...]
    faithfulness: Faithfulness


@dataclass(frozen=True, eq=False)
class Rowwise:
    """Numbers from rows of attention: the aggregated ones, those of a single layer, or their mean.

    ``columns`` maps a name (``mass``, ``null_mass``, ``entropy``, ...) to its values ``(instance,)``.
    ``nulls`` has the mass of each instance by the name of the stronger null; it is empty for an instance
    without relevant tokens.
    """

    columns: dict[str, Numbers]
    nulls: tuple[dict[str, NullMass], ...]

    @classmethod
    def join(cls, parts: Sequence["Rowwise"], place: NDArray[np.intp]) -> "Rowwise":
        """Join the batches; entry ``place[i]`` of the joined batches is instance i."""
        columns = {
            name: np.concatenate([part.columns[name] for part in parts])[place] for name in parts[0].columns
        }
        nulls = [of_instance for part in parts for of_instance in part.nulls]
        return cls(columns, tuple(nulls[i] for i in place))


@dataclass(frozen=True, eq=False, repr=False)
class Measurement(Rowwise):
    """Everything measured, one entry per instance in the order of the data.

    ``columns`` also has the ``probability`` of the right answer and whether the answer is ``correct``.
    ``rankings`` holds every importance by name, the model's attention (or gradient) first; ``random`` holds
    the random rankings, if any were drawn. ``layers`` has the numbers of each layer, and ``average`` those of
    their mean, if they were asked for. ``heads`` has mass and entropy of each head and, last, of uniform
    attention, ``(instance, 2, layer, head)``. ``others`` are measurements with tokens removed in other ways.
    ``titles`` are the titles of the tables.
    """

    titles: ClassVar[Mapping[str, str]] = _TITLES
    instances: tuple[Instance, ...]
    rankings: dict[str, Ranking]
    random: tuple[Ranking, ...]
    classes: tuple[str, ...]
    settings: dict[str, Any]
    layers: tuple[Rowwise, ...] = ()
    average: Rowwise | None = None
    heads: Numbers | None = None
    others: tuple["Measurement", ...] = ()

    @property
    def importance(self) -> tuple[Numbers, ...]:
        """The importance of each instance's tokens in the first ranking."""
        return next(iter(self.rankings.values())).importance

    @property
    def faithfulness(self) -> Faithfulness:
        """The faithfulness of the first ranking."""
        return next(iter(self.rankings.values())).faithfulness

    @property
    def outcomes(self) -> tuple[str, ...]:
        """The names of the model's outcomes: its classes, or ``target`` for a causal model."""
        return self.classes or ("target",)

    @cached_property
    def relevant(self) -> NDArray[np.bool_]:
        """Whether each instance has relevant tokens, ``(instance,)``."""
        return np.array([instance.relevant for instance in self.instances])

    @property
    def counts(self) -> str:
        """The number of instances, and what could not be measured on them."""
        cut, lost = (sum(getattr(x, name) for x in self.instances) for name in ("truncated", "relevance_cut"))
        text = f"{len(self.instances)} instances"
        if self.relevant.any():
            text += f", {int((~self.relevant).sum())} of them without a relevant token."
        else:
            text += (
                ". The data does not say which tokens are relevant, so attention on relevant tokens and"
                " plausibility are left out."
            )
        if cut:
            text += f" {cut} were cut to what the model reads"
            text += f", {lost} of them with all that was relevant." if lost else "."
        faint = sum(x.relevant and not x.rationale.any() for x in self.instances)
        if faint:
            text += (
                f" In {faint} no token has a relevance of one half: plausibility leaves them out, and their"
                " mass cannot reach the one half of AC."
            )
        return text

    @property
    def notes(self) -> list[str]:
        """Notes for readers of the scores: those of the self-check, and on attention outside the words."""
        notes, how = list(self.settings["notes"]), self.settings["aggregation"]
        for name, tokens in {"special": "special tokens", "first_token": "the first token"}.items():
            columns = [self.columns.get(f"{prefix}{name}_share", np.zeros(1)) for prefix in ("", "null_")]
            share, null = (float(column.mean()) for column in columns)
            if not share and not null:
                continue
            notes.append(
                f"{share:.2%} of the aggregated attention is on {tokens} (uniform attention: {null:.2%})"
            )
            if name == "first_token" and share > _COLLAPSED and how["method"] == "rollout":
                notes[-1] += (
                    "; over many causal layers rollout ends there whatever the model attends to, and the"
                    " mean over layers (mean) says more"
                )
        names = ("mass", "null_mass", "mrta_among_words", "null_mrta_among_words")
        if all(name in self.columns for name in names) and self.relevant.any():
            mass, null, words, null_words = (self.columns[name][self.relevant].mean() for name in names)
            apart = min(abs(mass - null), abs(words - null_words)) > ROUNDING
            if apart and (mass < null) != (words < null_words):
                notes.append(
                    f"MRTA is {'below' if mass < null else 'above'} its null ({mass:.2g} against {null:.2g}),"
                    f" but not among words ({words:.2g} against {null_words:.2g}): special tokens"
                    " or the first token hide where the model looks among words"
                )
        return notes

    def summary(
        self,
        mass_threshold: float = 0.5,
        probability_threshold: float = 0.5,
        plausibility_sample: int | None = None,
        edges: Sequence[float] = DTAP_EDGES,
    ) -> "Summary":
        """All scores over all instances; docs/scores.md explains them.

        Arguments:
            mass_threshold: The mass from which on attention counts as confident (AC, ACMC).
            probability_threshold: The probability from which on an answer counts as confident (ACMC).
            plausibility_sample: Compute plausibility on about this many instances, evenly over all lengths;
                by default on all, with 0 on none.
            edges: The edges of the DTAP table.

        Returns:
            A :class:`Summary`.
        """
        thresholds = {"mass_threshold": mass_threshold, "probability_threshold": probability_threshold}

        def mass_scores(rows: Rowwise) -> dict[str, Any]:
            if not self.relevant.any() or "mass" not in rows.columns:
                undefined = dict.fromkeys(("mrta", "ac", "acmc"))
                return {**undefined, "dtap": None, "dtap_edges": None, "null": undefined}
            probability = self.columns["probability"][self.relevant]
            mass, null_mass = (rows.columns[name][self.relevant] for name in ("mass", "null_mass"))
            scores = summarize(mass, probability, null_mass, edges=edges, **thresholds)
            nulls = [of_instance for of_instance in rows.nulls if of_instance]
            return scores | {
                null: null_scores([masses[null] for masses in nulls], probability, **thresholds)
                for null in (nulls[0] if nulls else ())
            }

        def layer_scores(layer: Rowwise) -> dict[str, Any]:
            scores = {name: value for name, value in mass_scores(layer).items() if "dtap" not in name}
            entropy, null = (float(layer.columns[name].mean()) for name in ("entropy", "null_entropy"))
            stronger = {name: scores.pop(name) for name in STRONGER_NULLS if name in scores}
            return {**scores, "entropy": entropy, "null": {**scores["null"], "entropy": null}, **stronger}

        aggregated = mass_scores(self)
        scores: dict[str, float | None] = {"accuracy": float(self.columns["correct"].mean())}
        null: dict[str, float | None] = {}
        for name, score in SCORES.items():
            if name in aggregated:
                scores[name], null[name] = aggregated[name], aggregated["null"][name]
            elif score.column in self.columns and score.compute:
                over = self.relevant if score.of_relevant else slice(None)
                means = (self.columns[prefix + score.column][over] for prefix in ("", "null_"))
                scores[name], null[name] = (float(values.mean()) if values.size else None for values in means)
        rankings = {
            name: self.ranking_scores(ranking, plausibility_sample) for name, ranking in self.rankings.items()
        }
        random = [self.ranking_scores(ranking, plausibility_sample) for ranking in self.random]
        null |= {name: _mean_of([draw[name] for draw in random]) for name in (random[0] if random else ())}
        null |= {name: 0.5 for name in next(iter(rankings.values())) if name.startswith("wins_")}
        average = mass_scores(self.average) if self.average and self.relevant.any() else {}
        return Summary(
            n=len(self.instances),
            n_without_relevance=int((~self.relevant).sum()),
            scores=scores | next(iter(rankings.values())),
            null=null,
            dtap=aggregated["dtap"],
            dtap_edges=aggregated["dtap_edges"],
            layers={str(n): layer_scores(layer) for n, layer in enumerate(self.layers, 1)} if average else {},
            average={name: value for name, value in average.items() if not name.startswith("dtap")},
            stronger_nulls={null: aggregated[null] for null in STRONGER_NULLS if null in aggregated},
            rankings=rankings,
            null_error=_standard_errors(random),
            heads=self.heads_table(),
            measured={
                **self.settings,
                "notes": self.notes,
                **({"draws": len(self.random)} if len(self.random) > 1 else {}),
                "n_truncated": sum(x.truncated for x in self.instances),
                "n_relevance_cut": sum(x.relevance_cut for x in self.instances),
            },
        )

    @cached_property
    def at_defaults(self) -> "Summary":
        """The summary with default thresholds, which tables show."""
        return self.summary()

    def ranking_scores(self, ranking: Ranking, sample: int | None = None) -> dict[str, float | None]:
        """Faithfulness and plausibility of one ranking, averaged over instances, by flat name."""
        values = self.instance_ranking_scores(ranking, sample)
        undefined = dict.fromkeys((*_PLAUSIBILITY, "iou_f1"))
        means = with_iou_f1(undefined | {name: _mean_of(column) for name, column in values.items()})
        return {name: None if value is None else float(value) for name, value in means.items()}

    # --- Instance by instance ---

    def instance_scores(self, name: str | None = None) -> dict[str, Numbers]:
        """Every score of every instance ``(instance,)`` by flat name, nan where it is not defined.

        A score of the summary is the mean over the instances that define it. ``name`` selects a ranking, by
        default the first. ``iou_f1`` is not a mean over instances; ``span_precision`` and ``span_recall``
        take its place.
        """
        by_name = {"accuracy": self.columns["correct"]}
        if "mass" in self.columns:
            reached = self.columns["mass"] >= 0.5
            confident = reached & (self.columns["probability"] >= 0.5)
            by_name["ac"], by_name["acmc"] = (
                np.where(self.relevant, 100.0 * x, np.nan) for x in (reached, confident)
            )
        for score in SCORES.values():
            if score.compute and score.column in self.columns:
                values = self.columns[score.column]
                by_name[score.name] = np.where(self.relevant, values, np.nan) if score.of_relevant else values
        return by_name | self.instance_ranking_scores(name)

    def instance_ranking_scores(
        self, of: Ranking | str | None = None, sample: int | None = None
    ) -> dict[str, Numbers]:
        """The scores of one ranking for every instance, as in :meth:`instance_scores`.

        Plausibility may be that of a ``sample``.
        """
        ranking = of if isinstance(of, Ranking) else self.rankings[of or next(iter(self.rankings))]
        faithfulness = ranking.faithfulness
        kinds = {kind: getattr(faithfulness, kind) for kind in KINDS}
        by_name: dict[str, Numbers] = {}
        for kind, values in kinds.items():
            by_name |= {f"{kind}_{k}": values[:, place] for place, k in enumerate(faithfulness.percents)}
        if faithfulness.percents:
            by_name |= {f"aopc_{kind}": _defined_mean(values) for kind, values in kinds.items()}
            if self.random and not any(ranking is draw for draw in self.random):
                by_name |= {f"wins_{kind}": self._wins(kind, by_name[f"aopc_{kind}"]) for kind in kinds}
        agreements = self.agreements(ranking.importance, sample)
        for name in (*_PLAUSIBILITY, *SPANS) if agreements else ():
            by_name[name] = np.full(len(self.instances), np.nan)
            by_name[name][list(agreements)] = [getattr(x, name) for x in agreements.values()]
        if LEAVE_ONE_OUT in self.rankings and ranking is not self.rankings[LEAVE_ONE_OUT]:
            by_name[TAU] = self.rank_correlations(ranking, self.rankings[LEAVE_ONE_OUT])
        return by_name

    def _wins(self, kind: str, values: Numbers) -> Numbers:
        """The share of random rankings that ``values`` ``(instance,)`` beat; ties count half."""
        drawn = np.stack([_defined_mean(getattr(draw.faithfulness, kind)) for draw in self.random])
        ahead = np.sign(values - drawn) * (1 if kind == "comprehensiveness" else -1)
        return np.asarray((ahead.mean(0) + 1) / 2)

    def rank_correlations(self, first: Ranking, second: Ranking) -> Numbers:
        """Kendall's tau of two rankings of each instance's tokens; nan if either is constant."""
        pairs = zip(self.instances, first.importance, second.importance, strict=True)
        return np.array([kendall_tau(a[x.rankable], b[x.rankable]) for x, a, b in pairs], dtype=float)

    def agreements(self, importance: Sequence[Numbers], sample: int | None = None) -> dict[int, Agreement]:
        """Plausibility of every instance that has a rationale, or of a ``sample`` of them, by its number."""
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

    # --- Tables ---

    def tables(self, intervals: Sequence[Mapping[str, Any] | None] = ()) -> dict[str, list[dict[str, Any]]]:
        """The tidy tables by name, in the order of ``titles``, without those that would be empty.

        ``intervals`` are those of this measurement and of each of ``others``, from :func:`score_intervals`.
        """
        bounds = [*intervals, *[None] * (1 + len(self.others) - len(intervals))]
        tables = {
            "scores": self.scores_table(bounds[0]),
            "importances": self.rankings_table() if len(self.rankings) > 1 else [],
            "removals": self.removals_table(bounds),
            "groups": self.groups_table(),
            "heads": self.heads_table(),
            "dtap": self.dtap_table(),
        }
        return {name: rows for name, rows in tables.items() if rows}

    def scores_table(
        self, intervals: Mapping[str, Any] | None = None, names: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """A tidy table: one row per score, with its null (uniform attention or a random ranking).

        ``n`` counts the instances that define the score. ``intervals``, from :func:`score_intervals`, add
        both ends of each score's interval. ``names`` are the scores, by default those of all tables.
        """
        summary, by_name = self.at_defaults, self.instance_scores()
        by_name["iou_f1"] = by_name.get(SPANS[0], np.empty(0))
        rows = []
        for flat_name, value in summary.scores.items():
            name = ScoreName.parse(flat_name)
            chosen = name.score.tables if names is None else flat_name in names
            if chosen and value is not None:
                row = {**name.row, "n": int((~np.isnan(by_name[flat_name])).sum()), "value": value}
                if intervals is not None:
                    bounds = intervals.get(flat_name)
                    row |= {"low": bounds and bounds.low, "high": bounds and bounds.high}
                row["null"] = summary.null.get(flat_name)
                row |= {null: scores.get(flat_name) for null, scores in summary.stronger_nulls.items()}
                if summary.null_error:
                    row["null error"] = summary.null_error.get(flat_name)
                rows.append(row)
        return rows

    def removals_table(self, intervals: Sequence[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
        """The means over k and the wins against random rankings, for each way to remove tokens.

        ``intervals`` has those of this measurement and of each of ``others``.
        """
        without = ("k", *STRONGER_NULLS)
        names = [f"{what}_{kind}" for kind in KINDS for what in ("aopc", "wins")]
        measurements = zip((self, *self.others), intervals, strict=True)
        return [
            {"removal": measurement.settings["removal"]["how"]}
            | {name: value for name, value in row.items() if name not in without}
            for measurement, bounds in measurements
            for row in measurement.scores_table(bounds, names)
        ]

    def groups_table(self) -> list[dict[str, Any]]:
        """Some scores over all instances, over right and wrong answers, and over each class."""
        values = self.instance_scores()
        if "null_mass" in self.columns:
            values["null_mrta"] = np.where(self.relevant, self.columns["null_mass"], np.nan)
        right = self.columns["correct"] > 0
        groups = {"all": np.ones_like(right), "right": right, "wrong": ~right}
        labels = np.array([-1 if x.label is None else x.label for x in self.instances])
        groups |= {f"label {name}": labels == number for number, name in enumerate(self.classes)}
        names = {name: name.replace("aopc_", "").replace("_", " ") for name in _GROUPED if name in values}
        return [
            {"instances": group, "n": int(chosen.sum())}
            | {title: _mean_of(values[name][chosen]) for name, title in names.items()}
            for group, chosen in groups.items()
            if chosen.any()
        ]

    def heads_table(self) -> list[dict[str, Any]]:
        """The MRTA of every head, or without relevant tokens its entropy: one row per layer.

        The last column is that of uniform attention.
        """
        if self.heads is None:
            return []
        cells = self.heads[self.relevant, 0] if self.relevant.any() else self.heads[:, 1]
        names = [*(f"head {number}" for number in range(cells.shape[2] - 1)), "uniform"]
        return [
            {"layer": layer, **dict(zip(names, map(_defined, row), strict=True))}
            for layer, row in enumerate(cells.mean(0))
        ]

    def dtap_table(self) -> list[dict[str, Any]]:
        """The DTAP table with the highest probability on top; empty if no token is relevant.

        ``n`` counts the instances of each row.
        """
        summary = self.at_defaults
        if not summary.dtap or not summary.dtap_edges:
            return []
        counts = [round(sum(row) * int(self.relevant.sum()) / 100) for row in reversed(summary.dtap)]
        rows = zip(dtap_lines(summary.dtap, summary.dtap_edges), counts, strict=True)
        return [row | {"n": count} for row, count in rows]

    def rankings_table(self) -> list[dict[str, Any]]:
        """A tidy table: one row per score, one column per ranking and one for random rankings.

        ``n`` counts the instances that define the score in some ranking.
        """
        summary = self.at_defaults
        names = dict.fromkeys(name for scores in summary.rankings.values() for name in scores)
        values_of = [self.instance_ranking_scores(ranking) for ranking in self.rankings]
        rows = []
        for name in names:
            values = {ranking: scores.get(name) for ranking, scores in summary.rankings.items()}
            if any(value is not None for value in values.values()):
                column = SPANS[0] if name == "iou_f1" else name
                count = max(int((~np.isnan(x[column])).sum()) for x in values_of if column in x)
                row = {**ScoreName.parse(name).row, "n": count, **values}
                rows.append(row | ({"random": summary.null.get(name)} if self.random else {}))
        return rows

    def instances_table(self) -> list[dict[str, Any]]:
        """A tidy table: one row per instance, with every score and the importance of every token.

        ``token_texts``, ``relevance`` and the importances, one per ranking, are lists.
        """
        rankings = {name: self.instance_ranking_scores(name) for name in self.rankings}
        first, instance_scores = next(iter(rankings)), self.instance_scores()
        rows = []
        for number, instance in enumerate(self.instances):
            row: dict[str, Any] = {
                "id": instance.id,
                "tokens": len(instance.tokens),
                "relevant": instance.relevant,
                "label": None if instance.label is None or not self.classes else self.classes[instance.label],
                "predicted": self.outcomes[int(self.faithfulness.whole[number].argmax())],
            }
            row |= {name: float(values[number]) for name, values in self.columns.items()}
            for name in ("ac", "acmc"):
                if name in instance_scores:
                    row[name] = _defined(instance_scores[name][number])
            for ranking_name, scores in rankings.items():
                prefix = "" if ranking_name == first else f"{ranking_name} "
                row |= {prefix + name: _defined(values[number]) for name, values in scores.items()}
            row |= {"token_texts": list(instance.texts_of_tokens), "relevance": instance.relevance.tolist()}
            for ranking_name, ranking in self.rankings.items():
                column = "importance" if ranking_name == first else f"{ranking_name} importance"
                row[column] = [float(f"{value:.6g}") for value in ranking.importance[number]]
            rows.append(row)
        return rows

    def to_frame(self) -> Any:
        """:meth:`instances_table` as a pandas data frame; token texts and importances are lists."""
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError:
            raise InputError("to_frame() needs pandas; `pip install pandas` installs it") from None
        return pandas.DataFrame(self.instances_table())

    def __repr__(self) -> str:
        scores = {name: self.at_defaults.scores.get(name) for name in ("accuracy", "mrta", "auprc")}
        scores["null mrta"] = self.at_defaults.null.get("mrta")
        shown = [f"{name} {value:.3f}" for name, value in scores.items() if value is not None]
        return f"<Measurement of {len(self.instances)} instances: {', '.join(shown)}>"

    def _repr_html_(self) -> str:
        from fasterqk.attention.page import measurement_html

        return measurement_html(self)


def _mean_of(values: Numbers | Sequence[float | None]) -> float | None:
    """The mean over those with a value; None if there are none."""
    array = np.asarray(values, dtype=float)
    defined = array[~np.isnan(array)]
    return float(defined.mean()) if defined.size else None


def _defined_mean(values: Numbers) -> Numbers:
    """The mean of each instance over the k that count; nan if none does."""
    defined = ~np.isnan(values)
    sums, counts = np.where(defined, values, 0).sum(1), defined.sum(1)
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def _defined(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _standard_errors(draws: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The standard error of the mean over several draws of each score; nothing for a single draw."""
    if len(draws) < 2:
        return {}
    values = {name: np.array([draw[name] for draw in draws], dtype=float) for name in draws[0]}
    return {name: _defined(x.std(ddof=1) / len(draws) ** 0.5) for name, x in values.items()}


@dataclass(frozen=True)
class Summary:
    """The scores of a measurement by flat name, such as ``mrta`` or ``sufficiency_5``.

    ``null`` has the scores of uniform attention or of random rankings under the same names; ``null_error``
    the standard errors over several random rankings; ``stronger_nulls`` the scores of mass under ``sharp``
    and ``permuted`` attention; ``rankings`` the scores of every measured importance. If layers were measured,
    ``layers`` has the scores of each, counted from "1", and ``average`` those of their mean. ``heads`` has
    the MRTA (without relevance the entropy) of every head, one row per layer.

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
    heads: Sequence[Mapping[str, float | None]] = ()

    def __getitem__(self, name: str) -> float | None:
        return self.scores[name]

    def to_json(self) -> dict[str, Any]:
        """The document that ``fasterqk measure --json`` prints."""
        scores = nested(self.scores)
        concentration = scores.pop("concentration", {})
        first = ("accuracy", "mrta", "ac", "acmc")
        random = {name: x for name, x in self.null.items() if ScoreName.parse(name).score.null == "random"}
        document: dict[str, Any] = {
            "n": self.n,
            "n_without_relevance": self.n_without_relevance,
            **{name: scores.pop(name) for name in first if name in scores},
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
        if self.heads:
            document["heads"] = list(self.heads)
        if self.layers:
            document |= {"average": dict(self.average), "layer": dict(self.layers)}
        return {**document, "concentration": concentration, "measured": dict(self.measured)}


def nested(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Scores by flat name, nested as in the JSON document."""
    document: dict[str, Any] = {}
    for name, value in scores.items():
        *groups, key = ScoreName.parse(name).place
        (document.setdefault(groups[0], {}) if groups else document)[key] = value
    return document
