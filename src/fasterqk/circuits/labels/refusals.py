"""What is not labelled, said in one line: blocks without attention, parameters that nothing explains."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from fasterqk.capture.modules import stack_of
from fasterqk.circuits.labels.judge import Judgement
from fasterqk.circuits.labels.registry import refused
from fasterqk.circuits.slices import Circuits
from fasterqk.errors import InputError

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
