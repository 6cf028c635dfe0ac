"""qk_clip: heads above the threshold are scaled back as by hand, and nothing else changes."""

import copy
import math

import pytest
import torch
import transformers
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict

from fasterqk import make_optimizer, qk_clip
from fasterqk.errors import InputError

VOCABULARY, LENGTH, THRESHOLD = 20, 8, 1.5
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16}
LATENT = {"q_lora_rank": 6, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 4}
EXPERTS = {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}


def gpt2():
    off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=4, n_embd=16, n_positions=LENGTH, **off, **TEXT)
    )


def llama():
    config = transformers.LlamaConfig(
        num_key_value_heads=2, intermediate_size=24, attention_bias=True, **SMALL, **TEXT
    )
    return transformers.LlamaForCausalLM(config)


def falcon():
    config = transformers.FalconConfig(num_kv_heads=2, new_decoder_architecture=True, **SMALL, **TEXT)
    return transformers.FalconForCausalLM(config)


def deepseek():
    config = transformers.DeepseekV3Config(
        num_key_value_heads=4,
        intermediate_size=24,
        first_k_dense_replace=2,
        **EXPERTS,
        **LATENT,
        **SMALL,
        **TEXT,
    )
    return transformers.DeepseekV3ForCausalLM(config)


class Pair(nn.Module):
    """Two layers of attention over embedded tokens."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(2))

    def forward(self, input_ids, attention_mask):
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = x + layer(x, x, x, key_padding_mask=attention_mask == 0, need_weights=False)[0]
        return x


# --- Unfused twins: one weight for the queries, and one for the keys, of each head ---


class ByHead(nn.Module):
    """A projection in parts: ``parts`` are (role, head, rows) in the order of the fused weight."""

    def __init__(self, fused, parts):
        super().__init__()
        rows = [part[2] for part in parts]
        self.parts = parts
        columns = type(fused).__name__ == "Conv1D"
        weight = fused.weight.detach().T if columns else fused.weight.detach()
        self.weights = nn.ParameterList(part.clone() for part in weight.split(rows))
        self.biases = None
        if getattr(fused, "bias", None) is not None:
            self.biases = nn.ParameterList(part.clone() for part in fused.bias.detach().split(rows))

    def forward(self, x):
        return nn.functional.linear(x, *self.joined())

    def joined(self):
        bias = None if self.biases is None else torch.cat(list(self.biases))
        return torch.cat(list(self.weights)), bias

    def multiply(self, role, head, number):
        for i, (its_role, index, _) in enumerate(self.parts):
            if (its_role, index) == (role, head):
                self.weights[i].data *= number
                if self.biases is not None:
                    self.biases[i].data *= number


class PlainAttention(nn.Module):
    """nn.MultiheadAttention written out, with a projection by head."""

    def __init__(self, fused):
        super().__init__()
        joint = nn.Linear(16, 48)
        joint.weight.data, joint.bias.data = fused.in_proj_weight.data, fused.in_proj_bias.data
        self.joint = ByHead(joint, HAND["mha"][1]["joint"])
        self.out_proj = fused.out_proj

    def forward(self, x, *_, key_padding_mask, need_weights):
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.joint(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / 2
        scores = scores.masked_fill(key_padding_mask[:, None, None], -math.inf)
        context = nn.functional.softmax(scores, dim=-1) @ v
        return self.out_proj(context.transpose(1, 2).flatten(2)), None


QUERIES = [("q", head, 4) for head in range(4)]
# By model: its attention modules, the parts of their projections, how many query heads share a key.
HAND = {
    "gpt2": (
        lambda model: [layer.attn for layer in model.transformer.h],
        {"c_attn": [*QUERIES, *[("k", head, 4) for head in range(4)], ("v", 0, 16)]},
        1,
    ),
    "llama": (
        lambda model: [layer.self_attn for layer in model.model.layers],
        {"q_proj": QUERIES, "k_proj": [("k", 0, 4), ("k", 1, 4)]},
        2,
    ),
    "falcon": (
        lambda model: [layer.self_attention for layer in model.transformer.h],
        {
            "query_key_value": [
                *[("q", 0, 4), ("q", 1, 4), ("k", 0, 4), ("v", 0, 4)],
                *[("q", 2, 4), ("q", 3, 4), ("k", 1, 4), ("v", 1, 4)],
            ]
        },
        2,
    ),
    "deepseek": (
        lambda model: [layer.self_attn for layer in model.model.layers],
        {
            "q_b_proj": [part for head in range(4) for part in (("q", head, 6), ("rotary", head, 4))],
            "kv_b_proj": [part for head in range(4) for part in (("k", head, 6), ("v", head, 4))],
        },
        1,
    ),
    "mha": (
        lambda model: list(model.layers),
        {"joint": [*QUERIES, *[("k", head, 4) for head in range(4)], ("v", 0, 16)]},
        1,
    ),
}
MAKE = {"gpt2": gpt2, "llama": llama, "falcon": falcon, "deepseek": deepseek, "mha": Pair}


def made(name):
    """A model in training mode whose logits are large."""
    torch.manual_seed(0)
    model = MAKE[name]().train()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, 0.4)
    return model


def unfused(model, name):
    """The twin, and the projections by head of each layer."""
    twin = copy.deepcopy(model)
    if name != "mha":
        twin.config._attn_implementation = "eager"
    modules, projections, _ = HAND[name]
    if name == "mha":
        twin.layers = nn.ModuleList(PlainAttention(layer) for layer in twin.layers)
    for module in modules(twin):
        for child, parts in projections.items() if name != "mha" else ():
            setattr(module, child, ByHead(getattr(module, child), parts))
    return twin, [[getattr(module, child) for child in projections] for module in modules(twin)]


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (3, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def loss_of(output):
    return (output if isinstance(output, torch.Tensor) else output.logits).square().mean()


def clip_by_hand(projections, largest, group, alpha):
    factors = [THRESHOLD / max(logit, THRESHOLD) for logit in largest]
    for first in range(0, 4, group):
        strictest = min(factors[first : first + group]) ** (1 - alpha)
        for projection in projections:
            projection.multiply("k", first // group, strictest)
            for head in range(first, first + group):
                projection.multiply("q", head, factors[head] / strictest)
                projection.multiply("rotary", head, factors[head])


@pytest.mark.parametrize("name", HAND)
def test_clip_equals_an_unfused_twin(name, monkeypatch):
    ours = made(name)
    twin, projections = unfused(ours, name)
    optimizer = optim.SGD(ours.parameters(), lr=0.02, momentum=0.9)
    by_hand = optim.SGD(twin.parameters(), lr=0.02, momentum=0.9)
    clip = qk_clip(ours, optimizer, THRESHOLD, alpha=0.3)
    largest_logits = []
    softmax = nn.functional.softmax

    def recorded(scores, *args, **kwargs):
        largest_logits.append(scores.detach().amax((0, 2, 3)))
        return softmax(scores, *args, **kwargs)

    heads = 0
    for step in range(3):
        for micro in range(2):
            loss_of(ours(**batch(2 * step + micro))).backward()
            with monkeypatch.context() as patch:
                patch.setattr(nn.functional, "softmax", recorded)
                loss_of(twin(**batch(2 * step + micro))).backward()
        for stepping in (optimizer, by_hand):
            stepping.step()
            stepping.zero_grad()
        assert len(largest_logits) == 4  # two layers, two micro-batches
        for layer, by_head in enumerate(projections):
            largest = torch.maximum(largest_logits[layer], largest_logits[layer + 2]).tolist()
            clip_by_hand(by_head, largest, HAND[name][2], alpha=0.3)
            heads += sum(logit > THRESHOLD for logit in largest)
        largest_logits.clear()
    assert 0 < clip.total == heads < 24, "some heads are clipped, others are not"
    for module, by_head in zip(HAND[name][0](ours), projections, strict=True):
        for child, projection in zip(HAND[name][1], by_head, strict=True):
            fused = getattr(module, child, None)
            weight = module.in_proj_weight if fused is None else fused.weight
            weight = weight.T if type(fused).__name__ == "Conv1D" else weight
            bias = module.in_proj_bias if fused is None else fused.bias
            expected, added = projection.joined()
            torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5)
            if bias is not None:
                torch.testing.assert_close(bias, added, rtol=1e-4, atol=1e-5)


def weight_of(module, child):
    """The weight of a projection with its outputs in rows."""
    if child == "joint":
        return module.in_proj_weight
    fused = getattr(module, child)
    return fused.weight.T if type(fused).__name__ == "Conv1D" else fused.weight


# --- What a clip promises ---


def clipped_once(model, **options):
    """A step with learning rate 0 and the clip after it."""
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    with qk_clip(model, optimizer, THRESHOLD, **options) as clip:
        loss_of(model(**batch(0))).backward()
        optimizer.step()
    return clip


def logits_on(model, name, inputs, monkeypatch):
    """The largest logit by head of each layer, from its full score matrix, given these inputs."""
    largest = []
    softmax = nn.functional.softmax

    def recorded(scores, *args, **kwargs):
        largest.append(scores.detach().amax((0, 2, 3)))
        return softmax(scores, *args, **kwargs)

    twin = unfused(model, name)[0]
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(nn.functional, "softmax", recorded)
        for module, (args, kwargs) in zip(HAND[name][0](twin), inputs, strict=True):
            module(
                *args, **{key: None if "Cache" in str(type(left)) else left for key, left in kwargs.items()}
            )
    return largest


def inputs_of(model, name):
    """What every attention module of the twin is given on the batch."""
    inputs = []
    twin = unfused(model, name)[0]
    for module in HAND[name][0](twin):
        module.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append((args, kwargs)), with_kwargs=True
        )
    twin(**batch(0))
    return inputs


@pytest.mark.parametrize("name", HAND)
def test_logits_end_at_the_threshold_and_others_stay(name, monkeypatch):
    model = made(name)
    inputs = inputs_of(model, name)
    before = logits_on(model, name, inputs, monkeypatch)
    old_model = copy.deepcopy(model)
    clip = clipped_once(model)
    above = {(head.layer, head.head) for head in clip.last}
    for layer, (old, new) in enumerate(zip(before, logits_on(model, name, inputs, monkeypatch), strict=True)):
        for head in range(4):
            assert ((layer, head) in above) == (old[head] > THRESHOLD)
            assert new[head] <= THRESHOLD * (1 + 1e-5)
            torch.testing.assert_close(new[head], old[head].clamp(max=THRESHOLD), rtol=1e-5, atol=1e-5)
    group = HAND[name][2]
    touched = {(layer, head // group) for layer, head in above}
    for layer, modules in enumerate(zip(*(HAND[name][0](m) for m in (model, old_model)), strict=True)):
        for child, parts in HAND[name][1].items():
            stop = 0
            for role, head, rows in parts:
                stop += rows
                key = head // group if role in ("q", "rotary") else head
                if role == "v" or (layer, key) not in touched:  # the same bits
                    new, old = (weight_of(module, child)[stop - rows : stop] for module in modules)
                    assert torch.equal(new, old)


def test_a_negative_maximum_gives_no_factor():
    """One head clips, the largest logit of another is negative."""
    model = nn.MultiheadAttention(4, 2, bias=False, batch_first=True)
    with torch.no_grad():
        model.in_proj_weight[:4] = torch.eye(4) * torch.tensor([3.0, 3.0, -1.0, -1.0]).unsqueeze(1)
        model.in_proj_weight[4:8] = torch.eye(4)
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    clip = qk_clip(model, optimizer, threshold=1.1)  # a little more in single precision
    x = torch.rand(2, 3, 4) + 0.5
    model(x, x, x)[0].sum().backward()
    before = model.in_proj_weight.detach().clone()
    optimizer.step()
    assert [clipped.head for clipped in clip.last] == [0]
    assert model.in_proj_weight.isfinite().all()
    assert torch.equal(model.in_proj_weight[2:4], before[2:4])
    assert torch.equal(model.in_proj_weight[6:8], before[6:8])


def test_logits_that_are_not_finite_are_left_alone():
    model = made("mha")
    with torch.no_grad():
        model.layers[0].in_proj_weight[:4] = math.inf
    before = [parameter.detach().clone() for parameter in model.layers[0].parameters()]
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    qk_clip(model, optimizer, threshold=1e6)
    model(**batch(0))
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.layers[0].parameters(), strict=True))


def test_log_only_changes_nothing_and_remove_takes_everything_off():
    model = made("llama")
    before = copy.deepcopy(model.state_dict())
    clip = clipped_once(model, log_only=True)
    assert clip.last and clip.log()["logits/clipped_heads"] == len(clip.last)
    assert clip.log()["logits/largest_clipped"] == max(head.logit for head in clip.last) > THRESHOLD
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "log only" in repr(clip)
    loss_of(model(**batch(1))).backward()
    assert clip.steps == 1
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_passes_that_do_not_train_do_not_count():
    model = made("gpt2")
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    clip = qk_clip(model, optimizer, threshold=1e6)
    loss_of(model(**batch(0))).backward()
    optimizer.step()
    optimizer.zero_grad()
    clip.threshold = 0.01
    model.eval()
    model(**batch(0))
    model.train()
    with torch.no_grad():
        model(**batch(0))
    optimizer.step()
    assert not clip.last


def test_a_model_that_never_trained_is_told():
    model = made("gpt2").eval()
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    qk_clip(model, optimizer)
    loss_of(model(**batch(0))).backward()
    with pytest.raises(InputError, match=r"model\.train\(\)"):
        optimizer.step()


def test_clip_reaches_what_make_optimizer_trains():
    """Fused weights trained slice by slice end where a plain optimizer at the same rate ends."""
    ours, plain = made("gpt2"), made("gpt2")
    almost_one = 1.0 + 1e-7  # another rate, so that the fused weight is split
    optimizers = [
        make_optimizer(ours, optim.SGD, lr=0.02, ratios={"q": almost_one}),
        optim.SGD(plain.parameters(), lr=0.02),
    ]
    for model, optimizer in zip((ours, plain), optimizers, strict=True):
        qk_clip(model, optimizer, THRESHOLD)
        for step in range(3):
            loss_of(model(**batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    for left, other in zip(HAND["gpt2"][0](ours), HAND["gpt2"][0](plain), strict=True):
        torch.testing.assert_close(left.c_attn.weight, other.c_attn.weight, rtol=1e-4, atol=1e-5)


def test_a_step_without_gradients_is_not_a_step_of_training():
    """As a checkpoint is loaded: torch fills the states of an optimizer by a step on zeros."""
    model = made("gpt2")
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    clip = qk_clip(model, optimizer)
    get_state_dict(model, optimizer)
    assert optimizer.state and clip.steps == 1 and not clip.last


def test_a_pass_that_is_not_seen_is_told_also_later():
    model = made("gpt2")
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    qk_clip(model, optimizer)
    loss_of(model(**batch(0))).backward()
    optimizer.step()
    model.eval()
    loss_of(model(**batch(0))).backward()
    with pytest.raises(InputError, match=r"no training pass was seen before this step .*compiled from it"):
        optimizer.step()


def test_double_precision():
    """The same heads, factors and weights as in single precision, to its rounding."""
    single, double = made("llama"), made("llama").double()
    clips = clipped_once(single), clipped_once(double)
    assert [(c.block, c.head) for c in clips[0].last] == [(c.block, c.head) for c in clips[1].last]
    for low, high in zip(single.parameters(), double.parameters(), strict=True):
        assert high.dtype == torch.float64
        torch.testing.assert_close(low.double(), high, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    plain, checkpointed = made("llama"), made("llama")
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert clipped_once(plain).last == clipped_once(checkpointed).last
    for left, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(left, other)


def test_resumed_training_is_the_same():
    def trained(model, optimizer, steps):
        with qk_clip(model, optimizer, THRESHOLD):
            for step in steps:
                loss_of(model(**batch(step))).backward()
                optimizer.step()
                optimizer.zero_grad()

    through, before = made("llama"), made("llama")
    trained(through, make_optimizer(through, optim.AdamW, lr=0.01, qk_ratio=3), range(4))
    first = make_optimizer(before, optim.AdamW, lr=0.01, qk_ratio=3)
    trained(before, first, range(2))
    after = made("llama")
    after.load_state_dict(before.state_dict())
    second = make_optimizer(after, optim.AdamW, lr=0.01, qk_ratio=3)
    second.load_state_dict(first.state_dict())
    trained(after, second, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(through.parameters(), after.parameters(), strict=True))


# --- What is refused, each in one line ---


class Normalised(nn.Module):
    """Attention that normalises queries without any parameter."""

    num_heads = 2

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            project(x).unflatten(-1, (2, 4)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = nn.functional.normalize(q, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def refusal(make, **options):
    with pytest.raises(InputError) as error:
        model = make()
        optimizer = optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.0)
        qk_clip(model, optimizer, **options)
        model(torch.randn(2, 3, 8))
    assert "\n" not in str(error.value)
    return str(error.value)


class Latent(nn.Module):
    """Queries in two factors, a norm between them as in DeepSeek's own code, or ``after`` both."""

    num_heads = 2

    def __init__(self, after):
        super().__init__()
        self.after = after
        self.wq_a, self.wq_b = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)
        self.q_norm = nn.RMSNorm(8 if after else 4)
        self.wk, self.wv, self.wo = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        q = self.q_norm(self.wq_b(self.wq_a(x))) if self.after else self.wq_b(self.q_norm(self.wq_a(x)))
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (q, self.wk(x), self.wv(x)))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.wo(mixed.transpose(1, 2).flatten(2))


