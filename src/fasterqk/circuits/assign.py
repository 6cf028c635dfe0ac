"""Every trainable parameter of a model, cut where its slices are told different things."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from torch import nn

from fasterqk.circuits.decay import undecayed
from fasterqk.circuits.find import find_circuits
from fasterqk.circuits.rules import Request, Resolver, Settings
from fasterqk.circuits.slices import Circuit, Circuits, Slice
from fasterqk.errors import InputError

Only = Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class Run:
    """``start:stop`` of a parameter along ``axis`` (None: all of it), and what it is told.

    ``arm`` is ``base``, or the circuit that is told something else than the base. ``exempt`` says that the
    run is not decayed although others of its arm are.
    """

    axis: int | None
    start: int
    stop: int
    role: str
    arm: str
    exempt: bool
    settings: Settings


@dataclass(frozen=True)
class Assigned:
    """A parameter and its runs, in order; a single run is the whole parameter."""

    name: str
    parameter: nn.Parameter
    runs: tuple[Run, ...]

    @property
    def split(self) -> bool:
        """Whether slices of it go different ways."""
        return len(self.runs) > 1

    def units(self) -> list[list[Run]]:
        """The runs of one role that are told the same, together: the queries of all heads, say."""
        units: list[list[Run]] = []
        for run in self.runs:
            same = [
                u for u in units if (u[0].role, u[0].arm, u[0].settings) == (run.role, run.arm, run.settings)
            ]
            if not same:
                same = [[]]
                units += same
            same[0].append(run)
        return units


def labels_for(model: nn.Module, request: Request, circuits: Circuits | None) -> Circuits | None:
    """The labels a request needs: the user's, freshly found ones, or None when all are told the same."""
    if circuits is not None or request.same_everywhere:
        return circuits
    return find_circuits(model, heads=request.per_head)


def assign(
    model: nn.Module, request: Request, circuits: Circuits | None, only: Only | None = None
) -> list[Assigned]:
    """What every trainable parameter that ``only`` lets through is told, in the model's order."""
    if only is not None and not callable(only):
        raise InputError(f"only={only!r} is no function of name and parameter")
    if circuits is not None and not isinstance(circuits, Circuits):
        raise InputError(f"circuits are what find_circuits returns, not a {type(circuits).__name__}")
    if request.per_head and circuits is not None and all(part.head is None for part in circuits):
        raise InputError("a ratio per head needs labels per head: find_circuits(model, heads=True)")
    resolver = Resolver(request, circuits or ())
    exempt = undecayed(model)
    slices = _by_parameter(model, circuits)
    assigned = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (only is not None and not only(name, parameter)):
            continue
        parts = slices.get(id(parameter), []) if circuits is not None else [None]
        runs = [_run(part, resolver, name not in exempt) for part in parts]
        if circuits is not None:
            _check_cover(name, parameter, runs)
        assigned.append(Assigned(name, parameter, _whole_or_runs(runs)))
    if not assigned:
        raise InputError("the model has no trainable parameters to optimize")
    if circuits is not None and only is None:
        trained = {part.circuit for each in assigned for part in slices.get(id(each.parameter), [])}
        _check_anything_to_do(request, trained)
    return assigned


def _check_anything_to_do(request: Request, trained: set[Circuit]) -> None:
    """A ratio for a circuit that is frozen (adapters on the values alone, say) would do nothing."""
    for circuit in get_args(Circuit):
        asked = request.asks_for(circuit)
        if asked and circuit not in trained:
            raise InputError(
                f"{asked} would do nothing: no parameter of the {circuit} circuit is there and trainable"
            )


def _by_parameter(model: nn.Module, circuits: Circuits | None) -> dict[int, list[Slice]]:
    """Slices by the identity of their parameter; a tied parameter may be labelled under any of its names."""
    known = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, dict[str, list[Slice]]] = {}
    for part in circuits or ():
        if part.parameter not in known:
            raise InputError(
                f"the labels name {part.parameter!r}, which this model does not have; "
                "call find_circuits on the model that is trained"
            )
        found.setdefault(id(known[part.parameter]), {}).setdefault(part.parameter, []).append(part)
    return {key: next(iter(names.values())) for key, names in found.items()}


def _run(part: Slice | None, resolver: Resolver, decayed: bool) -> Run:
    settings, usual = resolver.settings(part, decayed), resolver.settings(None, decayed)
    arm = "base" if part is None or settings == usual else part.circuit
    exempt = not decayed and settings != resolver.settings(part, True)
    if part is None or part.axis is None:
        return Run(None, 0, 0, part.role if part else "rest", arm, exempt, settings)
    return Run(part.axis, part.start or 0, part.stop or 0, part.role, arm, exempt, settings)


def _check_cover(name: str, parameter: nn.Parameter, runs: list[Run]) -> None:
    """The slices must cover the parameter exactly once, along one axis."""
    if len(runs) == 1 and runs[0].axis is None:
        return
    axes = {run.axis for run in runs}
    edge = 0
    for run in sorted(runs, key=lambda run: run.start):
        edge = run.stop if run.start == edge else -1
    if len(axes) != 1 or None in axes or edge != parameter.shape[next(iter(axes)) or 0]:
        spans = ", ".join(f"{run.start}:{run.stop} of axis {run.axis}" for run in runs) or "nothing"
        raise InputError(
            f"the labels of {name} (shape {tuple(parameter.shape)}) cover {spans}, "
            "not every entry exactly once; find_circuits makes complete ones"
        )


def merge(runs: Sequence[Run], *, by_role: bool = True) -> tuple[Run, ...]:
    """Neighbours that are told the same (and have one role) become one run."""
    merged: list[Run] = []
    for run in sorted(runs, key=lambda run: run.start):
        last = merged[-1] if merged else None
        if (
            last
            and (last.arm, last.settings) == (run.arm, run.settings)
            and (last.role == run.role or not by_role)
        ):
            run = replace(run, start=last.start)
            merged.pop()
        merged.append(run)
    return tuple(merged)


def _whole_or_runs(runs: list[Run]) -> tuple[Run, ...]:
    """A parameter that is told one thing is whole."""
    if all((run.arm, run.settings) == (runs[0].arm, runs[0].settings) for run in runs):
        return (replace(runs[0], axis=None, start=0, stop=0),)
    return merge(runs)
