"""``find_circuits``: a label for every parameter and every slice of a fused parameter."""

from typing import Any

from torch import nn

from fasterqk.capture.modules import is_attention
from fasterqk.circuits.heads import head_counts
from fasterqk.circuits.layouts import concatenated
from fasterqk.circuits.patterns import meaning
from fasterqk.circuits.slices import Circuits, Role, Slice
from fasterqk.errors import InputError


def find_circuits(model: nn.Module, rules: Any = None, verify: Any = "auto", heads: bool = False) -> Circuits:
    """Label every parameter of ``model``."""
    cores = {name: module for name, module in model.named_modules() if is_attention(module)}
    found: list[Slice] = []
    unknown = []
    for name, parameter in model.named_parameters():
        core = next((c for c in cores if name.startswith(c + ".") or c == ""), None)
        path = name.split(".")
        layer = next((int(p) for p in path if p.isdigit()), None)
        role: Role | None = "rest"
        if core is None and len(path) > 3 and ".".join(path[:-3]) + ".self" in cores:
            role = "o" if path[-2] == "dense" else "rest"
        if core is not None:
            role = None
            for part in reversed(path[core.count(".") + 1 if core else 0 :]):
                said = meaning(part)
                if said.letters in ("q", "k", "v"):
                    role = said.letters  # type: ignore[assignment]
                elif said.score:
                    role = "k"
                elif said.letters == "qkv" or part in ("c_attn", "in_proj_weight", "in_proj_bias"):
                    counts = head_counts(cores[core])
                    axis = 1 if path[-1] == "weight" and part == "c_attn" else 0
                    assert counts
                    start = 0
                    for block in concatenated(parameter.shape[axis], *counts):
                        numel = block.size * parameter.numel() // parameter.shape[axis]
                        last = found[-1] if found else None
                        if last and last.parameter == name and last.role == block.role and not heads:
                            found[-1] = Slice(
                                name,
                                axis,
                                last.start,
                                start + block.size,
                                block.role,
                                layer,
                                "registry",
                                last.numel + numel,
                            )
                        else:
                            found.append(
                                Slice(
                                    name,
                                    axis,
                                    start,
                                    start + block.size,
                                    block.role,
                                    layer,
                                    "registry",
                                    numel,
                                    block.head if heads else None,
                                )
                            )
                        start += block.size
                    break
                elif said.output:
                    role = "o"
                if role is not None:
                    break
            else:
                unknown.append(name)
        if role is not None:
            found.append(Slice(name, None, None, None, role, layer, "name", parameter.numel()))
    if unknown:
        raise InputError(f"{len(unknown)} attention parameters matched no circuit: {', '.join(unknown[:5])}")
    return Circuits(tuple(found))
