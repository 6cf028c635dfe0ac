"""A first label from the class of the module and the names on the way to the parameter."""

from dataclasses import dataclass

from torch import nn

from fasterqk.capture.heads import head_counts
from fasterqk.capture.names import meaning, words
from fasterqk.circuits.labels.address import Address, locate
from fasterqk.circuits.labels.layouts import Block, Layout, concatenated, keys_then_values
from fasterqk.circuits.labels.registry import registered
from fasterqk.circuits.labels.scopes import Scope
from fasterqk.circuits.slices import Role

_SCALES = {"scale", "scaling", "temperature"}
# Names of an output projection beside queries and keys, whatever the module is called.
_OUTPUTS = {"to_out", "out_proj", "proj_out"}
# Words that make a norm inside attention one of the output side.
_INNER = {"sub", "inner"}


@dataclass(frozen=True)
class Guess:
    """What registry and names say of one parameter.

    Either one ``role`` for the whole tensor, or ``blocks`` along ``axis``. ``certain`` is False for a
    fused weight whose layout only its name suggests: that has to be seen by the probe. ``firm`` labels
    stay whatever the probe sees.
    """

    role: Role | None
    by: str
    axis: int | None = None
    blocks: tuple[Block, ...] = ()
    certain: bool = True
    firm: bool = False


def guess(model: nn.Module, scope: Scope, name: str, parameter: nn.Parameter) -> Guess | None:
    """The first label of ``name``, which is inside ``scope``; None where nothing speaks."""
    if not scope.in_core(name):
        return _beside(locate(model, scope.path, name, parameter))
    address = locate(model, scope.core, name, parameter)
    for module, component in zip(reversed(address.modules), reversed(address.components), strict=True):
        entry = registered(module, component)
        if entry is not None and not isinstance(entry, str):
            return _fused(address, parameter, module, entry, "registry", certain=True)
        if entry is not None:
            return Guess(entry, "registry")
    return _by_name(scope, address, parameter)


def _by_name(scope: Scope, address: Address, parameter: nn.Parameter) -> Guess | None:
    said = [meaning(component) for component in address.components]
    norm = any(one.norm for one in said)
    if any(one.score for one in said) and not (norm and not any(one.letters for one in said)):
        scale = any(_SCALES & set(words(component)) for component in address.components)
        queries = any(one.letters == "q" for one in said)
        return Guess("q" if scale or queries else "k", "name", firm=True)
    letters = next((one.letters for one in reversed(said) if one.letters), "")
    if letters in ("q", "k", "v"):
        return Guess(letters, "name")  # type: ignore[arg-type]
    if letters == "qk":
        return Guess("q", "name")
    if letters:
        if norm or address.adapter == "in":
            return Guess("shared", "name")
        layout = concatenated if letters == "qkv" else keys_then_values
        return _fused(address, parameter, scope.module, layout, "name", certain=False)
    if norm:
        inside = {word for component in address.components for word in words(component)}
        on_output = inside & _INNER or any(one.output and one.norm for one in said)
        return Guess("o", "name") if on_output else Guess("rest", "name")
    if any(one.output for one in said) and (scope.named or _strictly_output(address)):
        return Guess("o", "name")
    return None if scope.named else Guess("rest", "name")


def _beside(address: Address) -> Guess:
    """Around the core, in the module that is still called attention: BERT's output projection."""
    said = [meaning(component) for component in address.components]
    output = any(one.output for one in said) and not any(one.norm for one in said)
    return Guess("o" if output else "rest", "name")


def _strictly_output(address: Address) -> bool:
    """Outside a module that is called attention ``out`` may mean anything; ``W_O`` does not."""
    return any(
        {"o", "wo", "ov"} & set(words(component)) or component in _OUTPUTS for component in address.components
    )


def _fused(
    address: Address, parameter: nn.Parameter, module: nn.Module, layout: Layout, by: str, certain: bool
) -> Guess:
    if address.adapter == "in" or not parameter.is_floating_point():
        # LoRA's first factor feeds all parts; quantised storage has no rows to part.
        return Guess("shared", by, firm=True)
    axis = 0 if address.adapter else address.axis
    rows = parameter.shape[axis]
    counts = head_counts(module)
    try:
        blocks = layout(rows, *(counts or (1, 1)))
    except ValueError:
        return Guess(None, by, certain=False)
    if counts is None:
        blocks = [Block(block.role, block.size) for block in blocks]
    return Guess(None, by, axis, tuple(blocks), certain)
