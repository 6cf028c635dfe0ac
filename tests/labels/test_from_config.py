"""Small copies keep what labels depend on: the types of layers and the structure of heads."""

import pytest
import torch
from torch import nn

from fasterqk.labels import find_circuits, model_without_weights
from fasterqk.labels._from_config import can_be_rebuilt, model_class, shrink, small_copies


def config(kind: str, **fields: object) -> object:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **fields)


@pytest.mark.parametrize(
    ("heads", "keys", "small"), [(32, 32, (4, 4)), (32, 8, (4, 2)), (16, 1, (4, 1)), (2, 2, (2, 2))]
)
def test_heads_keep_their_groups(heads: int, keys: int, small: tuple[int, int]) -> None:
    found = shrink(config("llama", num_attention_heads=heads, num_key_value_heads=keys))
    assert (found.num_attention_heads, found.num_key_value_heads) == small


def test_every_type_of_layer_stays() -> None:
    types = ["linear_attention"] * 3 + ["full_attention"]
    found = shrink(config("qwen3_next", num_hidden_layers=4, layer_types=types))
    assert found.layer_types == ["linear_attention", "full_attention"] and found.num_hidden_layers == 2


def test_layers_of_one_type_that_differ_in_another_list_stay() -> None:
    """Mistral Large 4: every fourth layer has no rotary positions, and then no rows that make them."""
    small = shrink(config("mistral_large4_text", num_hidden_layers=8))
    assert small.no_rope_layers == [1, 0] and small.num_hidden_layers == 2
    assert small.kv_source_layers == [0, 1]  # the places where the kept layers are now
    with torch.device("meta"):
        model = model_class(small)(config("mistral_large4_text", num_hidden_layers=4))
    latent = [piece for piece in find_circuits(model) if "kv_a_proj_with_mqa" in piece.parameter]
    roles = [(int(piece.parameter.split(".")[1]), piece.role) for piece in latent]
    assert roles == [*((layer, role) for layer in range(3) for role in ("shared", "k")), (3, "shared")]
    assert {piece.decided_by for piece in latent} == {"registry+probe"}


def test_the_original_stays_as_it_was() -> None:
    original = config("llama")
    before = original.to_dict()
    shrink(original)
    assert original.to_dict() == before


@pytest.mark.parametrize("kind", ["llama", "bert", "t5", "deepseek_v3", "gemma2", "vit"])
def test_twins_are_small(kind: str) -> None:
    found = config(kind)
    twin = next(small_copies(model_class(found), found))
    assert sum(parameter.numel() for parameter in twin.parameters()) < 1_000_000


def test_only_models_with_a_configuration_have_small_copies() -> None:
    assert not can_be_rebuilt(nn.MultiheadAttention(4, 2))


def test_large_models_are_verified_on_a_twin() -> None:
    """On the meta device nothing of the model itself can run."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config("phi3"))
    fused = [piece for piece in find_circuits(model, verify=True) if "qkv_proj" in piece.parameter]
    assert {piece.decided_by for piece in fused} == {"registry+probe"}
    assert [(piece.start, piece.stop, piece.role) for piece in fused[:3]] == [
        (0, 3072, "q"),
        (3072, 6144, "k"),
        (6144, 9216, "v"),
    ]


@pytest.mark.parametrize("kind", ["jamba", "longformer", "gemma3n_text", "perceiver", "led"])
def test_kinds_of_layers_that_are_counted_or_listed_stay_consistent(kind: str) -> None:
    """One layer in eight attends (Jamba); windows are listed by layer (Longformer); layers share keys."""
    import torch

    found = config(kind)
    with torch.device("meta"):
        model = model_class(found)(found)  # some models write their lists into the configuration
    names = [name for name, _ in next(small_copies(type(model), model.config)).named_modules()]
    assert any("att" in name for name in names)


def test_a_hybrid_with_two_mixers_under_one_name() -> None:
    """MiniMax: softmax attention and lightning attention are both called self_attn."""
    circuits = find_circuits(model_without_weights("minimax")[0])
    found = {(piece.layer, piece.role) for piece in circuits if piece.parameter.endswith("q_proj.weight")}
    assert found and {role for _, role in found} == {"q"}
    assert "(MiniMaxLightningAttention): at the base rate" in circuits.notes[0]
