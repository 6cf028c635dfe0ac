"""``find_circuits``: a label for every parameter and for every slice of a fused parameter.

How a label comes about, in this order:

1. The user's ``labels`` are read (``roles_from_labels``). They are never questioned.
2. Attention blocks are found by class and names (``names.find_scopes``).
3. Every parameter in a block gets a guess, from the registry of layouts (``_layouts``) or from its name
   (``names.guess``).
4. The probe runs the model, or a small copy, on the user's or on guessed inputs (``_inputs``,
   ``_from_config``), and keeps the queries, keys, values and outputs of its attention (``_signals``). It also
   finds blocks that are not called attention.
5. Gradients show which rows of which parameter make these: the evidence (``probe``).
6. Guess and evidence make a verdict: confirmed, decided otherwise, or left open (``_verdicts``).
7. Blocks that mix positions without a softmax stay at the base rate. Open parameters, and blocks that attend
   without queries or keys, are refused, with labels to paste.
8. Every parameter gets its slices, head by head if asked; neighbours of one role are joined.
9. The first training pass compares these labels with what the model does (``first_pass``).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, Literal, cast, get_args

from torch import nn

from fasterqk.errors import InputError
from fasterqk.labels._from_config import can_be_rebuilt, small_copies
from fasterqk.labels._inputs import run_guessed, runner
from fasterqk.labels._layouts import refused
from fasterqk.labels._verdicts import Verdict, first_guesses, probed, slices_by_head, transfer
from fasterqk.labels.names import guess, layer_prefixes, nearest
from fasterqk.labels.probe import WITHOUT_AUTOGRAD, is_large
from fasterqk.labels.slices import (
    CIRCUIT_OF_ROLE,
    NO_SOFTMAX,
    Circuits,
    Part,
    Role,
    Slice,
    as_label,
    joined,
    whole_slice,
)
from fasterqk.trace.modules import meaning, parameters_by_module, stack_of, uncompiled

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
) -> Circuits:
    """Label every parameter of ``model``, slice by slice where a weight is fused.

    Roles are q and k (circuit ``qk``), v and o (``ov``), ``shared`` (inside attention, part of both) and
    ``rest`` (outside attention). They come from ``labels``, a registry of layouts by module class, names, and
    an autograd probe, which verifies registry and names and decides what they leave open. The model stays as
    it was.

    Arguments:
        model: The model.
        labels: A mapping of patterns to roles or to slices ``[(axis, start, stop, role), ...]``. A pattern
            matches parameter names (``"*.attn.rel"``) or, if there are none, module classes (``"*Mixer"``,
            for all parameters inside). The first pattern that matches counts. Or a function of (name,
            parameter) that returns a role, slices, or None.
        verify: ``"auto"`` probes small models on a copy and large Hugging Face models on a small copy with
            random weights. True requires that the probe sees every attention block. False trusts registry and
            names.
        heads: Slice head by head.
        inputs: Example inputs for the probe (as for ``capture``), if they cannot be guessed.

    Returns:
        The :class:`Circuits`: all slices in the order of the parameters.

    Raises:
        InputError: An attention parameter remains unexplained, labels do not fit, or the model has no
            attention.

    >>> circuits = find_circuits(nn.MultiheadAttention(8, 2))
    >>> [(s.parameter, s.start, s.stop, s.role) for s in circuits][:3]
    [('in_proj_weight', 0, 8, 'q'), ('in_proj_weight', 8, 16, 'k'), ('in_proj_weight', 16, 24, 'v')]
    >>> find_circuits(nn.MultiheadAttention(8, 2), labels={"out_proj.*": "rest"})[-1].role
    'rest'
    """
    if verify is not True and verify is not False and verify != "auto":
        raise InputError(f'verify is True, False or "auto", not {verify!r}')
    model = uncompiled(model)
    by_user = roles_from_labels(labels, model)
    verdict = _verdict(model, verify, inputs, heads)
    verdict.linear = _without_softmax(model, verdict)
    _refuse_open(model, verdict, by_user)
    if verify is True:
        _refuse_unverified(verdict, by_user)
    circuits = _assemble(model, verdict, by_user, heads)
    _refuse_without_attention(model, verdict, circuits)
    _refuse_without_queries(model, verdict, circuits)
    notes = _notes(verdict, circuits, verify)
    slices = _under_model_names(model, circuits)
    return Circuits(slices, notes, tuple(verdict.scopes), matrices(model))


def matrices(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that are matrices and not tables of vectors."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    modules = [module for module in model.modules() if not isinstance(module, tables)]
    inside = {id(value) for module in modules for value in module.parameters(recurse=False)}
    parameters = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, value in parameters if value.dim() == 2 and id(value) in inside)


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
    sizes = {name: value.numel() for name, value in model.named_parameters(remove_duplicate=False)}
    for name, parts in groupby(circuits, lambda part: part.parameter):
        if sizes.get(name) != sum(part.numel for part in parts):
            raise InputError(
                f"circuits= names {name!r}, which this model does not have in that size; "
                "call find_circuits on the model that is trained"
            )
    return circuits


def resting_on_names(circuits: Circuits) -> list[str]:
    """The attention blocks whose labels come neither from the probe nor from the user."""
    sources: dict[str, set[str]] = {}
    for part in circuits:
        path = nearest(part.parameter, {block: block for block in circuits.blocks})
        if path is not None and part.circuit != "rest":
            sources.setdefault(path, set()).add(part.decided_by)
    return [path for path, decided_by in sources.items() if decided_by <= {"name", "registry"}]


def _under_model_names(model: nn.Module, circuits: Circuits) -> tuple[Slice, ...]:
    """The slices in the order of the model, under its own names for its parameters."""
    inside = {id(parameter): name for name, parameter in parameters_by_module(model)}
    names = [(inside[id(parameter)], name) for name, parameter in model.named_parameters()]
    if all(before == after for before, after in names):
        return circuits.slices
    parts: dict[str, list[Slice]] = {}
    for part in circuits:
        parts.setdefault(part.parameter, []).append(part)
    return tuple(replace(part, parameter=after) for before, after in names for part in parts[before])


# --- Something to run, and the verdict ---


def _verdict(model: nn.Module, verify: bool | str, inputs: Any, heads: bool) -> Verdict:
    """The verdict after a probe of the model or of a small copy."""
    verdict = first_guesses(model)
    if verify is False:
        return verdict
    has_memory = not any(parameter.is_meta for parameter in model.parameters())
    if (not has_memory or (inputs is None and is_large(model))) and can_be_rebuilt(model):
        carried, settled = _from_small_copies(model)
        if carried is not None and (settled or not has_memory):
            return carried
        verdict = carried or verdict
    if not has_memory:
        verdict.evidence.failure = "a model on the meta device does not run"
        return verdict
    in_place = _tried(model, run_guessed if inputs is None else runner(inputs), heads)
    return verdict if verdict.evidence.ran > in_place.evidence.ran else in_place


def _from_small_copies(model: nn.Module) -> tuple[Verdict | None, bool]:
    """The verdict on ``model`` from the small copy that shows most, and whether it settles everything."""
    best: Verdict | None = None
    for small in small_copies(type(model), model.config):
        verdict = _tried(small, run_guessed, heads=False)
        if best is None or len(verdict.evidence.ran) > len(best.evidence.ran):
            best = verdict
        if {stack_of(path) for path in best.evidence.ran} == {stack_of(path) for path in best.scopes}:
            break
    return (None, False) if best is None else transfer(best, model)


def _tried(model: nn.Module, run: Callable[[nn.Module], Any], heads: bool) -> Verdict:
    """The verdict of the probe, or the guesses alone if the model does not run."""
    try:
        return probed(model, run, heads)
    except InputError:
        raise
    except Exception as error:
        # Any model may fail on guessed inputs. Parameters that the probe would have decided stay open.
        verdict = first_guesses(model)
        verdict.evidence.failure = f"{type(error).__name__}: {error}"
        return verdict


def _without_softmax(model: nn.Module, verdict: Verdict) -> dict[str, nn.Module]:
    """The outermost blocks that mix positions without a softmax over queries and keys.

    They are known by class and parameters, or ran without such a softmax. A block that was seen to form one
    is attention, whatever its name.
    """
    silent = verdict.evidence.silent
    attending = verdict.evidence.complete - silent
    blocks = {
        path: module
        for path, module in model.named_modules()
        if (refused(module) or path in silent)
        and not any(block == path or _inside(block, path) for block in attending)
    }
    return {p: module for p, module in blocks.items() if not any(_inside(p, other) for other in blocks)}


# --- The user's labels ---


def roles_from_labels(labels: Labels | None, model: nn.Module) -> dict[str, tuple[Slice, ...]]:
    """The slices that ``labels`` give, by parameter name."""
    if labels is None:
        return {}
    parameters = dict(parameters_by_module(model))
    in_model = {id(parameter): name for name, parameter in model.named_parameters()}
    values: dict[str, LabelValue] = {}
    if callable(labels):
        answers = {name: labels(in_model[id(value)], value) for name, value in parameters.items()}
        values = {name: answer for name, answer in answers.items() if answer is not None}
    elif isinstance(labels, Mapping):
        if any(isinstance(value, Mapping) for value in labels.values()):
            raise InputError(
                f"labels={labels!r} holds optimizer options: pass it to make_optimizer as rules={labels!r}"
            )
        for pattern, value in labels.items():
            if not isinstance(pattern, str):
                raise InputError(
                    f"labels= has the key {pattern!r}; keys are patterns of names, such as '*.rel'"
                )
            for name in _matched(model, pattern, parameters, in_model):
                values.setdefault(name, value)
    else:
        raise InputError(f"labels are a mapping of patterns or a function, not {type(labels).__name__}")
    return {name: _from_label(name, value, parameters[name]) for name, value in values.items()}


def _matched(
    model: nn.Module, pattern: str, parameters: Mapping[str, nn.Parameter], in_model: Mapping[int, str]
) -> list[str]:
    """The parameters whose name a pattern matches, or those inside modules whose class it matches."""
    by_name = [
        name
        for name, value in parameters.items()
        if fnmatchcase(name, pattern) or fnmatchcase(in_model[id(value)], pattern)
    ]
    classes = [module for module in model.modules() if fnmatchcase(type(module).__name__, pattern)]
    inside = {id(value) for module in classes for value in module.parameters()}
    matched = by_name or [name for name, value in parameters.items() if id(value) in inside]
    if not matched:
        likely = [name for name in parameters if "att" in name.lower()] or list(parameters)
        raise InputError(
            f"label {pattern!r} matches no parameter and no class; names look like "
            + (repr(likely[0]) if likely else "nothing: the model has no parameters")
        )
    return matched


def _from_label(name: str, value: Any, parameter: nn.Parameter) -> tuple[Slice, ...]:
    whole = whole_slice(name, parameter.numel())
    if isinstance(value, str):
        return (replace(whole, role=_valid_role(name, value), decided_by="label"),)
    try:
        spans = sorted(
            (part.axis, part.start, part.stop, part.role) if isinstance(part, Slice) else tuple(part)
            for part in value
        )
        axes = {axis for axis, _, _, _ in spans}
    except (TypeError, ValueError):
        raise InputError(
            f"the label of {name!r} is {value!r}; give a role or a list of (axis, start, stop, role)"
        ) from None
    ends = [0, *(stop for _, _, stop, _ in spans)]
    starts = [start for _, start, _, _ in spans]
    whole_numbers = all(isinstance(number, int) for number in (*axes, *starts, *ends))
    fits = whole_numbers and len(axes) == 1 and 0 <= spans[0][0] < parameter.dim()
    if not fits or starts != ends[:-1] or ends[-1] != parameter.shape[spans[0][0]]:
        raise InputError(
            f"the slices {list(value)!r} do not cover {name!r} of shape {tuple(parameter.shape)} exactly once"
        )
    parts: list[Part] = [(_valid_role(name, role), stop - start, None) for _, start, stop, role in spans]
    return whole.split(spans[0][0], parts, "label")


def _valid_role(name: str, role: Any) -> Role:
    if role not in get_args(Role):
        raise InputError(f"the label of {name!r} is {role!r}; roles are {', '.join(get_args(Role))}")
    return cast(Role, role)


# --- Slices of all parameters: every parameter covered once, neighbours of one role joined ---


def _assemble(
    model: nn.Module, verdict: Verdict, by_user: Mapping[str, tuple[Slice, ...]], heads: bool
) -> Circuits:
    """The labels of all parameters of ``model``, in its order."""
    prefixes = layer_prefixes(verdict.scopes.values())
    names: dict[int, list[str]] = {}
    # Under one name per module: a parameter is tied if several modules hold it.
    for path, module in model.named_modules():
        for name, parameter in parameters_by_module(module, path, recurse=False, remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    slices: list[Slice] = []
    for name, parameter in parameters_by_module(model):
        scope = verdict.scope_of(name)
        layer = scope.layer if scope is not None else nearest(name, prefixes)
        whole = whole_slice(name, parameter.numel(), layer)
        parts: Sequence[Slice]
        if name in by_user:
            parts = [replace(part, layer=layer) for part in by_user[name]]
        elif verdict.is_linear(name):
            parts = [replace(whole, decided_by=NO_SOFTMAX)]
        elif scope is None:
            parts = [replace(whole, role=_outside(name, verdict))]
        else:
            parts = verdict.slices(name, heads)
        if name not in by_user and _crosses(model, verdict, parts, parameter, names[id(parameter)]):
            parts = [replace(whole, role="shared")]
        elif heads and scope is not None and not verdict.is_linear(name):
            parts = slices_by_head(model, scope, parameter, parts, verdict.evidence)
        slices += joined(parts)
    return Circuits(tuple(slices))


def _outside(name: str, verdict: Verdict) -> Role:
    """Everything outside attention is rest, except tables of biases that are added to the scores."""
    parts = name.split(".")
    meanings = [meaning(part) for part in parts[-3:]]
    table = any(m.score for m in meanings) and "bias" in name and not any(m.norm for m in meanings)
    return "k" if table and verdict.scopes and parts[-1] != "bias" else "rest"


def _crosses(
    model: nn.Module, verdict: Verdict, parts: Sequence[Slice], parameter: nn.Parameter, names: list[str]
) -> bool:
    """Whether a tied parameter serves another circuit under one of its other names."""
    for other in names if len(names) > 1 else ():
        scope = verdict.scope_of(other)
        role: Role | None = "rest"
        if scope is not None:
            guessed = guess(model, scope, other, parameter)
            role = None if guessed is None else guessed.role
        if role is not None and CIRCUIT_OF_ROLE[role] not in {part.circuit for part in parts}:
            return True
    return False


# --- Notes on the labels ---


def _notes(verdict: Verdict, circuits: Circuits, verify: bool | str) -> tuple[str, ...]:
    """One line per note; none if the probe saw every attention block."""
    evidence, notes = verdict.evidence, []
    left = {part.parameter for part in circuits if part.decided_by == NO_SOFTMAX}
    linear = {p: m for p, m in verdict.linear.items() if any(_inside(name, p) for name in left)}
    if linear:
        classes = dict.fromkeys(type(module).__name__ for module in linear.values())
        notes.append(
            f"no softmax over queries and keys in {stack_names(list(linear))} ({_some(list(classes))}): "
            f"at the base rate{_OTHER_FORMS if evidence.silent & linear.keys() else ''}"
        )
    if not verify:
        return tuple(notes)
    if verdict.unused:
        unused = stack_names(verdict.unused)
        notes.append(f"without effect on the probe's inputs, at the base rate: {unused}")
    labelled = {id(verdict.scope_of(part.parameter)) for part in circuits if part.circuit != "rest"}
    by_user = {id(verdict.scope_of(part.parameter)) for part in circuits if part.decided_by == "label"}
    unseen = [
        path
        for path, scope in verdict.scopes.items()
        if path not in evidence.ran and id(scope) in labelled - by_user
    ]
    if unseen:
        notes.append(
            f"not seen by the probe, labelled by registry and names: {stack_names(unseen)}{_why(verdict)}"
            + ("" if evidence.failure == WITHOUT_AUTOGRAD else "; to verify it, pass inputs= that run it")
        )
    for factor in ("queries", "keys"):
        paths = [path for path, foreign in evidence.foreign.items() if foreign == factor]
        if paths:
            notes.append(
                f"{factor} come from outside {stack_names(paths)}; if other parameters make them, name "
                "these with labels="
            )
    return tuple(notes)


def stack_names(paths: list[str]) -> str:
    """The stacks of layers that hold ``paths``, as text."""
    return _some(list(dict.fromkeys(stack_of(path) or "the model" for path in paths)))


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _why(verdict: Verdict, before: str = "") -> str:
    """The first line of the probe's failure, in brackets; empty without one."""
    line = verdict.evidence.failure.partition("\n")[0]
    line = line if len(line) <= 160 else line[:157] + "..."
    return f" ({before}{line})" if line else ""


