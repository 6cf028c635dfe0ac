"""A model whose forward was replaced runs itself in the probe and in the check, and stays as it was."""

import copy
import functools
import random
import types

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from fasterqk.errors import InputError
from fasterqk.labels import find_circuits
from fasterqk.optim import check_circuits, make_optimizer
from fasterqk.trace.isolated import isolated

IDS = torch.arange(12).view(2, 6) % 10
BATCH = {"input_ids": IDS, "labels": IDS}


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=10, n_layer=2, n_head=2, n_embd=8, n_positions=16, bos_token_id=0, eos_token_id=1
        )
    )


# --- The ways in which libraries and scripts replace a forward pass ---


def closure(model):
    """TRL's SFTTrainer: a method that remembers the original's bound method."""
    original = model.forward

    def forward(self, *args, **kwargs):
        return original(*args, **kwargs)

    model.forward = types.MethodType(functools.wraps(type(model).forward)(forward), model)


def plain_function(model):
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)


REMEMBERED = []


def through_a_global(model):
    """A script or notebook: the original is a global variable."""
    REMEMBERED[:] = [model.forward]
    model.forward = _call_remembered


def _call_remembered(*args, **kwargs):
    return REMEMBERED[0](*args, **kwargs)


def partial(model):
    model.forward = functools.partial(model.forward, use_cache=False)


class Wrapper:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def object_with_call(model):
    model.forward = Wrapper(model.forward)


def autocast(model):
    """Accelerate with mixed precision, as far as its wrapper is concerned."""
    from accelerate import Accelerator
    from accelerate.utils import convert_outputs_to_fp32

    Accelerator(cpu=True)
    function = torch.autocast("cpu", dtype=torch.float32, enabled=False)(model.forward.__func__)
    model.forward = types.MethodType(convert_outputs_to_fp32(function), model)


def in_a_layer(model):
    for block in model.transformer.h:
        plain_function(block.attn)


def hook_with_closure(model):
    """The hook calls a module of the model it was written for."""
    model.transformer.ln_f.register_forward_hook(lambda *seen: seen[2] + model.transformer.h[0].mlp(seen[2]))


def reentrant_checkpoints(model):
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def own_checkpoints(model):
    model.config.use_cache = False  # a cache would grow when a block runs again
    for block in model.transformer.h:
        original = block.forward
        block.forward = functools.partial(checkpoint, original, use_reentrant=False)


def own_reentrant_checkpoints(model):
    model.config.use_cache = False
    model.enable_input_require_grads()

    def wrapped(original):
        return lambda x, *_, **__: checkpoint(original, x, use_reentrant=True)

    for block in model.transformer.h:
        block.forward = wrapped(block.forward)


def compiled(model):
    model.forward = torch.compile(model.forward, backend="eager")


PATCHES = (closure, plain_function, through_a_global, partial, object_with_call, autocast, in_a_layer)
PATCHES += (hook_with_closure, reentrant_checkpoints, own_checkpoints)
PATCHES += (own_reentrant_checkpoints, compiled)


def everything(model):
    """What a model holds: tensors by value and identity, modes, and the attributes of all modules."""
    return (
        [(id(p), p.detach().clone(), p.requires_grad, p.grad) for p in model.parameters()],
        [(id(b), b.clone()) for b in model.buffers()],
        [(module.training, list(vars(module)), {k: id(v) for k, v in vars(module).items()})
         for module in model.modules()],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        [p.grad.clone() for p in model.parameters() if p.grad is not None],
    )  # fmt: skip


def random_states():
    return torch.get_rng_state(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.__name__)
def test_patched_models_run_themselves(patch):
    expected = [(part.parameter, part.start, part.role) for part in find_circuits(gpt2())]
    model = gpt2()
    patch(model)
    model.train()
    before, states = everything(model), random_states()
    circuits = find_circuits(model, verify=True)
    assert [(part.parameter, part.start, part.role) for part in circuits] == expected
    assert all(part.decided_by.endswith("probe") for part in circuits if part.circuit == "qk")
    assert same(everything(model), before) and same(random_states(), states)
    optimizer = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=7, circuits=circuits)
    before = everything(model)
    result = check_circuits(model, optimizer, BATCH)
    assert result.ok and [row.promised for row in result.rows] == [7, 1, 1]
    assert same(everything(model), before) and same(random_states(), states)
    assert all(p.grad is None for p in model.parameters())


def test_a_deep_copy_of_a_patched_model_runs_the_original():
    """The damage itself, which is why nothing is copied."""
    model = gpt2()
    closure(model)
    copy.deepcopy(model)(**BATCH).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


# --- Nothing is left behind, whatever happens ---


