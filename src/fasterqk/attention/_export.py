"""A measurement for others to read: in ERASER's format, and as HTML for notebooks.

ERASER's own code can score what :func:`write_eraser` writes. ``NAME.jsonl`` holds the predictions, the folder
``NAME.data`` beside it the human rationales (``test.jsonl``) and the tokens (``docs.jsonl``)::

    python rationale_benchmark/metrics.py --data_dir NAME.data --split test --results NAME.jsonl

The unit is the model's own token; special tokens are left out.
"""

import json
from collections.abc import Iterable
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.attention._faithfulness import spans, top_tokens
from fasterqk.files import write_text

if TYPE_CHECKING:
    from fasterqk.attention._measure import Measurement

_SHOWN = 5
_TOKENS_SHOWN = 200


def write_eraser(measurement: "Measurement", path: str | PathLike[str]) -> list[Path]:
    """Write predictions to ``path``, rationales and documents to the folder beside it; returns all paths.

    An instance without a rationale has an empty ``rationales`` list, so that it counts in faithfulness
    only; these come last, because ERASER looks at the first instance to see what there is. The fields
    ``sufficiency_classification_scores`` and ``comprehensiveness_classification_scores`` are those of the
    first k, ``thresholded_scores`` has all. For causal models the only outcome is the target text.
    """
    target = Path(path)
    folder = target.with_suffix(".data")
    rated = [bool(instance.rationale.any()) for instance in measurement.instances]
    order = sorted(range(len(rated)), key=lambda number: not rated[number])
    return [
        _write_lines(target, (_prediction(measurement, number) for number in order)),
        _write_lines(folder / "test.jsonl", (_annotation(measurement, number) for number in order)),
        _write_lines(folder / "docs.jsonl", (_document(measurement, number) for number in order)),
    ]


def _prediction(measurement: "Measurement", number: int) -> dict[str, Any]:
    instance, scores = measurement.instances[number], measurement.faithfulness
    soft = measurement.importance[number][instance.rankable]
    rationale = instance.rationale
    perturbed = [
        {
            "sufficiency_classification_scores": _named(measurement, scores.sufficient[number, place]),
            "comprehensiveness_classification_scores": _named(
                measurement, scores.comprehensive[number, place]
            ),
        }
        for place in range(len(scores.percents))
    ]
    predicted = {
        "docid": instance.id,
        "hard_rationale_predictions": _evidence(top_tokens(soft, int(rationale.sum()))),
        "soft_rationale_predictions": soft.tolist(),
    }
    return {
        "annotation_id": instance.id,
        "rationales": [predicted] if rationale.any() else [],
        "classification": _outcomes(measurement)[int(scores.predicted[number])],
        "classification_scores": _named(measurement, scores.whole[number]),
        **perturbed[0],
        "thresholded_scores": [
            {"threshold": percent / 100, **own}
            for percent, own in zip(scores.percents, perturbed, strict=True)
        ],
    }


def _annotation(measurement: "Measurement", number: int) -> dict[str, Any]:
    instance = measurement.instances[number]
    pieces = _pieces(measurement, number)
    groups = [
        [{"docid": instance.id, "text": " ".join(pieces[span["start_token"] : span["end_token"]]), **span}]
        for span in _evidence(instance.rationale)
    ]
    return {
        "annotation_id": instance.id,
        "classification": _outcomes(measurement)[instance.label or 0],
        "evidences": groups,
        "query": "",
        "docids": [instance.id],
    }


def _document(measurement: "Measurement", number: int) -> dict[str, str]:
    return {"docid": measurement.instances[number].id, "document": " ".join(_pieces(measurement, number))}


def _pieces(measurement: "Measurement", number: int) -> list[str]:
    """The ranked tokens as text without white space, because ERASER splits its documents at blanks."""
    instance = measurement.instances[number]
    pieces = instance.pieces or tuple(str(token) for token in instance.tokens)
    ranked = [piece for piece, may in zip(pieces, instance.rankable, strict=True) if may]
    return ["".join(piece.split()) or "▁" for piece in ranked]


def _evidence(chosen: NDArray[np.bool_]) -> list[dict[str, int]]:
    return [{"start_token": start, "end_token": end} for start, end in spans(chosen)]


def _outcomes(measurement: "Measurement") -> tuple[str, ...]:
    return measurement.classes or ("target",)


def _named(measurement: "Measurement", values: NDArray[np.float64]) -> dict[str, float]:
    return dict(zip(_outcomes(measurement), values.tolist(), strict=True))


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    return write_text(path, "".join(json.dumps(record, sort_keys=True) + "\n" for record in records))


# --- HTML: the scores beside their nulls, and tokens shaded by attention ---


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
