import torch

from fasterqk.lab.training._batches import generator


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
