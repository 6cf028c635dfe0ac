"""LogitMonitor: its maxima are those of the full score matrix, and training stays the same, bit for bit."""

import copy
import math
import pickle
import warnings

import pytest
import torch
import transformers
from torch import nn, optim
from torch.nn.attention import flex_attention as flex

from fasterqk import LogitMonitor, find_circuits, qk_clip
from fasterqk.errors import InputError
from fasterqk.stability._logits import LogitTrace, _traces

TEXT = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 24, "head_dim": 4}


def large(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, 0.5)
    return model.train()


def llama():
    return large(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **TEXT)))


def gemma():
    """A soft cap; half of its layers see a window."""
    config = transformers.Gemma2Config(sliding_window=3, attn_logit_softcapping=2.0, **SMALL, **TEXT)
    return large(transformers.Gemma2ForCausalLM(config))


def gpt_oss():
    """Sinks, and a maximum that is subtracted before the softmax."""
    config = transformers.GptOssConfig(num_local_experts=2, num_experts_per_tok=1, **SMALL, **TEXT)
    return large(transformers.GptOssForCausalLM(config))


def bloom():
    config = transformers.BloomConfig(n_layer=2, n_head=4, hidden_size=16, **TEXT)
    return large(transformers.BloomForCausalLM(config))


def t5():
    config = transformers.T5Config(
        d_model=16, d_kv=4, num_heads=4, d_ff=16, num_layers=2, vocab_size=20, dropout_rate=0.0
    )
    return large(transformers.T5EncoderModel(config))


