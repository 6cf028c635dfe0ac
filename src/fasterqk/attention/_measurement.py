"""The result of measuring a model on data: numbers of every instance, their summary, tables for people."""

from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.attention._faithfulness import Agreement, Faithfulness, agreement, plausibility
from fasterqk.attention._instances import Instance
from fasterqk.attention._scores import summarize

# A token belongs to the human rationale from this relevance on (half of the annotators, say).
RATIONALE_FROM = 0.5


@dataclass(frozen=True, eq=False)
class Measurement:
    """Everything measured, one entry an instance in the order of the data.

    ``columns`` maps a name (``mass``, ``null_mass``, ``probability``, ``correct``, ``entropy``, ...) to its
    values ``(instance,)``; ``importance`` holds the ranking of each instance's tokens, and
    ``random_importance`` a random one for comparison.
    """

    instances: tuple[Instance, ...]
    columns: dict[str, NDArray[np.float64]]
    importance: tuple[NDArray[np.float64], ...]
    faithfulness: Faithfulness
    random_importance: tuple[NDArray[np.float64], ...]
    random_faithfulness: Faithfulness
    classes: tuple[str, ...]
    edges: tuple[float, ...]
    settings: dict[str, Any]

    def summary(self, mass_threshold: float = 0.5, probability_threshold: float = 0.5) -> dict[str, Any]:
        """All scores as plain JSON data; see docs/measure.md for what each key means."""
        relevant = np.array([instance.relevant for instance in self.instances])
        column = self.columns
        scores = summarize(
            column["mass"][relevant],
            column["probability"][relevant],
            column["null_mass"][relevant],
            edges=self.edges,
            mass_threshold=mass_threshold,
            probability_threshold=probability_threshold,
        )
        means, null = self._means(relevant, ""), self._means(relevant, "null_")
        return {
            "n": len(self.instances),
            "n_without_relevance": int((~relevant).sum()),
            "accuracy": float(column["correct"].mean()),
            **{name: scores[name] for name in ("mrta", "ac", "acmc", "dtap", "dtap_edges")},
            "entropy": means.pop("entropy"),
            **ranking_scores(self.faithfulness, self.agreements()),
            "null": {**scores["null"], **null},
            "random": ranking_scores(self.random_faithfulness, self.agreements(random=True)),
            "concentration": means,
            "measured": {**self.settings, "n_truncated": sum(x.truncated for x in self.instances)},
        }

    def _means(self, relevant: NDArray[np.bool_], prefix: str) -> dict[str, float]:
        """Every metric but mass (which is MRTA) averaged over the instances it speaks of."""
        names = [name.removeprefix("null_") for name in self.columns if name.startswith("null_")]
        return {
            name: float(
                self.columns[prefix + name][relevant if name.startswith("mass") else slice(None)].mean()
            )
            for name in names
            if name != "mass"
        }

    def agreements(self, random: bool = False) -> list[Agreement]:
        """Plausibility of every instance that has a rationale, in order."""
        rankings = self.random_importance if random else self.importance
        pairs = zip(self.instances, rankings, strict=True)
        return [
            agreement(ranking[instance.rankable], rationale_of(instance))
            for instance, ranking in pairs
            if rationale_of(instance).any()
        ]

    def scores_table(self) -> list[dict[str, Any]]:
        """A tidy table: one row a score, with what uniform attention or a random ranking gives."""
        summary = self.summary()
        rows = [
            {"score": name, "k": None, "value": summary[name], "null": summary["null"].get(name)}
            for name in ("accuracy", "mrta", "ac", "acmc", "entropy")
        ]
        for name in ("sufficiency", "comprehensiveness"):
            chance = summary["random"]
            rows += [
                {"score": name, "k": int(k), "value": value, "null": chance[name][k]}
                for k, value in summary[name].items()
            ]
            rows.append(
                {
                    "score": f"aopc {name}",
                    "k": None,
                    "value": summary["aopc"][name],
                    "null": chance["aopc"][name],
                }
            )
        rows += [
            {"score": name, "k": None, "value": value, "null": summary["random"]["plausibility"][name]}
            for name, value in summary["plausibility"].items()
        ]
        return rows

    def instances_table(self) -> list[dict[str, Any]]:
        """A tidy table: one row an instance."""
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

        return measurement_html(self)


def rationale_of(instance: Instance) -> NDArray[np.bool_]:
    """The human rationale over the tokens that may be ranked, 0/1."""
    return np.asarray(instance.relevance[instance.rankable] >= RATIONALE_FROM)


def ranking_scores(scores: Faithfulness, agreements: list[Agreement]) -> dict[str, Any]:
    """``sufficiency``, ``comprehensiveness``, ``aopc`` and ``plausibility`` of one ranking, averaged."""
    sufficiency = scores.sufficiency.mean(0)
    comprehensiveness = scores.comprehensiveness.mean(0)
    names = [str(percent) for percent in scores.percents]
    return {
        "sufficiency": dict(zip(names, sufficiency.tolist(), strict=True)),
        "comprehensiveness": dict(zip(names, comprehensiveness.tolist(), strict=True)),
        "aopc": {
            "sufficiency": float(sufficiency.mean()),
            "comprehensiveness": float(comprehensiveness.mean()),
        },
        "plausibility": plausibility(agreements),
    }


# --- Measurements as HTML for notebooks: the scores beside their nulls, and tokens shaded by attention ---

_SHOWN = 5
_TOKENS_SHOWN = 200


def measurement_html(measurement: "Measurement") -> str:
    """A table of all scores with their nulls, and the first instances with shaded, underlined tokens."""
    rows = "".join(_row(row) for row in measurement.scores_table())
    first = "".join(instance_html(measurement, i) for i in range(min(_SHOWN, len(measurement.instances))))
    return (
        f"<p>{len(measurement.instances)} instances; shade = importance, underlined = relevant</p>"
        "<table><thead><tr><th>score</th><th>k %</th><th>value</th><th>null or random</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>{first}"
    )


def instance_html(measurement: "Measurement", number: int) -> str:
    """One instance: its tokens shaded by importance, the relevant ones underlined."""
    instance = measurement.instances[number]
    pieces = instance.pieces or tuple(str(token) for token in instance.tokens)
    weights = np.clip(measurement.importance[number], 0, None)
    top = weights.max() or 1.0
    words = [
        _token(piece, weight / top, relevance)
        for piece, weight, relevance in zip(pieces, weights, instance.relevance, strict=True)
    ]
    rest = "" if len(words) <= _TOKENS_SHOWN else f" and {len(words) - _TOKENS_SHOWN} more"
    probability = float(measurement.columns["probability"][number])
    return (
        f"<p><b>{escape(instance.id)}</b> p = {probability:.3f}: {' '.join(words[:_TOKENS_SHOWN])}{rest}</p>"
    )


def _token(piece: str, shade: float, relevance: float) -> str:
    line = ";text-decoration:underline" if relevance > 0 else ""
    return f'<span style="background:rgba(230,159,0,{shade:.2f}){line}">{escape(piece)}</span>'


def _row(row: dict[str, Any]) -> str:
    cells = (row["score"], row["k"], row["value"], row["null"])
    return "<tr>" + "".join(f"<td>{escape(_cell(value))}</td>" for value in cells) + "</tr>"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
