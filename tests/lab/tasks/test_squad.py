import json
import lzma

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk.lab.experiments.table_squad import table_squad
from fasterqk.lab.tasks import load_task
from fasterqk.lab.tasks.squad import (
    ANSWERABLE,
    FORMS,
    FULL,
    GUESSED,
    NOT_IN_CONTEXT,
    TOO_LONG,
    check,
    fitting,
)
from fasterqk.lab.training import train

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
    report = check(folder)
    assert report["note"].startswith(
        "left out: 2 with an answer that is not in its context, 1 with an answer"
    )
    assert report["counts"] == {"train": 5, "validation": 1, "test": 3}
    assert report["expected"] is False


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
    report = check(folder)
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
    assert "note" not in check(folder)


def test_questions_that_do_not_fit_are_counted(folder):
    questions = load_task("squad", form="whole", data_dir=folder).splits["train"]
    longest = int(questions.lengths.max())
    assert fitting(questions, longest)[1] == 0
    kept, left = fitting(questions, longest - 1)
    assert left == np.count_nonzero(questions.lengths == longest)
    assert len(kept) == len(questions) - left
    assert all(kept.lengths < longest)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1, 2], r"is not SQuAD: it has no list 'data'; download it from https://rajpurkar"),
        ({"data": {}}, r"is not SQuAD: it has no list 'data'"),
        ({"data": [3]}, r"article 1 is not SQuAD: it has no text 'title'"),
        ({"data": [{"title": "A"}]}, r"article 1 is not SQuAD: it has no list 'paragraphs'"),
        (
            {"data": [{"title": "A", "paragraphs": [{"qas": []}]}]},
            r"article 1 is not SQuAD: it has no text 'context'",
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
            r"question 'a' is not SQuAD: it has no whole number 'answer_start'",
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
    report = check(empty)
    assert len(report["missing"]) == 3
    assert "counts" not in report
    (folder / "squad" / "dev-v2.0.json").unlink()
    with pytest.raises(InputError, match=r"no squad/dev-v2.0.json"):
        load_task("squad", data_dir=folder)


def test_unknown_form_lists_the_known():
    with pytest.raises(
        InputError, match=r"no form 'middle'; its forms are 'random', 'random-short', 'whole'"
    ):
        load_task("squad", form="middle")


def test_published_counts_are_recognised(folder, monkeypatch):
    monkeypatch.setitem(ANSWERABLE, "train-v1.1", 6)
    monkeypatch.setitem(ANSWERABLE, "dev-v2.0", 2)
    assert check(folder)["expected"] is True


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
