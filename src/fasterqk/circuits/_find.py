"""The user's own labels: patterns of names, or a function."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import nn

from fasterqk.capture.modules import head_counts, meaning, stack_of, uncompiled
from fasterqk.circuits._guess import Scope, cut_by_head, guess, layer_prefixes, nearest
from fasterqk.circuits._inputs import can_have_twin, run_guessed, runner, twins
from fasterqk.circuits._layouts import Block, matching, refused
from fasterqk.circuits._probe import Judgement, first_guesses, judge, transfer
from fasterqk.circuits._slices import CIRCUIT_OF_ROLE, Circuits, Role, Slice
from fasterqk.errors import InputError

# One role, or runs (axis, start, stop, role) that cover the tensor.
Stated = Role | Sequence[tuple[int, int, int, Role] | Slice]
Rules = Mapping[str, Stated] | Callable[[str, nn.Parameter], Stated | None]


def apply_rules(rules: Rules | None, model: nn.Module) -> dict[str, Any]:
    """What the rules say: by parameter name a role, or runs ``(axis, start, stop, role)`` in order.

    A pattern is one of parameter names; if it matches none, of classes of modules, and then stands for all
    that is inside them.
    """
    if rules is None:
        return {}
    parameters = dict(model.named_parameters())
    if callable(rules):
        said = {name: rules(name, parameter) for name, parameter in parameters.items()}
        stated = {name: value for name, value in said.items() if value is not None}
    elif isinstance(rules, Mapping):
        stated = {}
        for pattern, value in rules.items():
            matched = [name for name in parameters if fnmatchcase(name, pattern)]
            matched = matched or _inside_class(model, pattern)
            if not matched:
                raise InputError(
                    f"rule {pattern!r} matches no parameter and no class; names look like {_some(parameters)}"
                )
            for name in matched:
                stated.setdefault(name, value)
    else:
        raise InputError(f"rules are a mapping of name patterns or a function, not {type(rules).__name__}")
    return {name: _checked(name, value, parameters[name]) for name, value in stated.items()}


def _inside_class(model: nn.Module, pattern: str) -> list[str]:
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    found = dict.fromkeys(
        id(parameter)
        for module in model.modules()
        if fnmatchcase(type(module).__name__, pattern)
        for parameter in module.parameters()
    )
    return [known[key] for key in found]


def _checked(name: str, value: Any, parameter: nn.Parameter) -> Any:
    if isinstance(value, str):
        return _role(name, value)
    try:
        runs = sorted(
            (run.axis, run.start, run.stop, run.role) if isinstance(run, Slice) else tuple(run)
            for run in value
        )
        axes = {axis for axis, _, _, _ in runs}
    except (TypeError, ValueError):
        raise InputError(
            f"the rule for {name!r} gives {value!r}; give a role or a list of (axis, start, stop, role)"
        ) from None
    ends = [0, *(stop for _, _, stop, _ in runs)]
    fits = len(axes) == 1 and all(isinstance(axis, int) and 0 <= axis < parameter.dim() for axis in axes)
    if not fits or [start for _, start, _, _ in runs] != ends[:-1] or ends[-1] != parameter.shape[runs[0][0]]:
        raise InputError(
            f"the runs {list(value)!r} do not cover {name!r} of shape {tuple(parameter.shape)} exactly once"
        )
    return [(axis, start, stop, _role(name, role)) for axis, start, stop, role in runs]


def _role(name: str, role: Any) -> Role:
    if role not in get_args(Role):
        raise InputError(f"the rule for {name!r} gives {role!r}; roles are {', '.join(get_args(Role))}")
    return role


def _some(parameters: Mapping[str, nn.Parameter]) -> str:
    inside = [name for name in parameters if "att" in name.lower()] or list(parameters)
    return repr(inside[0]) if inside else "nothing: the model has no parameters"


# --- Slices from judgements: every parameter covered once, cut by head on request, neighbours merged ---


def assemble(model: nn.Module, judgement: Judgement, stated: Mapping[str, Any], heads: bool) -> Circuits:
    """The labels of all parameters of ``model``, in its order."""
    prefixes = layer_prefixes(judgement.scopes.values())
    tied = _tied(model)
    slices: list[Slice] = []
    for name, parameter in model.named_parameters():
        scope = judgement.scope_of(name)
        layer = scope.layer if scope is not None else nearest(name, prefixes)
        whole = Slice(name, None, None, None, "rest", layer, "name", parameter.numel())
        if name in stated:
            cut = _stated(whole, parameter, stated[name])
        elif scope is None:
            cut = [replace(whole, role=_outside(name, judgement))]
        else:
            cut = _labelled(whole, parameter, scope, judgement, heads)
        if _crosses(model, judgement, cut, tied.get(id(parameter), ())):
            cut = [replace(whole, role="shared", decided_by="name")]
        elif heads and scope is not None:
            cut = cut_by_head(model, scope, parameter, cut, judgement.heads.get(scope.path))
        slices += _merged(cut)
    return Circuits(tuple(slices))


def _labelled(
    whole: Slice, parameter: nn.Parameter, scope: Scope, judgement: Judgement, heads: bool
) -> list[Slice]:
    name = whole.parameter
    finding, own = judgement.found.get(name), judgement.guesses[name]
    if finding is not None:
        by = "probe"
        if finding.axis is None:
            return [replace(whole, role=finding.runs[0][2], decided_by=by)]
        counts = head_counts(scope.module)
        blocks = matching(finding.runs, *counts) if counts else None
        if blocks is None:
            blocks = [Block(role, stop - start) for start, stop, role in finding.runs]
        return list(_cut(whole, parameter, finding.axis, blocks, by, heads))
    assert own is not None  # what is open has been refused
    by = own.by + ("+probe" if name in judgement.confirmed else "")
    if own.role is not None:
        return [replace(whole, role=own.role, decided_by=by)]
    assert own.axis is not None
    return list(_cut(whole, parameter, own.axis, own.blocks, by, heads))


def _cut(
    whole: Slice, parameter: nn.Parameter, axis: int, blocks: Any, by: str, heads: bool
) -> Iterator[Slice]:
    start, line = 0, parameter.numel() // parameter.shape[axis]
    for block in blocks:
        yield replace(
            whole,
            axis=axis,
            start=start,
            stop=start + block.size,
            role=block.role,
            decided_by=by,
            numel=block.size * line,
            head=block.head if heads else None,
        )
        start += block.size


def _stated(whole: Slice, parameter: nn.Parameter, value: Role | list[Any]) -> list[Slice]:
    if isinstance(value, str):
        return [replace(whole, role=value, decided_by="rule")]
    blocks = [Block(role, stop - start) for _, start, stop, role in value]
    return list(_cut(whole, parameter, value[0][0], blocks, "rule", heads=False))


def _outside(name: str, judgement: Judgement) -> Role:
    """Outside attention everything is rest, but for tables of biases that are added to the scores."""
    parts = name.split(".")
    said = [meaning(part) for part in parts[-3:]]
    table = any(one.score for one in said) and "bias" in name and not any(one.norm for one in said)
    return "k" if table and judgement.scopes and parts[-1] != "bias" else "rest"


def _merged(cut: list[Slice]) -> list[Slice]:
    """Neighbours of one role, head and origin as one slice; a single slice is the whole tensor."""
    joined: list[Slice] = []
    for piece in cut:
        last = joined[-1] if joined else None
        if last is not None and (last.role, last.head) == (piece.role, piece.head):
            joined[-1] = replace(last, stop=piece.stop, numel=last.numel + piece.numel)
        else:
            joined.append(piece)
    if len(joined) == 1:
        return [replace(joined[0], axis=None, start=None, stop=None)]
    return joined


def _tied(model: nn.Module) -> dict[int, list[str]]:
    """The names of parameters that have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {key: value for key, value in names.items() if len(value) > 1}


