from math import comb

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk_lab.tasks import TASKS, kvqa, load_task, task_module


@pytest.fixture(scope="module")
def task():
    return load_task("kvqa")


def test_every_answer_repeats_the_asked_pairs(task):
    for split in task.splits.values():
        for index in range(0, len(split), 97):
            words = kvqa.as_text(split.prompts[index]).split()
            first = kvqa.FIRST_PAIR
            assert (words[0], words[first - 1], words[-1]) == ("Q:", "C:", "A:")
            asked = words[1 : first - 1]
            assert len(set(asked)) == kvqa.ASKED
            pairs = dict(zip(words[first:-1:2], words[first + 1 : -1 : 2], strict=True))
            assert len(pairs) == kvqa.PAIRS >= 16
            assert len(set(pairs.values())) == kvqa.PAIRS
            assert list(pairs) == sorted(pairs)
            answer = " ".join(f"{key} {pairs[key]}" for key in asked)
            assert task.text(split.answers[index][:-1]) == answer
            assert split.answers[index][-1] == task.end
            assert split.gold[index] == (answer,)
            held = [int(place) for place in np.flatnonzero(split.relevance[index])]
            assert min(held) >= first
            assert sorted(words[place] for place in held) == sorted(answer.split())


def test_pairs_are_fresh_and_every_place_and_value_is_asked_for(task):
    train = task.splits["train"]
    prompts = {tuple(prompt) for split in task.splits.values() for prompt in split.prompts}
    repeated = sum(map(len, task.splits.values())) - len(prompts)
    assert repeated == 0
    counts = np.sum(train.relevance, axis=0)[kvqa.FIRST_PAIR :: 2][: kvqa.PAIRS]
    assert counts.min() > 0.9 * kvqa.ASKED * len(train) / 16
    values = np.bincount([answer[1] for answer in train.answers])[kvqa.FIRST_VALUE :]
    assert len(values) == kvqa.VALUES >= 64
    assert values.min() > 0.75 * len(train) / 64


def test_where_a_key_stands_among_all_keys_does_not_answer_for_it(task):
    train, test = task.splits["train"], task.splits["test"]
    seen = np.zeros((kvqa.KEYS, kvqa.PAIRS))
    for prompt in train.prompts:
        np.add.at(seen, (_context_keys(prompt), np.arange(kvqa.PAIRS)), 1)
    usual = seen.argmax(1)
    found = []
    for prompt in test.prompts:
        asked = prompt[1 : kvqa.ASKED + 1] - kvqa.FIRST_KEY
        found.append(_context_keys(prompt)[usual[asked]] == asked)
    # The probability that a key which is present has so many others before it.
    keys, pairs = kvqa.KEYS, kvqa.PAIRS
    placed = [
        [comb(key, place) * comb(keys - 1 - key, pairs - 1 - place) for place in range(pairs)]
        for key in range(keys)
    ]
    blind = np.max(placed, axis=1).mean() / comb(keys - 1, pairs - 1)
    assert round(blind, 2) == 0.38
    assert np.mean(found) == pytest.approx(blind, abs=0.02)
    assert np.mean(np.all(found, axis=1)) < 0.05


def _context_keys(prompt):
    return prompt[kvqa.FIRST_PAIR : -1 : 2] - kvqa.FIRST_KEY


def test_the_sample_is_fixed(task):
    again = kvqa.load(kvqa.FORMS[0], "", None)
    assert all(
        np.array_equal(one, two)
        for one, two in zip(task.splits["test"].prompts, again.splits["test"].prompts, strict=True)
    )
    assert {name: len(split) for name, split in task.splits.items()} == kvqa.COUNTS


def test_tasks_of_both_kinds_are_found_by_name():
    assert {"agreement", "kvqa", "squad"} <= set(TASKS)
    assert task_module("kvqa") is kvqa
    assert load_task("kvqa") is load_task("kvqa")
    assert load_task("agreement").classes == ("singular", "plural")
    with pytest.raises(InputError, match=r"unknown task 'imdb'; choose from hatexplain.*squad, kvqa"):
        load_task("imdb")
    with pytest.raises(InputError, match=r"'mine.jsonl' belongs to task 'jsonl'"):
        load_task("kvqa", file="mine.jsonl")
    with pytest.raises(InputError, match="has no form 'whole'"):
        load_task("kvqa", form="whole")
