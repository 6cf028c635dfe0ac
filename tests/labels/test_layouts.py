"""Layouts of fused weights, and every line of the registry seen by the probe on a model that uses it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.architectures.odd_modules import LSHSelfAttention
from torch import nn

from fasterqk.labels._from_config import model_class, small_copies
from fasterqk.labels._inputs import run_guessed
from fasterqk.labels._layouts import (
    REGISTRY,
    concatenated,
    keys_then_values,
    per_group,
    per_head,
    queries_then_keys,
)
from fasterqk.labels._verdicts import probed

LAYOUTS = (concatenated, per_group, keys_then_values, queries_then_keys)


@given(st.sampled_from(LAYOUTS), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_every_layout_covers_all_rows_with_equal_heads(layout, groups: int, queries: int, width: int) -> None:
    heads = groups * queries
    for rows in range(1, 6 * heads * width + 1):
        try:
            parts = layout(rows, heads, groups)
        except ValueError:
            continue
        assert sum(size for _, size, _ in parts) == rows
        assert len({size for _, size, _ in parts}) == 1
        for role in "qkv":
            numbers = [head for part_role, _, head in parts if part_role == role]
            assert sorted(numbers) == list(range(len(numbers))) and len(numbers) in (0, heads, groups)


def test_per_group_with_one_query_a_key_is_per_head() -> None:
    assert per_group(24, 2, 2) == per_head(("q", 4), ("k", 4), ("v", 4))(24, 2, 2)


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="7 rows"):
        concatenated(7, 2, 2)


# --- Every line of the registry is seen by the probe on a model that uses it ---


def grown(kind: str, **fields: Any) -> nn.Module:
    """A small model of that type."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **fields)
    return next(small_copies(model_class(config), config))


def run_speech(model: nn.Module) -> None:
    model.encoder(torch.randn(1, 20, model.config.encoder_config.input_dim))


def run_projector(model: nn.Module) -> None:
    width = model.config.vision_config.hidden_size
    model.multi_modal_projector(torch.randn(1, 1225, width))


def torch_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)


def conformer() -> nn.Module:
    """Relative attention as in conformers: two biases that are both added to the queries."""

    class RelativeAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))
            self.bias_u, self.bias_v = (nn.Parameter(torch.randn(8)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k = self.q_proj(x), self.k_proj(x)
            scores = (q + self.bias_u) @ k.transpose(1, 2) + (q + self.bias_v) @ x.transpose(1, 2)
            return self.o_proj(scores.softmax(-1) @ self.v_proj(x))

    return RelativeAttention()


# A pattern of the registry -> models that use it, and how to run them.
Model = tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]


def of(*kinds: str) -> list[Model]:
    return [(lambda kind=kind: grown(kind), run_guessed) for kind in kinds]


USED_BY: dict[str, list[Model]] = {
    "GPT2Attention": [
        *of("gpt2", "imagegpt"),
        (lambda: grown("gpt2", add_cross_attention=True), run_guessed),
    ],
    "MultiheadAttention": [(torch_layer, run_guessed)],
    "Phi3Attention": of("phi3"),
    "ModernBert": of("modernbert", "mpt"),
    "GPTNeoX": of("gpt_neox", "gpt_neox_japanese", "bloom", "persimmon"),
    "FalconAttention": of("falcon"),
    "GPTBigCodeAttention": [
        *of("gpt_bigcode"),
        (lambda: grown("gpt_bigcode", multi_query=False), run_guessed),
    ],
    "CodeGenAttention": of("codegen"),
    "DisentangledSelfAttention": of("deberta"),
    "BarkSelfAttention": of("bark"),
    "Qwen3": of("qwen3", "qwen3_next"),
    "AXK2Attention": of("axk2"),
    "LevitAttention": of("levit"),
    "GraniteSpeech": [(lambda: grown("granite_speech"), run_speech)],
    "DeepseekV4": of("deepseek_v4"),
    "AriaCrossAttention": [(lambda: grown("aria"), run_projector)],
    "LSHSelfAttention": [(LSHSelfAttention, run_guessed)],
    "XLNetRelativeAttention": of("xlnet", "funnel"),
    r"\w*": [(conformer, run_guessed)],
    r"\w*(Attention|MLA)": of("deepseek_v3"),
}


def test_every_line_is_used() -> None:
    starts = list(USED_BY)
    assert [
        next(start for start in reversed(starts) if pattern.startswith(start)) for pattern in REGISTRY
    ] == starts


@pytest.mark.parametrize("start", USED_BY)
def test_the_probe_agrees(start: str) -> None:
    for build, run in USED_BY[start]:
        verdict = probed(build(), run)
        registered = {
            name
            for name, guess in verdict.guesses.items()
            if guess is not None and guess.slices and guess.slices[0].decided_by == "registry"
            if verdict.scope_of(name).path in verdict.evidence.ran
        }
        assert registered
        overruled = {name for name in verdict.verified if not verdict.confirmed(name)}
        assert not registered & overruled
        # An indexer chooses keys without a gradient; compression needs a longer text, segments a second one.
        quiet = ("indexer", "compressor", "seg_embed")
        unseen = registered - verdict.verified.keys()
        assert [name for name in unseen if not any(word in name for word in quiet)] == []
