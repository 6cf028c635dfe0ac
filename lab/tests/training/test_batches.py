import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fasterqk.errors import InputError
from fasterqk_lab.tasks import LabelledInstance, LabelledInstances, Questions
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._batches import epoch_batches, fitting, generator, pack_questions, pad_instances


def examples(lengths):
    return LabelledInstances.collect(
        LabelledInstance(str(i), np.arange(1, n + 1), i % 2, np.ones(n) if i % 3 else None)
        for i, n in enumerate(lengths)
    )


@given(st.lists(st.integers(1, 30), min_size=1, max_size=80), st.integers(1, 7), st.integers(1, 5))
def test_every_example_once_an_epoch(lengths, batch_size, bucket):
    config = TrainConfig("agreement", batch_size=batch_size, bucket=bucket)
    batches = epoch_batches(torch.tensor(lengths), config, 0)
    assert sorted(torch.cat(batches).tolist()) == list(range(len(lengths)))
    assert sorted(len(batch) for batch in batches)[1:] == [batch_size] * (len(batches) - 1)


def test_buckets_hold_similar_lengths():
    lengths = torch.randint(1, 100, (640,), generator=torch.Generator().manual_seed(1))

    def padding(bucket):
        batches = epoch_batches(lengths, TrainConfig("agreement", batch_size=16, bucket=bucket), 2)
        return sum(int((lengths[batch].max() - lengths[batch]).sum()) for batch in batches)

    assert padding(8) < padding(1) / 3


def test_read_after_the_text_is_the_first_padding():
    split = pad_instances(examples([2, 4]), context=9, read="after", pad=0)
    assert split.read.tolist() == [2, 4]
    tokens, read, labels = split.batch(torch.tensor([0]))
    assert tokens.tolist() == [[1, 2, 0]]
    assert (read.tolist(), labels.tolist()) == ([2], [0])


def test_read_at_the_last_token():
    split = pad_instances(examples([2, 4]), context=9, read="last", pad=0)
    tokens, read, _ = split.batch(torch.tensor([0, 1]))
    assert read.tolist() == [1, 3]
    assert tokens.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]


def test_the_read_position_stays_within_the_context():
    after = pad_instances(examples([3, 12]), context=8, read="after", pad=0)
    assert after.lengths.tolist() == [3, 7]
    assert int(after.read.max()) == 7
    last = pad_instances(examples([3, 12]), context=8, read="last", pad=0)
    assert last.lengths.tolist() == [3, 8]
    assert int(last.read.max()) == 7


def test_taking_some_and_sorting_by_length():
    split = pad_instances(examples([5, 2, 9, 1]), context=16, read="after", pad=0)
    part = split.take(torch.tensor([2, 0]))
    assert part.lengths.tolist() == [9, 5]
    assert [batch.tolist() for batch in split.by_length(3)] == [[3, 1, 0], [2]]


@pytest.fixture
def questions():
    draw = np.random.default_rng(0)
    lengths = [(3, 1), (5, 4), (2, 2), (9, 3), (4, 4)]
    return Questions(
        ids=tuple("abcde"),
        prompts=tuple(draw.integers(1, 50, prompt) for prompt, _ in lengths),
        answers=tuple(draw.integers(1, 50, answer) for _, answer in lengths),
        relevance=tuple(np.zeros(prompt) for prompt, _ in lengths),
        gold=(("x",),) * 5,
    )


def test_a_batch_reads_the_positions_before_every_token_of_the_answers(questions):
    packed = pack_questions(questions)
    chosen = [3, 0, 4]
    batch = packed.batch(torch.tensor(chosen))
    assert batch.tokens.shape == (3, 11)  # the longest, without its last token, which nobody reads
    labels = iter(batch.labels.tolist())
    for row, number in enumerate(chosen):
        prompt, answer = questions.prompts[number].tolist(), questions.answers[number].tolist()
        text = [*prompt, *answer]
        assert batch.tokens[row, : len(text) - 1].tolist() == text[:-1]
        assert not batch.tokens[row, len(text) - 1 :].any()
        positions = batch.position[row][batch.real[row]].tolist()
        assert positions == list(range(len(prompt) - 1, len(text) - 1))
        assert [next(labels) for _ in positions] == answer
    assert next(labels, None) is None
    assert batch.real.nonzero()[:, 0].tolist() == [0] * 3 + [1] + [2] * 4


def test_taken_questions_are_the_same_questions(questions):
    packed = pack_questions(questions)
    taken = packed.take(torch.tensor([4, 1]))
    whole, part = packed.batch(torch.tensor([4, 1])), taken.batch(torch.arange(2))
    assert all(torch.equal(getattr(whole, name), getattr(part, name)) for name in vars(whole))
    lengths = torch.cat([packed.lengths[chosen] for chosen in packed.by_length(2)])
    assert lengths.tolist() == sorted(packed.lengths.tolist())


def test_what_is_too_long_is_left_out_and_nothing_left_is_an_error(questions):
    assert fitting(questions, 12, "train") is questions
    assert fitting(questions, 8, "train").ids == ("a", "c", "e")
    with pytest.raises(InputError, match=r"no test question fits a context of 3 tokens .* takes 4"):
        fitting(questions, 3, "test")


def draw(*purpose):
    return torch.rand(4, generator=generator(*purpose)).tolist()


def test_named_by_seed_and_purpose():
    assert draw(0, "batches", 3) == draw(0, "batches", 3)
    names = [(0, "batches", 3), (1, "batches", 3), (0, "batches", 4), (0, "weights", 3), (0, "batches", "3x")]
    drawn = [draw(*name) for name in names]
    assert all(drawn.count(one) == 1 for one in drawn)


def test_leaves_the_global_generator_alone():
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    draw(0, "batches")
    assert torch.equal(before, torch.random.get_rng_state())
