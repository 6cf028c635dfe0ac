"""What is not labelled, said in one line: blocks without attention, parameters that nothing explains."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from fasterqk.circuits.labels.judge import Judgement
from fasterqk.circuits.labels.registry import refused
from fasterqk.errors import InputError


def refuse_linear_attention(
    model: nn.Module, stated: Mapping[str, Any], silent: Collection[str] = ()
) -> None:
    """Raise for blocks that mix positions without a softmax, unless rules label all they hold."""
    for path, module in model.named_modules():
        known = refused(module)
        prefix = path + "." if path else ""
        held = [prefix + name for name, _ in module.named_parameters()]
        if not held or not (known or path in silent) or all(name in stated for name in held):
            continue
        if known and any(refused(child) for child in module.modules() if child is not module):
            continue  # name the block, not the model around it
        pattern = ".".join("*" if part.isdigit() else part for part in path.split("."))
        raise InputError(
            f"{path or type(model).__name__} ({type(module).__name__}) forms no softmax over queries and "
            f"keys, so it has no QK circuit; to leave such blocks at the base rate pass "
            f"rules={{{pattern + '.*'!r}: 'rest'}}"
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
        scope.path
        for scope in judgement.scopes
        if scope.path not in judgement.ran
        and not all(name in stated for name in judgement.guesses if scope.holds(name))
    ]
    if unseen:
        why = f" ({judgement.failure})" if judgement.failure else ""
        raise InputError(
            f"the probe did not reach {len(unseen)} attention blocks: {', '.join(unseen[:4])}{why}; "
            "pass inputs= that run them, or verify='auto'"
        )