def _crosses(model: nn.Module, judgement: Judgement, cut: list[Slice], names: Any) -> bool:
    """Whether a tied parameter serves different circuits under its other names."""
    parameters = dict(model.named_parameters(remove_duplicate=False)) if names else {}
    for other in names:
        scope = judgement.scope_of(other)
        role: Role | None = "rest"
        if scope is not None:
            own = guess(model, scope, other, parameters[other])
            role = None if own is None else own.role
        if role is not None and CIRCUIT_OF_ROLE[role] not in {piece.circuit for piece in cut}:
            return True
    return False


# --- What a reader of labels should know beside them: what the probe did not see, and why ---


def notes(judgement: Judgement, circuits: Circuits) -> tuple[str, ...]:
    """One line for each thing worth knowing; none where the probe saw every attention block."""
    labelled = {id(judgement.scope_of(piece.parameter)) for piece in circuits if piece.circuit != "rest"}
    ruled = {id(judgement.scope_of(piece.parameter)) for piece in circuits if piece.decided_by == "rule"}
    unseen = [
        path
        for path, scope in judgement.scopes.items()
        if path not in judgement.ran and id(scope) in labelled - ruled
    ]
    found = []
    if unseen:
        why = f" ({_short(judgement.failure)})" if judgement.failure else ""
        found.append(
            f"not seen by the probe, labelled by registry and names: {_stacks(unseen)}{why}; "
            "pass inputs= that run it to have it verified"
        )
    for word in ("queries", "keys"):
        paths = [path for path, made in judgement.foreign.items() if made == word]
        if paths:
            found.append(
                f"{word} come from outside of {_stacks(paths)}; if other parameters make them, name these "
                "with rules="
            )
    return tuple(found)