# --- Refusals, with advice to paste ---

# The probe does not see every form of attention: a sigmoid, a kernel.
_OTHER_FORMS = "; to label them by name anyway, pass circuits=find_circuits(model, verify=False)"


def _refuse_without_attention(model: nn.Module, verdict: Verdict, circuits: Circuits) -> None:
    """Raise if everything is rest, or all blocks mix positions without a softmax."""
    if any(part.circuit in ("qk", "shared") or part.decided_by == "label" for part in circuits):
        return
    model_class = type(model).__name__
    if verdict.linear:
        path, block = next(iter(verdict.linear.items()))
        likely = _likely(model, verdict, verdict.linear)
        raise InputError(
            f"{path or 'the model'} ({type(block).__name__}) forms no softmax over queries and keys, and "
            f"nothing in {model_class} does: it has no QK circuit"
            + (_OTHER_FORMS if path in verdict.evidence.silent else "")
            + (f"; to name one, pass {labels_text(model, likely)}" if likely else "")
        )
    if any(part.circuit != "rest" for part in circuits):
        return
    if any(hasattr(module, "_packed_params") for module in model.modules()):
        raise InputError(
            f"the weights of {model_class} are packed for integer arithmetic and are no longer "
            "parameters; label and train the model before it is quantised"
        )
    likely = _likely(model, verdict, [""])
    advice = f"; if it has some, name the queries and keys, for example {labels_text(model, likely)}"
    raise InputError(f"no attention was found in {model_class}{advice if likely else ''}")


