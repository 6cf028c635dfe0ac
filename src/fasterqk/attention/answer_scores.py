"""How well a generated answer agrees with the accepted ones: SQuAD's official exact match and F1."""

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalized(answer: str) -> str:
    """An answer as SQuAD compares it: lower case, without punctuation (of ASCII), articles, extra blanks.

    In this order, so that punctuation inside a word joins its parts and may make an article.

    >>> normalized("The  U.S. of A. (1776)")
    'us of 1776'
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """1 when the normalised prediction is one of the accepted answers, else 0.

    >>> exact_match("the Normans.", ["Normans", "Norman people"])
    1.0
    """
    return float(normalized(prediction) in _accepted(golds))


def token_f1(prediction: str, golds: Sequence[str]) -> float:
    """F1 of the words of the prediction, in 0..1, against the accepted answer where it is highest.

    A prediction of no words agrees only with an accepted answer of none.

    >>> round(token_f1("in the year 1066", ["1066", "year 1066"]), 4)
    0.8
    """
    predicted = normalized(prediction).split()
    return max(_f1(predicted, gold.split()) for gold in _accepted(golds))


def _accepted(golds: Sequence[str]) -> list[str]:
    """Normalised answers without empty ones; when there is nothing else, the empty answer is right."""
    return [gold for gold in map(normalized, golds) if gold] or [""]


def _f1(predicted: list[str], gold: list[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    common = (Counter(predicted) & Counter(gold)).total()
    return 2 * common / (len(predicted) + len(gold))
