"""``find_circuits``: a label for every parameter and every slice of a fused parameter."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from fasterqk.capture.compiled import uncompiled
from fasterqk.capture.modules import stack_of
from fasterqk.circuits.labels.assemble import assemble
from fasterqk.circuits.labels.inputs import run_guessed, runner
from fasterqk.circuits.labels.judge import Judgement, first_guesses, judge, transfer
from fasterqk.circuits.labels.notes import notes
from fasterqk.circuits.labels.refusals import (
    refuse_linear_attention,
    refuse_open,
    refuse_unverified,
    refuse_without_attention,
    refuse_without_queries,
)
from fasterqk.circuits.labels.twin import can_have_twin, twins
from fasterqk.circuits.labels.user_rules import Rules, apply_rules
from fasterqk.circuits.slices import Circuits
from fasterqk.errors import InputError

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
