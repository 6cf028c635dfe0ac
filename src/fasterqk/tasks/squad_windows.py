"""The part of a paragraph that a SQuAD prompt shows, and whether its edges give the answer away.

- ``whole``: the paragraph.
- ``centred``: 200 characters to either side of the answer, as in the released notebooks. It leaks: the
  answer stands 200 characters from each edge that is not the paragraph's own.
- ``random``, ``random-short``: a window of fixed width at a random offset.

Random windows do not leak. A window of N characters may begin anywhere such that it holds the answer, also
before the paragraph begins or so that it reaches over its end, where it shows less; words it would cut are
left out. An answer whose words take c characters is held by N - c + 1 windows wherever in the paragraph it
stands, and each is drawn with the same probability, so a window is equally probable under every answer of
that length that it holds: seeing the window says nothing about which of them it is. (Windows pushed back
inside the paragraph would say something: those at its beginning would mostly be those of early answers.)
"""

import hashlib

from fasterqk.tasks.squad_paragraphs import Asked

CENTRED_MARGIN = 200
RANDOM_WIDTHS = {"random": 400, "random-short": 140}
WINDOWS = (*RANDOM_WIDTHS, "whole", "centred")
TOO_LONG = "an answer longer than the window"


def window(asked: Asked, kind: str) -> tuple[int, int] | None:
    """First and last (exclusive) character of the context that is shown; None when the answer is too long."""
    if kind == "whole":
        return 0, len(asked.context)
    if kind == "centred":
        return max(0, asked.start - CENTRED_MARGIN), min(len(asked.context), asked.stop + CENTRED_MARGIN)
    return random_window(asked.context, asked.start, asked.stop, RANDOM_WIDTHS[kind], uniform(asked.id))


def uniform(name: str) -> float:
    """A number in [0, 1) that only the name decides, the same on every machine.

    >>> uniform("a") == uniform("a") != uniform("b")
    True
    """
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def random_window(context: str, start: int, stop: int, width: int, draw: float) -> tuple[int, int] | None:
    """The window of ``width`` characters round ``context[start:stop]`` that ``draw`` in [0, 1) chooses.

    It begins and ends with a whole word.

    >>> text = "one two three four five"
    >>> [text[slice(*random_window(text, 8, 13, 10, draw))] for draw in (0, .5, .9)]
    ['two three', 'three', 'three four']
    """
    first, last = start, stop
    while first > 0 and not context[first - 1].isspace():
        first -= 1
    while last < len(context) and not context[last].isspace():
        last += 1
    offsets = width - (last - first) + 1
    if offsets < 1:
        return None
    left = last - width + int(draw * offsets)
    right = left + width
    left, right = max(left, 0), min(right, len(context))
    # A word that is cut is left out; the answer's own words are inside and stay.
    while left < first and (context[left].isspace() or (left > 0 and not context[left - 1].isspace())):
        left += 1
    while right > last and (
        context[right - 1].isspace() or (right < len(context) and not context[right].isspace())
    ):
        right -= 1
    return left, right
