"""``find_circuits``: a label for every parameter and for every slice of a fused parameter.

The sources of a label, first to last: the user's ``labels``, the registry of layouts (``_layouts``), names
(``_guess``), and the autograd probe (``_probe``), which confirms or corrects registry and names. This chapter
brings them together, and refuses a model in which an attention parameter is left without a label.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, Literal, get_args

from torch import nn

from fasterqk.errors import InputError
from fasterqk.labels._from_config import can_be_rebuilt, small_copies
from fasterqk.labels._inputs import run_guessed, runner
from fasterqk.labels._layouts import Block, matching, refused, spans_of
from fasterqk.labels.names import Scope, find_scopes, guess, layer_prefixes, nearest, slice_by_head
from fasterqk.labels.probe import (
    SMALL,
    WITHOUT_AUTOGRAD,
    Evidence,
    Judgement,
    first_guesses,
    judge,
    settle,
    transfer,
    with_discovered,
)
from fasterqk.labels.slices import CIRCUIT_OF_ROLE, NO_SOFTMAX, Circuits, Role, Slice
from fasterqk.trace.modules import head_counts, meaning, parameters_by_module, stack_of, uncompiled

# One role, or slices (axis, start, stop, role) that cover the tensor.
LabelValue = Role | Sequence[tuple[int, int, int, Role] | Slice]
Labels = Mapping[str, LabelValue] | Callable[[str, nn.Parameter], LabelValue | None]


def find_circuits(
    model: nn.Module,
    labels: Labels | None = None,
    verify: bool | Literal["auto"] = "auto",
    heads: bool = False,
    *,
    inputs: Any = None,
    rules: None = None,
) -> Circuits:
    """Label every parameter of ``model``, slice by slice where a weight is fused.

    Roles are q and k (circuit ``qk``), v and o (``ov``), ``shared`` (inside attention, part of both) and
    ``rest`` (outside attention). Sources, first to last: ``labels``, a registry of layouts by module class,
    names, and the autograd probe on a copy, which verifies registry and names and decides what they leave
    open. An attention parameter that none of them explains is an ``InputError``.

    ``labels``: a mapping of patterns to roles or to slices ``[(axis, start, stop, role), ...]``. A pattern
    matches parameter names (``"*.attn.rel"``) or else module classes (``"*Mixer"``: all parameters inside).
    Or a function ``(name, parameter)`` that returns a role, slices, or None.

    ``verify``: ``"auto"`` probes small models on a copy and large Hugging Face models on a small copy with
    random weights; True requires that the probe sees every attention block; False trusts registry and
    names. ``heads`` slices head by head. ``inputs`` are example inputs for the probe (as for ``capture``)
    where they cannot be guessed. The model is never changed.

    >>> circuits = find_circuits(nn.MultiheadAttention(8, 2))
    >>> [(s.parameter, s.start, s.stop, s.role) for s in circuits][:3]
    [('in_proj_weight', 0, 8, 'q'), ('in_proj_weight', 8, 16, 'k'), ('in_proj_weight', 16, 24, 'v')]
    >>> find_circuits(nn.MultiheadAttention(8, 2), labels={"out_proj.*": "rest"})[-1].role
    'rest'
    """
    if rules is not None:
        raise InputError(
            f"find_circuits takes labels=, not rules=: find_circuits(model, labels={rules!r}); "
            "rules= are the optimizer options of make_optimizer"
        )
    if verify not in (True, False, "auto"):
        raise InputError(f'verify is True, False or "auto", not {verify!r}')
    model = uncompiled(model)
    given = roles_from_labels(labels, model)
    judgement = _judgement(model, verify, inputs, heads)
    judgement.linear = _without_softmax(model, judgement)
    _refuse_open(model, judgement, given)
    if verify is True:
        _refuse_unverified(judgement, given)
    circuits = _assemble(model, judgement, given, heads)
    _refuse_without_attention(model, judgement, circuits)
    _refuse_without_queries(model, judgement, circuits)
    notes = _notes(judgement, circuits, verify)
    return Circuits(_under_own_names(model, circuits), notes, tuple(judgement.scopes))


def _under_own_names(model: nn.Module, circuits: Circuits) -> tuple[Slice, ...]:
    """The slices under the names that the model gives its parameters, in its order."""
    inside = {id(parameter): name for name, parameter in parameters_by_module(model)}
    own = [(inside[id(parameter)], name) for name, parameter in model.named_parameters()]
    if all(before == after for before, after in own):
        return circuits.slices
    parts: dict[str, list[Slice]] = {}
    for part in circuits:
        parts.setdefault(part.parameter, []).append(part)
    return tuple(replace(part, parameter=after) for before, after in own for part in parts[before])


def given_or_found(
    model: nn.Module, circuits: Circuits | None, labels: Labels | None, heads: bool = False
) -> Circuits:
    """The ``circuits`` a user passed, or those found with the user's ``labels``."""
    if circuits is None:
        return find_circuits(model, labels, heads=heads)
    if labels is not None:
        raise InputError("give labels= or circuits=, not both: circuits=find_circuits(model, labels)")
    if not isinstance(circuits, Circuits):
        raise InputError(
            f"circuits= takes what find_circuits returns, not a {type(circuits).__name__}; "
            "patterns of parameter names are labels="
        )
    return circuits


