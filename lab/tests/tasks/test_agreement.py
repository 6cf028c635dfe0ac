import numpy as np

from fasterqk_lab.tasks import agreement, load_task
from fasterqk_lab.tasks import agreement as words

SINGULAR = set(words.NOUNS)
PLURAL = {f"{noun}s" for noun in words.NOUNS}


def test_a_few_hundred_different_words():
    task = load_task("agreement")
    assert len(set(task.vocabulary)) == task.vocabulary_size
    assert 200 <= task.vocabulary_size <= 500
    assert not SINGULAR & PLURAL


def test_the_relevant_token_is_the_subject_and_it_alone_has_the_label():
    task = load_task("agreement")
    for example in task.splits["test"]:
        sentence = [task.vocabulary[token] for token in example.tokens]
        (place,) = np.flatnonzero(example.relevance)
        subject = sentence[place]
        assert subject in (PLURAL if example.label else SINGULAR)
        # The first noun of the sentence is its subject.
        assert not any(word in SINGULAR | PLURAL for word in sentence[:place])
        other = SINGULAR if example.label else PLURAL
        assert example.groups["attractors"] == sum(word in other for word in sentence[place + 1 :])


def test_only_nouns_show_number():
    # The same words occur around singular and plural subjects, apart from the nouns themselves.
    task = load_task("agreement")
    train = task.splits["train"]
    around = [set(), set()]
    for example in train:
        around[example.label] |= {task.vocabulary[token] for token in example.tokens}
    assert around[0] == around[1]


def test_sizes_sample_and_splits_are_fixed():
    task = load_task("agreement")
    assert {name: len(split) for name, split in task.splits.items()} == agreement.COUNTS
    again = agreement.load("prefix", "", None)
    assert again.splits["test"].tokens.tolist() == task.splits["test"].tokens.tolist()
    sentences = [{tuple(example.tokens) for example in split} for split in task.splits.values()]
    assert not sentences[0] & sentences[2]
    assert not sentences[1] & sentences[2]


def test_guessing_from_the_most_frequent_number_of_nouns_fails_with_attractors():
    # A reader of all nouns alike is right without attractors and wrong with two of them.
    task = load_task("agreement")
    right = {0: [], 2: []}
    for example in task.splits["test"]:
        sentence = [task.vocabulary[token] for token in example.tokens]
        plural = sum(word in PLURAL for word in sentence)
        nouns = sum(word in SINGULAR | PLURAL for word in sentence)
        if example.groups["attractors"] in right:
            right[example.groups["attractors"]].append((2 * plural > nouns) == bool(example.label))
    assert all(right[0])
    assert np.mean(right[2]) < 0.5
