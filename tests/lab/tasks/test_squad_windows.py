"""Windows round an answer: what they show, and that a random one says nothing about where the answer is."""

from collections import Counter, defaultdict
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fasterqk.attention._scores import token_f1
from fasterqk.lab.tasks import data_folder
from fasterqk.lab.tasks.squad import (
    CENTRED_MARGIN,
    RANDOM_WIDTHS,
    WINDOWS,
    Asked,
    find_squad,
    random_window,
    read_squad,
    uniform,
    window,
)

WORDS = st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=9)
BLANKS = st.sampled_from([" ", "  ", "\n", " \xa0"])


def generated_questions(count=1500):
    """Made-up paragraphs of distinct words with a few of them, anywhere, as the answer."""
    draw = Random(5)
    questions = []
    for number in range(count):
        words = [f"w{i}{'x' * draw.randrange(8)}" for i in range(draw.randrange(30, 200))]
        first = draw.randrange(len(words) - 4)
        answer = " ".join(words[first : first + draw.randrange(1, 5)])
        context = " ".join(words)
        start = context.index(answer)
        questions.append(Asked(f"q{number}", "", "", context, start, start + len(answer), (answer,)))
    return questions


@pytest.fixture(scope="module")
def questions():
    """SQuAD's own questions where its dev file is at hand, else generated ones."""
    path = find_squad(data_folder(), "dev")
    return generated_questions() if path is None else read_squad(path, Counter())[::3]


@settings(deadline=None)
@given(WORDS, BLANKS, st.integers(0, 40), st.floats(0, 1, exclude_max=True), st.data())
def test_a_random_window_has_whole_words_and_the_answer(words, blank, width, draw, data):
    context = blank.join(words)
    start = data.draw(st.integers(0, len(context) - 1))
    stop = data.draw(st.integers(start + 1, len(context)))
    cut = random_window(context, start, stop, width, draw)
    if cut is None:
        assert width < len(context)
        return
    left, right = cut
    assert 0 <= left <= start < stop <= right <= len(context)
    assert right - left <= width
    # Nothing but white space is next to the window, unless the answer itself is white space there.
    if not context[start:stop].isspace():
        assert left == 0 or context[left - 1].isspace() or left == start
        assert right == len(context) or context[right].isspace() or right == stop
    shown = context[left:right].split()
    assert any(words[i : i + len(shown)] == shown for i in range(len(words) + 1))


@settings(deadline=None)
@given(WORDS, st.integers(1, 25))
@example(["aa", "bbb", "a", "bb", "a"], 6)
@example(["a"], 20)
def test_seeing_a_window_says_nothing_about_the_answers_place(words, width):
    """Every window is as probable under each answer it holds, among answers of the same length."""
    context = " ".join(words)
    starts = np.cumsum([0] + [len(word) + 1 for word in words])
    probabilities = defaultdict(dict)
    for first in range(len(words)):
        for last in range(first, len(words)):
            start, stop = int(starts[first]), int(starts[last + 1]) - 1
            offsets = width - (stop - start) + 1
            seen = Counter(
                random_window(context, start, stop, width, (offset + 0.5) / offsets)
                for offset in range(offsets)
            )
            for cut, times in seen.items():
                probabilities[cut, stop - start][start, stop] = times
    for (cut, length), times in probabilities.items():
        assert len(set(times.values())) == 1
        held = {
            (int(start), int(start) + length)
            for start in starts[:-1]
            if cut[0] <= start and start + length + 1 in starts and start + length <= cut[1]
        }
        assert set(times) == held


def test_the_draw_is_uniform_and_the_name_alone_decides_it():
    draws = np.array([uniform(f"question {number}") for number in range(4000)])
    # Kolmogorov's distance; 1.63 / sqrt(n) would be exceeded once in a hundred sets of names.
    ranks = np.arange(1, 4001) / 4000
    assert np.abs(np.sort(draws) - ranks).max() < 1.63 / np.sqrt(4000)
    assert uniform("question 1") == draws[1]


def places(questions, kind):
    """Where the answer begins in windows that no edge of the paragraph clips: 0 leftmost, 1 rightmost."""
    found = []
    for asked in questions:
        cut = window(asked, kind)
        if cut is not None and cut[0] > 0 and cut[1] < len(asked.context):
            room = cut[1] - cut[0] - (asked.stop - asked.start)
            found.append((asked.start - cut[0]) / room if room else 0.5)
    return np.array(found)


@pytest.mark.parametrize("kind", RANDOM_WIDTHS)
def test_answers_stand_anywhere_in_random_windows(questions, kind):
    found = places(questions, kind)
    assert len(found) > 300
    shares = np.histogram(found, 5, (0, 1))[0] / len(found)
    # Not exactly a fifth each: words are whole, and people ask about some places more than others.
    assert shares.min() > 0.12
    assert shares.max() < 0.28
    assert np.abs(places(questions, "centred") - 0.5).max() < 1e-9


def words_from(text, place, count):
    """``count`` words from the one that holds a character."""
    place = min(max(place, 0), len(text) - 1)
    while place > 0 and not text[place - 1].isspace():
        place -= 1
    return " ".join(text[place:].split()[:count])


def blind_rules():
    """Answers from the shape of the window alone: between two margins, or some words at some place."""
    rules = [lambda text, m=margin: text[m:-m] for margin in (CENTRED_MARGIN, 60, 20)]
    for count in (1, 2, 4):
        rules += [lambda text, n=count, d=d: words_from(text, d, n) for d in range(0, 240, 40)]
        rules += [lambda text, n=count, d=d: words_from(text, len(text) - d, n) for d in range(0, 240, 40)]
        rules += [lambda text, n=count, p=p: words_from(text, int(p * len(text)), n) for p in (0.2, 0.5, 0.8)]
    return rules


def best_blind_f1(questions, kind):
    shown = [(asked, window(asked, kind)) for asked in questions]
    texts = [(asked.context[slice(*cut)], asked.gold) for asked, cut in shown if cut is not None]
    return max(np.mean([token_f1(rule(text), gold) for text, gold in texts]) for rule in blind_rules())


def test_who_reads_no_question_answers_from_centred_windows_only(questions):
    sample = questions[::4]
    assert best_blind_f1(sample, "centred") > 0.35
    assert best_blind_f1(sample, "random") < 0.15


def test_each_kind_shows_what_it_says():
    context = "x" * 300 + " river " + "y" * 300
    asked = Asked("a", "", "", context, 301, 306, ("river",))
    assert window(asked, "whole") == (0, len(context))
    assert window(asked, "centred") == (101, 506)
    # The words beside the answer are longer than the window.
    assert window(asked, "random-short") == (301, 306)
    assert window(Asked("a", "", "", "x" * 900, 0, 900, ("x" * 900,)), "random") is None
    for kind in WINDOWS:
        assert window(asked, kind) == window(asked, kind)
