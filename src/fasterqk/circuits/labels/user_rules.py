"""The user's own labels: patterns of names, or a function."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, get_args

from torch import nn

from fasterqk.circuits.slices import Role, Slice
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
