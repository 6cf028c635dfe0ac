"""The written-out kernels against torch's own, over masks, shapes and options."""

import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fasterqk.trace import AttentionCall, AttentionTrace, calls, capture


@settings(max_examples=40, deadline=None)
@given(
    queries=st.integers(1, 5),
    keys=st.integers(1, 5),
    groups=st.sampled_from([1, 2]),
    mask=st.sampled_from(["none", "causal", "bool", "float"]),
    scale=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 1000),
)
def test_scaled_dot_product_attention(
    queries: int, keys: int, groups: int, mask: str, scale: float | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 4, queries, 3, generator=generator)
    key, value = torch.randn(2, 2, 4 // groups, keys, 3, generator=generator).unbind(0)
    options = {"scale": scale, "enable_gqa": groups > 1, "is_causal": mask == "causal"}
    if mask == "bool":
        options["attn_mask"] = torch.rand(2, 1, queries, keys, generator=generator) < 0.6
    if mask == "float":
        options["attn_mask"] = torch.randn(queries, keys, generator=generator)
    ours = calls.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(query, key, value, **options))


def test_a_row_that_sees_nothing_is_zero() -> None:
    query = torch.randn(1, 1, 2, 3)
    mask = torch.tensor([[True, True], [False, False]])
    output = calls.scaled_dot_product_attention(query, query, query, mask)
    assert torch.equal(output[0, 0, 1], torch.zeros(3))


MULTIHEAD = {
    "plain": {},
    "no bias": {"bias": False},
    "extra keys": {"add_bias_kv": True, "add_zero_attn": True},
    "other widths": {"kdim": 5, "vdim": 7},
    "sequence first": {"batch_first": False},
}


@pytest.mark.parametrize("options", MULTIHEAD.values(), ids=MULTIHEAD)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float", "per head"])
def test_multi_head_attention(options: dict, padded: bool, mask: str | None) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, **{"batch_first": True, **options}).eval()
    query, key, value = torch.randn(3, 4, 8), torch.randn(3, 4, module.kdim), torch.randn(3, 4, module.vdim)
    if not module.batch_first:
        query, key, value = (states.transpose(0, 1) for states in (query, key, value))
    masks: dict = {}
    if padded:
        masks["key_padding_mask"] = torch.tensor(
            [[False] * 4, [False, False, True, True], [False] * 3 + [True]]
        )
    if mask is not None:
        upper = torch.ones(4, 4, dtype=torch.bool).triu(1)
        masks["attn_mask"] = {
            "bool": upper,
            "float": torch.randn(4, 4),
            "per head": torch.randn(6, 4, 4),
        }[mask]
        if padded and mask != "bool":
            # torch wants both masks of one type.
            padding = masks["key_padding_mask"]
            masks["key_padding_mask"] = torch.zeros(3, 4).masked_fill(padding, -math.inf)
    with torch.no_grad():
        output, weights = module(query, key, value, average_attn_weights=False, **masks)
    captured = capture(module, {"query": query, "key": key, "value": value, "need_weights": False, **masks})
    torch.testing.assert_close(captured[0], weights)
    torch.testing.assert_close(captured.outputs[0], output)
    assert captured.outputs[1] is None


def test_unbatched_multi_head_attention() -> None:
    module = nn.MultiheadAttention(8, 2).eval()
    states = torch.randn(4, 8)
    captured = capture(module, (states, states, states))
    with torch.no_grad():
        output, weights = module(states, states, states)
    torch.testing.assert_close(captured.outputs, (output, weights))
    assert captured[0].shape == (1, 2, 4, 4)


# --- The trace, for observers of any kind ---


class Observer(AttentionTrace):
    """Counts attention calls; torch's kernels run as they are, so that a training pass does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[AttentionCall] = []
        self.kernels = 0

    def kernel(self, operation: calls.Operation) -> object:
        self.kernels += 1
        return operation.run()

    def weighed(self, call: AttentionCall) -> None:
        self.calls.append(call)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.mT / math.sqrt(3)).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf)
    return F.dropout(scores.softmax(-1), 0.0).reshape(scores.shape) @ v


@pytest.mark.parametrize(
    "attend", [plain, lambda q, k, v: torch.einsum("bhts,bhse->bhte", (q @ k.mT).softmax(-1), v)]
)
def test_an_observer_sees_calls_and_changes_nothing(attend) -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 3)
    with Observer() as observer:
        output = attend(q, k, v)
        routed = (q.sum(-1).softmax(-1).unsqueeze(-1) * v).sum()  # weights nothing by a product
    assert torch.equal(output, attend(q, k, v)) and routed.dim() == 0
    assert [call.shape for call in observer.calls] == [(2, 4, 5, 5)] and observer.calls[0].products


def test_kernels_are_seen_as_they_are_where_an_observer_runs_them() -> None:
    states = torch.randn(3, 2, 4, 5, 3)
    with Observer() as observer:
        output = F.scaled_dot_product_attention(*states)
    assert torch.equal(output, F.scaled_dot_product_attention(*states))
    assert (observer.kernels, observer.calls) == (1, [])


def test_the_trace_keeps_no_tensor_alive() -> None:
    gc.disable()
    try:
        with Observer() as observer:
            q = torch.randn(1, 2, 5, 3)
            scores = q @ q.mT
            probabilities = scores.softmax(-1)
            context = probabilities @ q
            tensors = [weakref.ref(tensor) for tensor in (q, scores, probabilities, context)]
            del q, scores, probabilities, context
        assert len(observer.calls) == 1 and [ref() for ref in tensors] == [None] * 4
    finally:
        gc.enable()
