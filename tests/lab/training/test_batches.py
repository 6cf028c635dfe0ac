import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fasterqk.lab.tasks import LabelledInstance, LabelledInstances
from fasterqk.lab.training._batches import pad_instances, shuffled_batches


def examples(lengths):
    return LabelledInstances.collect(
        LabelledInstance(str(i), np.arange(1, n + 1), i % 2, np.ones(n) if i % 3 else None)
        for i, n in enumerate(lengths)
    )


@given(st.lists(st.integers(1, 30), min_size=1, max_size=80), st.integers(1, 7), st.integers(1, 5))
def test_every_example_once_an_epoch(lengths, batch_size, bucket):
    batches = shuffled_batches(
        torch.tensor(lengths),
        batch_size=batch_size,
        bucket=bucket,
        generator=torch.Generator().manual_seed(0),
    )
    assert sorted(torch.cat(batches).tolist()) == list(range(len(lengths)))
    assert sorted(len(batch) for batch in batches)[1:] == [batch_size] * (len(batches) - 1)


def test_buckets_hold_similar_lengths():
    lengths = torch.randint(1, 100, (640,), generator=torch.Generator().manual_seed(1))

    def padding(bucket):
        batches = shuffled_batches(
            lengths, batch_size=16, bucket=bucket, generator=torch.Generator().manual_seed(2)
        )
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
