import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasterqk.errors import InputError
from fasterqk_lab.tasks import TASKS, LabelledInstance, LabelledInstances, check_data, load_task, task_module


def test_every_task_offers_what_the_registry_promises(tmp_path):
    for name in TASKS:
        module = task_module(name)
        assert module.FORMS
        report = check_data(name, tmp_path)
        assert {"files", "missing"} <= set(report)


def test_a_task_is_read_once():
    assert load_task("agreement") is load_task("agreement", form="prefix")


def test_unknown_task_form_and_file_quote_the_input():
    with pytest.raises(InputError, match="unknown task 'imdb'; choose from hatexplain"):
        load_task("imdb")
    with pytest.raises(InputError, match="no form 'whole'; its forms are 'prefix'"):
        load_task("agreement", form="whole")
    with pytest.raises(InputError, match=r"'mine\.jsonl' belongs to task 'jsonl'"):
        load_task("agreement", file="mine.jsonl")


texts = st.lists(
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=9),
    min_size=1,
    max_size=8,
)


def collect(pairs):
    return LabelledInstances.collect(
        LabelledInstance(
            id=str(number),
            tokens=np.array([token for token, _ in text]),
            label=number % 3,
            relevance=np.array([weight for _, weight in text]) if number % 2 else None,
            groups={"size": len(text)},
        )
        for number, text in enumerate(pairs)
    )


@given(texts)
def test_what_goes_in_comes_out(pairs):
    examples = collect(pairs)
    assert len(examples) == len(pairs)
    for number, (text, example) in enumerate(zip(pairs, examples, strict=True)):
        assert example.id == str(number)
        assert example.label == number % 3
        assert example.tokens.tolist() == [token for token, _ in text]
        assert example.groups == {"size": len(text)}
        if number % 2:
            assert example.relevance.tolist() == [weight for _, weight in text]
        else:
            assert example.relevance is None


@given(texts, st.integers(1, 12))
def test_truncation_cuts_the_end_of_each(pairs, length):
    examples = collect(pairs)
    for whole, cut in zip(examples, examples.truncate(length), strict=True):
        assert cut.tokens.tolist() == whole.tokens[:length].tolist()
        if whole.relevance is not None:
            assert cut.relevance.tolist() == whole.relevance[:length].tolist()


@given(texts)
def test_padding_keeps_every_token_in_its_place(pairs):
    examples = collect(pairs)
    tokens, relevance = examples.padded(11, pad=0)
    for number, example in enumerate(examples):
        length = len(example.tokens)
        assert tokens[number, :length].tolist() == example.tokens.tolist()
        assert not tokens[number, length:].any()
        assert not relevance[number, length:].any()


def test_slices_and_negative_indices():
    examples = collect([[(1, 0.0)], [(2, 1.0)], [(3, 0.0)]])
    assert examples[-1].tokens.tolist() == [3]
    assert [example.tokens.tolist() for example in examples][1:] == [[2], [3]]
    with pytest.raises(IndexError):
        examples[3]
