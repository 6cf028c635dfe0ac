"""From fused parameters to the leaves an optimizer gets: which slices, and by what mechanism."""

from typing import Any

from torch import nn

from fasterqk.circuits.alias import Fused
from fasterqk.circuits.assign import Assigned, Run, merge
from fasterqk.circuits.parametrization import parametrize_split
from fasterqk.circuits.window import Window, regular
from fasterqk.errors import InputError

_VECTOR = 64  # entries; a multiple of every vector width in use


def split(
    model: nn.Module, assigned: list[Assigned], mechanism: str, optimizer_class: Any, kwargs: dict[str, Any]
) -> tuple[list[Fused], list[tuple[Run, nn.Parameter, str]]]:
    """Leaves for every slice that goes its own way; whole parameters stay as they are."""
    fused = []
    pieces: list[tuple[Run, nn.Parameter, str]] = []
    for each in assigned:
        if not each.split:
            pieces.append((each.runs[0], each.parameter, each.name))
            continue
        if hasattr(each.parameter, "placements"):
            raise InputError(
                f"{each.name} is fused and sharded over devices, which make_optimizer does not split; "
                "sharded models need separate query, key and value weights"
            )
        if mechanism == "parametrization":
            pieces += parametrize_split(model, each)
            continue
        windows = _windows(each, optimizer_class, kwargs)
        made = Fused(
            each.name,
            each.parameter,
            [window for _, window in windows],
            copied=mechanism != "alias",
            always=mechanism == "shadow",
        )
        if made.strided and not _is_torchs_own(optimizer_class):
            raise InputError(
                f"mechanism='alias' hands {optimizer_class!r} slices of {each.name} that are not one piece "
                "of memory, which only torch's own optimizers are known to respect; use mechanism='auto'"
            )
        fused.append(made)
        for (run, window), leaf in zip(windows, made.leaves, strict=True):
            pieces.append((run, leaf, window.label(each.name)))
    return fused, pieces


def _windows(assigned: Assigned, optimizer_class: Any, kwargs: dict[str, Any]) -> list[tuple[Run, Window]]:
    """What the leaves of a fused parameter look at: a run each, as few as the optimizer allows.

    Where entries do not see each other, queries and keys that lie side by side are one run. Fused kernels
    round the last few entries of a tensor another way than the rest (vector against scalar instructions);
    where that would show, the runs of all heads become one leaf, as in a separate weight.
    """
    axis = assigned.runs[0].axis or 0
    size = assigned.parameter.shape[axis]
    row = assigned.parameter.numel() // size
    uneven = any((run.stop - run.start) * row % _VECTOR for run in assigned.runs)
    if uneven and _uses_torch_fused(optimizer_class, kwargs):
        found = []
        for unit in assigned.units():
            together = regular(axis, size, [(run.start, run.stop) for run in unit])
            windows = [_window(run) for run in unit] if together is None else [(unit[0], together)]
            found += windows
        return found
    runs = assigned.runs
    if _is_elementwise(optimizer_class):
        runs = merge(runs, by_role=False)
    return [_window(run) for run in runs]


def _window(run: Run) -> tuple[Run, Window]:
    return run, Window(run.axis or 0, run.start, run.stop - run.start)


def _uses_torch_fused(optimizer_class: Any, kwargs: dict[str, Any]) -> bool:
    """Also where it is wrapped: ``functools.partial(AdamW, fused=True)``."""
    options = {**getattr(optimizer_class, "keywords", {}), **kwargs}
    return bool(options.get("fused")) and _is_torchs_own(optimizer_class)


def _is_elementwise(optimizer_class: Any) -> bool:
    """Whether an entry's update depends on no other entry, so that slices may be joined."""
    name = getattr(optimizer_class, "func", optimizer_class).__name__
    return _is_torchs_own(optimizer_class) and name not in ("Muon", "Adafactor")


def _is_torchs_own(optimizer_class: Any) -> bool:
    return str(getattr(optimizer_class, "func", optimizer_class).__module__).startswith("torch.optim.")