def likely_labels(model: nn.Module, paths: Iterable[str]) -> dict[str, Any]:
    """Labels to begin with for the blocks at ``paths``."""
    return _likely(model, first_guesses(model), paths)


def _likely(model: nn.Module, verdict: Verdict, paths: Iterable[str]) -> dict[str, Any]:
    """Labels of the weights in ``paths`` that are called queries or keys, else of the first two."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    inside = {n: p for n, p in parameters_by_module(model) if any(_inside(n, path) for path in paths)}
    names = [
        name for name, parameter in inside.items() if parameter.dim() > 1 and id(parameter) not in tables
    ]
    likely: dict[str, Any] = {}
    for name in names:
        guessed = verdict.guesses.get(name)
        letters = {meaning(part).letters for part in name.split(".")[-2:]} & {"q", "k"}
        if guessed is not None and guessed.role in ("q", "k"):
            likely[name] = guessed.role
        elif guessed is not None and guessed.fused:
            likely[name] = as_label(guessed.slices)
            bias = name.removesuffix("weight") + "bias"
            if bias in inside:  # it needs a label, too
                likely[bias] = as_label(replace(part, axis=0) for part in guessed.slices)
        elif guessed is None and len(letters) == 1:
            likely[name] = letters.pop()
    return likely or dict(zip(names, ("q", "k"), strict=False))


def _refuse_without_queries(model: nn.Module, verdict: Verdict, circuits: Circuits) -> None:
    """Raise for blocks that attend although none of their parameters is in the QK circuit."""
    evidence = verdict.evidence
    held: dict[str, set[str]] = {}
    for part in circuits:
        scope = verdict.scope_of(part.parameter)
        if scope is not None:
            held.setdefault(scope.path, set()).add(part.circuit if part.decided_by != "label" else "qk")
    without = [
        path
        for path, in_block in held.items()
        if path in evidence.ran & evidence.complete - evidence.foreign.keys()
        and not in_block & {"qk", "shared"}
    ]
    if without:
        weights = [next(parameters_by_module(model.get_submodule(path), path))[0] for path in without]
        raise InputError(
            f"{without[0] or 'the model'} forms attention, but no parameter in it was found to make queries "
            f"or keys; name one that does, for example {labels_text(model, dict.fromkeys(weights, 'q'))}"
        )


def _refuse_open(model: nn.Module, verdict: Verdict, by_user: Mapping[str, Any]) -> None:
    """Raise for attention parameters that labels, registry, names and probe leave without a role."""
    guesses = {name: verdict.guesses[name] for name in verdict.open() if name not in by_user}
    roles: dict[str, Any] = {
        name: as_label(guessed.slices) if guessed and guessed.fused else "q"
        for name, guessed in guesses.items()
    }
    if not roles:
        return
    parameters = dict(parameters_by_module(model))
    shown = _some([f"{name} {tuple(parameters[name].shape)}" for name in roles])
    why = _why(verdict, "the probe could not run: ")
    raise InputError(
        f"{len(roles)} attention parameters have no label: {shown}{why}; "
        f"name them, for example {labels_text(model, roles)}, or let the probe see them: "
        "circuits=find_circuits(model, inputs=batch)"
    )


def _refuse_unverified(verdict: Verdict, by_user: Mapping[str, Any]) -> None:
    """Raise for attention blocks that the probe did not see (``verify=True``)."""
    unseen = [
        path
        for path, scope in verdict.scopes.items()
        if path not in verdict.evidence.ran
        and path not in verdict.linear
        and not all(name in by_user for name in verdict.guesses if verdict.scope_of(name) is scope)
    ]
    if unseen:
        raise InputError(
            f"the probe did not reach {len(unseen)} attention blocks: {_some(unseen)}{_why(verdict)}; "
            + ("" if verdict.evidence.failure == WITHOUT_AUTOGRAD else "pass inputs= that run them, or ")
            + "verify='auto'"
        )


def labels_text(model: nn.Module, roles: Mapping[str, Any]) -> str:
    """``labels={...}`` with these roles, one pattern per stack of layers if it matches nothing else."""
    names = [name for name, _ in parameters_by_module(model)]
    patterns = {}
    for name, role in roles.items():
        pattern = stack_of(name)
        alone = all(roles.get(other) == role for other in names if fnmatchcase(other, pattern))
        patterns[pattern if alone else name] = role
    return f"labels={patterns!r}"


def _inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(outer + "."))
