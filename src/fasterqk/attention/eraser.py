"""Export a measurement in ERASER's format.

ERASER's own code can score the files that :func:`write_eraser` writes; :func:`eraser_commands` returns the
command lines. The folder ``NAME.data`` holds the human rationales and the tokens (``docs.jsonl``).
``NAME.jsonl`` has the predictions for all instances (``test.jsonl`` in that folder),
``NAME.rationales.jsonl`` those for instances with a rationale (``rationales.jsonl``). There are two because
ERASER's ``metrics.py`` takes soft scores of all instances or of none, and counts an AUPRC of .5 for an
instance without a rationale.

The unit is the model's token; special tokens are left out.
"""

import json
from collections import Counter
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.attention.faithfulness import CONVENTIONS, spans, top_tokens
from fasterqk.attention.instances import Instance
from fasterqk.errors import InputError
from fasterqk.files import check_output, write_text

if TYPE_CHECKING:
    from fasterqk.attention.measurement import Measurement


def write_eraser(measurement: "Measurement", path: str | PathLike[str]) -> list[Path]:
    """Write predictions to ``path``, rationales and documents to the folder beside it; return all paths.

    Instances with a rationale come first, because ERASER decides by the first instance which fields to
    score. The fields ``sufficiency_classification_scores`` and ``comprehensiveness_classification_scores``
    belong to the first k; ``thresholded_scores`` has all k. The only outcome of a causal model is the target
    text. ERASER cannot score predictions that name a class no instance has (:func:`unscorable_class`); in
    that case only the rationales are written.
    """
    paths, instances = eraser_paths(path), measurement.instances
    (name, count), *_ = Counter(instance.id for instance in instances).most_common(1)
    if count > 1:
        raise InputError(
            f"two instances have the id {name!r}, by which ERASER identifies them; give each its own:"
            " Instance(..., id='1')"
        )
    order = sorted(range(len(instances)), key=lambda number: not instances[number].rationale.any())
    rated = [number for number in order if instances[number].rationale.any()]
    predictions = [_rationales(measurement, number, soft=len(rated) == len(order)) for number in order]
    if unscorable_class(measurement) is None:
        for prediction, number in zip(predictions, order, strict=True):
            prediction |= _classified(measurement, number)
    annotations = [_annotation(measurement, number) for number in order]
    documents = [
        {"docid": instances[number].id, "document": " ".join(_pieces(instances[number]))} for number in order
    ]
    alone = [_rationales(measurement, number, soft=True) for number in rated]
    files = (predictions, annotations, documents, alone, annotations[: len(rated)])
    return [
        write_text(target, "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))
        for target, lines in zip(paths, files, strict=True)
        if lines
    ]


def eraser_paths(path: str | PathLike[str]) -> tuple[Path, Path, Path, Path, Path]:
    """The files that :func:`write_eraser` writes: predictions, annotations and documents of all instances,
    then predictions and annotations of those with a rationale.

    >>> [str(path) for path in eraser_paths("out/mine.jsonl")][:3]
    ['out/mine.jsonl', 'out/mine.data/test.jsonl', 'out/mine.data/docs.jsonl']
    """
    check_output(path)
    target = Path(path)
    folder, alone = target.with_suffix(".data"), target.with_suffix(".rationales.jsonl")
    if folder == target:
        raise InputError(f"{str(path)!r} is the name of the folder beside the predictions; end in .jsonl")
    return target, folder / "test.jsonl", folder / "docs.jsonl", alone, folder / "rationales.jsonl"


def eraser_commands(measurement: "Measurement", path: str | PathLike[str]) -> list[str]:
    """The command lines that score the files of :func:`write_eraser` with ERASER's code."""
    target, test, _, alone, _ = eraser_paths(path)
    command = f"python rationale_benchmark/metrics.py --data_dir {quote(str(test.parent))} --split"
    whole = f"{command} test --results {quote(str(target))}"
    percents = measurement.faithfulness.percents
    # Without --aopc_thresholds, ERASER's metrics.py wants the scores at exactly the k of its convention.
    expected = set(CONVENTIONS["eraser"][0])
    if percents and unscorable_class(measurement) is None and not expected <= set(percents):
        whole += " --aopc_thresholds " + " ".join(str(percent / 100) for percent in percents)
    rated = any(x.rationale.any() for x in measurement.instances)
    return [whole, f"{command} rationales --results {quote(str(alone))}"] if rated else [whole]


def unscorable_class(measurement: "Measurement") -> str | None:
    """A class that the model predicts but no instance has, which ERASER's code cannot score; else None."""
    if not measurement.classes:
        return None
    labels = {instance.label for instance in measurement.instances}
    wrong = sorted({int(number) for number in measurement.faithfulness.predicted} - labels)
    return measurement.classes[wrong[0]] if wrong else None


def _rationales(measurement: "Measurement", number: int, *, soft: bool) -> dict[str, Any]:
    instance = measurement.instances[number]
    importance, rationale = measurement.importance[number][instance.rankable], instance.rationale
    predicted: dict[str, Any] = {
        "docid": instance.id,
        "hard_rationale_predictions": _evidence(top_tokens(importance, int(rationale.sum()))),
    }
    if soft:
        predicted["soft_rationale_predictions"] = importance.tolist()
    return {"annotation_id": instance.id, "rationales": [predicted] if rationale.any() else []}


def _classified(measurement: "Measurement", number: int) -> dict[str, Any]:
    scores, names = measurement.faithfulness, measurement.outcomes

    def by_class(outcomes: NDArray[np.float64]) -> dict[str, float]:
        return dict(zip(names, outcomes.tolist(), strict=True))

    classified: dict[str, Any] = {
        "classification": names[int(scores.predicted[number])],
        "classification_scores": by_class(scores.whole[number]),
    }
    perturbed = [
        {
            "sufficiency_classification_scores": by_class(scores.sufficient[number, place]),
            "comprehensiveness_classification_scores": by_class(scores.comprehensive[number, place]),
        }
        for place in range(len(scores.percents))
    ]
    if perturbed:
        thresholds = zip(scores.percents, perturbed, strict=True)
        classified |= perturbed[0]
        classified["thresholded_scores"] = [{"threshold": k / 100, **outcomes} for k, outcomes in thresholds]
    return classified


def _annotation(measurement: "Measurement", number: int) -> dict[str, Any]:
    instance = measurement.instances[number]
    pieces = _pieces(instance)
    groups = [
        [{"docid": instance.id, "text": " ".join(pieces[span["start_token"] : span["end_token"]]), **span}]
        for span in _evidence(instance.rationale)
    ]
    return {
        "annotation_id": instance.id,
        "classification": measurement.outcomes[instance.label or 0],
        "evidences": groups,
        "query": "",
        "docids": [instance.id],
    }


def _pieces(instance: Instance) -> list[str]:
    """The ranked tokens as text without white space, because ERASER splits documents at blanks."""
    ranked = [piece for piece, may in zip(instance.texts_of_tokens, instance.rankable, strict=True) if may]
    return ["".join(piece.split()) or "▁" for piece in ranked]


def _evidence(chosen: NDArray[np.bool_]) -> list[dict[str, int]]:
    return [{"start_token": start, "end_token": end} for start, end in spans(chosen)]
