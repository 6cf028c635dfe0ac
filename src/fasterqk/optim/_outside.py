"""Parameters outside attention: without weight decay, tables, heads, norms, and how deep each one lies."""

import re
from collections.abc import Collection
from dataclasses import replace
from typing import cast

from torch import nn

from fasterqk.errors import InputError
from fasterqk.labels.slices import NO_SOFTMAX, Circuits, Role
from fasterqk.optim.ratio import modules_in_common
from fasterqk.trace.modules import stack_of

# The patterns of the Hugging Face Trainer, searched in lower-case names.
_NORM = re.compile(r"layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
# Tables that are plain parameters, by name: pos_embed, positional_encoding, W_E, W_pos.
_TABLE = re.compile(r"pos(ition(al)?)?_?(emb|enc|table)|(^|\.)(wte|wpe|W_E|W_pos|positions)$", re.IGNORECASE)


def undecayed(model: nn.Module) -> set[str]:
    """The names of parameters without weight decay, by the rule of the Hugging Face Trainer.

    These are all biases and all parameters of normalisation layers, recognised by name (as in the Trainer) or
    by class, which also finds an ``nn.RMSNorm`` called ``ln_1``.

    >>> sorted(undecayed(nn.TransformerEncoderLayer(8, 2)))[:3]
    ['linear1.bias', 'linear2.bias', 'norm1.bias']
    """
    return {name for name, _ in model.named_parameters() if "bias" in name.lower()} | norms(model)


def tables(model: nn.Module) -> set[str]:
    """The names of token and position tables, including those under which other modules share them."""
    table_ids = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or type(module).__name__.endswith("Embedding")
        for parameter in module.parameters(recurse=False)
    }
    return {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in table_ids or (parameter.dim() > 1 and _TABLE.search(name))
    }


# Output heads, which like embeddings are usually not trained with Muon.
_HEAD = re.compile(r"(^|\.)(lm_head|head|heads|classifier|score|unembed|embed_out|output_projection)(\.|$)")


def output_head(model: nn.Module) -> set[str]:
    """The names of the parameters of the output head, also where they are tied to a table."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    inside = {id(value) for value in head.parameters()} if isinstance(head, nn.Module) else set()
    parameters = model.named_parameters(remove_duplicate=False)
    return {name for name, value in parameters if id(value) in inside or _HEAD.search(name)}


def with_outer_roles(model: nn.Module, circuits: Circuits, wanted: Collection[str]) -> Circuits:
    """``circuits`` with the roles of what is outside attention: tables, and what else is ``wanted``.

    A tied output head is a table. ``mlp`` is everything else in a layer, routers included, unless it mixes
    positions without a softmax.
    """
    names = {"embedding": tables(model), "lm_head": output_head(model), "norm": norms(model)}
    layers = [path.rpartition(".")[0] for path in circuits.blocks if path]
    outer = []
    for part in circuits:
        role = next((role for role, alike in names.items() if part.parameter in alike), "mlp")
        inside = part.layer is not None or any(_is_in(part.parameter, layer) for layer in layers)
        linear = part.decided_by == NO_SOFTMAX
        if role != "embedding" and (role not in wanted or (role == "mlp" and (linear or not inside))):
            role = "rest"
        free = part.role == "rest" and part.decided_by != "label"
        outer.append(replace(part, role=cast(Role, role)) if free else part)
    return replace(circuits, slices=tuple(outer))


def _is_in(name: str, path: str) -> bool:
    return not path or name.startswith(path + ".")


def norms(model: nn.Module) -> set[str]:
    """The names of the parameters of normalisation layers, recognised by class or by name."""
    return {
        name
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(prefix, recurse=False)
        if "norm" in type(module).__name__.lower() or _NORM.search(name.lower())
    }


def depths_of(model: nn.Module, circuits: Circuits) -> dict[str, int]:
    """How many layers lie above each parameter, itself counted: 0 for the head, 1 for the last layer.

    What is in no layer (tables, a patch embedding, its norm) lies below the layers that come after it in the
    model, a table below all of them. Towers (an encoder and a decoder) are counted apart; a parameter belongs
    to the one whose name has most in common with its own.
    """
    towers: dict[str, dict[int, int]] = {}  # the first slice of each layer
    tower_of = {part.parameter: stack_of(part.parameter).partition("*")[0] for part in circuits}
    for index, part in enumerate(circuits):
        if part.layer is not None:
            towers.setdefault(tower_of[part.parameter], {}).setdefault(part.layer, index)
    if not towers:
        raise InputError("layer_decay needs numbered layers, and the layers of this model have no numbers")
    depths, head = {}, output_head(model)
    for index, part in enumerate(circuits):
        if part.layer is not None:
            layers = sorted(towers[tower_of[part.parameter]])
            depths[part.parameter] = len(layers) - layers.index(part.layer)
        elif part.role == "embedding" or (part.parameter not in head and part.numel > 1):
            common = {tower: modules_in_common(tower, part.parameter) for tower in towers}
            nearest = [towers[tower] for tower, length in common.items() if length == max(common.values())]
            above = max(
                sum(part.role == "embedding" or start > index for start in tower.values())
                for tower in nearest
            )
            depths[part.parameter] = above + 1 if above else 0
    return depths
