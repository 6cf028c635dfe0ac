"""What names mean, over the spellings that are in use."""

import pytest
import torch

from fasterqk.trace.modules import meaning, nothing_compiled


@pytest.mark.parametrize(
    ("name", "letters"),
    [
        ("q_proj", "q"),
        ("W_Q", "q"),
        ("_W_K", "k"),
        ("b_V", "v"),
        ("query", "q"),
        ("to_q", "q"),
        ("wk", "k"),
        ("k_lin", "k"),
        ("q_proj_weight", "q"),
        ("query_global", "q"),
        ("q_a_proj", "q"),
        ("qkv", "qkv"),
        ("Wqkv", "qkv"),
        ("query_key_value", "qkv"),
        ("c_attn", "qkv"),
        ("in_proj_weight", "qkv"),
        ("W_pack", "qkv"),
        ("kv_a_proj_with_mqa", "kv"),
        ("query_key", "qk"),
        ("output_value", "v"),
        ("convolution_projection_key", "k"),
        ("c_proj", ""),
        ("convolution", ""),
        ("invoke", ""),
    ],
)
def test_letters(name: str, letters: str) -> None:
    assert meaning(name).letters == letters


@pytest.mark.parametrize(
    "name", ["o_proj", "out_proj", "c_proj", "W_O", "wo", "dense", "to_out", "proj", "out_lin"]
)
def test_output(name: str) -> None:
    assert meaning(name).output


@pytest.mark.parametrize(
    "name", ["in_proj", "dt_proj", "r_proj", "fc1", "layer", "q_proj", "linear", "input_linear"]
)
def test_not_output(name: str) -> None:
    assert not meaning(name).output


@pytest.mark.parametrize(
    "name", ["q_norm", "q_layernorm", "LayerNorm", "ln_1", "batch_norm", "normalization"]
)
def test_norm(name: str) -> None:
    assert meaning(name).norm


@pytest.mark.parametrize(
    "name", ["relative_attention_bias", "rel_pos_h", "relative_position_bias_table", "sinks", "logit_scale"]
)
def test_score(name: str) -> None:
    assert meaning(name).score


def test_two_that_run_eagerly_may_end_in_any_order() -> None:
    """As two monitors of one model do."""
    compiled = torch.compile(lambda x: torch.compiler.is_compiling(), backend="eager")
    first, second = nothing_compiled(), nothing_compiled()
    first.__enter__()
    second.__enter__()
    assert not compiled(torch.zeros(1))
    first.__exit__(None, None, None)
    assert not compiled(torch.zeros(1))
    second.__exit__(None, None, None)
    assert compiled(torch.zeros(1))
    torch._dynamo.reset()