def _judgement(model: nn.Module, verify: bool | str, inputs: Any, heads: bool) -> Judgement:
    plain = first_guesses(model)
    if verify is False:
        return plain
    size = sum(parameter.numel() for parameter in model.parameters())
    has_memory = not any(parameter.is_meta for parameter in model.parameters())
    run = run_guessed if inputs is None else runner(inputs)
    if (not has_memory or (size > SMALL and inputs is None)) and can_be_rebuilt(model):
        carried, settled = _from_small_copies(model)
        if carried is not None and (settled or not has_memory):
            return carried
        plain = carried or plain
    if not has_memory:
        plain.failure = plain.failure or "a model on the meta device does not run"
        return plain
    judgement = _tried(model, run, heads)
    return plain if plain.ran > judgement.ran else judgement


def _without_softmax(model: nn.Module, judgement: Judgement) -> dict[str, nn.Module]:
    """The outermost blocks that mix positions without a softmax over queries and keys.

    They are known by class and parameters, or ran without such a softmax. What was seen to form one is
    attention, whatever it is called.
    """
    attends = judgement.complete - judgement.silent
    blocks = {
        path: module
        for path, module in model.named_modules()
        if (refused(module) or path in judgement.silent)
        and not any(seen == path or _inside(seen, path) for seen in attends)
    }
    return {p: module for p, module in blocks.items() if not any(_inside(p, other) for other in blocks)}


def _from_small_copies(model: nn.Module) -> tuple[Judgement | None, bool]:
    """What the small copy that shows most says of ``model``, and whether that settles everything."""
    best: Judgement | None = None
    for small in small_copies(type(model), model.config):
        seen = _tried(small, run_guessed, heads=False)
        if best is None or len(seen.ran) > len(best.ran):
            best = seen
        if {stack_of(path) for path in best.ran} == {stack_of(path) for path in best.scopes}:
            break
    return (None, False) if best is None else transfer(best, model)


def _tried(model: nn.Module, run: Any, heads: bool) -> Judgement:
    """The judgement of the probe, or the guesses alone if the model does not run."""
    try:
        return judge(model, run, heads)
    except InputError:
        raise
    except Exception as error:
        # Any forward may fail on inputs that were made up. What the probe would have decided then stays
        # open and is reported as such.
        judgement = first_guesses(model)
        judgement.failure = f"{type(error).__name__}: {error}"
        return judgement


# --- One block, by what was seen of it in training ---


