import numpy as np
import pytest
import torch

from fasterqk.errors import InputError
from fasterqk.lab.tasks import Questions
from fasterqk.lab.training._batches import fitting, pack_questions


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
    assert batch.instance.tolist() == [0] * 3 + [1] + [2] * 4
    assert packed.labels(torch.tensor(chosen)) == 8


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
