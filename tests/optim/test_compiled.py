"""``torch.compile(optimizer.step)``: the compiled step equals the plain one, in every layout."""

import pytest
import torch
from torch import optim
from transformers import GPT2Config, GPT2LMHeadModel

from fasterqk.optim import Ramp, make_optimizer
from fasterqk.stability import LogitMonitor

# Torch's compiled AdamW rounds differently from its loop, with and without us; these do not.
LAYOUTS = [("rows", optim.SGD, {"momentum": 0.9}), ("columns", optim.AdamW, {"fused": True})]
LAYOUTS += [("interleaved", optim.SGD, {"momentum": 0.9})]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch.compiler.set_stance("default")  # a monitor of another test may be waiting for its next step
    yield
    torch._dynamo.reset()


def trained(model, loss, optimizer, backend=None, steps=2):
    step = optimizer.step if backend is None else torch.compile(optimizer.step, backend=backend)
    for _ in range(steps):
        loss(model).backward()
        step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "optimizer_class", "options"), LAYOUTS)
def test_a_compiled_step_equals_the_plain_one(layout, optimizer_class, options, net, label):
    def made(backend):
        model = net(layout, layers=1)
        ratio = Ramp(1, 5, 2) if layout == "columns" else 5
        settings = {"lr": 1e-2, "qk_ratio": ratio, "circuits": label(model), **options}
        return trained(model, type(model).loss, make_optimizer(model, optimizer_class, **settings), backend)

    for plain, compiled in zip(made(None), made("eager"), strict=True):
        assert torch.equal(plain, compiled)


def gpt2_trained(backend):
    torch.manual_seed(0)
    size = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 1}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=10, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **size))
    ids = torch.arange(8)[None]
    optimizer = make_optimizer(model, optim.SGD, lr=1e-2, qk_ratio=5, momentum=0.9)
    return trained(model, lambda network: network(input_ids=ids, labels=ids).loss, optimizer, backend)


@pytest.mark.slow
def test_gpt2_with_ahead_of_time_graphs():
    """Its columns are copies during a step, with another stride than between steps."""
    for plain, compiled in zip(gpt2_trained(None), gpt2_trained("aot_eager"), strict=True):
        assert torch.equal(plain, compiled)


def test_the_monitor_reads_a_compiled_model_uncompiled(net):
    model, plain = net("rows"), net("rows")
    compiled = torch.compile(model, backend="eager")
    monitor, expected = LogitMonitor(compiled, every=2), LogitMonitor(plain)
    plain(plain.inputs)
    for _ in range(3):
        compiled(model.inputs)
    assert monitor.last.step == 2
    assert torch._dynamo.eval_frame._stance.stance == "default"  # between passes others run compiled
    for path, reading in expected.last.readings.items():
        assert torch.equal(monitor.last.readings[path].logit, reading.logit)


def test_evaluation_between_two_steps_runs_compiled(net):
    """Also before a step that is read, and although another monitor waits for its own."""
    model = net("rows")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    monitors = [LogitMonitor(compiled, optimizer, every=every) for every in (1, 2)]
    for _ in range(2):
        compiled.train()
        compiled(model.inputs).square().mean().backward()
        assert not graphs
        optimizer.step()
        model.eval()
        assert torch._dynamo.eval_frame._stance.stance == "default"
    with torch.no_grad():
        compiled(model.inputs)
    assert graphs
    assert monitors[0].last.step == 1 and monitors[1].last.step == 0
    for monitor in monitors:
        monitor.remove()
    assert "train" not in vars(model)
