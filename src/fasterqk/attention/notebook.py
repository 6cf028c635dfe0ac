"""Measurements as HTML for notebooks: the scores beside their nulls, and tokens shaded by attention."""

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fasterqk.attention.measurement import Measurement

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
