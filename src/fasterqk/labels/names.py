"""First labels, from registry and names: attention blocks, the path to each parameter, its likely slices.

``find_scopes`` finds the attention blocks of a model, ``locate`` the path from a block down to a parameter
(through adapters and wrappers), ``guess`` the slices of the parameter. ``slice_by_head`` cuts labelled
parameters by head. The probe (``probe``) confirms or corrects the guesses.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from torch import nn

from fasterqk.errors import InputError
from fasterqk.labels._layouts import Layout, concatenated, keys_then_values, queries_then_keys, registered
from fasterqk.labels.slices import Circuits, Role, Slice, whole_slice
from fasterqk.trace.modules import (
    attention_modules,
    class_of,
    first_number,
    head_counts,
    layer_number,
    meaning,
    parameters_by_module,
    says_attention,
    stack_of,
    words,
)

# Wrappers: PEFT, parametrizations, TransformerLens, torch.compile, FSDP, ...
_WRAPPERS = {"base_layer", "parametrizations", "modules_to_save", "original_module"}
_WRAPPERS |= {"_original_component", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Usual names of a projection's parameters, including weight norm and spectral norm.
_PLAIN_LEAVES = {"weight", "bias", "original", "original0", "original1"}
_PLAIN_LEAVES |= {"weight_g", "weight_v", "weight_orig", "weight_u"}


@dataclass(frozen=True)
class Location:
    """The path from an attention block down to a parameter.

    ``components`` are the names on it that carry meaning (``("q_proj",)``, ``("output", "dense")``), and
    ``modules`` the modules that hold them, outermost first. ``adapter`` is None for a parameter of the model
    itself, ``"in"`` for the factor of an adapter that reads its input (LoRA's A), ``"out"`` for all others
    (LoRA's B). ``axis`` is the output axis.
    """

    components: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    adapter: str | None
    axis: int
    bias: bool


def locate(root: nn.Module, path: str, name: str, parameter: nn.Parameter) -> Location:
    """The location, below the module at ``path``, of the parameter called ``name`` in ``root``."""
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
    return Location(
        tuple(components),
        tuple(holders),
        adapter,
        # Conv1D of GPT-2 keeps (in, out) where nn.Linear keeps (out, in).
        axis=1 if class_of(module).__name__ == "Conv1D" and parameter.dim() == 2 else 0,
        bias=leaf == "bias" or leaf.endswith("_bias"),
    )


# --- Attention blocks: the module that forms queries and keys, and the wrapper around it ---

Value = TypeVar("Value")


@dataclass(frozen=True)
class Scope:
    """One attention block.

    ``core`` is the path of the module that forms queries and keys. ``path`` is the same, or the module around
    it if the core has no output projection (BERT). ``layer`` is the number in the stack. ``named``: the class
    is called attention, so everything inside belongs to it.
    """

    path: str
    core: str
    module: nn.Module
    layer: int | None
    named: bool = True


def find_scopes(model: nn.Module) -> dict[str, Scope]:
    """The attention blocks of ``model`` by path; a core inside another belongs to the outer one."""
    cores: dict[str, nn.Module] = {}
    for path, module in attention_modules(model).items():
        name = _caller(model, path, module)
        if not any(outer and name.startswith(outer + ".") for outer in cores):
            cores.setdefault(name, model.get_submodule(name))
    layers = layer_numbers(list(cores), model)
    scopes = (
        Scope(_wrapper(model, name, core, cores), name, core, layers[name], _named(core))
        for name, core in cores.items()
    )
    return {scope.path: scope for scope in scopes}


def with_discovered(model: nn.Module, scopes: dict[str, Scope], paths: Sequence[str]) -> dict[str, Scope]:
    """The scopes, and the modules at ``paths`` whose attention only the probe has seen."""
    layers = layer_numbers(list(paths), model)
    discovered = {}
    for path in paths:
        if not any(known == path or known.startswith(path + ".") for known in scopes):
            module = model.get_submodule(path)
            discovered[path] = Scope(path, path, module, layers[path], says_attention(module))
    return scopes | discovered


def scopes_of(model: nn.Module, circuits: Circuits) -> dict[str, Scope]:
    """The attention blocks of ``model``, by name or by the probe."""
    named = find_scopes(model)
    paths = {path for path, _ in model.named_modules()}
    return with_discovered(model, named, [p for p in circuits.blocks if p not in named and p in paths])


def stacks(model: nn.Module, scopes: Mapping[str, "Scope"]) -> dict[str, list[str]]:
    """The attention blocks that are alike, by the first of them: same place, code, shapes and switches."""
    alike: dict[Any, list[str]] = {}
    for path, scope in scopes.items():
        block = model.get_submodule(path)
        shapes = tuple((name, tuple(value.shape)) for name, value in parameters_by_module(block))
        switches = {k: v for k, v in vars(scope.module).items() if isinstance(v, bool | str)}
        settings = tuple(sorted((key, value) for key, value in switches.items() if key != "training"))
        code = tuple(code_of(module) for module in block.modules())
        alike.setdefault((stack_of(path), code, shapes, settings), []).append(path)
    return {paths[0]: paths for paths in alike.values()}


def code_of(module: nn.Module) -> tuple[str, Any]:
    """The class of a module and the code that runs; an instance may override ``forward``."""
    kind = class_of(module)
    forward: Any = getattr(module, "forward", None)
    while isinstance(forward, partial):
        forward = forward.func
    forward = getattr(forward, "__func__", forward)
    return f"{kind.__module__}.{kind.__qualname__}", getattr(forward, "__code__", forward)


def nearest(name: str, by_path: Mapping[str, Value]) -> Value | None:
    """The value of the innermost path around ``name``.

    >>> nearest("h.0.attn.q.weight", {"h.0": 1, "h.0.attn": 2, "h.1": 3})
    2
    """
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in by_path:
            return by_path[path]
    return None


def layer_numbers(paths: list[str], model: nn.Module | None = None) -> dict[str, int | None]:
    """The number of each path in its stack of layers.

    This is the number in the path that varies. If several vary (Swin's stages and blocks), blocks are counted
    from 0. In a list of sublayers (x-transformers: attention, feed-forward, attention, ...), layers are
    counted from 0. A path without numbers has None.

    >>> layer_numbers(["h.0.attn", "h.2.attn"])
    {'h.0.attn': 0, 'h.2.attn': 2}
    >>> list(layer_numbers(["s.0.b.0", "s.0.b.1", "s.1.b.0"]).values())
    [0, 1, 2]
    """
    numbered = _numbered(paths)
    numbers = {path: number for path, (number, _) in numbered.items()}
    if model is None:
        return numbers
    stacks: dict[str, list[str]] = {}
    for path, (number, prefix) in numbered.items():
        if number is not None and isinstance(model.get_submodule(prefix), nn.ModuleList):
            stacks.setdefault(prefix.rpartition(".")[0], []).append(path)
    for members in stacks.values():
        places = sorted({numbers[path] or 0 for path in members})
        # Attention that follows attention (a decoder's, to the encoder) is in the same layer.
        starts = [place for place in places if place - 1 not in places]
        if places != list(range(len(places))):
            for path in members:
                numbers[path] = sum(start <= (numbers[path] or 0) for start in starts) - 1
    return numbers


def layer_prefixes(scopes: Iterable[Scope]) -> dict[str, int]:
    """The layer number by path of each numbered layer, for parameters of the layer outside attention."""
    layers = {scope.core: scope.layer for scope in scopes}
    numbered = _numbered(list(layers))
    return {numbered[core][1]: layer for core, layer in layers.items() if layer is not None}


def _numbered(paths: list[str]) -> dict[str, tuple[int | None, str]]:
    """For each path its number and the path up to it, from the numbers in the names."""
    stacks: dict[str, list[list[str]]] = {}
    for path in paths:
        stacks.setdefault(stack_of(path), []).append(path.split("."))
    numbers: dict[str, tuple[int | None, str]] = {}
    for members in stacks.values():
        digits = [i for i, part in enumerate(members[0]) if layer_number(part) is not None]
        varying = [i for i in digits if len({parts[i] for parts in members}) > 1]
        for count, parts in enumerate(members):
            chosen = (varying or digits[:1])[-1:]
            prefix = ".".join(parts[: chosen[0] + 1]) if chosen else ""
            number = count if len(varying) > 1 else layer_number(parts[chosen[0]]) if chosen else None
            numbers[".".join(parts)] = (number, prefix)
    return {path: numbers[path] for path in paths}


def _caller(model: nn.Module, name: str, module: nn.Module) -> str:
    """The path of the module that is called: no dictionary of projections, no single head of a list."""
    parent, _, last = name.rpartition(".")
    if isinstance(module, nn.ModuleDict | nn.ModuleList):
        return _caller(model, parent, model.get_submodule(parent)) if parent else parent
    around = parent.rpartition(".")[0]
    listed = last.isdigit() and isinstance(model.get_submodule(parent), nn.ModuleList)
    if listed and says_attention(model.get_submodule(around)) and not _has_output(module):
        return around
    return name


def _has_output(module: nn.Module) -> bool:
    return any(meaning(child).output for child, _ in module.named_children())


def _named(core: nn.Module) -> bool:
    return says_attention(core) or isinstance(core, nn.MultiheadAttention)


def _wrapper(model: nn.Module, name: str, core: nn.Module, cores: dict[str, nn.Module]) -> str:
    """The parent, if it is called attention and may hold the output projection; otherwise the core."""
    if not _named(core) or _has_output(core):
        return name
    parent = name.rpartition(".")[0]
    alone = sum(1 for other in cores if other.startswith(parent + ".")) == 1
    return parent if parent and alone and says_attention(model.get_submodule(parent)) else name


# --- A first label, from the class of the module and the names on the path ---

_SCALES = {"scale", "scaling", "temperature"}
_OUTPUTS = {"to_out", "out_proj", "proj_out"}  # an output projection in a module of any name
_INNER = {"sub", "inner"}  # words in the name of a norm that acts on the output
# A feed-forward network in a block that is called attention as a whole.
_FEED_FORWARD = {"mlp", "ff", "ffn", "feed_forward", "feedforward", "feedForward"}
# The likely layout of a fused weight with these letters in its name.
_LAYOUTS: dict[str, Layout] = {"kv": keys_then_values, "qk": queries_then_keys}


@dataclass(frozen=True)
class Guess:
    """The slices of one parameter by registry or name; empty if its layout is unknown.

    ``certain`` is False for a fused weight whose layout only its name suggests; the probe must confirm it.
    ``firm`` labels stay, whatever the probe sees. ``open``: rest, unless the probe sees that the parameter
    makes queries, keys or values.
    """

    slices: tuple[Slice, ...]
    certain: bool = True
    firm: bool = False
    open: bool = False

    @property
    def role(self) -> Role | None:
        """The role of the whole tensor; None where it is split, or nothing is known."""
        return self.slices[0].role if self.slices and self.slices[0].axis is None else None

    @property
    def fused(self) -> bool:
        """Whether the parameter holds slices of several roles."""
        return len(self.slices) > 1


def guess(model: nn.Module, scope: Scope, name: str, parameter: nn.Parameter) -> Guess | None:
    """The first label of parameter ``name`` in ``scope``; None if neither registry nor name decides."""
    whole = whole_slice(name, parameter.numel(), scope.layer)
    if scope.core and not name.startswith(scope.core + "."):
        # BERT's output projection is in the wrapper, not in the core.
        beside = locate(model, scope.path, name, parameter)
        meanings = [meaning(component) for component in beside.components]
        output = any(m.output for m in meanings) and not any(m.norm for m in meanings)
        return Guess((replace(whole, role="o" if output else "rest"),))
    location = locate(model, scope.core, name, parameter)
    if _is_part(model, location, name, parameter):
        return Guess((), certain=False)  # the layout is of all rows
    for module, component in zip(reversed(location.modules), reversed(location.components), strict=True):
        entry = registered(module, component)
        if isinstance(entry, str):
            return Guess((replace(whole, role=entry, decided_by="registry"),))
        if entry is not None:
            return _fused(replace(whole, decided_by="registry"), location, parameter, module, entry)
    return _by_name(whole, scope, location, parameter)


def _is_part(model: nn.Module, location: Location, name: str, parameter: nn.Parameter) -> bool:
    """Whether this parameter has some of the rows of a weight that a parametrization joins."""
    path, parametrized, rest = name.partition("parametrizations.")
    if not parametrized or not parameter.dim():
        return False
    weight = getattr(model.get_submodule(path.rstrip(".")), rest.partition(".")[0])
    axis = min(location.axis, parameter.dim() - 1, weight.dim() - 1)
    return bool(parameter.shape[axis] != weight.shape[axis])


def _by_name(whole: Slice, scope: Scope, location: Location, parameter: nn.Parameter) -> Guess | None:
    def labelled(role: Role, **options: bool) -> Guess:
        return Guess((replace(whole, role=role),), **options)

    meanings = [meaning(component) for component in location.components]
    norm = any(m.norm for m in meanings)
    if any(m.score for m in meanings) and not (norm and not any(m.letters for m in meanings)):
        scale = any(_SCALES & set(words(component)) for component in location.components)
        queries = any(m.letters == "q" for m in meanings)
        return labelled("q" if scale or queries else "k", firm=True)
    letters = next((m.letters for m in reversed(meanings) if m.letters), "")
    if letters in ("q", "k", "v"):
        return labelled(letters)  # type: ignore[arg-type]
    if letters == "qk" and (norm or location.adapter == "in"):
        return labelled("q")
    if letters and (norm or location.adapter == "in"):
        return labelled("shared")
    if letters:
        # Rows of queries and keys are in one circuit, whatever their order.
        layout, certain = _LAYOUTS.get(letters, concatenated), letters == "qk"
        fused = _fused(whole, location, parameter, scope.module, layout, certain)
        return labelled("q") if certain and not fused.fused else fused
    if _FEED_FORWARD & set(location.components):
        return labelled("rest", open=True)
    if norm:
        inside = {word for component in location.components for word in words(component)}
        on_output = inside & _INNER or any(m.output and m.norm for m in meanings)
        return labelled("o" if on_output else "rest")
    if any(m.output for m in meanings) and (scope.named or _strictly_output(location)):
        return labelled("o")
    return None if scope.named else labelled("rest")


def _strictly_output(location: Location) -> bool:
    """Whether a name is unambiguous; ``out`` may mean anything in a module that is not called attention."""
    return any(
        {"o", "wo", "ov"} & set(words(component)) or component in _OUTPUTS
        for component in location.components
    )


def _fused(
    whole: Slice,
    location: Location,
    parameter: nn.Parameter,
    module: nn.Module,
    layout: Layout,
    certain: bool = True,
) -> Guess:
    if location.adapter == "in" or not parameter.is_floating_point():
        # LoRA's first factor feeds all parts; quantised storage has no rows.
        return Guess((replace(whole, role="shared"),), firm=True)
    axis = 0 if location.adapter else location.axis
    counts = head_counts(module)
    try:
        parts = layout(parameter.shape[axis], *(counts or (1, 1)))
    except ValueError:
        return Guess((), certain=False)
    if len({role for role, _, _ in parts}) == 1:
        # Only the latent of keys and values (Mistral Large 4).
        return Guess((replace(whole, role=parts[0][0]),))
    if counts is None:
        parts = [(role, rows, None) for role, rows, _ in parts]
    return Guess(whole.split(axis, parts, whole.decided_by), certain)


# --- Slices per head ---


def slice_by_head(
    model: nn.Module,
    scope: Scope,
    parameter: nn.Parameter,
    slices: Sequence[Slice],
    observed: tuple[int, int, int, int] | None = None,
) -> Sequence[Slice]:
    """The slices of one parameter; a whole tensor with one role is cut head by head.

    Queries, keys and values are cut along their output, output projections along their input. Parameters that
    serve all heads (norms inside a head, low-rank factors, the output bias) keep ``head`` None. ``observed``
    are the head counts that the probe saw (queries, keys, contexts, values); without them, the module's
    count.
    """
    whole = slices[0]
    if len(slices) > 1 or whole.axis is not None or whole.circuit in ("rest", "shared"):
        return slices
    location = locate(model, scope.path, whole.parameter, parameter)
    single = _single_head(location)
    if single is not None:
        return [replace(whole, head=single)]
    if observed is not None:
        counts = observed[2:] if whole.role in ("v", "o") else observed[:2]
    else:
        counts = _stated_counts(model, scope, parameter)
    number = counts[0] if whole.role in ("q", "o") else counts[1]
    axis = _head_axis(location, parameter, whole.role, number, counts[0], _width(model, scope, whole.role))
    if axis is None:
        return slices
    number = counts[0] if parameter.shape[axis] == counts[0] else number
    size = parameter.shape[axis] // number
    return whole.split(axis, [(whole.role, size, head) for head in range(number)], whole.decided_by)


def _stated_counts(model: nn.Module, scope: Scope, parameter: nn.Parameter) -> tuple[int, int]:
    """(query heads, key heads) from attributes of the module and the widths of its projections."""
    counted = parameter.shape[0] if parameter.dim() == 3 else _listed(model, scope)
    counts = head_counts(scope.module)
    if counts is not None and counts[0] == counts[1]:
        # Key heads may have any attribute name; they are as wide as query heads.
        queries, keys = _width(model, scope, "q"), _width(model, scope, "k")
        width = queries // counts[0]
        fits = width > 0 and queries % counts[0] == 0 and keys % width == 0
        counts = (counts[0], keys // width) if keys and keys < queries and fits else counts
    counts = counts or ((counted, counted) if counted else _from_widths(model, scope))
    if counts is None or counts[0] % counts[1]:
        raise InputError(
            f"heads=True, but {scope.core or type(model).__name__} ({type(scope.module).__name__}) does not "
            "say how many heads it has; set num_heads on the module"
        )
    return counts


def _single_head(location: Location) -> int | None:
    """The number of the head in a list with one module per head: ``heads.3.query``."""
    listed = (number for name, number in pairwise(location.components) if "head" in name.lower())
    return next((int(number) for number in listed if number.isdigit()), None)


def _head_axis(
    location: Location, parameter: nn.Parameter, role: str, number: int, queries: int, width: int
) -> int | None:
    """The axis along which ``parameter`` has one part per head, or None."""
    shape = parameter.shape
    if any(meaning(component).score for component in location.components):
        return next((axis for axis in reversed(range(len(shape))) if shape[axis] == queries), None)
    if len(shape) == 3:
        return next((axis for axis in range(3) if shape[axis] == number), None)
    if role == "o":
        inward = 1 - location.axis
        fits = len(shape) == 2 and not location.bias and location.adapter != "out"
        return inward if fits and shape[inward] % number == 0 else None
    if len(shape) == 2 and location.bias:
        return 0 if shape[0] == number else None
    axis = 0 if location.adapter else location.axis
    axis = axis if axis < len(shape) else 0
    return axis if location.adapter != "in" and shape[axis] == width and width % number == 0 else None


def _width(model: nn.Module, scope: Scope, role: str) -> int:
    """The rows of the widest projection of ``role`` in the block."""
    widest = 0
    for name, parameter in parameters_by_module(scope.module, scope.core):
        if parameter.dim() == 2:
            location = locate(model, scope.core, name, parameter)
            meanings = [meaning(component) for component in location.components]
            if any(m.letters == role and not m.score for m in meanings) and location.adapter != "in":
                widest = max(widest, parameter.shape[0 if location.adapter else location.axis])
    return widest


def _from_widths(model: nn.Module, scope: Scope) -> tuple[int, int] | None:
    """(query heads, key heads) from the width of a head and the rows of the projections."""
    size = first_number(
        (scope.module,), ("head_dim", "attention_head_size", "head_size", "dim_head", "d_head")
    )
    queries, keys = (_width(model, scope, role) // size if size else 0 for role in ("q", "k"))
    return (queries, keys) if queries and keys else None


def _listed(model: nn.Module, scope: Scope) -> int:
    """The number of heads in a list with one module per head; 0 without such a list."""
    heads = {
        _single_head(locate(model, scope.path, name, parameter))
        for name, parameter in parameters_by_module(scope.module, scope.core)
    }
    return len(heads - {None})
