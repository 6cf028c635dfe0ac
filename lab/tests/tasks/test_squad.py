import json
import lzma
from collections import Counter, defaultdict
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fasterqk.errors import InputError
from fasterqk_lab.experiments.table_main import table_squad
from fasterqk_lab.tasks import check_data, data_folder, load_task
from fasterqk_lab.tasks.squad import (
    CENTRED_MARGIN,
    FORMS,
    FULL,
    GUESSED,
    NARROWEST,
    NOT_IN_CONTEXT,
    RANDOM_WIDTHS,
    TOO_LONG,
    WINDOWS,
    SquadQuestion,
    random_window,
    read_squad,
    require_squad,
    uniform,
    window,
)
from fasterqk_lab.training import train
from fasterqk_lab.training._batches import fitting
from fasterqk_lab.training._generation import token_f1

RIVERS = ["Amber", "Birch", "Copper", "Dove", "Elm", "Falcon"]
MORE = " and flows on past mills and orchards and a bridge" * 12


def question(identity, text, *answers):
    """A record of the official schema; an answer is its text, its start and what else it carries."""
    return {
        "id": identity,
        "question": text,
        "answers": [{"text": answer, "answer_start": start, **more} for answer, start, more in answers],
    }


def article(name, *extra):
    context = f"The river {name} rises in the hills near {name}ton{MORE}."
    start = context.index("the hills")
    asked = question(f"{name}-1", f" Where does the river {name} rise?", ("the hills", start, {}))
    return {"title": name, "paragraphs": [{"context": context, "qas": [asked, *extra]}]}


def write(folder, name, articles, place="squad"):
    path = folder / place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps({"version": "made up", "data": articles}).encode()
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    return path


@pytest.fixture
def folder(tmp_path, write_byte_pairs):
    """A data folder with made-up articles in SQuAD's files."""
    write_byte_pairs(tmp_path)
    write(tmp_path, "train-v1.1.json.xz", [article(name) for name in RIVERS])
    several = question("both", "Which?", ("Gull", 10, {}), ("river Gull", 4, {}))
    nowhere = {**question("never", "Why?"), "is_impossible": True, "plausible_answers": []}
    write(tmp_path, "dev-v2.0.json", [article("Gull", several, nowhere)])
    return tmp_path


def shown(task, ids):
    return "".join(task.vocabulary[token] for token in ids)


def test_prompt_answer_and_relevance(folder):
    task = load_task("squad", form="whole", data_dir=folder)
    assert {name: len(own) for name, own in task.splits.items()} == {"train": 5, "validation": 1, "test": 2}
    test = task.splits["test"]
    assert test.ids == ("Gull-1", "both")
    context = f"The river Gull rises in the hills near Gullton{MORE}."
    assert shown(task, test.prompts[0]) == f"Q: Where does the river Gull rise? C: {context} A:"
    assert test.answers[0][-1] == task.end
    assert shown(task, test.answers[0][:-1]) == " the hills"
    assert task.text(test.answers[0][:-1]) == "the hills"
    assert shown(task, test.prompts[0][test.relevance[0] > 0]) == " the hills"
    assert test.gold == (("the hills",), ("Gull", "river Gull"))
    assert shown(task, test.prompts[1][test.relevance[1] > 0]) == "Gull"
    assert task.skipped == {}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_answer_and_counts_its_tokens_from_zero(folder, form):
    task = load_task("squad", form=form, data_dir=folder)
    used = set()
    for questions in task.splits.values():
        for prompt, answer, relevance in zip(
            questions.prompts, questions.answers, questions.relevance, strict=True
        ):
            assert len(prompt) == len(relevance)
            # A blank that is a token of its own is not part of the answer in the context.
            assert shown(task, prompt[relevance > 0]).strip() == task.text(answer[:-1])
            assert shown(task, answer).startswith(" ")
            assert shown(task, prompt).startswith("Q: W")
            assert shown(task, prompt).endswith(" A:")
            used |= {*prompt.tolist(), *answer.tolist()}
    full = 256 + 11 + 1
    assert used <= set(range(task.vocabulary_size))
    assert task.vocabulary_size == (full if form.endswith(FULL) else len(used))
    assert task.vocabulary[task.end] == "<|endoftext|>"
    assert task.vectors is None


