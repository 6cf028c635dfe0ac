"""Definitions: every abbreviation of a page is explained where it occurs first."""

import re
from collections.abc import Iterable
from typing import Any

from fasterqk.attention.scores import SCORES

_LETTERS = "the query-key weights are {}, the output-value weights {}"
_FACTORIZED, _COLLAPSED = "two matrices (factorized)", "one matrix (collapsed)"
TERMS = {
    "MRTA": "mean relevant-token attention: the share of a model's attention, at the position that makes the"
    " prediction, that falls on relevant words; mean over instances",
    "AC": "attention confidence: percent of instances with at least half of the attention on relevant words",
    "ACMC": "percent of instances with at least half of the attention on relevant words and a probability of"
    " the right answer of at least one half",
    "DTAP": "instances counted by attention on relevant words (across) and by probability of the right answer"
    " (up)",
    "AOPC": "mean over several percentages k of tokens that are kept or removed",
    "AUPRC": "area under the precision-recall curve: are the most attended words those that people marked?",
    "IOU": "intersection over union of attended and marked words",
    "sufficiency": f"{SCORES['sufficiency'].description}; lower is better",
    "comprehensiveness": f"{SCORES['comprehensiveness'].description}; higher is better",
    "FAFO": _LETTERS.format(_FACTORIZED, _FACTORIZED),
    "FACO": _LETTERS.format(_FACTORIZED, _COLLAPSED),
    "CAFO": _LETTERS.format(_COLLAPSED, _FACTORIZED),
    "CACO": _LETTERS.format(_COLLAPSED, _COLLAPSED),
    "QK": "query-key circuit: the weights that decide where a model attends",
    "OV": "output-value circuit: the weights that decide what is read there",
    "null": "the score of uniform attention, or of a random ranking of the words",
    "baseline": "the arm in which all weights have the same learning rate",
    "rollout": "attention multiplied through all layers, from the last to the words",
}
_TERM = re.compile(rf"(?<![\w-])({'|'.join(TERMS)})(?![\w-])")
# Terms that are marked wherever they stand; the others are in the list of words only.
_MARKED = {term for term in TERMS if term.isupper() and len(term) > 1} - {"QK", "OV"}


def terms_in(texts: Iterable[Any]) -> list[str]:
    """The terms with a definition that occur in ``texts``, in the order of the list."""
    present = {term for text in texts if isinstance(text, str) for term in _TERM.findall(text)}
    return [term for term in TERMS if term in present]


class Definitions:
    """Defines each term where it occurs first on a page; marks it wherever it stands."""

    def __init__(self) -> None:
        self._defined: set[str] = set()

    def first(self, *texts: Any) -> list[tuple[str, str]]:
        """Terms of ``texts`` that the page has not defined so far, each with its definition."""
        new = [term for term in terms_in(texts) if term in _MARKED and term not in self._defined]
        self._defined |= set(new)
        return [(term, TERMS[term]) for term in new]

    @staticmethod
    def mark(text: Any) -> Any:
        """``text``, escaped, with every abbreviation that has a definition as an ``abbr`` element."""
        from markupsafe import Markup, escape

        def mark(match: re.Match[str]) -> str:
            term = match[1]
            return f'<abbr title="{escape(TERMS[term])}">{term}</abbr>' if term in _MARKED else term

        return Markup(_TERM.sub(mark, str(escape(text))))
