import pytest
import torch

from fasterqk.errors import InputError
from fasterqk.lab.training._steps import build_optimizer, build_trainable, clip_gradients


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


def test_an_imbalance_between_queries_and_keys_leaves_the_function_as_it_was(config):
    even, uneven = (build_trainable(config.replace(qk_imbalance=factor)) for factor in (1, 4))
    here, there = even.model.blocks[0].attention, uneven.model.blocks[0].attention
    assert torch.equal(there.W_Q, 4 * here.W_Q)
    assert torch.equal(there.W_K, here.W_K / 4)
    tokens, read, _ = even.splits["test"].batch(torch.arange(8))
    assert torch.allclose(even.model(tokens, read), uneven.model(tokens, read), atol=1e-6)


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
