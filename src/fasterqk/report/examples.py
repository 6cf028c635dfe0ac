"""Examples on disk: the tokens of single inputs with the attention that several arms pay to them.

``out/examples/NAME.json`` is ``{name, title, caption, sensitive, arms, examples}``. An example is
``{tokens, relevance, label, arms}`` (and, where wanted, ``read``: the index of the read position, and
``null``: what uniform attention puts on the relevant tokens, if that is not their share), where
``arms`` maps an arm to ``{prediction, probability, layers}`` and ``layers`` maps the name of a layer
(``"layer 1"``, ``"rollout"``) to one weight a token. ``probability`` is that of the right answer.
Sets marked ``sensitive`` are shown by the report only after a click.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.files import plain
from fasterqk.report.documents import load_documents, save_document

FOLDER = "examples"


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
    return save_document(out, FOLDER, document)


def load_examples(out: Path) -> list[dict[str, Any]]:
    """The example sets of a results folder, checked, sorted by name."""
    sets = load_documents(out, FOLDER)
    for document in sets:
        check_examples(document, repr(str(Path(out) / FOLDER / f"{document['name']}.json")))
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