def scopes_of(model: nn.Module, circuits: Circuits) -> dict[str, Scope]:
    """The attention blocks of ``model``: those that names show, and those that only the probe has seen."""
    named = find_scopes(model)
    paths = {path for path, _ in model.named_modules()}
    return with_discovered(model, named, [p for p in circuits.blocks if p not in named and p in paths])


def resting_on_names(circuits: Circuits) -> list[str]:
    """The attention blocks of whose labels the probe has seen none, and the user has given none."""
    inside: dict[str, set[str]] = {}
    for part in circuits:
        path = nearest(part.parameter, {block: block for block in circuits.blocks})
        if path is not None and part.circuit != "rest":
            inside.setdefault(path, set()).add(part.decided_by)
    return [path for path, sources in inside.items() if sources <= {"name", "registry"}]


def slices_by_evidence(
    model: nn.Module, scope: Scope, evidence: Evidence, heads: bool
) -> dict[str, list[Slice]] | None:
    """By parameter of one block the slices that the evidence shows; None if it shows no attention."""
    guesses = first_guesses(model, {scope.path: scope})
    parameters = dict(parameters_by_module(model))
    judgement = settle(guesses, evidence, parameters)
    if scope.path not in judgement.ran & judgement.complete:
        return None
    slices = {}
    for name in judgement.guesses:
        if name not in judgement.confirmed | judgement.found.keys():
            continue
        parameter = parameters[name]
        whole = Slice(name, None, None, None, "rest", scope.layer, "name", parameter.numel())
        parts = _from_judgement(whole, parameter, scope, judgement, heads)
        if heads:
            parts = _by_head(model, scope, parameter, parts, judgement)
        slices[name] = _joined(parts)
    return slices


# --- The user's labels ---


def roles_from_labels(labels: Labels | None, model: nn.Module) -> dict[str, Any]:
    """By parameter name the role that ``labels`` give, or slices ``(axis, start, stop, role)`` in order.

    A pattern matches parameter names; if it matches none, classes of modules, and then stands for all
    parameters inside them.
    """
    if labels is None:
        return {}
    parameters = dict(parameters_by_module(model))
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    if callable(labels):
        answers = {name: labels(own[id(each)], each) for name, each in parameters.items()}
        given = {name: value for name, value in answers.items() if value is not None}
    elif isinstance(labels, Mapping):
        if any(isinstance(value, Mapping) for value in labels.values()):
            raise InputError(
                f"labels={labels!r} holds optimizer options: pass it to make_optimizer as rules={labels!r}"
            )
        given = {}
        for pattern, value in labels.items():
            classes = [each for each in model.modules() if fnmatchcase(type(each).__name__, pattern)]
            inside = {id(parameter) for module in classes for parameter in module.parameters()}
            matched = [
                name
                for name, each in parameters.items()
                if fnmatchcase(name, pattern) or fnmatchcase(own[id(each)], pattern)
            ]
            matched = matched or [name for name, each in parameters.items() if id(each) in inside]
            if not matched:
                raise InputError(
                    f"label {pattern!r} matches no parameter and no class; names look like "
                    + _example(parameters)
                )
            for name in matched:
                given.setdefault(name, value)
    else:
        raise InputError(f"labels are a mapping of patterns or a function, not {type(labels).__name__}")
    return {name: _validated(name, value, parameters[name]) for name, value in given.items()}


