"""Where attention is in a model: the module that forms queries and keys, and the wrapper around it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from fasterqk.capture.modules import attention_modules, says_attention, stack_of
from fasterqk.capture.names import meaning

Found = TypeVar("Found")


@dataclass(frozen=True)
class Scope:
    """One attention block.

    ``core`` is the path of the module that forms queries and keys. ``path`` is that of the module around
    it where the core has no output projection of its own (BERT), else the same. ``layer`` counts along
    the stack. ``named``: the class says that it is attention, so whatever is inside belongs to it.
    """

    path: str
    core: str
    module: nn.Module
    layer: int | None
    named: bool = True

    def in_core(self, parameter: str) -> bool:
        """Whether the parameter of that name is inside the core."""
        return not self.core or parameter.startswith(self.core + ".")


def find_scopes(model: nn.Module) -> dict[str, Scope]:
    """The attention blocks of ``model`` by path; a core inside another belongs to the outer one."""
    cores: dict[str, nn.Module] = {}
    for found, module in attention_modules(model).items():
        name = _caller(model, found, module)
        if not any(outer and name.startswith(outer + ".") for outer in cores):
            cores.setdefault(name, model.get_submodule(name))
    layers = layer_numbers(list(cores))
    scopes = (
        Scope(_wrapper(model, name, core, cores), name, core, layers[name], _named(core))
        for name, core in cores.items()
    )
    return {scope.path: scope for scope in scopes}


def nearest(name: str, by_path: Mapping[str, Found]) -> Found | None:
    """What the innermost path around ``name`` stands for.

    >>> nearest("h.0.attn.q.weight", {"h.0": 1, "h.0.attn": 2, "h.1": 3})
    2
    """
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in by_path:
            return by_path[path]
    return None


def layer_numbers(paths: list[str]) -> dict[str, int | None]:
    """The place of each path in its stack of layers.

    Where one number of the path varies it is that number; where several do (Swin's stages and blocks)
    the blocks are counted through; a path without numbers has None.

    >>> layer_numbers(["h.0.attn", "h.2.attn"])
    {'h.0.attn': 0, 'h.2.attn': 2}
    >>> list(layer_numbers(["s.0.b.0", "s.0.b.1", "s.1.b.0"]).values())
    [0, 1, 2]
    """
    return {path: number for path, (number, _) in _numbered(paths).items()}


def layer_prefixes(scopes: Iterable[Scope]) -> dict[str, int]:
    """The path of each numbered layer, for what is in the layer but not in its attention."""
    numbered = _numbered([scope.core for scope in scopes])
    return {prefix: number for number, prefix in numbered.values() if number is not None}


def _numbered(paths: list[str]) -> dict[str, tuple[int | None, str]]:
    stacks: dict[str, list[list[str]]] = {}
    for path in paths:
        stacks.setdefault(stack_of(path), []).append(path.split("."))
    numbers: dict[str, tuple[int | None, str]] = {}
    for members in stacks.values():
        digits = [i for i, part in enumerate(members[0]) if part.isdigit()]
        varying = [i for i in digits if len({parts[i] for parts in members}) > 1]
        for count, parts in enumerate(members):
            chosen = (varying or digits[:1])[-1:]
            prefix = ".".join(parts[: chosen[0] + 1]) if chosen else ""
            number = count if len(varying) > 1 else int(parts[chosen[0]]) if chosen else None
            numbers[".".join(parts)] = (number, prefix)
    return {path: numbers[path] for path in paths}


def _caller(model: nn.Module, name: str, module: nn.Module) -> str:
    """The module that is called: not a dictionary of projections, not a single head among others."""
    parent, _, own = name.rpartition(".")
    if isinstance(module, nn.ModuleDict | nn.ModuleList):
        return parent
    around = parent.rpartition(".")[0]
    listed = own.isdigit() and isinstance(model.get_submodule(parent), nn.ModuleList)
    if listed and says_attention(model.get_submodule(around)) and not _has_output(module):
        return around
    return name


def _has_output(module: nn.Module) -> bool:
    return any(meaning(child).output for child, _ in module.named_children())


def _named(core: nn.Module) -> bool:
    return says_attention(core) or isinstance(core, nn.MultiheadAttention)


def _wrapper(model: nn.Module, name: str, core: nn.Module, cores: dict[str, nn.Module]) -> str:
    """The parent where that is called attention and only it can have the output projection."""
    if not _named(core) or _has_output(core):
        return name
    parent = name.rpartition(".")[0]
    alone = sum(1 for other in cores if other.startswith(parent + ".")) == 1
    return parent if parent and alone and says_attention(model.get_submodule(parent)) else name
