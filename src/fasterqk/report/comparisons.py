"""A comparison on disk: what each arm of an experiment reached, from which the report tells the story.

``out/comparisons/NAME.json`` is ``{name, title, setting, arms, matched}``. The first arm is the baseline.
An arm is ``{arm, qk_ratio, seeds, metrics}`` and, where known, ``null`` (the same attention metrics under
uniform attention), ``paper`` (what the paper reports) and ``seconds`` (training time of one cell).
``metrics``, ``null`` and ``paper`` map a key of ``METRICS`` to a number or an interval
``{mean, half_width, n}``. ``matched`` is what ``fasterqk.attention.matched_loss`` returns, or null.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.files import plain
from fasterqk.report.documents import load_documents, save_document

FOLDER = "comparisons"

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
    return save_document(out, FOLDER, document)


def load_comparisons(out: Path) -> list[dict[str, Any]]:
    """The comparisons of a results folder, checked, sorted by name."""
    documents = load_documents(out, FOLDER)
    for document in documents:
        check_comparison(document, repr(str(Path(out) / FOLDER / f"{document['name']}.json")))
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