def _validated(name: str, value: Any, parameter: nn.Parameter) -> Any:
    if isinstance(value, str):
        return _valid_role(name, value)
    try:
        slices = sorted(
            (part.axis, part.start, part.stop, part.role) if isinstance(part, Slice) else tuple(part)
            for part in value
        )
        axes = {axis for axis, _, _, _ in slices}
    except (TypeError, ValueError):
        raise InputError(
            f"the label of {name!r} is {value!r}; give a role or a list of (axis, start, stop, role)"
        ) from None
    ends = [0, *(stop for _, _, stop, _ in slices)]
    fits = len(axes) == 1 and all(isinstance(axis, int) and 0 <= axis < parameter.dim() for axis in axes)
    starts = [start for _, start, _, _ in slices]
    if not fits or starts != ends[:-1] or ends[-1] != parameter.shape[slices[0][0]]:
        raise InputError(
            f"the slices {list(value)!r} do not cover {name!r} of shape {tuple(parameter.shape)} exactly once"
        )
    return [(axis, start, stop, _valid_role(name, role)) for axis, start, stop, role in slices]


def _valid_role(name: str, role: Any) -> Role:
    if role not in get_args(Role):
        raise InputError(f"the label of {name!r} is {role!r}; roles are {', '.join(get_args(Role))}")
    return role


def _example(parameters: Mapping[str, nn.Parameter]) -> str:
    inside = [name for name in parameters if "att" in name.lower()] or list(parameters)
    return repr(inside[0]) if inside else "nothing: the model has no parameters"


# --- Slices from judgements: every parameter covered once, neighbours of one role joined ---


