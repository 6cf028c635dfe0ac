import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from fasterqk.errors import InputError
from fasterqk_lab.benchmarks.training import PlainClassifier
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._steps import (
    Steps,
    build_optimizer,
    build_trainable,
    clip_gradients,
    factor,
    one_thread,
    set_rates,
)


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


def groups(optimizer):
    """The rate and the decay of every parameter, as they are during a step."""
    found = {}

    def look(optimizer, *arguments):
        for group in optimizer.param_groups:
            found.update(dict.fromkeys(group["param_names"], (group["lr"], group["weight_decay"])))

    optimizer.register_step_pre_hook(look)
    optimizer.step()
    return found


def test_query_key_alone_learns_faster_and_decays_as_much(config):
    config = config.replace(lr=1e-3, weight_decay=0.1, qk_ratio=30)
    model = build_trainable(config).model
    for name, (lr, decay) in groups(build_optimizer(model, config)).items():
        faster = name.rpartition(".")[2] in ("W_Q", "W_K", "b_Q", "b_K")
        assert lr == pytest.approx(0.03 if faster else 0.001)
        assert lr * decay == pytest.approx(1e-4)


def test_coupled_decay_is_multiplied_too(config):
    config = config.replace(lr=1e-3, weight_decay=0.1, qk_ratio=30, decay="coupled")
    found = groups(build_optimizer(build_trainable(config).model, config))
    assert found["blocks.0.attention.W_Q"] == pytest.approx((0.03, 0.1))


def test_output_value_can_learn_slower(config):
    config = config.replace(lr=1.0, weight_decay=0.1, qk_ratio=1, ov_ratio=0.25)
    found = groups(build_optimizer(build_trainable(config).model, config))
    slower = {name.rpartition(".")[2] for name, (lr, _) in found.items() if lr == 0.25}
    assert slower == {"W_V", "W_O", "b_V", "b_O"}
    assert found["blocks.0.attention.W_V"] == pytest.approx((0.25, 0.4))


def test_every_role_can_have_its_own_rate(config):
    config = config.replace(lr=1.0, weight_decay=0.0, qk_ratio=1, ratios="q=8,k=4,v=2,o=0.5,embedding=0.25")
    found = groups(build_optimizer(build_trainable(config).model, config))
    rates = {name.rpartition(".")[2]: lr for name, (lr, _) in found.items() if "attention" in name}
    assert [rates[f"W_{role}"] for role in "QKVO"] == [8, 4, 2, 0.5]
    assert [rates[f"b_{role}"] for role in "QKVO"] == [8, 4, 2, 0.5]
    assert {name for name, (lr, _) in found.items() if lr == 0.25} == {
        "embedding.weight",
        "embedding.unseen_scale",  # stands for the rows that training never sees
        "positions",
    }


def test_a_ratio_can_hold_for_a_part_of_training_alone(config):
    config = config.replace(lr=1.0, weight_decay=0.1, qk_ratio=4, ratio_from=1 / 3, ratio_until=2 / 3)
    optimizer = build_optimizer(build_trainable(config).model, config, total=3)
    rates = [groups(optimizer)["blocks.0.attention.W_Q"] for _ in range(3)]
    assert rates == [pytest.approx(pair) for pair in ((1.0, 0.1), (4.0, 0.025), (1.0, 0.1))]


def test_an_imbalance_between_queries_and_keys_leaves_the_function_as_it_was(config):
    even, uneven = (build_trainable(config.replace(qk_imbalance=factor)) for factor in (1, 4))
    here, there = even.model.blocks[0].attention, uneven.model.blocks[0].attention
    assert torch.equal(there.W_Q, 4 * here.W_Q)
    assert torch.equal(there.W_K, here.W_K / 4)
    tokens, read, _ = even.splits["test"].batch(torch.arange(8))
    assert torch.allclose(even.model(tokens, read), uneven.model(tokens, read), atol=1e-6)


def test_one_circuit_can_start_larger_than_the_other(config):
    even, uneven = (build_trainable(config.replace(circuit_imbalance=factor)) for factor in (1, 4))
    here, there = even.model.blocks[0].attention, uneven.model.blocks[0].attention
    for larger, smaller in (("W_Q", "W_V"), ("W_K", "W_O")):
        assert torch.equal(getattr(there, larger), 2 * getattr(here, larger))
        assert torch.equal(getattr(there, smaller), getattr(here, smaller) / 2)


