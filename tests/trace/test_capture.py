"""capture: what it returns, what it refuses, and that it leaves models as they were."""

import gc
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.trace import Captured, capture, record

WIDTH = 8


class OwnAttention(nn.Module):
    """One head; tells the capture about itself where asked to."""

    def __init__(self, tell: bool = False, kind: str = "self") -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tell, self.kind = tell, kind

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        probabilities = (self.query(x) @ self.key(source).transpose(1, 2)).softmax(-1)
        if self.tell:
            record(self, probabilities[:, None], kind=self.kind)
        return probabilities @ self.value(source)


class HiddenAttention(OwnAttention):
    """Forms its weights in a way that cannot be seen: not a softmax."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return scores.sigmoid() @ self.value(x)


def states(batch: int = 2, length: int = 5) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(0))


def test_a_single_head_gets_its_axis() -> None:
    captured = capture(OwnAttention(), states())
    assert captured[0].shape == (2, 1, 5, 5)


def test_record_and_trace_do_not_count_twice() -> None:
    model = nn.Sequential(OwnAttention(tell=True), OwnAttention())
    captured = capture(model, states())
    assert captured.names == ("0", "1")
    torch.testing.assert_close(captured[0], capture(model[0], states())[0])


def test_record_without_a_capture_does_nothing_and_compiles() -> None:
    model = OwnAttention(tell=True)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(states()), model(states()))
    assert len(capture(compiled, states())) == 1
    torch.testing.assert_close(compiled(states()), model(states()))


def test_kinds_that_models_state_are_kept() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = OwnAttention(tell=True)
            self.decoder = nn.ModuleList([OwnAttention(tell=True), OwnAttention(tell=True, kind="cross")])

        def forward(self, x: Tensor) -> Tensor:
            memory = self.encoder(x)
            return self.decoder[1](self.decoder[0](x), memory)

    captured = capture(Both(), states())
    assert captured.kinds == ("encoder", "decoder", "cross")
    assert len(captured.select("self")) == 2 and captured.select("cross").names == ("decoder.1",)


def test_unknown_kind_is_quoted() -> None:
    with pytest.raises(InputError, match="unknown kind of attention 'sideways'"):
        Captured((), (), ()).select("sideways")  # type: ignore[arg-type]


def test_fewer_layers_than_the_model_has_is_an_error_that_names_them() -> None:
    model = nn.Sequential(OwnAttention(), HiddenAttention())
    with pytest.raises(
        InputError, match=r"captured 1 attention layers, but 1 more .*: 1 \(HiddenAttention\)"
    ):
        capture(model, states())


def test_a_layer_that_is_left_out_is_an_error() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(OwnAttention() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[2](self.layers[0](x))

    with pytest.raises(InputError, match=r"layers\.1"):
        capture(Skips(), states())


def test_a_part_that_is_not_asked_for_is_no_gap() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.vision = OwnAttention(), OwnAttention()

        def read(self, x: Tensor) -> Tensor:
            return self.text(x)

    model = Towers()
    assert capture(model, states(), forward=model.read).names == ("text",)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(InputError, match="no attention probabilities were formed in Linear"):
        capture(nn.Linear(2, 2), torch.zeros(1, 2))


def test_other_softmaxes_are_not_attention() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.router = OwnAttention(), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.attention(x)
            gates = self.router(x).softmax(-1).topk(2).values
            return F.softmax(gates.sum(-1, keepdim=True) * x, dim=-1)

    assert len(capture(Routed(), states())) == 1


def test_everything_is_undone_after_an_exception() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = OwnAttention()

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError(f"not today {self.attention(x).shape}")

    model = Fails().train()
    fast = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(RuntimeError, match="not today"):
        capture(model, states())
    assert torch.backends.mha.get_fastpath_enabled() == fast
    for module in model.modules():
        assert module.training and not module._forward_hooks and not module._forward_pre_hooks
        assert "_fasterqk_recorder" not in module.__dict__


def test_inputs_that_cannot_be_passed_are_quoted() -> None:
    with pytest.raises(InputError, match="mapping, a tuple or a tensor, not int"):
        capture(OwnAttention(), 3)


def test_heads_folded_into_the_batch_are_unfolded() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 4
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            batch, length, _ = x.shape
            q, k, v = (
                part(x).view(batch, length, 4, 2).transpose(1, 2).reshape(batch * 4, length, 2)
                for part in (self.q, self.k, self.v)
            )
            return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)

    folded = Folded()
    captured = capture(folded, states())
    assert captured[0].shape == (2, 4, 5, 5)
    q, k = (part(states()).view(2, 5, 4, 2).transpose(1, 2) for part in (folded.q, folded.k))
    torch.testing.assert_close(captured[0], (q @ k.transpose(-1, -2)).softmax(-1))


def test_a_shape_that_is_not_attention_of_positions_is_refused() -> None:
    class Windows(OwnAttention):
        def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
            windows = x.view(2, 3, 2, 2, 1, WIDTH)
            probabilities = (self.query(windows) @ self.key(windows).transpose(-1, -2)).softmax(-1)
            return probabilities @ self.value(windows)

    with pytest.raises(InputError, match=r"has shape \(2, 3, 2, 2, 1, 1\)"):
        capture(Windows(), states(2, 12))


def test_dropout_is_off_while_capturing() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.9, batch_first=True).train()
    first, second = capture(layer, states()), capture(layer, states())
    torch.testing.assert_close(first.outputs, second.outputs)
    torch.testing.assert_close(first[0].sum(-1), torch.ones(2, 2, 5))


def test_rows_alone_are_kept_and_nothing_behind_them() -> None:
    model = nn.Sequential(OwnAttention(), OwnAttention(tell=True))
    rows = torch.tensor([4, 1])
    for whole, row in zip(capture(model, states()), capture(model, states(), rows=rows), strict=True):
        torch.testing.assert_close(row, whole[torch.arange(2), :, rows].unsqueeze(2), rtol=0, atol=0)
        assert row.untyped_storage().nbytes() == row.numel() * row.element_size()


def test_rows_that_no_layer_has_are_refused() -> None:
    with pytest.raises(InputError, match=r"shape \(2, 1, 5, 5\) has no rows \[4, 5\]"):
        capture(OwnAttention(), states(), rows=torch.tensor([4, 5]))


def test_a_layer_is_let_go_of_before_the_collector_comes() -> None:
    def whole() -> list[Tensor]:
        return [x for x in gc.get_objects() if type(x) is Tensor and x.shape[-2:] == (5, 5)]

    model = nn.Sequential(OwnAttention(), OwnAttention(tell=True))
    gc.collect()
    gc.disable()
    try:
        others = whole()  # of other tests
        rows = capture(model, states(), rows=torch.tensor([4, 1]))
        left = [x for x in whole() if not any(x is other for other in others)]
    finally:
        gc.enable()
    assert len(rows) == 2
    assert not left


# --- Masks, half precision, and attention of which only a part is seen ---


def tiny(head, config, **changes):
    torch.manual_seed(0)
    size = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"intermediate_size": 24, "max_position_embeddings": 64, **changes}
    return getattr(transformers, head)(getattr(transformers, config)(**size)).eval()


def test_longformer_shows_its_global_rows_alone_and_is_refused():
    model = tiny(
        "LongformerForSequenceClassification", "LongformerConfig", attention_window=4, pad_token_id=0
    )
    ids = torch.arange(3, 15).unsqueeze(0)
    with pytest.raises(InputError, match="only a part of the attention of 2 layers can be seen: longformer"):
        capture(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


@pytest.mark.parametrize(
    ("head", "config", "changes", "expected"),
    [
        ("BertModel", "BertConfig", {}, (9, 9)),
        ("GPT2Model", "GPT2Config", {}, (9, 0)),
        ("MistralModel", "MistralConfig", {"sliding_window": 4, "num_key_value_heads": 2}, (3, 0)),
        ("OpenAIGPTModel", "OpenAIGPTConfig", {}, (9, 0)),
    ],
)
@pytest.mark.parametrize("half", [False, True])
def test_masks_of_models(head, config, changes, expected, half):
    model = tiny(head, config, **changes)
    model = model.bfloat16() if half else model
    captured = capture(model, torch.arange(10).unsqueeze(0), masks=True)
    assert len(captured.masks) == 2
    behind, ahead = expected
    for mask in captured.select("self").masks:
        assert mask[0].tolist() == torch.ones(10, 10).triu(-behind).tril(ahead).bool().tolist()
    assert captured.masks[0] is captured.masks[1]
    assert capture(model, torch.arange(10).unsqueeze(0)).masks == ()


def test_the_mask_is_that_of_the_model_where_attention_underflows():
    # Each row puts all its weight on itself: the weights look causal, the mask is not.
    class Sharp(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            scores = 1e3 * torch.eye(4) + 0 * self.q_proj(x) @ self.k_proj(x).transpose(1, 2)
            return scores.softmax(-1) @ x

    captured = capture(Sharp(), torch.randn(1, 4, 4), masks=True)
    assert captured[0].tolist() == torch.eye(4)[None, None].tolist()
    assert captured.masks[0].all()


@pytest.mark.parametrize("mask", [-1e3, -1e4, -math.inf])
def test_a_mask_is_seen_whatever_it_adds(mask):
    class Masked(nn.Module):
        def forward(self, x):
            scores = x @ x.transpose(1, 2) + torch.full((4, 4), mask).triu(1)
            return scores.softmax(-1) @ x

    captured = capture(Masked(), 3 * torch.randn(1, 4, 4), masks=True)
    assert captured.masks[0][0].tolist() == torch.ones(4, 4).tril().bool().tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [None, torch.tensor([9])])
def test_half_precision_keeps_what_its_softmax_knew(dtype, rows):
    model = tiny("BertModel", "BertConfig", initializer_range=0.8)
    ids = torch.arange(10).unsqueeze(0)
    single = capture(model, ids, rows=rows)[0]
    half = capture(model.to(dtype), ids, rows=rows)[0]
    assert single.min() < 1e-6
    assert half.dtype == torch.float32
    assert half.shape == single.shape
    # The logits are of the precision of the model, so their differences are too.
    rough = 0.5 if dtype == torch.bfloat16 else 0.05
    assert (half.clamp_min(1e-30).log() - single.log()).abs().max() < rough * single.log().abs().max()


def test_half_precision_of_a_plain_module_stays_differentiable():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return (30 * self.q_proj(x) @ self.k_proj(x).transpose(-2, -1)).softmax(-1) @ x

    torch.manual_seed(0)
    model, x = Plain().bfloat16(), torch.randn(1, 1, 5, 4).bfloat16()
    captured = capture(model, x, differentiable=True)
    assert captured[0].dtype == torch.float32
    assert torch.autograd.grad(captured.outputs.sum(), captured[0])[0].abs().sum() > 0
    assert torch.equal(captured.outputs, model(x))


class Flat(nn.Module):
    """Two heads in the first axis, with the instances: before them, or after them."""

    num_heads = 2

    def __init__(self, heads_first: bool) -> None:
        super().__init__()
        self.heads_first = heads_first
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def heads(self, x: Tensor) -> Tensor:
        return self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.heads(x).transpose(1, 2) if self.heads_first else self.heads(x)
        q, k, v = parts.flatten(1, 2)
        return ((q @ k.mT).softmax(-1) @ v).unflatten(0, parts.shape[1:3])


@pytest.mark.parametrize("rows", [None, torch.tensor([4, 1])])
def test_instances_and_heads_in_one_axis_are_told_apart(rows: Tensor | None) -> None:
    model = Flat(heads_first=False)
    q, k, _ = model.heads(states())
    expected = (q @ k.mT).softmax(-1)
    expected = expected if rows is None else expected[torch.arange(2), :, rows].unsqueeze(2)
    torch.testing.assert_close(capture(model, states(), rows=rows)[0], expected)
    with pytest.raises(InputError, match=r"has shape \(4, 5, 5\), which is not \(batch, head, query, key\)"):
        capture(Flat(heads_first=True), {"x": states()}, rows=rows)
    assert capture(Flat(heads_first=True), states(batch=1))[0].shape == (1, 2, 5, 5)
    unknown = states()
    unknown[0, 0] = torch.nan
    assert capture(model, unknown, rows=rows)[0].isnan().any((1, 2, 3)).tolist() == [True, False]


def test_a_row_that_sees_no_key_has_no_attention() -> None:
    class Blind(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            visible = torch.tensor([True, True, False]).unsqueeze(1)
            return F.scaled_dot_product_attention(x, x, x, attn_mask=visible)

    model, x = Blind(), torch.randn(1, 2, 3, 4)
    captured = capture(model, x, differentiable=True)
    torch.testing.assert_close(captured[0] @ x, model(x))
    assert not captured[0][:, :, 2].any()


@pytest.mark.parametrize("rows", [[1, 2], torch.tensor([1.0, 2.0]), torch.tensor([1, -1]), torch.ones(2) > 0])
def test_rows_are_positions(rows: object) -> None:
    with pytest.raises(InputError, match="rows is a tensor of query positions, one per instance, not"):
        capture(OwnAttention(), states(), rows=rows)  # type: ignore[arg-type]


def test_lazy_layers_have_no_graph() -> None:
    with pytest.raises(InputError, match="lazy=True keeps no graph"):
        capture(OwnAttention(), states(), lazy=True, differentiable=True)
