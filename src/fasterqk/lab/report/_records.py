"""A comparison on disk: what each arm of an experiment reached, from which the report tells the story.

``out/comparisons/NAME.json`` is ``{name, title, setting, arms, matched}``. The first arm is the baseline.
An arm is ``{arm, qk_ratio, seeds, metrics}`` and, where known, ``null`` (the same attention metrics under
uniform attention), ``paper`` (what the paper reports) and ``seconds`` (training time of one cell).
``metrics``, ``null`` and ``paper`` map a key of ``METRICS`` to a number or an interval
``{mean, half_width, n}``. ``matched`` is what ``fasterqk.attention._compare`` returns, or null.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.files import plain
from fasterqk.lab.report._tables import load_documents, save_document

COMPARISONS = "comparisons"

# Scales as everywhere in the package: the first four in 0..1, AC and ACMC in percent.
METRICS = ("train_accuracy", "accuracy", "mrta", "probability", "ac", "acmc", "loss")


def save_comparison(
    out: Path,
    name: str,
    *,
    title: str,
    setting: str,
    arms: Sequence[Mapping[str, Any]],
    matched: Sequence[Mapping[str, Any]] | None = None,
) -> Path:
    """Write ``out/comparisons/NAME.json`` and return its path.

    >>> save_comparison(Path("out"), "demo", title="Demo", setting="3 seeds, one layer",  # doctest: +SKIP
    ...     arms=[{"arm": "baseline", "qk_ratio": 1, "seeds": 3, "metrics": {"mrta": 0.2}},
    ...           {"arm": "faster QK", "qk_ratio": 10, "seeds": 3, "metrics": {"mrta": 0.7}}])
    """
    document = plain({"name": name, "title": title, "setting": setting, "arms": arms, "matched": matched})
    check_comparison(document, f"comparison {name!r}")
    return save_document(out, COMPARISONS, document)


def load_comparisons(out: Path) -> list[dict[str, Any]]:
    """The comparisons of a results folder, checked, sorted by name."""
    documents = load_documents(out, COMPARISONS)
    for document in documents:
        check_comparison(document, repr(str(Path(out) / COMPARISONS / f"{document['name']}.json")))
    return documents


def check_comparison(document: Mapping[str, Any], where: str) -> None:
    """Raise an ``InputError`` that names ``where`` unless ``document`` has the format above."""
    arms = document.get("arms")
    if not isinstance(arms, list) or not arms:
        raise InputError(f"{where} has no list 'arms' with a baseline in it")
    for arm in arms:
        if not isinstance(arm, Mapping) or "arm" not in arm or not isinstance(arm.get("metrics"), Mapping):
            raise InputError(f"{where}: arm {arm!r:.80} has no 'arm' and 'metrics'")
        given = [*arm["metrics"], *(arm.get("null") or {}), *(arm.get("paper") or {})]
        unknown = [key for key in given if key not in METRICS]
        if unknown:
            raise InputError(f"{where}: metric {unknown[0]!r} is not one of {', '.join(METRICS)}")


# --- Training curves on disk: what every cell measured along its training ---
# ``out/curves/NAME.json`` is ``{name, title, caption, x, metrics, cells}``. ``x`` is ``{key, label}``; a
# metric is ``{key, label}`` and, where wanted, ``log`` (a logarithmic axis) and ``null`` (the value of
# uniform attention, drawn as a line). A cell is ``{arm, seed, points}`` with one mapping a point.

CURVES = "curves"


def save_curves(
    out: Path,
    name: str,
    *,
    title: str,
    caption: str,
    x: Mapping[str, str],
    metrics: Sequence[Mapping[str, Any]],
    cells: Iterable[Mapping[str, Any]],
) -> Path:
    """Write ``out/curves/NAME.json`` and return its path; points keep only the keys that are drawn.

    >>> save_curves(Path("out"), "demo", title="Demo", caption="", x={"key": "step", "label": "step"},
    ...             metrics=[{"key": "loss", "label": "training loss", "log": True}],   # doctest: +SKIP
    ...             cells=[{"arm": "r = 1", "seed": 0, "points": [{"step": 0, "loss": 1.6}]}])
    """
    keys = [x["key"], *(metric["key"] for metric in metrics)]
    document = {
        "name": name,
        "title": title,
        "caption": caption,
        "x": dict(x),
        "metrics": [dict(metric) for metric in metrics],
        "cells": [
            {
                "arm": cell["arm"],
                "seed": cell.get("seed"),
                "points": [{key: plain(point.get(key)) for key in keys} for point in cell["points"]],
            }
            for cell in cells
        ],
    }
    check_curves(document, f"curves {name!r}")
    return save_document(out, CURVES, document)


def load_curves(out: Path) -> list[dict[str, Any]]:
    """The training curves of a results folder, checked, sorted by name."""
    curves = load_documents(out, CURVES)
    for document in curves:
        check_curves(document, repr(str(Path(out) / CURVES / f"{document['name']}.json")))
    return curves


def check_curves(document: Mapping[str, Any], where: str) -> None:
    """Raise an ``InputError`` that names ``where`` unless ``document`` has the format above."""
    if not isinstance(document.get("metrics"), list) or not isinstance(document.get("cells"), list):
        raise InputError(f"{where} has no lists 'metrics' and 'cells'")
    for description in (document.get("x"), *document["metrics"]):
        if not isinstance(description, Mapping) or not {"key", "label"} <= set(description):
            raise InputError(f"{where}: {description!r} has no 'key' and 'label'")
    for cell in document["cells"]:
        if not isinstance(cell, Mapping) or "arm" not in cell or not isinstance(cell.get("points"), list):
            raise InputError(f"{where}: cell {cell!r:.80} has no 'arm' and 'points'")


# --- Examples on disk: the tokens of single inputs with the attention that several arms pay to them ---
# ``out/examples/NAME.json`` is ``{name, title, caption, sensitive, arms, examples}``. An example is
# ``{tokens, relevance, label, arms}`` (and, where wanted, ``read``: the index of the read position, and
# ``null``: what uniform attention puts on the relevant tokens, if that is not their share), where
# ``arms`` maps an arm to ``{prediction, probability, layers}`` and ``layers`` maps the name of a layer
# (``"layer 1"``, ``"rollout"``) to one weight a token. ``probability`` is that of the right answer.
# Sets marked ``sensitive`` are shown by the report only after a click.

EXAMPLES = "examples"


def save_examples(
    out: Path,
    name: str,
    *,
    title: str,
    arms: Sequence[str],
    examples: Iterable[Mapping[str, Any]],
    sensitive: bool,
    caption: str = "",
) -> Path:
    """Write ``out/examples/NAME.json`` and return its path; weights keep four decimals.

    >>> save_examples(Path("out"), "demo", title="Demo", arms=["r = 1"], sensitive=False,  # doctest: +SKIP
    ...     examples=[{"tokens": ["a", "cat"], "relevance": [0, 1], "label": "animal",
    ...                "arms": {"r = 1": {"prediction": "animal", "probability": 0.9,
    ...                                   "layers": {"layer 1": [0.2, 0.8]}}}}])
    """
    document = {
        "name": name,
        "title": title,
        "caption": caption,
        "sensitive": bool(sensitive),
        "arms": list(arms),
        "examples": [_rounded(plain(example)) for example in examples],
    }
    check_examples(document, f"examples {name!r}")
    return save_document(out, EXAMPLES, document)


def load_examples(out: Path) -> list[dict[str, Any]]:
    """The example sets of a results folder, checked, sorted by name."""
    sets = load_documents(out, EXAMPLES)
    for document in sets:
        check_examples(document, repr(str(Path(out) / EXAMPLES / f"{document['name']}.json")))
    return sets


def check_examples(document: Mapping[str, Any], where: str) -> None:
    """Raise an ``InputError`` that names ``where`` unless ``document`` has the format above."""
    if not isinstance(document.get("arms"), list) or not isinstance(document.get("examples"), list):
        raise InputError(f"{where} has no lists 'arms' and 'examples'")
    for index, example in enumerate(document["examples"]):
        here = f"{where}, example {index}"
        if not isinstance(example, Mapping) or not {"tokens", "relevance", "arms"} <= set(example):
            raise InputError(f"{here} has no 'tokens', 'relevance' and 'arms'")
        length = len(example["tokens"])
        if len(example["relevance"]) != length:
            raise InputError(f"{here}: {length} tokens but {len(example['relevance'])} relevance marks")
        for arm, reading in example["arms"].items():
            if arm not in document["arms"]:
                raise InputError(f"{here}: {arm!r} is not one of the arms {document['arms']}")
            if not isinstance(reading, Mapping) or not isinstance(reading.get("layers"), Mapping):
                raise InputError(f"{here}, {arm!r} has no 'layers'")
            for layer, weights in reading["layers"].items():
                if len(weights) != length:
                    raise InputError(
                        f"{here}, {arm!r}, {layer!r}: {length} tokens but {len(weights)} weights"
                    )


def _rounded(example: dict[str, Any]) -> dict[str, Any]:
    arms = {
        arm: {
            **reading,
            "layers": {
                layer: [round(float(weight), 4) for weight in weights]
                for layer, weights in reading["layers"].items()
            },
        }
        for arm, reading in example["arms"].items()
    }
    return {**example, "arms": arms}