def test_one_circuit_can_decay_alone(config):
    config = config.replace(qk_ratio=1, weight_decay=0.0, ov_decay=0.5, gradient_norm=1.0)
    found = groups(build_optimizer(build_trainable(config).model, config))
    assert {name[-3:] for name, (_, decay) in found.items() if decay} == {"W_V", "W_O", "b_V", "b_O"}


def test_gradients_of_both_circuits_get_the_norm_that_was_asked_for(config):
    config = config.replace(qk_ratio=1, gradient_norm=0.5)
    trainable = build_trainable(config)
    optimizer = build_optimizer(trainable.model, config)
    trainable.loss(torch.arange(16), 0).backward()
    optimizer.step()
    attention = trainable.model.blocks[0].attention
    for names in (("W_Q", "W_K", "b_Q"), ("W_V", "W_O", "b_V", "b_O")):
        gradients = [getattr(attention, name).grad for name in names]
        assert torch.nn.utils.get_total_norm(gradients) == pytest.approx(0.5, rel=1e-5)


def test_patterns_choose_other_parameters_instead(config):
    config = config.replace(lr=1.0, qk_ratio=30, faster=("embedding.*", "*.W_Q"))
    found = groups(build_optimizer(build_trainable(config).model, config))
    faster = {name for name, (lr, _) in found.items() if lr == 30}
    assert faster == {"embedding.weight", "embedding.unseen_scale", "blocks.0.attention.W_Q"}


def test_frozen_parameters_are_left_out(config):
    config = config.replace(frozen=("*.mlp.*",))
    model = build_trainable(config).model
    found = groups(build_optimizer(model, config))
    assert not any(".mlp." in name for name in found)
    assert not model.blocks[0].mlp.W_in.requires_grad
    stale = build_trainable(config).model
    build_optimizer(stale, config.replace(stale_gradients=True))
    assert stale.blocks[0].mlp.W_in.requires_grad


def test_sgd_with_momentum(config):
    config = config.replace(optimizer="sgd", momentum=0.9)
    optimizer = build_optimizer(build_trainable(config).model, config)
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_a_pattern_that_matches_nothing_is_an_error(config):
    config = config.replace(frozen=("*.norm.*",))
    with pytest.raises(InputError, match=r"no parameter matches '\*\.norm\.\*'"):
        build_optimizer(build_trainable(config).model, config)


@pytest.mark.parametrize("scale", [0.01, 1.0, 50.0])
def test_clipping_is_that_of_torch(scale):
    generator = torch.Generator().manual_seed(0)
    ours = [torch.nn.Parameter(torch.zeros(3, 4)), torch.nn.Parameter(torch.zeros(5))]
    theirs = [torch.nn.Parameter(torch.zeros(3, 4)), torch.nn.Parameter(torch.zeros(5))]
    for one, other in zip(ours, theirs, strict=True):
        one.grad = scale * torch.randn(one.shape, generator=generator)
        other.grad = one.grad.clone()
    without = torch.nn.Parameter(torch.zeros(2))
    norm = clip_gradients([*ours, without], 1.0)
    assert norm == torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=0)


def test_linear_warm_up_then_cosine_to_zero():
    config = TrainConfig("agreement", warmup=0.25)
    values = [factor(config, step, 40) for step in range(41)]
    assert values[0] == 0
    assert values[5] == pytest.approx(0.5)
    assert values[10] == 1
    assert values[25] == pytest.approx(0.5)
    assert values[40] == pytest.approx(0, abs=1e-15)
    assert values[:11] == sorted(values[:11])
    assert values[10:] == sorted(values[10:], reverse=True)


def test_constant_without_warm_up():
    config = TrainConfig("agreement", schedule="constant", warmup=0)
    assert {factor(config, step, 10) for step in range(10)} == {1.0}


def test_rates_are_set_from_the_start_and_do_not_compound():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(
        [{"params": [parameters[0]], "lr": 1.0}, {"params": [parameters[1]], "lr": 30.0}]
    )
    for multiplier in (0.5, 0.5, 0.25):
        set_rates(optimizer, multiplier)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 7.5]


def test_one_thread_inside_and_as_before_after():
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="stopped"), one_thread():
        inside = torch.get_num_threads()
        raise ValueError("stopped")
    assert inside == 1
    assert torch.get_num_threads() == before
