"""The odd modules as architectures, with their labels by hand."""

import warnings

from torch import nn
from torch.nn.utils import parametrizations

from .architecture import HEAD, HEADS, LAYERS, WIDTH, Architecture, in_turn, prefixed
from .odd_modules import (
    AllInOne,
    Dictionary,
    DifferentialAttention,
    Lucid,
    MultiHeadAttention,
    Nameless,
    Parallel,
    TalkingHeads,
)
from .own_modules import TimmAttention
from .torch_models import THIRDS, seeded, states, token_ids


def twice(module: type[nn.Module]) -> nn.Module:
    return nn.Sequential(module(), module())


def weight_normed() -> nn.Module:
    """Both ways of torch to write a weight as length and direction, on a fused projection."""
    made = twice(TimmAttention)
    parametrizations.weight_norm(made[0].qkv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch would rather have the other one
        nn.utils.weight_norm(made[1].qkv)
    return made


def packed_normed() -> dict[str, object]:
    return {
        "*.qkv.bias": THIRDS,
        "*.qkv.parametrizations.weight.original0": THIRDS,
        "*.qkv.parametrizations.weight.original1": THIRDS,
        "*.qkv.weight_g": THIRDS,
        "*.qkv.weight_v": THIRDS,
        "*.proj.weight": "o",
        "*.proj.bias": "o",
    }


ODD = [
    Architecture(
        "heads-in-a-list",
        seeded(lambda: twice(MultiHeadAttention)),
        states,
        {
            **prefixed("*.heads.*", query="q", key="k", value="v", bias=False),
            **prefixed("*", proj="o"),
        },
        {"self": 2 * HEADS},
    ),
    Architecture(
        "lucid",
        seeded(lambda: twice(Lucid)),
        states,
        {
            "*.to_q.weight": "q",
            "*.to_kv.weight": in_turn(0, ("k", WIDTH), ("v", WIDTH)),
            "*.to_out.*.weight": "o",
        },
        {"self": 2},
    ),
    Architecture(
        "dictionary",
        seeded(lambda: twice(Dictionary)),
        states,
        prefixed("*.proj", q="q", k="k", v="v", o="o"),
        {"self": 2},
    ),
    Architecture(
        "nameless",
        seeded(lambda: twice(Nameless)),
        states,
        prefixed("*", first=in_turn(0, ("v", WIDTH), ("q", WIDTH), ("k", WIDTH)), last="o"),
        {"self": 2},
    ),
    Architecture(
        "parallel",
        seeded(lambda: twice(Parallel)),
        states,
        {
            "*.fused.weight": in_turn(0, ("q", WIDTH), ("k", HEAD), ("v", HEAD), ("rest", 24)),
            "*.attention_out.weight": "o",
        },
        {"self": 2},
    ),
    Architecture(
        "talking-heads",
        seeded(lambda: twice(TalkingHeads)),
        states,
        prefixed("*", qkv=THIRDS, proj="o", proj_l="k", proj_w="k"),
        {"self": 2},
    ),
    Architecture(
        "differential",
        seeded(lambda: twice(DifferentialAttention)),
        states,
        {
            **prefixed("*", q_proj="q", k_proj="k", v_proj="v", o_proj="o", bias=False),
            **prefixed("*", subln="o"),
            "*.lambda_1": "k",
            "*.lambda_2": "k",
        },
        {"self": 2},
    ),
    Architecture(
        "all-in-one",
        seeded(AllInOne),
        token_ids,
        {
            f"{name}.*.{kind}": role
            for name, role in {"one": "k", "two": "q", "three": "v", "four": "o"}.items()
            for kind in ("weight", "bias")
        },
        {"self": LAYERS},
    ),
    Architecture("weight-norm", seeded(weight_normed), states, packed_normed(), {"self": 2}),
]
