import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from fasterqk.lab.models import PlainClassifier
from fasterqk.lab.training._steps import Steps, build_trainable, factor


@pytest.fixture
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def train_plainly(plain, trainable, config, optimizer, steps):
    """The reference: every position, the whole vocabulary, torch's own clipping."""
    train = trainable.splits["train"]
    total = config.optimisation.epochs * len(trainable.batches(0))
    rates = [group["lr"] for group in optimizer.param_groups]
    batches = [batch for epoch in range(config.optimisation.epochs) for batch in trainable.batches(epoch)]
    for step in range(steps):
        chosen = batches[step]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor(config, step, total)
        optimizer.zero_grad()
        tokens, read = train.tokens[chosen], train.read[chosen]
        cross_entropy(plain(tokens, read), train.labels[chosen]).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), config.optimisation.clip)
        optimizer.step()


def take(steps, count):
    assert all(math.isfinite(steps.step()) for _ in range(count))


def compare(trainable, plain, rtol=1e-9):
    torch.testing.assert_close(trainable.model.embedding.full_table(), plain.W_E, rtol=rtol, atol=1e-12)
    others = dict(plain.named_parameters())
    for name, parameter in trainable.model.named_parameters():
        if name.startswith("embedding.") or name.endswith("b_K"):
            continue
        other = others[name.replace("attention.", "").replace("mlp.", "")]
        torch.testing.assert_close(parameter, other, rtol=rtol, atol=1e-12)


def split_by_circuit(plain, config):
    names = dict(plain.named_parameters())
    qk = [p for name, p in names.items() if name.endswith(("W_Q", "W_K", "b_Q", "b_K"))]
    rest = [p for name, p in names.items() if not name.endswith(("W_Q", "W_K", "b_Q", "b_K"))]
    ratio = config.optimisation.qk_ratio
    return [
        {"params": rest, "lr": config.optimisation.lr, "weight_decay": config.optimisation.weight_decay},
        {
            "params": qk,
            "lr": config.optimisation.lr * ratio,
            "weight_decay": config.optimisation.weight_decay / ratio,
        },
    ]


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("layers", [1, 2])
def test_adamw_training_equals_the_plain_way(config, layers):
    config = config.replace(layers=layers, weight_decay=0.1, clip=0.5)
    trainable = build_trainable(config)
    plain = PlainClassifier(trainable.model)
    train_plainly(plain, trainable, config, torch.optim.AdamW(split_by_circuit(plain, config)), 25)
    steps = Steps(config, trainable)
    take(steps, 25)
    compare(trainable, plain)
    assert trainable.model.embedding.unseen_scale.item() < 1


@pytest.mark.usefixtures("double_precision")
def test_sgd_training_equals_the_plain_way(config):
    config = config.replace(optimizer="sgd", momentum=0.9, lr=0.05, weight_decay=0.01)
    trainable = build_trainable(config)
    plain = PlainClassifier(trainable.model)
    optimizer = torch.optim.SGD(split_by_circuit(plain, config), momentum=0.9)
    train_plainly(plain, trainable, config, optimizer, 25)
    steps = Steps(config, trainable)
    take(steps, 25)
    compare(trainable, plain)


@pytest.mark.usefixtures("double_precision")
def test_stale_gradients_of_the_frozen_mlp_enter_the_norm(config):
    config = config.replace(frozen=("*.mlp.*",), stale_gradients=True, clip=0.05, decay="coupled")
    trainable = build_trainable(config)
    plain = PlainClassifier(trainable.model)
    known = [p for name, p in plain.named_parameters() if not name.endswith(("_in", "_out"))]
    chosen = {id(p) for p in split_by_circuit(plain, config)[1]["params"]}
    groups = [
        {"params": [p for p in known if id(p) not in chosen], "lr": config.optimisation.lr},
        {
            "params": [p for p in known if id(p) in chosen],
            "lr": config.optimisation.lr * config.optimisation.qk_ratio,
        },
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=config.optimisation.weight_decay)
    # The optimizer's zero_grad does not know the MLP, whose gradients add up, as in the notebooks.
    train_plainly(plain, trainable, config, optimizer, 25)
    steps = Steps(config, trainable)
    take(steps, 25)
    compare(trainable, plain)
    assert set(steps.stale_gradients()) == {
        f"blocks.0.mlp.{name}" for name in ("W_in", "b_in", "W_out", "b_out")
    }
    clean = build_trainable(config.replace(stale_gradients=False))
    clean_steps = Steps(clean.config, clean)
    take(clean_steps, 25)
    assert clean_steps.stale_gradients() == {}
    assert not torch.equal(clean.model.W_U, trainable.model.W_U)


def test_a_loss_that_is_not_finite_is_told(config):
    trainable = build_trainable(config)
    steps = Steps(config, trainable)
    with torch.no_grad():
        trainable.model.W_U.fill_(float("nan"))
    assert math.isnan(steps.step())


def test_arms_share_weights_and_batches(config):
    one, other = build_trainable(config), build_trainable(config.replace(qk_ratio=1, lr=1.0))
    for (name, a), (_, b) in zip(one.model.named_parameters(), other.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(one.batches(2), other.batches(2), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.batches(0)[0], one.batches(1)[0])
    third = build_trainable(config.replace(seed=1))
    assert not torch.equal(third.model.W_U, one.model.W_U)