def _assemble(model: nn.Module, judgement: Judgement, given: Mapping[str, Any], heads: bool) -> Circuits:
    """The labels of all parameters of ``model``, in its order."""
    prefixes = layer_prefixes(judgement.scopes.values())
    names: dict[int, list[str]] = {}
    # Each module under one name: a parameter is tied where several modules hold it.
    for path, module in model.named_modules():
        for name, parameter in parameters_by_module(module, path, recurse=False, remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    slices: list[Slice] = []
    for name, parameter in parameters_by_module(model):
        scope = judgement.scope_of(name)
        layer = scope.layer if scope is not None else nearest(name, prefixes)
        whole = Slice(name, None, None, None, "rest", layer, "name", parameter.numel())
        if name in given:
            parts = _from_label(whole, parameter, given[name])
        elif judgement.is_linear(name):
            parts = [replace(whole, decided_by=NO_SOFTMAX)]
        elif scope is None:
            parts = [replace(whole, role=_outside(name, judgement))]
        else:
            parts = _from_judgement(whole, parameter, scope, judgement, heads)
        if _crosses(model, judgement, parts, parameter, names[id(parameter)]):
            parts = [replace(whole, role="shared", decided_by="name")]
        elif heads and scope is not None and not judgement.is_linear(name):
            parts = _by_head(model, scope, parameter, parts, judgement)
        slices += _joined(parts)
    return Circuits(tuple(slices))


def _from_label(whole: Slice, parameter: nn.Parameter, value: Role | list[Any]) -> list[Slice]:
    if isinstance(value, str):
        return [replace(whole, role=value, decided_by="label")]
    blocks = [Block(role, stop - start) for _, start, stop, role in value]
    return _cut(whole, parameter, value[0][0], blocks, "label")


def _from_judgement(
    whole: Slice, parameter: nn.Parameter, scope: Scope, judgement: Judgement, heads: bool
) -> list[Slice]:
    name = whole.parameter
    finding, own = judgement.found.get(name), judgement.guesses[name]
    blocks: Sequence[Block]
    if finding is not None:
        role, axis, by = finding.role, finding.axis, "probe"
        counts = head_counts(scope.module)
        known = matching(finding.spans, *counts) if counts and axis is not None else None
        blocks = known or [Block(part, stop - start) for start, stop, part in finding.spans]
    else:
        assert own is not None  # what is open has been refused
        role, axis, blocks = own.role, own.axis, own.blocks
        by = own.by + ("+probe" if name in judgement.confirmed else "")
    if role is not None:
        return [replace(whole, role=role, decided_by=by)]
    assert axis is not None
    if not heads or scope.path in judgement.heads:
        blocks = [replace(block, head=None) for block in blocks]  # the probe has seen which head they are
    return _cut(whole, parameter, axis, blocks, by)


def _cut(whole: Slice, parameter: nn.Parameter, axis: int, blocks: Sequence[Block], by: str) -> list[Slice]:
    slices, start = [], 0
    for block in blocks:
        stop, numel = start + block.size, block.size * parameter.numel() // parameter.shape[axis]
        span = replace(whole, axis=axis, start=start, stop=stop, numel=numel)
        slices.append(replace(span, role=block.role, decided_by=by, head=block.head))
        start = stop
    return slices


def _by_head(
    model: nn.Module, scope: Scope, parameter: nn.Parameter, parts: list[Slice], judgement: Judgement
) -> list[Slice]:
    """The slices of one parameter head by head: as the probe saw them, else by what the module says."""
    if scope.path in judgement.irregular:
        raise InputError(
            f"heads=True, but in {scope.path or type(model).__name__} the query heads that share a key head "
            "are not neighbours, so its heads have no order; give one ratio for all heads of a layer"
        )
    counts = judgement.heads.get(scope.path)
    axis, heads = judgement.head_lines.get(parts[0].parameter, (None, ()))
    whole = parts[0].axis is None
    if counts is not None and not whole:
        # The only head of keys or values, in a weight that holds more than them.
        single = {role for role, number in (("k", counts[1]), ("v", counts[3])) if number == 1}
        parts = [replace(part, head=0) if part.role in single else part for part in parts]
    labelled = parts[0].decided_by == "label"
    if counts is None or axis is None or labelled or not (whole or parts[0].axis == axis):
        return slice_by_head(model, scope, parameter, parts, counts)
    slices = []
    for part in parts:
        start, stop = (0, len(heads)) if whole else (part.start or 0, part.stop or 0)
        for head, same in groupby(range(start, stop), lambda line: heads[line]):
            lines = list(same)
            numel = parameter.numel() // len(heads) * len(lines)
            head = part.head if head is None else head
            span = replace(part, axis=axis, start=lines[0], stop=lines[-1] + 1)
            slices.append(replace(span, numel=numel, head=head))
    return slices


def _outside(name: str, judgement: Judgement) -> Role:
    """Outside attention everything is rest, except tables of biases that are added to the scores."""
    parts = name.split(".")
    said = [meaning(part) for part in parts[-3:]]
    table = any(one.score for one in said) and "bias" in name and not any(one.norm for one in said)
    return "k" if table and judgement.scopes and parts[-1] != "bias" else "rest"


def _joined(parts: list[Slice]) -> list[Slice]:
    """Neighbours of one role and head as one slice; a single slice is the whole tensor."""
    joined = []
    for _, group in groupby(parts, lambda part: (part.role, part.head)):
        same = list(group)
        joined.append(replace(same[0], stop=same[-1].stop, numel=sum(part.numel for part in same)))
    if len(joined) == 1:
        return [replace(joined[0], axis=None, start=None, stop=None)]
    return joined


def _crosses(
    model: nn.Module, judgement: Judgement, parts: list[Slice], parameter: nn.Parameter, names: list[str]
) -> bool:
    """Whether a parameter, if it is tied, serves different circuits under its other names."""
    for other in names if len(names) > 1 else ():
        scope = judgement.scope_of(other)
        role: Role | None = "rest"
        if scope is not None:
            own = guess(model, scope, other, parameter)
            role = None if own is None else own.role
        if role is not None and CIRCUIT_OF_ROLE[role] not in {part.circuit for part in parts}:
            return True
    return False


# --- Notes: what the probe did not see, and why ---


def _notes(judgement: Judgement, circuits: Circuits, verify: bool | str) -> tuple[str, ...]:
    """One line per thing worth knowing; none where the probe saw every attention block."""
    found = []
    left = {part.parameter for part in circuits if part.decided_by == NO_SOFTMAX}
    linear = {p: m for p, m in judgement.linear.items() if any(_inside(name, p) for name in left)}
    if linear:
        classes = dict.fromkeys(type(module).__name__ for module in linear.values())
        found.append(
            f"no softmax over queries and keys in {_stacks(list(linear))} ({_some(list(classes))}): "
            f"at the base rate{_OTHER_FORMS if judgement.silent & linear.keys() else ''}"
        )
    if not verify:
        return tuple(found)
    if judgement.unused:
        stacks = list(dict.fromkeys(map(stack_of, judgement.unused)))
        found.append(f"without effect on the probe's inputs, at the base rate: {_some(stacks)}")
    labelled = {id(judgement.scope_of(part.parameter)) for part in circuits if part.circuit != "rest"}
    by_user = {id(judgement.scope_of(part.parameter)) for part in circuits if part.decided_by == "label"}
    unseen = [
        path
        for path, scope in judgement.scopes.items()
        if path not in judgement.ran and id(scope) in labelled - by_user
    ]
    if unseen:
        found.append(
            f"not seen by the probe, labelled by registry and names: {_stacks(unseen)}{_why(judgement)}"
            + ("" if judgement.failure == WITHOUT_AUTOGRAD else "; to verify it, pass inputs= that run it")
        )
    for word in ("queries", "keys"):
        paths = [path for path, made in judgement.foreign.items() if made == word]
        if paths:
            found.append(
                f"{word} come from outside of {_stacks(paths)}; if other parameters make them, name these "
                "with labels="
            )
    return tuple(found)


def _stacks(paths: list[str]) -> str:
    return _some(list(dict.fromkeys(stack_of(path) or "the model" for path in paths)))


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _why(judgement: Judgement, before: str = "") -> str:
    """The first line of the probe's failure, in brackets; empty if it did not fail."""
    line = judgement.failure.partition("\n")[0]
    line = line if len(line) <= 160 else line[:157] + "..."
    return f" ({before}{line})" if line else ""


# --- Refusals: blocks without attention, parameters without a label. Their advice can be pasted ---

# Attention may be formed in ways that the probe does not see: a sigmoid, a kernel.
_OTHER_FORMS = "; to label them by name all the same circuits=find_circuits(model, verify=False)"


def _refuse_without_attention(model: nn.Module, judgement: Judgement, circuits: Circuits) -> None:
    """Raise where everything is rest, or all that mixes positions does it without a softmax."""
    if any(part.circuit in ("qk", "shared") or part.decided_by == "label" for part in circuits):
        return
    own = type(model).__name__
    if judgement.linear:
        path, block = next(iter(judgement.linear.items()))
        named = _likely(model, judgement, judgement.linear)
        raise InputError(
            f"{path or 'the model'} ({type(block).__name__}) forms no softmax over queries and keys, and "
            f"nothing in {own} does: it has no QK circuit"
            + (_OTHER_FORMS if path in judgement.silent else "")
            + (f"; to name one {labels_text(model, named)}" if named else "")
        )
    if any(part.circuit != "rest" for part in circuits):
        return
    if any(hasattr(module, "_packed_params") for module in model.modules()):
        raise InputError(
            f"the weights of {own} are packed for integer arithmetic and are no longer "
            "parameters; label and train the model before it is quantised"
        )
    named = _likely(model, judgement, [""])
    text = labels_text(model, named)
    advice = f"; if there is, say which parameters make queries and keys, in the form {text}" if named else ""
    raise InputError(f"no attention was found in {own}{advice}")


def likely_labels(model: nn.Module, paths: Iterable[str]) -> dict[str, Any]:
    """Labels to begin with for the blocks at ``paths``."""
    return _likely(model, first_guesses(model), paths)


def _likely(model: nn.Module, judgement: Judgement, paths: Iterable[str]) -> dict[str, Any]:
    """Labels of weights in ``paths``: those called queries and keys, else the first two but tables."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    inside = {n: p for n, p in parameters_by_module(model) if any(_inside(n, path) for path in paths)}
    names = [
        name for name, parameter in inside.items() if parameter.dim() > 1 and id(parameter) not in tables
    ]
    found: dict[str, Any] = {}
    for name in names:
        own = judgement.guesses.get(name)
        said = {meaning(part).letters for part in name.split(".")[-2:]} & {"q", "k"}
        if own is not None and own.role in ("q", "k"):
            found[name] = own.role
        elif own is not None and own.axis is not None:
            found[name] = [(own.axis, *span) for span in spans_of(own.blocks)]
            bias = name.removesuffix("weight") + "bias"
            if bias in inside:  # open without a label of its own
                found[bias] = [(0, *span) for span in spans_of(own.blocks)]
        elif own is None and len(said) == 1:
            found[name] = said.pop()
    return found or dict(zip(names, ("q", "k"), strict=False))


def _refuse_without_queries(model: nn.Module, judgement: Judgement, circuits: Circuits) -> None:
    """Raise for blocks that were seen attending while none of their parameters is in the QK circuit."""
    held: dict[str, set[str]] = {}
    for part in circuits:
        scope = judgement.scope_of(part.parameter)
        if scope is not None:
            held.setdefault(scope.path, set()).add(part.circuit if part.decided_by != "label" else "qk")
    without = [
        path
        for path, found in held.items()
        if path in judgement.ran & judgement.complete - judgement.foreign.keys()
        and not found & {"qk", "shared"}
    ]
    if without:
        weights = [next(parameters_by_module(model.get_submodule(path), path))[0] for path in without]
        raise InputError(
            f"{without[0] or 'the model'} forms attention, but no parameter in it was found to make queries "
            f"or keys; say which does, for example {labels_text(model, dict.fromkeys(weights, 'q'))}"
        )


def _refuse_open(model: nn.Module, judgement: Judgement, given: Mapping[str, Any]) -> None:
    """Raise for attention parameters that labels, registry, names and probe leave without a role."""
    roles: dict[str, Any] = {name: "q" for name in judgement.open() if name not in given}
    for name in roles:
        own = judgement.guesses[name]
        if own is not None and own.axis is not None:
            roles[name] = [(own.axis, *span) for span in spans_of(own.blocks)]
    if not roles:
        return
    parameters = dict(parameters_by_module(model))
    shown = _some([f"{name} {tuple(parameters[name].shape)}" for name in roles])
    why = _why(judgement, "the probe could not run: ")
    raise InputError(
        f"{len(roles)} attention parameters have no label: {shown}{why}; say what they are, for "
        f"example {labels_text(model, roles)}, or let the probe see them: "
        "circuits=find_circuits(model, inputs=batch)"
    )


def _refuse_unverified(judgement: Judgement, given: Mapping[str, Any]) -> None:
    """Raise for attention blocks that the probe did not see (``verify=True``)."""
    unseen = [
        path
        for path, scope in judgement.scopes.items()
        if path not in judgement.ran
        and path not in judgement.linear
        and not all(name in given for name in judgement.guesses if judgement.scope_of(name) is scope)
    ]
    if unseen:
        raise InputError(
            f"the probe did not reach {len(unseen)} attention blocks: {_some(unseen)}{_why(judgement)}; "
            + ("" if judgement.failure == WITHOUT_AUTOGRAD else "pass inputs= that run them, or ")
            + "verify='auto'"
        )


def labels_text(model: nn.Module, roles: Mapping[str, Any]) -> str:
    """``labels={...}`` with these roles: one pattern per stack of layers where it matches nothing else."""
    every = [name for name, _ in parameters_by_module(model)]
    found = {}
    for name, role in roles.items():
        pattern = stack_of(name)
        alone = all(roles.get(other) == role for other in every if fnmatchcase(other, pattern))
        found[pattern if alone else name] = role
    return f"labels={found!r}"


def _inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(outer + "."))