def batch():
    ids = torch.randint(2, 20, (3, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def full_scores(model, monkeypatch):
    """What enters the softmax of each layer, from the model's own eager attention."""
    recorded_scores = []
    softmax = nn.functional.softmax

    def recorded(scores, *args, **kwargs):
        recorded_scores.append(scores.detach())
        return softmax(scores, *args, **kwargs)

    before = model.config._attn_implementation
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(nn.functional, "softmax", recorded)
        model.config._attn_implementation = "eager"
        model(**batch())
    model.config._attn_implementation = before
    return [scores for scores in recorded_scores if scores.dim() == 4]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_maxima_and_entropies_of_the_full_score_matrix(implementation, monkeypatch):
    model = llama()
    model.config._attn_implementation = implementation
    monitor = LogitMonitor(model)
    model(**batch())
    scores = full_scores(model, monkeypatch)
    assert len(scores) == len(monitor.last.readings) == 2 and monitor.last.way == "exact"
    for full, reading in zip(scores, monitor.last.readings.values(), strict=True):
        torch.testing.assert_close(reading.logit, full.amax((0, 2, 3)), rtol=1e-5, atol=1e-6)
        assert torch.equal(reading.logit, reading.product) and not reading.biased and not reading.capped
        weights = full.softmax(-1)
        entropy = -torch.xlogy(weights, weights).sum(-1)
        torch.testing.assert_close(reading.entropy, entropy.mean((0, 2)), rtol=1e-4, atol=1e-5)
    assert monitor.last.largest == pytest.approx(max(float(layer.max()) for layer in scores), rel=1e-6)
    assert monitor.last.log()["logits/max"] == monitor.last.largest
    assert "self_attn" in str(monitor.last) and "at least" not in str(monitor.last)


@pytest.mark.parametrize("make", [gemma, bloom, t5])
def test_soft_caps_and_additive_biases_are_reported_as_such(make, monkeypatch):
    model = make()
    monitor = LogitMonitor(model)
    model(**batch())
    for full, reading in zip(full_scores(model, monkeypatch), monitor.last.readings.values(), strict=True):
        torch.testing.assert_close(reading.logit, full.amax((0, 2, 3)), rtol=1e-4, atol=1e-5)
        assert (reading.capped, reading.biased) == (make is gemma, make is not gemma)
        if reading.capped:
            uncapped = 2 * torch.atanh(full.double().masked_fill(full < -5000, 0.0) / 2)
            shown = uncapped.masked_fill(full < -5000, -math.inf).amax((0, 2, 3)).float()
            keep = shown < 6  # beyond it the cap has rounded the product away
            torch.testing.assert_close(reading.product[keep], shown[keep], rtol=1e-3, atol=1e-3)
            assert (reading.product > reading.logit).all()
    assert monitor.last.log()["logits/max_product"] >= 0
    assert ("soft cap" if make is gemma else "additive bias") in str(monitor.last)


def test_sinks_are_no_keys(monkeypatch):
    model = gpt_oss()
    monitor = LogitMonitor(model)
    model(**batch())
    for full, reading in zip(full_scores(model, monkeypatch), monitor.last.readings.values(), strict=True):
        # The softmax sees scores and sink less the larger of both; rows where a score is largest show it.
        shown = full[..., :-1].masked_fill(full[..., :-1] < -5000, -math.inf)
        assert (shown.amax((0, 2, 3)) <= 1e-6).all() and (reading.logit > 1).all()
        assert not reading.biased


class Custom(nn.Module):
    """Attention in other words: one weight, three axes, and a mask that is multiplied and subtracted."""

    heads = 2

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (self.by_head(project(x)) for project in (self.to_q, self.to_k, self.to_v))
        scores = torch.einsum("bid,bjd->bij", q * 4**-0.5, k)
        self.shown = scores - 1e10 * torch.ones_like(scores).triu(1)
        mixed = torch.bmm(self.shown.softmax(dim=-1), v)
        return self.to_out(mixed.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2))

    def by_head(self, x):
        return x.unflatten(-1, (2, 4)).transpose(1, 2).flatten(0, 1)


def test_custom_code():
    model = large(Custom())
    monitor = LogitMonitor(model)
    model(torch.randn(3, 5, 8))
    expected = model.shown.unflatten(0, (3, 2)).amax((0, 2, 3))
    torch.testing.assert_close(monitor.last.readings[""].logit, expected)
    torch.testing.assert_close(monitor.last.readings[""].product, expected)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(need_weights):
    model = large(nn.MultiheadAttention(8, 2, batch_first=True))
    monitor = LogitMonitor(model)
    x = torch.randn(3, 5, 8)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    output = model(x, x, x, attn_mask=hidden, need_weights=need_weights)[0]
    q, k, _ = nn.functional.linear(x, model.in_proj_weight, model.in_proj_bias).chunk(3, -1)
    q, k = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (q, k))
    scores = (q @ k.transpose(-1, -2) / 2).masked_fill(hidden, -math.inf)
    torch.testing.assert_close(monitor.last.readings[""].logit, scores.amax((0, 2, 3)))
    monitor.remove()
    assert torch.equal(output, model(x, x, x, attn_mask=hidden, need_weights=need_weights)[0])


class Flexible(nn.Module):
    """FlexAttention with a causal mask and a bias; frozen, because it does not train on a processor."""

    num_heads = 2

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))
        self.requires_grad_(False)

    def forward(self, x):
        q, k, v = (
            project(x).unflatten(-1, (2, 4)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 5, 5, device="cpu")
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + 0.5 * (j - i), block_mask=mask)


def flex_attention(query, key, value, score_mod=None, block_mask=None, return_aux=None):
    """What torch's function computes; without its compiler, which takes half a minute."""
    scores = query @ key.transpose(-1, -2) / 2 + 0.5 * (torch.arange(5) - torch.arange(5).unsqueeze(1))
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf)
    output = scores.softmax(-1) @ value
    return output if return_aux is None else (output, flex.AuxOutput(max_scores=scores.amax(-1)))


def test_flex_attention(monkeypatch):
    monkeypatch.setattr(flex, "flex_attention", flex_attention)  # the name by which it is known
    model = large(Flexible())
    monitor = LogitMonitor(model, circuits=find_circuits(model, verify=False))
    x = torch.randn(3, 5, 8)
    with torch.enable_grad():
        model(x)
    q, k = (project(x).unflatten(-1, (2, 4)).transpose(1, 2) for project in (model.q_proj, model.k_proj))
    _, said = flex_attention(q, k, k, return_aux=flex.AuxRequest(max_scores=True))
    reading = monitor.last.readings[""]
    torch.testing.assert_close(reading.logit, said.max_scores.amax((0, 2)))
    assert reading.biased
    assert globals()["flex_attention"] is flex.flex_attention


