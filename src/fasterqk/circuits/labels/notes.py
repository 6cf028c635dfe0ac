"""What a reader of labels should know beside them: what the probe did not see, and why."""

from fasterqk.capture.modules import stack_of
from fasterqk.circuits.labels.judge import Judgement
from fasterqk.circuits.slices import Circuits


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
