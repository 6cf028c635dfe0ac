"""Claims: what the paper states, one row each, with the verdict of the one rule."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from fasterqk.errors import InputError
from fasterqk_lab.compare import VERDICTS
from fasterqk_lab.figures._documents import Document, save_document


@dataclass(frozen=True)
class Claim:
    """One claim and what became of it.

    ``where`` is its place in the paper (``Table 1``). ``effect`` is the deciding effect as text, with the
    number of seeds; ``remark`` is one line. ``experiment`` is the name under ``fasterqk-lab reproduce`` that
    decides it: the page links to its chapter. ``group`` is the heading that it stands under.
    """

    claim: str
    where: str
    verdict: str
    effect: str = ""
    remark: str = ""
    experiment: str = ""
    group: str = ""

    def __post_init__(self) -> None:
        if not self.claim:
            raise InputError(f"a claim of {self.where!r} has no text")
        if self.verdict not in VERDICTS:
            choices = ", ".join(VERDICTS)
            raise InputError(
                f"claim {self.claim!r:.60}: {self.verdict!r} is not a verdict; choose from {choices}"
            )


def save_claims(out: Path, claims: Iterable[Claim], name: str = "paper", *, title: str) -> Path:
    """Write ``out/claims/NAME.json`` and return its path; the page shows the claims in this order.

    >>> save_claims(Path("out"), [Claim("Attention is sharper", "Table 1", "not run")], title="Claims")
    PosixPath('out/claims/paper.json')
    """
    return save_document(out, "claims", name, {"title": title, "claims": [asdict(claim) for claim in claims]})


def read_claims(document: Document) -> list[Claim]:
    """The claims of a document that :func:`save_claims` wrote."""
    try:
        return [Claim(**claim) for claim in document["claims"]]
    except (KeyError, TypeError) as error:
        raise InputError(f"claims {document.get('name')!r} are damaged ({error}); make them again") from None


def count_verdicts(claims: Iterable[Claim]) -> str:
    """How many claims have which verdict.

    >>> count_verdicts([Claim("a", "", "confirmed"), Claim("b", "", "not run"), Claim("c", "", "not run")])
    'confirmed 1, not run 2'
    """
    counts = Counter(claim.verdict for claim in claims)
    return ", ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