def test_steps_micro_batches_and_the_log():
    model = llama()
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    logged = []
    monitor = LogitMonitor(
        model, optimizer, every=2, log=lambda numbers, step: logged.append((step, numbers))
    )
    with pytest.raises(InputError, match=r"optimizer\.step\(\)"):
        monitor.last  # noqa: B018
    for step in range(3):
        for scale in (1, 1 + step):  # the second micro-batch repeats tokens
            model(input_ids=batch()["input_ids"][:, : 4 * scale]).logits.sum().backward()
        model.eval()
        model(**batch())
        model.train()
        optimizer.step()
    assert [step for step, _ in logged] == [0, 2] and monitor.steps == 3
    assert logged[1][1]["logits/max"] >= logged[0][1]["logits/max"]
    monitor.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_it_warns_once_in_one_line():
    model = llama()
    monitor = LogitMonitor(model, every=1, limit=1.0)
    with pytest.warns(UserWarning, match=r"have reached .* head \d, at step 0 \(limit 1\)") as warned:
        model(**batch())
        assert monitor.last
    assert "\n" not in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch())
        assert monitor.last.step == 1


class WrittenOut(Custom):
    """A softmax in plain operations, which shows no logits."""

    def forward(self, x):
        q, k, v = (self.by_head(project(x)) for project in (self.to_q, self.to_k, self.to_v))
        weights = (q @ k.transpose(-1, -2)).exp()
        mixed = weights / weights.sum(-1, keepdim=True) @ v
        return self.to_out(mixed.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2))


def test_what_cannot_be_seen_is_a_warning():
    """An observer does not stop a training: it names the block once and reads the others."""
    model = nn.Sequential(large(Custom()), large(WrittenOut()))
    labels = {"*.to_q.*": "q", "*.to_k.*": "k", "*.to_v.*": "v", "*.to_out.*": "o"}
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    monitor = LogitMonitor(model, optimizer, every=1, circuits=find_circuits(model, labels, verify=False))
    with pytest.warns(
        UserWarning, match=r"leaves out a block: 1 \(WrittenOut\) forms no attention scores"
    ) as said:
        for _ in range(2):
            model(torch.randn(3, 5, 8)).sum().backward()
            optimizer.step()
    assert len(said) == 1 and "\n" not in str(said[0].message)
    assert list(monitor.last.readings) == ["0"] and monitor.last.step == 1


def test_double_precision():
    model = llama().double()
    monitor = LogitMonitor(model)
    model(**batch())
    assert all(reading.logit.dtype == torch.float64 for reading in monitor.last.readings.values())


def test_training_is_the_same_to_the_last_bit():
    def trained(watched):
        model = llama()
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        if watched:
            LogitMonitor(model, optimizer, every=1)
        for _ in range(2):
            model(**batch()).logits.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


