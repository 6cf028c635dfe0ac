"""First labels: adapters and wrappers are labelled by the projection they act on."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fasterqk.labels import Circuits, find_circuits
from fasterqk.labels.names import find_scopes

WIDTH, HEADS = 16, 2


def base(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModel

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, "vocab_size": 20}
    sizes |= {"pad_token_id": 0, "intermediate_size": 12}
    return AutoModel.from_config(AutoConfig.for_model(kind, **sizes))


def roles(circuits: Circuits, part: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for piece in circuits:
        if part in piece.parameter:
            found.setdefault(piece.parameter.partition("self_attn.")[2], []).append(piece.role)
    return found


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "loha", "adalora"])
def test_adapters_on_separate_projections_follow_them(kind: str) -> None:
    import peft

    targets: dict[str, Any] = {"target_modules": ["k_proj", "v_proj"]}
    adapter = {
        "lora": lambda: peft.LoraConfig(r=2, **targets),
        "dora": lambda: peft.LoraConfig(r=2, use_dora=True, **targets),
        "ia3": lambda: peft.IA3Config(feedforward_modules=[], **targets),
        "loha": lambda: peft.LoHaConfig(r=2, **targets),
        "adalora": lambda: peft.AdaLoraConfig(total_step=10, **targets),
    }[kind]()
    found = roles(find_circuits(peft.get_peft_model(base("llama"), adapter)), "self_attn")
    added = {name: role for name, role in found.items() if "base_layer" not in name and name.count(".") > 1}
    assert len(added) >= 2
    assert all(role == [name[0]] for name, role in added.items())


def test_dora_on_a_fused_projection_is_parted_with_it() -> None:
    import peft

    adapter = peft.LoraConfig(r=2, use_dora=True, target_modules=["qkv_proj"])
    found = roles(find_circuits(peft.get_peft_model(base("phi3"), adapter)), "qkv_proj")
    assert found == {
        "qkv_proj.base_layer.weight": ["q", "k", "v"],
        "qkv_proj.lora_A.default.weight": ["shared"],
        "qkv_proj.lora_B.default.weight": ["q", "k", "v"],
        "qkv_proj.lora_magnitude_vector.default.weight": ["q", "k", "v"],
    }


def test_parametrized_weights_are_seen_through() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 1
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.proj((q @ k.transpose(1, 2)).softmax(-1) @ v)

    model = Attention()
    weight_norm(model.qkv)
    found: dict[str, list[str]] = {}
    for piece in find_circuits(model):
        found.setdefault(piece.parameter, []).append(piece.role)
    for name in ("original0", "original1"):
        assert found[f"qkv.parametrizations.weight.{name}"] == ["q", "k", "v"]


# --- Numbers of layers ---


def attention(width: int = 8) -> nn.Module:
    return nn.MultiheadAttention(width, 2, batch_first=True)


def layers_of(model: nn.Module) -> list[int | None]:
    return [scope.layer for scope in find_scopes(model).values()]


def test_numbers_at_the_end_of_a_name() -> None:
    """torchvision's ViT, and stages with names of their own."""
    names = [f"encoder_layer_{i}" for i in range(12)]
    named = nn.ModuleDict({name: nn.ModuleDict({"self_attention": attention()}) for name in names})
    assert layers_of(named) == list(range(12))
    stages = nn.ModuleDict({f"stage{i}": nn.ModuleList([attention() for _ in range(2)]) for i in (2, 3)})
    assert layers_of(stages) == [0, 1, 2, 3]
    # Two kinds of attention in one layer are not two layers.
    both = nn.ModuleList([nn.ModuleDict({"attn1": attention(), "attn2": attention()}) for _ in range(3)])
    assert layers_of(both) == [0, 0, 1, 1, 2, 2]


def sublayers(*kinds: str) -> nn.Module:
    """As x-transformers keeps them: for each a list of a norm and the module."""
    made = {"a": attention, "c": attention, "f": lambda: nn.Linear(8, 8)}
    lists = (nn.ModuleList([nn.LayerNorm(8), made[kind]()]) for kind in kinds)
    return nn.ModuleDict({"layers": nn.ModuleList(lists)})


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [("afaf", [0, 1]), ("acfacf", [0, 0, 1, 1]), ("faffaf", [0, 1]), ("aaa", [0, 1, 2])],
)
def test_lists_of_sublayers(kinds: str, expected: list[int]) -> None:
    assert layers_of(sublayers(*kinds)) == expected


def test_layers_of_lists_keep_their_numbers() -> None:
    nested = nn.ModuleList([nn.ModuleList([attention(), nn.Linear(8, 8)]) for _ in range(3)])
    assert layers_of(nested) == [0, 1, 2]


class CrossAttentionBlock(nn.Module):
    """A whole layer that is called attention, with a norm of keys and values in front (open_clip)."""

    def __init__(self, inner: bool) -> None:
        super().__init__()
        self.ln_kv = nn.LayerNorm(8)
        self.ff = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        if inner:
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        else:
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.ln_kv(x)
        if hasattr(self, "attn"):
            x = x + self.attn(x, states, states)[0]
        else:
            scores = self.q_proj(x) @ self.k_proj(states).mT
            x = x + self.o_proj(scores.softmax(-1) @ self.v_proj(states))
        return x + self.ff(x)


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_a_feed_forward_network_in_a_block_called_attention_is_rest(inner: bool, verify: bool) -> None:
    circuits = find_circuits(CrossAttentionBlock(inner), verify=verify)
    assert {piece.role for piece in circuits if piece.parameter.startswith("ff")} == {"rest"}
    assert {piece.role for piece in circuits if "ff" not in piece.parameter} >= {"q", "k", "v", "o"}


class BorrowingAttention(nn.Module):
    """Attention that may take keys and values of another layer and then has none of its own (Gemma 3n)."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        if own:
            self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, kept: tuple[torch.Tensor, ...]) -> torch.Tensor:
        out: torch.Tensor = self.o_proj((self.q_proj(x) @ kept[0].mT).softmax(-1) @ kept[1])
        return out


class Borrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([BorrowingAttention(True), BorrowingAttention(False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: Any = self.layers[0]
        kept = first.k_proj(x), first.v_proj(x)
        for layer in self.layers:
            x = x + layer(x, kept)
        return x


def test_a_layer_that_borrows_its_keys_is_attention() -> None:
    circuits = find_circuits(Borrowing())
    found = {piece.parameter: piece.role for piece in circuits}
    assert found["layers.1.q_proj.weight"] == "q" and found["layers.1.o_proj.weight"] == "o"
    assert {piece.layer for piece in circuits if piece.role == "q"} == {0, 1}