def _stacks(paths: list[str]) -> str:
    patterns = list(dict.fromkeys(stack_of(path) or "the model" for path in paths))
    return ", ".join(patterns[:4]) + (f" and {len(patterns) - 4} more" if len(patterns) > 4 else "")


def _short(reason: str) -> str:
    line = reason.splitlines()[0] if reason else ""
    return line if len(line) <= 160 else line[:157] + "..."


# --- What is not labelled, said in one line: blocks without attention, parameters that nothing explains ---

# Attention may be formed in ways the probe does not see: exp and sum written out, a sigmoid, a kernel.
_OTHER_FORMS = ", or to label them by name all the same verify=False"


def refuse_linear_attention(
    model: nn.Module, stated: Mapping[str, Any], silent: Collection[str] = ()
) -> None:
    """Raise for blocks that mix positions without a softmax, unless rules label all they hold."""
    blocks = {path: module for path, module in model.named_modules() if refused(module) or path in silent}
    outer = [path for path in blocks if not any(_inside(path, other) for other in blocks)]
    left = [path for path in outer if any(name not in stated for name in _held(blocks[path], path))]
    if not left:
        return
    # A pattern of names may also catch the softmax layers of a hybrid: the class does not.
    loose = {stack_of(path) for path, _ in model.named_modules() if path not in blocks}
    named = ((path, stack_of(path)) for path in left)
    keys = dict.fromkeys(
        type(blocks[path]).__name__ if pattern in loose else pattern + ".*" for path, pattern in named
    )
    rules = ", ".join(f"{key!r}: 'rest'" for key in keys)
    raise InputError(
        f"{left[0] or 'the model'} ({type(blocks[left[0]]).__name__}) forms no softmax over queries and keys"
        f", so it has no QK circuit; to leave such blocks at the base rate pass rules={{{rules}}}"
        f"{_OTHER_FORMS if left[0] in silent else ''}"
    )


def refuse_without_attention(model: nn.Module, circuits: Circuits) -> None:
    """Raise where everything is rest."""
    if all(piece.circuit == "rest" for piece in circuits):
        if any(hasattr(module, "_packed_params") for module in model.modules()):
            raise InputError(
                f"the weights of {type(model).__name__} are packed for integer arithmetic and are no "
                "parameters any more; label and train the model before it is quantised"
            )
        raise InputError(
            f"no attention was found in {type(model).__name__}; name its parts with "
            "rules={'*.my_query.weight': 'q', '*.my_key.weight': 'k', ...}"
        )


def refuse_without_queries(judgement: Judgement, circuits: Circuits) -> None:
    """Raise for blocks that were seen attending while nothing in them is labelled as looking."""
    held: dict[str, set[str]] = {}
    for piece in circuits:
        scope = judgement.scope_of(piece.parameter)
        if scope is not None:
            held.setdefault(scope.path, set()).add(piece.circuit if piece.decided_by != "rule" else "qk")
    for path, found in held.items():
        outside = path in judgement.foreign or path not in judgement.complete
        if path in judgement.ran and not outside and not found & {"qk", "shared"}:
            raise InputError(
                f"{path or 'the model'} forms attention, but no parameter in it was found to make queries or "
                f"keys; say which does with rules={{'{path + '.' if path else ''}...': 'q', ...}}"
            )


def refuse_open(model: nn.Module, judgement: Judgement, stated: Mapping[str, Any]) -> None:
    """Raise for attention parameters that rules, registry, names and probe leave without a label."""
    names = [name for name in judgement.open() if name not in stated]
    if not names:
        return
    parameters = dict(model.named_parameters())
    shown = ", ".join(f"{name} {tuple(parameters[name].shape)}" for name in names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    why = f" (the probe could not run: {judgement.failure})" if judgement.failure else ""
    raise InputError(
        f"{len(names)} attention parameters matched no circuit: {shown}{more}{why}; add a rule such as "
        f"rules={{{names[0]!r}: 'q'}} or [(axis, start, stop, role), ...], or pass inputs= for the probe"
    )


def refuse_unverified(judgement: Judgement, stated: Mapping[str, Any]) -> None:
    """Raise for attention blocks that the probe did not see (``verify=True``)."""
    unseen = [
        path
        for path, scope in judgement.scopes.items()
        if path not in judgement.ran
        and not all(name in stated for name in judgement.guesses if judgement.scope_of(name) is scope)
    ]
    if unseen:
        why = f" ({judgement.failure})" if judgement.failure else ""
        raise InputError(
            f"the probe did not reach {len(unseen)} attention blocks: {', '.join(unseen[:4])}{why}; "
            "pass inputs= that run them, or verify='auto'"
        )


def _inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(outer + "."))


