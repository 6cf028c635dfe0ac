import pytest
import torch
from torch import nn

from fasterqk.lab.models import Embedding

SEEN = [0, 2, 3, 7]


def table(seed=0):
    return torch.randn(10, 4, generator=torch.Generator().manual_seed(seed))


def test_rows_are_those_of_the_table():
    embedding = Embedding(table(), SEEN)
    tokens = torch.arange(10).view(2, 5)
    assert torch.equal(embedding(tokens), table()[tokens])
    assert torch.equal(embedding.full_table(), table())
    assert embedding.weight.shape == (4, 4)


def test_all_tokens_seen_needs_nothing_else():
    embedding = Embedding(table())
    assert [name for name, _ in embedding.named_parameters()] == ["weight"]
    embedding.zero_unseen_gradient()


def optimizers():
    yield lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.3)
    yield lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.3, fused=True)
    yield lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.3)
    yield lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.3, momentum=0.9)
    yield lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.3, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("make_optimizer", list(optimizers()))
def test_decay_of_unseen_rows_is_exactly_that_of_a_dense_table(make_optimizer):
    dense = nn.Parameter(table().double())
    split = Embedding(table().double(), SEEN)
    dense_optimizer, split_optimizer = make_optimizer([dense]), make_optimizer(split.parameters())
    generator = torch.Generator().manual_seed(1)
    for step in range(40):
        tokens = torch.tensor(SEEN)[torch.randint(0, 4, (6,), generator=generator)]
        target = torch.randn(6, 4, generator=generator).double()
        for optimizer, rows in ((dense_optimizer, dense[tokens]), (split_optimizer, split(tokens))):
            optimizer.zero_grad()
            ((rows - target) ** 2).sum().backward()
            split.zero_unseen_gradient()
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (1 - step / 40)
            optimizer.step()
    torch.testing.assert_close(split.full_table(), dense, rtol=1e-12, atol=1e-14)
    assert split.unseen_scale.item() < 0.9


def test_without_the_zero_gradient_an_optimizer_would_pass_it_over():
    split = Embedding(table(), SEEN)
    optimizer = torch.optim.AdamW(split.parameters(), lr=0.1, weight_decay=0.5)
    split(torch.tensor(SEEN)).sum().backward()
    optimizer.step()
    assert split.unseen_scale.item() == 1.0
    split.zero_unseen_gradient()
    optimizer.step()
    assert split.unseen_scale.item() == pytest.approx(0.95)


def test_state_dict_restores_it():
    split = Embedding(table(), SEEN)
    with torch.no_grad():
        split.weight += 1
        split.unseen_scale *= 0.5
    other = Embedding(table(3), SEEN)
    other.load_state_dict(split.state_dict())
    assert torch.equal(other.full_table(), split.full_table())
