"""Compiled models: a bound inside their graph, and the steps that a clip runs uncompiled."""

import pytest
import torch
import transformers
from tests.stability.test_clip import MAKE, batch, loss_of, made
from tests.stability.test_monitor import Written, large
from torch import nn, optim
from torch._dynamo.utils import counters

from fasterqk import LogitMonitor, qk_clip
from fasterqk.errors import InputError
from fasterqk.stability import see_attention

EAGER = {"backend": "eager", "fullgraph": True}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    assert torch._dynamo.eval_frame._stance.stance == "default"
    torch._dynamo.reset()


def trained(model, run, threshold, steps=4):
    """The clipped heads, the exact steps and the number of graphs after each step."""
    optimizer = optim.SGD(model.parameters(), lr=0.02)
    record = []
    with qk_clip(run, optimizer, threshold) as clip:
        for step in range(steps):
            loss_of(run(**batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            record.append((clip.last, clip.bound, clip.exact_steps, counters["stats"]["unique_graphs"]))
    return record


CASES = [(name, way) for name in MAKE for way in ("sdpa", "eager") if name != "mha"] + [("mha", None)]


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_a_compiled_clip_equals_a_plain_one(name, implementation):
    """Always above the threshold: all steps uncompiled. Always below: one graph, no break, equal bits."""
    for threshold, graphs, exact in ((0.05, [0, 0, 0, 0], 4), (1e6, [0, 1, 1, 1], 1)):
        torch._dynamo.reset()
        counters.clear()
        models = [made(name), made(name)]
        for model in models if implementation else ():
            model.config._attn_implementation = implementation
        plain = trained(models[0], models[0], threshold)
        compiled = trained(models[1], torch.compile(models[1], **EAGER), threshold)
        assert [step[:2] for step in plain] == [step[:2] for step in compiled]
        assert [step[3] for step in compiled] == graphs and compiled[-1][2] == exact
        assert bool(plain[0][0]) == (threshold < 1)
        assert not counters["graph_break"]
        assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


def test_a_threshold_between_runs_compiled_again_without_compiling_again():
    """The bound passes the threshold now and then: exact steps follow, one graph serves the others."""
    model = made("gpt2")
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    clip = qk_clip(compiled := torch.compile(model, **EAGER), optimizer, threshold=30.0)
    exact, bounds = [], []
    for scale in (1.0, 1.0, 3.0, 1.0, 1 / 3, 1.0):
        with torch.no_grad():
            model.transformer.h[0].attn.c_attn.weight *= scale
        loss_of(compiled(**batch(0))).backward()
        optimizer.step()
        exact.append(clip.exact_steps)
        bounds.append(clip.bound)
    assert [bound > 30 for bound in bounds] == [False, False, True, True, False, False]
    assert exact == [1, 1, 1, 2, 3, 3]  # the step after one above it, until one is below
    assert clip.total > 0 and counters["stats"]["unique_graphs"] == 1
    clip.remove()


@pytest.mark.parametrize("part", ["layers", "attention", "projection"])
def test_parts_that_are_compiled(part):
    """Also a part inside of attention, whose hooks then run uncompiled."""
    plain, model = made("llama"), made("llama")
    for layer in model.model.layers:
        inner = {"layers": layer, "attention": layer.self_attn, "projection": layer.self_attn.q_proj}[part]
        inner.compile(backend="eager")
    expected, record = trained(plain, plain, 1e6), trained(model, model, 1e6)
    assert [step[:2] for step in expected] == [step[:2] for step in record] and record[-1][2] == 1
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_checkpointed_parts_of_compiled_code_run_uncompiled():
    """A bound cannot be written there; the clip reads these blocks exactly."""
    plain, model = made("llama"), made("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = trained(plain, plain, 1.5)
    record = trained(model, torch.compile(model, backend="eager"), 1.5)
    assert [step[0] for step in expected] == [step[0] for step in record]


class Method(nn.Module):
    """A softmax that is a method of the tensor, which compiled code does not show."""

    num_heads = 2

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (2, 4)).transpose(1, 2) for project in projections)
        return self.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v


def steps_of(model, optimizer, run, count=3, scale=1.0):
    torch.manual_seed(0)
    for _ in range(count):
        run(scale * torch.randn(2, 5, 8)).pow(3).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_code_that_shows_nothing_runs_uncompiled():
    model = Method()
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    compiled = torch.compile(model, **EAGER)
    clip = qk_clip(compiled, optimizer, threshold=1e6)
    with pytest.warns(UserWarning, match=r"the model shows qk_clip no queries.*see_attention") as said:
        steps_of(model, optimizer, compiled, 4)
    ours = [warning for warning in said if "qk_clip" in str(warning.message)]  # torch has others
    assert len(ours) == 1 and clip.exact_steps == 3
    clip.remove()


class Outside(Method):
    """A flash kernel from outside torch: a stand-in that returns its log-sum-exp, as those do."""

    says_lse = False

    def attend(self, q, k, v):
        scores = q @ k.transpose(-1, -2) / 2
        lse = scores.exp().sum(-1).log()
        see_attention(q, k, v, lse=lse if self.says_lse else None)
        return (scores - lse.unsqueeze(-1)).exp() @ v


@pytest.mark.parametrize("lse", [False, True])
def test_kernels_from_outside(lse):
    """Shown by one line: the same maxima as torch's own softmax, a bound in the graph, and the same clip."""
    torch.manual_seed(0)
    outside, shown = Outside(), Method()
    outside.says_lse = lse
    shown.load_state_dict(outside.state_dict())
    monitors = []
    for model in (outside, shown):
        optimizer = optim.SGD(model.parameters(), lr=0.0)
        monitors.append(LogitMonitor(model, optimizer, every=1))
        with qk_clip(model, optimizer, threshold=1.0) as clip:
            steps_of(model, optimizer, model, 2, scale=3.0)
        assert clip.total
        monitors[-1].remove()
    for old, new in zip(*(list(monitor.history) for monitor in monitors), strict=True):
        torch.testing.assert_close(old.readings[""].logit, new.readings[""].logit)
    for old, new in zip(outside.parameters(), shown.parameters(), strict=True):
        torch.testing.assert_close(old, new)
    optimizer = optim.SGD(outside.parameters(), lr=0.0)
    compiled = torch.compile(outside, **EAGER)
    clip = qk_clip(compiled, optimizer, threshold=1e3)
    steps_of(outside, optimizer, compiled, scale=3.0)
    assert clip.exact_steps == 1 and counters["stats"]["unique_graphs"] == 1
    exact = monitors[0].last.readings[""].logit.amax()
    assert exact <= clip.bound
    if lse:
        assert clip.bound <= 3 + torch.tensor(5.0).log()  # the maximum and the logarithm of five keys
    clip.remove()


def test_an_implementation_of_transformers_is_shown_by_four_lines():
    """As in docs/stability.md: any attention function that transformers knows by name."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def shown(module, query, key, value, mask, scaling=None, **options):
        see_attention(query, key, value, scale=scaling, causal=True)
        outside = torch._C._nn.scaled_dot_product_attention  # what is called is none of torch's names
        assert outside is not None
        with torch._C.DisableTorchFunction():
            return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)

    transformers.AttentionInterface.register("outside", shown)
    transformers.AttentionMaskInterface.register("outside", transformers.masking_utils.sdpa_mask)
    model = made("llama")
    plain = LogitMonitor(model)
    model(input_ids=batch(0)["input_ids"])
    plain.last.readings  # noqa: B018
    plain.remove()
    model.config._attn_implementation = "outside"
    monitor = LogitMonitor(model)
    model(input_ids=batch(0)["input_ids"])
    for path, reading in monitor.last.readings.items():
        torch.testing.assert_close(reading.logit, plain.last.readings[path].logit)


def test_a_model_that_was_compiled_before_is_told():
    model = nn.TransformerEncoderLayer(8, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(3, 1, 8))
    clip = qk_clip(compiled, optimizer)
    compiled(torch.randn(3, 1, 8)).pow(3).sum().backward()
    optimizer.step()
    compiled(torch.randn(3, 1, 8)).pow(3).sum().backward()
    with pytest.raises(InputError, match="compiled from it and had not run before"):
        optimizer.step()
    clip.remove()


@pytest.mark.parametrize("compile", [False, True])
def test_the_monitor_keeps_a_bound_in_every_step(compile):
    model = made("llama")
    optimizer = optim.SGD(model.parameters(), lr=0.02)
    run = torch.compile(model, **EAGER) if compile else model
    monitor = LogitMonitor(run, optimizer, way="bound", every=3, limit=1e6)
    exact = LogitMonitor(model, optimizer, every=1, limit=1e6) if not compile else None
    for step in range(7):
        loss_of(run(**batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [logits.way for logits in monitor.history] == ["exact", "bound", "bound"]
    assert counters["stats"]["unique_graphs"] == int(compile) and not counters["graph_break"]
    assert "logits/max_bound" in monitor.last.log() and "at most" in str(monitor.last)
    if exact is not None:
        for path, reading in monitor.last.readings.items():
            since = torch.stack([logits.readings[path].logit for logits in exact.history[4:]]).amax(0)
            assert (since <= reading.logit).all() and (reading.logit < 20 * since.clamp(min=1)).all()
        exact.remove()
    monitor.remove()
    assert nn.functional.softmax.__module__ == "torch.nn.functional"


@pytest.mark.parametrize("capped", [True, False])
def test_a_softmax_of_shifted_or_capped_logits_proves_nothing(capped):
    """A soft cap leaves the products without a bound; a subtracted maximum the logits, too."""
    cap = (lambda p, _: (p / 2).tanh()) if capped else (lambda p, _: (p - p.amax(-1, keepdim=True)) / 2)
    model = large(Written(cap))
    x = torch.randn(3, 6, 8)
    products = model.products(x).detach().amax((0, 2, 3)) / 2
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    monitor = LogitMonitor(model, optimizer, way="bound", every=1, limit=1e30)
    compiled = torch.compile(model, **EAGER)
    for _ in range(2):
        compiled(x).sum().backward()
        optimizer.step()
    reading = monitor.last.readings[""]
    assert reading.way == "bound" and (reading.product >= products).all()
    assert (reading.logit <= 1).all() if capped else (reading.logit >= products).all()
    monitor.remove()
    torch._dynamo.reset()
    with qk_clip(model, optimizer, float(products.max()) * 1.5) as clip:
        for scale in (1, 2, 1, 1):  # a compiled step passes the threshold
            model.q_proj.weight.data *= scale
            compiled(x).sum().backward()
            optimizer.step()
    assert clip.total > 0 and float(model.products(x).max()) / 2 <= clip.threshold * 1.001