def test_a_norm_between_two_factors_is_not_one_on_queries():
    torch.manual_seed(0)
    model = Latent(after=False)
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    clip = qk_clip(model, optimizer, threshold=0.01)
    x = 5 * torch.randn(2, 3, 8)
    model(x).sum().backward()
    optimizer.step()
    assert clip.last
    assert "do not follow" in refusal(lambda: Latent(after=True))


def test_norms_on_queries_and_keys_are_refused():
    def qwen():
        config = transformers.Qwen3Config(
            num_key_value_heads=2, head_dim=4, intermediate_size=8, **SMALL, **TEXT
        )
        return transformers.Qwen3ForCausalLM(config)

    assert "q_norm.weight" in refusal(qwen)
    assert "do not follow" in refusal(Normalised)


def test_what_cannot_be_clipped_is_refused():
    def half_frozen():
        model = Normalised()
        model.q_proj.requires_grad_(False)
        return model

    assert "q_proj.weight is frozen" in refusal(half_frozen)
    assert "threshold" in refusal(Normalised, threshold=0)
    assert "alpha=2" in refusal(Normalised, alpha=2)
    model = Normalised()
    with pytest.raises(InputError, match="not trained by this optimizer"):
        qk_clip(model, optim.SGD(model.v_proj.parameters(), lr=0.1))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="there is nothing to clip"):
        qk_clip(model, optimizer, labels={"[qk]_*": "rest"})
    with pytest.raises(InputError, match="not 'gpt2'"):
        qk_clip("gpt2", optimizer)


