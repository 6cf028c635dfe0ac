"""Where a parameter sits inside an attention block, with adapters and wrappers seen through."""

from dataclasses import dataclass

from torch import nn

# Modules that only wrap another one: PEFT, parametrizations, FSDP, torch.compile, checkpointing.
_WRAPPERS = {
    "base_layer",
    "parametrizations",
    "modules_to_save",
    "original_module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
}
# What a parameter of a projection may be called; weight norm and spectral norm have names of their own.
_PLAIN_LEAVES = {"weight", "bias", "original", "original0", "original1"}
_PLAIN_LEAVES |= {"weight_g", "weight_v", "weight_orig", "weight_u"}


@dataclass(frozen=True)
class Address:
    """The way from an attention block down to a parameter.

    ``components`` are the names on it that mean something (``("q_proj",)``, ``("output", "dense")``),
    ``modules`` the modules that hold each of them, outermost first. ``adapter`` is None for a parameter
    of the model itself, ``"in"`` for the factor of an adapter that reads its input (LoRA's A), ``"out"``
    for the one that writes its output (LoRA's B and everything else). ``axis`` is the output axis.
    """

    components: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    adapter: str | None
    axis: int
    bias: bool


def locate(root: nn.Module, path: str, name: str, parameter: nn.Parameter) -> Address:
    """The address, seen from the module at ``path``, of the parameter called ``name`` in ``root``."""
    parts = name.split(".")[path.count(".") + 1 if path else 0 :]
    module = root.get_submodule(path)
    components: list[str] = []
    holders: list[nn.Module] = []
    adapter = None
    for part in parts[:-1]:
        if adapter is None and hasattr(module, "base_layer") and part != "base_layer":
            adapter = "in" if part.endswith(("_A", "_a")) else "out"
        if adapter is None and part not in _WRAPPERS:
            components.append(part)
            holders.append(module)
        module = getattr(module, part)
    leaf = parts[-1]
    if adapter is None and leaf not in _PLAIN_LEAVES:
        components.append(leaf)
        holders.append(module)
    return Address(
        tuple(components),
        tuple(holders),
        adapter,
        # Conv1D of GPT-2 keeps (in, out) where nn.Linear keeps (out, in).
        axis=1 if type(module).__name__ == "Conv1D" and parameter.dim() == 2 else 0,
        bias=leaf == "bias" or leaf.endswith("_bias"),
    )