def test_both_vocabularies_show_the_same(folder):
    reduced, full = (load_task("squad", form=f"random{end}", data_dir=folder) for end in ("", FULL))
    for name, questions in reduced.splits.items():
        for mine, other in zip(questions.prompts, full.splits[name].prompts, strict=True):
            assert shown(reduced, mine) == shown(full, other)


def test_validation_is_from_other_articles_whatever_their_order(folder):
    task = load_task("squad", data_dir=folder)
    (held_out,) = task.splits["validation"].ids
    assert held_out not in task.splits["train"].ids
    other = folder / "other"
    write(other, "train-v1.1.json", [article(name) for name in reversed(RIVERS)])
    write(other, "dev-v2.0.json", [article("Gull")])
    (folder / "tokenizers").rename(other / "tokenizers")
    assert load_task("squad", data_dir=other).splits["validation"].ids == (held_out,)


def test_what_cannot_be_used_is_counted_skipped_and_said(folder):
    long = article("Heron")
    context = long["paragraphs"][0]["context"]
    long["paragraphs"][0]["qas"] = [
        question("moved", "?", ("the hills", 3, {})),
        question("negative", "?", ("the hills", -3, {})),
        question("guess", "?", ("the hills", context.index("the hills"), {"n_occurrences": 2})),
        question("second", "?", ("past", 0, {}), ("near", context.index("near"), {})),
        question("long", "?", (context[:-1], 0, {})),
    ]
    write(folder, "dev-v2.0.json", [article("Gull"), long])
    task = load_task("squad", form="random", data_dir=folder)
    assert task.skipped == {NOT_IN_CONTEXT: 2, GUESSED: 1, TOO_LONG: 1}
    assert task.splits["test"].ids == ("Gull-1", "second")
    # Its first answer is accepted, but the second is the one that is found.
    assert task.splits["test"].gold[1] == ("past", "near")
    assert task.text(task.splits["test"].answers[1][:-1]) == "near"
    report = check_data("squad", folder)
    assert "left out: 2 with an answer that is not in its context, 1 with an answer" in report["note"]
    assert report["counts"] == {"train": 5, "validation": 1, "test": 2}


def test_blanks_round_an_answer_are_not_the_answer(folder):
    padded = article("Heron")
    start = padded["paragraphs"][0]["context"].index(" the hills ")
    padded["paragraphs"][0]["qas"] = [question("padded", "Where? ", (" the hills ", start, {}))]
    write(folder, "dev-v2.0.json", [padded])
    task = load_task("squad", form="whole", data_dir=folder)
    test = task.splits["test"]
    assert shown(task, test.prompts[0]).startswith("Q: Where? C: The")
    assert shown(task, test.prompts[0][test.relevance[0] > 0]) == " the hills"
    assert test.gold == (("the hills",),)


def test_files_are_named_with_their_checksum_and_version_two_goes_first(folder):
    task = load_task("squad", data_dir=folder)
    assert set(task.files) == {"train-v1.1.json.xz", "dev-v2.0.json", "encoder.json", "vocab.bpe"}
    assert all(len(digest) == 64 for digest in task.files.values())
    path = write(folder, "train-v2.0.json", [article(name) for name in RIVERS], place="")
    report = check_data("squad", folder)
    assert str(path) in report["files"]
    assert not any("train-v1.1" in name for name in report["files"])


def test_word_vectors_are_those_of_the_tokens_that_occur(folder):
    (folder / "glove").mkdir()
    (folder / "glove" / "glove.6B.100d.txt").write_text("river 1 2\nthe 3 4\nunused 5 6\n")
    task = load_task("squad", data_dir=folder)
    assert task.vectors.shape == (task.vocabulary_size, 2)
    assert task.vectors[task.vocabulary.index(" river")].tolist() == [1, 2]
    assert task.vectors[task.vocabulary.index(" the")].tolist() == [3, 4]
    assert np.isnan(task.vectors[task.end]).all()
    assert "glove.6B.100d.txt" in task.files
    assert "note" not in check_data("squad", folder)