@pytest.mark.parametrize("layout", ["rows", "columns", "interleaved"])
def test_heads_that_no_attribute_states(layout, net, label):
    """The probe has seen how many heads a fused weight of unknown code has."""
    ours, by_hand = net(layout, layers=1), net(layout, layers=1)
    for model, circuits in ((ours, None), (by_hand, label(by_hand, heads=True))):
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        clip = qk_clip(model, optimizer, threshold=0.5, circuits=circuits)
        model.loss().backward()
        optimizer.step()
        assert clip.last
    assert torch.equal(ours.qkv(), by_hand.qkv())


def test_a_head_at_the_threshold_is_not_counted_again():
    """Scaled back, it is above the threshold by rounding alone."""
    torch.manual_seed(0)
    model = Pair()
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    clip = qk_clip(model, optimizer, threshold=0.05)
    counts = []
    for _ in range(6):
        tokens = torch.arange(LENGTH)[None]
        model(tokens, torch.ones_like(tokens)).sum().backward()
        optimizer.step()
        counts.append(len(clip.last))
    # The first clip of a layer changes what the next one gets.
    assert counts[0] > 0 and counts[2:] == [0] * 4


def test_a_block_that_casts_itself_is_verified_in_its_precision():
    class Cast(nn.MultiheadAttention):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x, x, x, need_weights=False)[0].float()

    torch.manual_seed(0)
    model = Cast(16, 4, batch_first=True)
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    with qk_clip(model, optimizer, threshold=0.1) as clip:
        model(torch.randn(2, 6, 16)).sum().backward()
        optimizer.step()
    assert clip.last