def _held(module: nn.Module, path: str) -> list[str]:
    return [f"{path}.{name}" if path else name for name, _ in module.named_parameters()]


# --- ``find_circuits``: a label for every parameter and every slice of a fused parameter ---

# Up to this many parameters the probe runs on a copy of the model itself; larger ones are verified on a
# small twin where there is a configuration to build it from, and copied only when a layout is unknown.
_SMALL = 8_000_000
_COPY = 400_000_000


def find_circuits(
    model: nn.Module,
    rules: Rules | None = None,
    verify: bool | Literal["auto"] = "auto",
    heads: bool = False,
    *,
    inputs: Any = None,
) -> Circuits:
    """Label every parameter of ``model``, slice by slice where a weight is fused.

    Roles are q and k (circuit ``qk``), v and o (``ov``), ``shared`` (inside attention, reaching both) and
    ``rest`` (outside attention). In this order: ``rules``, a registry of layouts by module class, the
    names, and the autograd probe on a copy, which verifies all of it and decides what is left. An
    attention parameter that nothing explains is an ``InputError``.

    ``rules``: a mapping of patterns to roles or to runs ``(axis, start, stop, role)``, where a pattern is
    one of parameter names (``"*.attn.rel"``) or else of module classes (``"*Mixer"``: all they hold); or a
    function ``(name, parameter)`` that returns a role, runs, or None.

    ``verify``: ``"auto"`` probes small models on a copy and large Hugging Face models on a shrunken twin;
    True demands that the probe sees every attention block; False trusts registry and names. ``heads``
    cuts slices head by head. ``inputs`` are example inputs for the probe (as for ``capture``) where they
    cannot be guessed. The model is never changed.

    >>> circuits = find_circuits(nn.MultiheadAttention(8, 2))
    >>> [(s.parameter, s.start, s.stop, s.role) for s in circuits][:3]
    [('in_proj_weight', 0, 8, 'q'), ('in_proj_weight', 8, 16, 'k'), ('in_proj_weight', 16, 24, 'v')]
    """
    if verify not in (True, False, "auto"):
        raise InputError(f'verify is True, False or "auto", not {verify!r}')
    model = uncompiled(model)
    stated = apply_rules(rules, model)
    refuse_linear_attention(model, stated)
    judgement = _judgement(model, stated, verify, inputs)
    refuse_linear_attention(model, stated, judgement.silent)
    refuse_open(model, judgement, stated)
    if verify is True:
        refuse_unverified(judgement, stated)
    circuits = assemble(model, judgement, stated, heads)
    refuse_without_attention(model, circuits)
    refuse_without_queries(judgement, circuits)
    return replace(circuits, notes=notes(judgement, circuits) if verify else ())


def _judgement(model: nn.Module, stated: Mapping[str, Any], verify: bool | str, inputs: Any) -> Judgement:
    plain = first_guesses(model)
    if verify is False:
        return plain
    size = sum(parameter.numel() for parameter in model.parameters())
    runs = not any(parameter.is_meta for parameter in model.parameters())
    run = run_guessed if inputs is None else runner(inputs)
    if (not runs or (size > _SMALL and inputs is None)) and can_have_twin(model):
        carried, settled = _from_twins(model)
        if carried is not None and (settled or not runs):
            return carried
        plain = carried or plain
    if not runs:
        plain.failure = plain.failure or "a model on the meta device does not run"
    unknown = [name for name in plain.open() if name not in stated]
    if runs and (size <= _COPY or unknown or verify is True):
        return _tried(model, run)
    return plain


def _from_twins(model: nn.Module) -> tuple[Judgement | None, bool]:
    """What the twin that shows most says of ``model``, and whether that settles everything."""
    best: Judgement | None = None
    for twin in twins(type(model), model.config):
        seen = _tried(twin, run_guessed)
        if best is None or len(seen.ran) > len(best.ran):
            best = seen
        if {stack_of(path) for path in best.ran} == {stack_of(path) for path in best.scopes}:
            break
    return (None, False) if best is None else transfer(best, model)


def _tried(model: nn.Module, run: Any) -> Judgement:
    """The judgement of the probe, or the guesses alone where the model would not run."""
    try:
        return judge(model, run)
    except InputError:
        raise
    except Exception as error:
        # Anybody's forward may fail on inputs we made up. What the probe would have decided then stays
        # open and is reported as such.
        judgement = first_guesses(model)
        judgement.failure = f"{type(error).__name__}: {error}"
        return judgement
