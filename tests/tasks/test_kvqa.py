import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk.tasks import kvqa
from fasterqk.tasks.answers import load_answer_task
from fasterqk.tasks.kinds import ALL_TASKS, any_task_module, load_any_task


@pytest.fixture(scope="module")
def task():
    return load_answer_task("kvqa")


@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_every_answer_has_the_values_behind_the_asked_keys(task, name):
    split, first = task.splits[name], kvqa.FIRST_PAIR
    different = set()
    for index in range(0, len(split), 97):
        words = kvqa.as_text(split.prompts[index]).split()
        assert (words[0], words[first - 1], words[-1]) == ("Q:", "C:", "A:")
        asked, places = words[1 : first - 1], range(first + 1, len(words) - 1, 2)
        assert (len(asked), len(places)) == (kvqa.ASKED, kvqa.PAIRS)
        pairs = {words[place - 1]: words[place] for place in places}
        assert all(pairs[words[place - 1]] == words[place] for place in places)
        assert len(set(pairs.values())) == len(pairs)
        different.add(len(pairs))
        answer = " ".join(pairs[key] for key in asked)
        assert task.text(split.answers[index][:-1]) == answer
        assert split.answers[index][-1] == task.end
        assert split.gold[index] == (answer,)
        relevant = [place for place in places if words[place - 1] in asked]
        assert np.flatnonzero(split.relevance[index]).tolist() == relevant
    assert different == set(kvqa.DISTINCT[name])
    assert kvqa.DISTINCT["test"] == kvqa.DISTINCT["validation"] == (kvqa.PAIRS,)
    assert kvqa.PAIRS >= 16


def test_pairs_are_fresh_and_every_place_and_value_is_asked_for(task):
    train = task.splits["train"]
    prompts = {tuple(prompt) for split in task.splits.values() for prompt in split.prompts}
    assert len(prompts) > 0.99 * sum(map(len, task.splits.values()))
    measured = [tuple(prompt) for name in ("validation", "test") for prompt in task.splits[name].prompts]
    assert not {tuple(prompt) for prompt in train.prompts} & set(measured)
    places = np.stack(train.relevance).sum(0)[kvqa.FIRST_PAIR + 1 : -1 : 2]
    assert places.min() > 0.9 * places.max()
    values = np.bincount(np.stack(train.answers)[:, :-1].ravel())[kvqa.FIRST_VALUE :]
    assert len(values) == kvqa.VALUES >= 64
    assert values.min() > 0.75 * values.mean()


def test_the_sample_is_fixed(task):
    again = kvqa.load_answers(kvqa.FORMS[0], None)
    assert all(
        np.array_equal(one, two)
        for one, two in zip(task.splits["test"].prompts, again.splits["test"].prompts, strict=True)
    )
    assert kvqa.check(None)["counts"] == {name: len(split) for name, split in task.splits.items()}


def test_tasks_of_both_kinds_are_found_by_name():
    assert {"agreement", "kvqa", "squad"} <= set(ALL_TASKS)
    assert any_task_module("kvqa") is kvqa
    assert load_any_task("kvqa") is load_answer_task("kvqa")
    assert load_any_task("agreement").classes == ("singular", "plural")
    with pytest.raises(InputError, match=r"unknown task 'imdb'; choose from hatexplain.*squad, kvqa"):
        load_any_task("imdb")
    with pytest.raises(InputError, match=r"'mine.jsonl' belongs to task 'jsonl'"):
        load_any_task("kvqa", file="mine.jsonl")
    with pytest.raises(InputError, match="has no form 'whole'"):
        load_any_task("kvqa", form="whole")