class Untidy(nn.Module):
    """A forward pass that changes everything it can reach."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.table = nn.Embedding(6, 8, max_norm=0.1)  # renormalised in the forward pass
        self.seen, self.cache, self.calls = [], {}, 0
        self.tensor = torch.zeros(2)
        self.fails = False

    def forward(self, ids):
        self.calls += 1
        self.seen.append(ids)
        self.tensor += 1
        x = self.table(ids)
        self.cache["x"] = x
        self.last = x  # computed: a deep copy of it is an error
        x = self.norm(self.attention(x, x, x)[0].transpose(1, 2))
        torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
        self.register_forward_hook(lambda *_: None)
        if self.fails:
            raise ValueError("no")
        return {"loss": x.square().mean() + x[0].sum()}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("backward_before", [False, True])
def test_an_untidy_forward_pass_leaves_nothing(fails, backward_before):
    torch.manual_seed(0)
    model, ids = Untidy(), torch.arange(6).view(2, 3)
    optimizer = make_optimizer(model, optim.AdamW, lr=1e-3, qk_ratio=5)
    if backward_before:
        model(ids)["loss"].backward()
    model.fails = fails

    def seen():
        return everything(model), len(model.seen), dict(model.cache), model.calls, model.tensor.clone()

    before, states = seen(), random_states()
    stepped = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    if fails:
        with pytest.raises(ValueError, match="no"):
            check_circuits(model, optimizer, ids)
    else:
        assert check_circuits(model, optimizer, ids).ok
    assert same(seen(), before) and same(random_states(), states)
    assert stepped == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    assert not optimizer.state
    if backward_before:
        optimizer.step()


def test_an_interrupt_leaves_nothing():
    model = Untidy()
    before = everything(model)
    with pytest.raises(KeyboardInterrupt), isolated(model):
        model(torch.zeros(2, 3, dtype=torch.long))
        raise KeyboardInterrupt
    assert same(everything(model), before)


def test_a_function_that_holds_a_parameter_itself_leaves_no_gradient():
    model = gpt2()
    head = model.lm_head.weight
    model.transformer.ln_f.register_forward_hook(lambda *seen: seen[2] + head.sum())
    optimizer = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=7)
    check_circuits(model, optimizer, BATCH)
    assert all(p.grad is None for p in model.parameters())


def test_recurrent_and_scripted_parts():
    class Mixed(nn.Module):
        def __init__(self, scripted):
            super().__init__()
            self.lstm = nn.LSTM(8, 8, batch_first=True)  # keeps its weights in a list as well
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.last = torch.jit.script(nn.Linear(8, 8)) if scripted else nn.Linear(8, 8)

        def forward(self, x):
            x = self.lstm(x)[0]
            return self.last(self.attention(x, x, x)[0]).square().mean()

    for scripted in (False, True):
        model = Mixed(scripted)
        optimizer = make_optimizer(model, optim.SGD, lr=1.0, qk_ratio=3)
        result = check_circuits(model, optimizer, torch.randn(2, 3, 8))
        assert result.ok and all(row.moved > 0.8 for row in result.rows)
        assert all(p.grad is None for p in model.parameters())


# --- What counts as a loss ---


@pytest.mark.parametrize(
    ("returned", "loss"),
    [
        (lambda x: {"loss": x.square().mean(), "logits": x}, None),
        (lambda x: (x.square().mean(), x), None),
        (lambda x: [x.square().mean()], None),
        (lambda x: types.SimpleNamespace(loss=x.square().mean()), None),
        (lambda x: x.square().mean(), None),
        (lambda x: (x, x), lambda outputs: outputs[1].square().mean()),
    ],
)
def test_losses(returned, loss, net, label):
    class Returning(type(net())):
        def forward(self, x):
            return returned(super().forward(x))

    model = Returning()
    optimizer = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=5, circuits=label(model))
    assert check_circuits(model, optimizer, model.inputs, loss).ok


@pytest.mark.parametrize(
    ("returned", "loss", "told"),
    [
        (lambda x: {"logits": x}, None, "the model returned dict without a loss"),
        (lambda x: (), None, "the model returned tuple without a loss"),
        (lambda x: x, lambda outputs: outputs, r"loss= returned a Tensor of shape \(6, 5, 4\), not a tensor"),
        (lambda x: x, lambda outputs: 0.5, "loss= returned a float, not a tensor with one value"),
        (lambda x: x.detach().sum(), None, "the loss does not depend on the parameters"),
    ],
)
def test_what_is_no_loss_is_told(returned, loss, told, net, label):
    class Returning(type(net())):
        def forward(self, x):
            return returned(super().forward(x))

    model = Returning()
    optimizer = make_optimizer(model, optim.SGD, lr=1e-3, qk_ratio=5, circuits=label(model))
    with pytest.raises(InputError, match=told):
        check_circuits(model, optimizer, model.inputs, loss)
