"""Claims: what somebody states, what the results say about it, and the verdict, one row each.

``lab.experiments`` computes the rows from results and saves them here; the page shows them after its answer.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasterqk.attention import Interval
from fasterqk.console import is_interval, mean_of, number_text
from fasterqk.errors import InputError
from fasterqk.files import plain
from fasterqk_lab.figures._documents import Document, save_document

# Verdicts, and how a count of them reads.
VERDICTS = {
    "holds": "hold",
    "holds in part": "hold in part",
    "does not hold": "do not hold",
    "not tested": "were not tested",
}


@dataclass(frozen=True)
class Claim:
    """One claim and what is known about it.

    ``where`` is its place in the paper (``Table 1``, ``Section 4``). ``evidence`` is a sentence or two with
    the numbers; for the verdict ``not tested`` it is the reason. ``effect`` is the difference that decides,
    at equal loss where that was measured, as an interval or a number, in ``unit``. ``null`` is what uniform
    attention or a random ranking would give; ``seeds`` counts the seeds behind the effect. ``experiment`` is
    the name under ``fasterqk-lab reproduce`` that gives the evidence: the page links to its chapter. ``link``
    is the place in the documentation, relative to ``docs``: ``results.md#hatexplain-two-layers``.
    """

    claim: str
    where: str
    verdict: str
    evidence: str
    effect: Interval | Mapping[str, Any] | float | None = None
    unit: str = ""
    null: float | None = None
    seeds: int | None = None
    experiment: str = ""
    link: str = ""

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            choices = ", ".join(VERDICTS)
            raise InputError(
                f"claim {self.claim!r:.60}: {self.verdict!r} is no verdict; choose from {choices}"
            )
        if not self.claim or not self.evidence:
            raise InputError(f"claim {self.claim!r:.60} needs a text and its evidence")

    @property
    def effect_text(self) -> str:
        """The effect with its sign, its interval and its unit, or nothing.

        >>> Claim("c", "Table 1", "holds", "e", effect={"mean": 0.26, "half_width": 0.05, "n": 5}).effect_text
        '+0.26 ± 0.05'
        """
        effect = plain(self.effect)
        mean = mean_of(effect)
        if mean is None:
            return ""
        return signed_text(effect) + (f" {self.unit}" if self.unit else "")


def signed_text(value: Any, digits: int = 2) -> str:
    """A difference with its sign, and its half width where it has one.

    >>> signed_text({"mean": -0.5, "half_width": 0.25, "n": 3}), signed_text(0.123)
    ('−0.50 ± 0.25', '+0.12')
    """
    mean = mean_of(value)
    if mean is None:
        return "–"
    text = number_text(mean, digits)
    sign = "+" if mean > 0 and float(f"{mean:.{digits}f}") else ""
    half_width = value.get("half_width") if is_interval(value) else None
    return f"{sign}{text}" + ("" if half_width is None else f" ± {number_text(half_width, digits)}")


def save_claims(out: Path, claims: Iterable[Claim], name: str = "paper", *, title: str) -> Path:
    """Write ``out/claims/NAME.json`` and return its path; the page shows the claims in this order.

    >>> rows = [Claim("Attention is sharper", "Table 1", "not tested", "No data.", experiment="table-main")]
    >>> save_claims(Path("out"), rows, title="The paper's claims")
    PosixPath('out/claims/paper.json')
    """
    return save_document(out, "claims", name, {"title": title, "claims": [plain(claim) for claim in claims]})


def read_claims(document: Document) -> list[Claim]:
    """The claims of a document that :func:`save_claims` wrote."""
    try:
        return [Claim(**claim) for claim in document["claims"]]
    except (KeyError, TypeError) as error:
        raise InputError(f"claims {document.get('name')!r} are damaged ({error}); make them again") from None


def count_verdicts(claims: Iterable[Claim]) -> str:
    """How many claims have which verdict, in one clause.

    >>> count_verdicts([Claim("a", "", "holds", "e"), Claim("b", "", "not tested", "e")])
    '1 holds, 1 was not tested'
    """
    counts = Counter(claim.verdict for claim in claims)
    singular = {"not tested": "was not tested"}
    return ", ".join(
        f"{counts[verdict]} {singular.get(verdict, verdict) if counts[verdict] == 1 else plural}"
        for verdict, plural in VERDICTS.items()
        if counts[verdict]
    )