def test_wrong_arguments_are_refused():
    for wrong in ({"every": 0}, {"instances": -1}, {"limit": 0}, {"every": True}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            LogitMonitor(llama(), **wrong)


def test_a_softmax_that_is_no_attention_is_left_alone():
    calls = []
    with LogitTrace(2, calls.append):
        (torch.randn(3, 5, 8) @ torch.randn(8, 4)).softmax(-1)  # a router
    assert not calls


@pytest.mark.parametrize("way", ["exact", "sampled", "bound", "weights"])
def test_copies_of_an_observed_model_are_their_own(way):
    """An average of weights is a deep copy: it trains and evaluates by itself, and nobody observes it."""
    model = llama()
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    monitor = LogitMonitor(model, optimizer, way=way, every=1)
    clip = qk_clip(model, optimizer, threshold=1e6)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in copies:
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(10)
        twin.eval()
        assert model.training and not any(module.training for module in twin.modules())
        twin.train()(**batch())
    model(**batch()).logits.sum().backward()
    optimizer.step()
    alone = llama()
    optimizer = optim.SGD(alone.parameters(), lr=1e-3)
    expected = LogitMonitor(alone, optimizer, way=way)
    alone(**batch())
    optimizer.step()
    assert clip.steps == clip.exact_steps == 1
    assert monitor.last.largest == expected.last.largest


def test_a_clip_made_after_a_monitor_leaves_it_reading():
    """The clip labels the model in evaluation mode, and runs its blocks with other weights: not read."""
    logs = []
    for clipped in (False, True):
        model = llama()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        monitor = LogitMonitor(model, optimizer)
        if clipped:
            qk_clip(model, optimizer, threshold=1e6)
        model(**batch()).logits.sum().backward()
        optimizer.step()
        logs.append(monitor.last.log())
    assert logs[0] == logs[1] and len(monitor.last.readings) == 2


# --- What explains instability, and where it is shown ---


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_spread_first_token_and_lengths(implementation, monkeypatch):
    """From the full score matrix: within rows, over the pairs that the mask allows."""
    model = llama()
    model.config._attn_implementation = implementation
    monitor = LogitMonitor(model)
    model(**batch())
    for full, reading in zip(full_scores(model, monkeypatch), monitor.last.readings.values(), strict=True):
        expected = torch.zeros(2, 4)
        rows = several = 0
        for instance in full:
            for row in range(8):
                visible = instance[0, row] > -5000
                rows, several = rows + 1, several + int(visible.sum() > 1)
                expected[0] += instance[:, row, visible].std(-1, correction=0)
                if visible.sum() > 1:
                    expected[1] += instance[:, row, visible].softmax(-1)[:, 0]
        torch.testing.assert_close(reading.spread, expected[0] / rows, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(reading.first_token, expected[1] / several, rtol=1e-4, atol=1e-5)
        assert (reading.query > 0).all() and len(reading.key) == 4
        assert (reading.value is None) == (implementation == "eager")
    names = {"std", "first_token_share", "query_norm", "key_norm"}
    assert {f"logits/{name}" for name in names} <= monitor.last.log().keys()


def test_lengths_of_queries_keys_and_values():
    model = large(nn.MultiheadAttention(8, 2, batch_first=True))
    monitor = LogitMonitor(model)
    x = torch.randn(3, 5, 8)
    model(x, x, x, need_weights=False)
    reading = monitor.last.readings[""]
    parts = nn.functional.linear(x, model.in_proj_weight, model.in_proj_bias).chunk(3, -1)
    for length, part in zip((reading.query, reading.key, reading.value), parts, strict=True):
        torch.testing.assert_close(length, part.unflatten(-1, (2, 4)).norm(dim=-1).mean((0, 1)))


class Counting(nn.Module):
    """Attention with dropout; buffers and an attribute count passes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, dropout=0.2, batch_first=True)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0

    def forward(self, x):
        self.passes += 1
        self.calls = self.calls + 1
        self.count += 1
        return self.layer(x)


@pytest.mark.parametrize("compile", [False, True])
def test_a_sample_is_one_more_pass_that_changes_nothing(compile):
    def trained(**options):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Counting().train()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        run = torch.compile(model, backend="eager") if compile else model
        monitor = LogitMonitor(run, optimizer, every=2, **options) if options else None
        for _ in range(3):
            run(torch.randn(6, 4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, monitor

    model, monitor = trained(way="sampled", instances=2, explain=True)
    plain, _ = trained()
    assert model.passes == model.calls == model.count == 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert [logits.way for logits in monitor.history] == ["sampled", "sampled"]
    assert "logits/max_sampled" in monitor.last.log() and "logits/max" not in monitor.last.log()
    assert "at least" in str(monitor.last) and monitor.last.as_dict()["way"] == "sampled"
    monitor.remove()


def test_a_sample_reads_the_first_instances():
    model = llama()
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    inputs = {name: tensor[:2] for name, tensor in batch().items()}
    exact, sample = (LogitMonitor(model, optimizer, way=way, instances=2) for way in ("exact", "sampled"))
    alone = LogitMonitor(model)
    model(**inputs).logits.sum().backward()
    expected = alone.last
    model(**batch()).logits.sum().backward()
    optimizer.step()
    for path, reading in sample.last.readings.items():
        torch.testing.assert_close(reading.logit, expected.readings[path].logit)
        assert (reading.logit <= exact.last.readings[path].logit + 1e-5).all()


def test_what_a_step_changes():
    """Against the logits of all pairs before and after, and the weights before and after."""
    model = large(Custom())
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    monitor = LogitMonitor(model, optimizer, explain=True, instances=3)
    x, before = torch.randn(3, 5, 8), {name: p.detach().clone() for name, p in model.named_parameters()}
    model(x).pow(3).sum().backward()
    old = model.shown.detach()
    optimizer.step()
    with torch.no_grad():
        model(x)
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    change = (model.shown - old).unflatten(0, (3, 2))[:, :, visible].square().mean((0, 2)).sqrt()
    torch.testing.assert_close(monitor.last.readings[""].change, change)
    for role, name in (("q", "to_q.weight"), ("v", "to_v.weight"), ("o", "to_out.weight")):
        moved = (model.get_parameter(name) - before[name]).norm() / before[name].norm()
        assert monitor.last.updates[role] == pytest.approx(float(moved.detach()), rel=1e-5)
        assert monitor.last.log()[f"update/{role}"] == monitor.last.updates[role]
    with pytest.raises(InputError, match="give the monitor the optimizer"):
        LogitMonitor(model, explain=True)


class Recorded:
    """A tracker that is called in one of four ways."""

    def __init__(self, method):
        self.entries = {}
        setattr(self, method, getattr(self, f"_{method}"))

    def _add_scalar(self, name, value, step):
        self.entries[name, step] = value

    def _log(self, numbers, step):
        self.entries |= {(name, step): value for name, value in numbers.items()}

    _log_metrics = _log


def test_numbers_reach_any_tracker():
    function = Recorded("log")
    targets = [Recorded("add_scalar"), Recorded("log"), Recorded("log_metrics"), function._log]
    for target in targets:
        model = nn.TransformerEncoderLayer(8, 2)
        monitor = LogitMonitor(model, log=target)
        model(torch.zeros(3, 1, 8))
        assert monitor.last
        entries = function.entries if target == function._log else target.entries
        assert entries["logits/max", 0] == 0.0 and entries["logits/max/self_attn", 0] == 0.0
    with pytest.raises(InputError, match="neither a function"):
        LogitMonitor(model, log=3)


def test_heat_maps_and_the_page(tmp_path):
    model = nn.ModuleDict({"<b>": nn.TransformerEncoderLayer(8, 2), "b": nn.TransformerEncoderLayer(8, 4)})
    model.forward = lambda x: model["b"](model["<b>"](x))
    monitor = LogitMonitor(model, every=1)
    assert "No reading" in monitor._repr_html_()
    for _ in range(3):
        model(torch.randn(3, 1, 8))
        shown = monitor._repr_html_()
        assert "<td" in shown
    assert "&lt;b&gt;.self_attn" in shown and "<b>" not in shown
    assert shown.count("<td") == 2 * (2 + 4) and shown.count("<polyline") == 12  # two numbers, six heads
    page = monitor.write(tmp_path / "logits.html").read_text()
    assert "3 readings since step 0" in page and "<b>" not in page and page.count("<h3>") == 7
    for part in ("http://", "https://", "<script src"):
        assert part not in page
    assert f"{monitor.last.largest:.3g}" in page


def test_the_history_is_thinned(monkeypatch):
    """And the hooks of one reading are gone in the next, also where the model itself is the block."""
    monkeypatch.setattr("fasterqk.stability._monitor._KEPT", 20)
    model = nn.MultiheadAttention(8, 2)
    monitor = LogitMonitor(model, every=1)
    x = torch.zeros(2, 1, 8)
    for _ in range(22):
        model(x, x, x)
    assert len(monitor.history) < 20 and [monitor.history[0].step, monitor.last.step] == [0, 21]
    assert not _traces


def test_a_monitor_prints_what_it_does(net):
    model = net("rows")
    monitor = LogitMonitor(model, every=3)
    assert repr(monitor) == "LogitMonitor(exact, every 3 steps, limit 100, 0 readings)"
    monitor.remove()


# Logits of products p and a bias b, in which the mask or the bias comes before the scale 1/2.
HIDDEN = ~torch.ones(6, 6).tril().bool()
WRITTEN = {
    "masked, then scaled": lambda p, b: p.masked_fill(HIDDEN, -math.inf) / 2,
    "masked, then scaled in place": lambda p, b: p.masked_fill(HIDDEN, -1e9).mul_(0.5),
    "masked by a little, then scaled": lambda p, b: ((4 * p).masked_fill(HIDDEN, -1e4)) / torch.tensor(8),
    "masked, then scaled by head": lambda p, b: (4 * p).masked_fill(HIDDEN, -1e4) / torch.full((2, 1, 1), 8),
    "masked, then scaled by name": lambda p, b: (4 * p).masked_fill(HIDDEN, -1e4).mul(other=0.125),
    "masked after the maximum": lambda p, b: (p / 2 - p.amax(-1, keepdim=True) / 2).masked_fill(HIDDEN, -1e9),
    "biased, then scaled by a tensor": lambda p, b: (p + b) * torch.tensor(0.5),
    "less the maximum, then scaled": lambda p, b: (p - p.amax(-1, keepdim=True)) / 2,
    "negated": lambda p, b: -(-p + b) / 2,
    "subtracted": lambda p, b: 1 - (b - p / 2),
    "added with a factor": lambda p, b: torch.add(b, p, alpha=0.5),
}


@pytest.mark.parametrize("form", WRITTEN)
def test_products_are_known_in_whatever_order_they_are_scaled(form):
    model = large(Written(WRITTEN[form]))
    x = torch.randn(3, 6, 8)
    products = model.products(x).detach() / 2
    visible = ~HIDDEN if "masked" in form else torch.ones_like(HIDDEN)
    largest = products.masked_fill(~visible, -math.inf).amax((0, 2, 3))
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    threshold = float(largest.mean())
    with LogitMonitor(model, optimizer) as monitor, qk_clip(model, optimizer, threshold):
        model(x).sum().backward()
        optimizer.step()
    torch.testing.assert_close(monitor.last.readings[""].product, largest, rtol=1e-5, atol=1e-6)
    after = (model.products(x).detach() / 2).masked_fill(~visible, -math.inf).amax((0, 2, 3))
    torch.testing.assert_close(after, largest.clamp(max=threshold), rtol=1e-4, atol=1e-5)


class Written(nn.Module):
    """Two heads whose logits are ``form`` of their products and of a bias."""

    num_heads = 2

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.register_buffer("bias", torch.randn(6, 6))

    def heads(self, projected):
        return projected.unflatten(-1, (2, 4)).transpose(1, 2)

    def products(self, x):
        return self.heads(self.q_proj(x)) @ self.heads(self.k_proj(x)).mT

    def forward(self, x):
        weights = nn.functional.softmax(self.form(self.products(x), self.bias), -1)
        return self.o_proj((weights @ self.heads(self.v_proj(x))).transpose(1, 2).flatten(2))


def test_a_maximum_subtracted_by_name_is_no_part_of_a_logit():
    model = large(Written(lambda p, b: torch.sub(p, other=p.amax(-1, keepdim=True))))
    monitor = LogitMonitor(model)
    x = torch.randn(3, 6, 8)
    model(x)
    torch.testing.assert_close(monitor.last.readings[""].logit, model.products(x).amax((0, 2, 3)))


class Masked(Written):
    """Torch's kernel with a mask."""

    def forward(self, x):
        q, k, v = (self.heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, self.form)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("instances", [2, 3])
@pytest.mark.parametrize("axes", [2, 3, 4])
def test_a_mask_is_broadcast_as_torch_does(axes, instances):
    """One of three axes has one mask for each head, however many instances there are."""
    mask = torch.stack([torch.eye(6), torch.ones(6, 6)]).bool()
    mask = mask[0] if axes == 2 else mask[(None,) * (axes - 3)]
    model = large(Masked(mask))
    monitor = LogitMonitor(model)
    x = torch.randn(instances, 6, 8)
    model(x)
    expected = (model.products(x) / 2).masked_fill(~mask, -math.inf).amax((0, 2, 3))
    torch.testing.assert_close(monitor.last.readings[""].logit, expected)


class Preallocated(Written):
    """Megatron's products: into memory that is not read."""

    def products(self, x):
        q, k = (self.heads(project(x)).flatten(0, 1) for project in (self.q_proj, self.k_proj))
        memory = torch.full((len(q), 6, 6), math.nan)
        return torch.baddbmm(memory, q, k.mT, beta=0.0, alpha=0.5).unflatten(0, (-1, 2))


def test_memory_that_a_product_is_written_into_is_no_bias():
    model = large(Preallocated(lambda p, b: p))
    monitor = LogitMonitor(model)
    x = torch.randn(3, 6, 8)
    model(x)
    reading = monitor.last.readings[""]
    assert torch.equal(reading.product, model.products(x).amax((0, 2, 3))) and not reading.biased


class SinkFirst(Written):
    """A sink in front of the keys, so that no column of the logits is that of its product."""

    def forward(self, x):
        products = self.products(x).masked_fill(HIDDEN, -math.inf)
        weights = torch.cat([torch.zeros_like(products[..., :1]), products], -1).softmax(-1)[..., 1:]
        return self.o_proj((weights @ self.heads(self.v_proj(x))).transpose(1, 2).flatten(2))


def test_a_sink_in_front_of_the_keys_is_not_read_as_one():
    model = large(SinkFirst(None))
    monitor = LogitMonitor(model)
    with pytest.warns(UserWarning, match="leaves out a block"):
        model(torch.randn(3, 6, 8))
    with pytest.raises(InputError, match="no training pass was read"):
        _ = monitor.last


def test_a_batch_is_not_kept_for_a_reading_that_needs_none():
    model = large(Custom())
    exact, sampled = LogitMonitor(model), LogitMonitor(model, way="sampled")
    model(torch.randn(3, 5, 8))
    assert exact._inputs is None and sampled._inputs is not None


def test_a_refused_monitor_leaves_no_hooks():
    model = large(Custom())
    with pytest.raises(InputError, match="str is not a torch optimizer"):
        LogitMonitor(model, "adam", way="bound")
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


class Mixer(nn.Module):
    """Attention that no name shows, from bare parameters."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(8, 8)) for _ in range(4))

    def forward(self, x):
        q, k, v = ((x @ weight).unflatten(-1, (2, 4)).transpose(1, 2) for weight in (self.a, self.b, self.c))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + mixed.transpose(1, 2).flatten(2) @ self.d


def test_blocks_that_only_the_probe_sees_are_read_and_clipped_one_by_one():
    model, x = large(nn.Sequential(Mixer(), Mixer())), torch.randn(3, 6, 8)
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    circuits = find_circuits(model, inputs=(x[:1],), heads=True)
    monitor = LogitMonitor(model, optimizer, circuits=circuits)
    clip = qk_clip(model, optimizer, threshold=0.1, circuits=circuits)
    model(x).sum().backward()
    optimizer.step()
    assert list(monitor.last.readings) == ["0", "1"] and {head.block for head in clip.last} == {"0", "1"}


def test_an_optimizer_that_is_never_stepped_is_named_once(monkeypatch):
    monkeypatch.setattr("fasterqk.stability._monitor._KEPT", 3)
    model = large(Custom())
    LogitMonitor(model, optim.SGD(model.parameters(), lr=0.0))
    with pytest.warns(UserWarning, match="read 3 calls of the model without a step") as said:
        for _ in range(6):
            model(torch.randn(3, 5, 8))
    assert len(said) == 1