def test_questions_that_do_not_fit_are_counted(folder):
    questions = load_task("squad", form="whole", data_dir=folder).splits["train"]
    longest = int(questions.lengths.max())
    assert len(fitting(questions, longest, "train")) == len(questions)
    kept = fitting(questions, longest - 1, "train")
    assert len(questions) - len(kept) == np.count_nonzero(questions.lengths == longest)
    assert all(kept.lengths < longest)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1, 2], r"json' has no list 'data'; download it again"),
        ({"data": {}}, r"has no list 'data'"),
        ({"data": [3]}, r"article 1 has no text 'title'"),
        ({"data": [{"title": "A"}]}, r"article 1 has no list 'paragraphs'"),
        (
            {"data": [{"title": "A", "paragraphs": [{"qas": []}]}]},
            r"article 1 has no text 'context'",
        ),
        (
            {
                "data": [
                    {
                        "title": "A",
                        "paragraphs": [{"context": "x", "qas": [question("a", "?", ("x", "0", {}))]}],
                    }
                ]
            },
            r"question 'a' has no whole number 'answer_start'",
        ),
        ({"data": []}, r"has no usable question for the train split$"),
    ],
)
def test_a_file_that_is_not_squad_is_one_line(folder, document, message):
    (folder / "squad" / "train-v2.0.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=message) as error:
        load_task("squad", data_dir=folder)
    assert "\n" not in str(error.value)
    assert "train-v2.0.json'" in str(error.value)


def test_a_truncated_archive_is_one_line(folder):
    path = folder / "squad" / "train-v1.1.json.xz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"train-v1.1.json.xz' is truncated; download it again"):
        load_task("squad", data_dir=folder)


def test_missing_files_say_where_and_what(tmp_path, folder):
    empty = tmp_path / "empty"
    line = r"no squad/train-v2.0.json or squad/train-v1.1.json in the data folder .*empty'.*SQuAD-explorer/"
    with pytest.raises(InputError, match=line):
        load_task("squad", data_dir=empty)
    report = check_data("squad", empty)
    assert len(report["missing"]) == 3
    assert report["note"].endswith("embeddings start at random")
    assert "counts" not in report
    (folder / "squad" / "dev-v2.0.json").unlink()
    with pytest.raises(InputError, match=r"no squad/dev-v2.0.json"):
        load_task("squad", data_dir=folder)


def test_unknown_form_lists_the_known():
    with pytest.raises(
        InputError, match=r"no form 'middle'; its forms are 'random', 'random-short', 'random-mixed'"
    ):
        load_task("squad", form="middle")


def test_the_tiny_size_is_trained_and_measured_on_the_papers_scale(folder):
    config = table_squad("tiny")["paper"].arms["faster_qk"].replace(context=256, epochs=1)
    result = train(config, data_dir=folder)
    assert result.task == "squad"
    test = result.test
    assert test["dtap_edges"] == [0, 0.05, 0.1, 0.5, 1]
    high = np.array(test["dtap"])[:, test["dtap_edges"].index(0.1) :].sum()
    assert test["ac"] == pytest.approx(high)
    assert np.sum(test["dtap"]) == pytest.approx(100)
    with pytest.raises(InputError, match="no train question fits a context of 16 tokens"):
        train(config.replace(context=16), data_dir=folder)


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
        questions.append(SquadQuestion(f"q{number}", "", "", context, start, start + len(answer), (answer,)))
    return questions


@pytest.fixture(scope="module")
def questions():
    """SQuAD's own questions where its dev file is at hand, else generated ones."""
    path = require_squad(data_folder(), "dev")
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
    asked = SquadQuestion("a", "", "", context, 301, 306, ("river",))
    assert window(asked, "whole") == (0, len(context))
    assert window(asked, "centred") == (101, 506)
    # The words beside the answer are longer than the window.
    assert window(asked, "random-short") == (301, 306)
    assert window(SquadQuestion("a", "", "", "x" * 900, 0, 900, ("x" * 900,)), "random") is None
    for kind in WINDOWS:
        assert window(asked, kind) == window(asked, kind)


def test_mixed_windows_have_every_width_and_hold_the_answer(questions):
    cuts = [(asked, window(asked, "random-mixed", NARROWEST)) for asked in questions]
    shown = [(asked, *cut) for asked, cut in cuts if cut is not None]
    assert all(left <= asked.start and asked.stop <= right for asked, left, right in shown)
    widths = np.array([right - left for _, left, right in shown])
    assert widths.max() <= RANDOM_WIDTHS["random-mixed"]
    # Words that would be cut are left out, so that windows are some characters narrower than drawn.
    assert np.histogram(widths, 4, (20, 140))[0].min() > len(widths) / 8
    # What is tested is as wide as ever.
    assert [window(asked, "random-mixed") for asked, *_ in shown] == [
        window(asked, "random-short") for asked, *_ in shown
    ]
