"""Predictions and rationales in ERASER's format, so that anyone can score them again with ERASER's code.

``NAME.jsonl`` holds the predictions, the folder ``NAME.data`` beside it the human rationales
(``test.jsonl``) and the tokens (``docs.jsonl``)::

    python rationale_benchmark/metrics.py --data_dir NAME.data --split test --results NAME.jsonl

The unit is the model's own token; special tokens are left out.
"""

import json
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.attention._faithfulness import spans, top_tokens
from fasterqk.attention._measurement import Measurement, rationale_of
from fasterqk.files import write_text


def write_eraser(measurement: Measurement, path: str | PathLike[str]) -> list[Path]:
    """Write predictions to ``path``, rationales and documents to the folder beside it; returns all paths.

    An instance without a rationale has an empty ``rationales`` list, so that it counts in faithfulness
    only; these come last, because ERASER looks at the first instance to see what there is. The fields
    ``sufficiency_classification_scores`` and ``comprehensiveness_classification_scores`` are those of the
    first k, ``thresholded_scores`` has all. For causal models the only outcome is the target text.
    """
    target = Path(path)
    folder = target.with_suffix(".data")
    rated = [bool(rationale_of(instance).any()) for instance in measurement.instances]
    order = sorted(range(len(rated)), key=lambda number: not rated[number])
    return [
        _write_lines(target, (_prediction(measurement, number) for number in order)),
        _write_lines(folder / "test.jsonl", (_annotation(measurement, number) for number in order)),
        _write_lines(folder / "docs.jsonl", (_document(measurement, number) for number in order)),
    ]


def _prediction(measurement: Measurement, number: int) -> dict[str, Any]:
    instance, scores = measurement.instances[number], measurement.faithfulness
    soft = measurement.importance[number][instance.rankable]
    rationale = rationale_of(instance)
    thresholded = [
        {
            "threshold": percent / 100,
            "sufficiency_classification_scores": _named(measurement, scores.sufficient[number, place]),
            "comprehensiveness_classification_scores": _named(
                measurement, scores.comprehensive[number, place]
            ),
        }
        for place, percent in enumerate(scores.percents)
    ]
    first = {name: value for name, value in thresholded[0].items() if name != "threshold"}
    return {
        "annotation_id": instance.id,
        "rationales": [
            {
                "docid": instance.id,
                "hard_rationale_predictions": _evidence(top_tokens(soft, int(rationale.sum()))),
                "soft_rationale_predictions": soft.tolist(),
            }
        ]
        if rationale.any()
        else [],
        "classification": _outcomes(measurement)[int(scores.predicted[number])],
        "classification_scores": _named(measurement, scores.whole[number]),
        **first,
        "thresholded_scores": thresholded,
    }


def _annotation(measurement: Measurement, number: int) -> dict[str, Any]:
    instance = measurement.instances[number]
    pieces = _pieces(measurement, number)
    groups = [
        [{"docid": instance.id, "text": " ".join(pieces[span["start_token"] : span["end_token"]]), **span}]
        for span in _evidence(rationale_of(instance))
    ]
    return {
        "annotation_id": instance.id,
        "classification": _outcomes(measurement)[instance.label or 0],
        "evidences": groups,
        "query": "",
        "docids": [instance.id],
    }


def _document(measurement: Measurement, number: int) -> dict[str, str]:
    return {"docid": measurement.instances[number].id, "document": " ".join(_pieces(measurement, number))}


def _pieces(measurement: Measurement, number: int) -> list[str]:
    """The ranked tokens as text without white space, because ERASER splits its documents at blanks."""
    instance = measurement.instances[number]
    pieces = instance.pieces or tuple(str(token) for token in instance.tokens)
    ranked = [piece for piece, may in zip(pieces, instance.rankable, strict=True) if may]
    return ["".join(piece.split()) or "▁" for piece in ranked]


def _evidence(chosen: NDArray[np.bool_]) -> list[dict[str, int]]:
    return [{"start_token": start, "end_token": end} for start, end in spans(chosen)]


def _outcomes(measurement: Measurement) -> tuple[str, ...]:
    return measurement.classes or ("target",)


def _named(measurement: Measurement, values: NDArray[np.float64]) -> dict[str, float]:
    return dict(zip(_outcomes(measurement), values.tolist(), strict=True))


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    return write_text(path, "".join(json.dumps(record, sort_keys=True) + "\n" for record in records))
