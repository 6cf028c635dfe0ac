"""Verdicts: guesses from registry and names against the evidence of a probe.

A ``Verdict`` holds the guesses (``names``) and the evidence (``probe``) for a whole model, and the slices
that the probe confirmed or decided otherwise:

1. ``first_guesses`` finds the attention blocks and guesses every parameter in them;
2. ``probed`` runs the probe and looks for attention outside of these blocks;
3. ``settle`` compares guess and evidence, parameter by parameter;
4. ``transfer`` carries the verdict on a small copy over to the model that it is a copy of;
5. ``slices_by_head`` cuts the slices of a parameter head by head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.labels._signals import Finding
from fasterqk.labels.names import (
    Guess,
    Scope,
    code_of,
    find_scopes,
    guess,
    nearest,
    slice_by_head,
    stacks,
    with_discovered,
)
from fasterqk.labels.probe import Evidence, is_large, probe
from fasterqk.labels.slices import CIRCUIT_OF_ROLE, Role, Slice, joined, whole_slice
from fasterqk.trace.modules import parameters_by_module, stack_of


@dataclass
class Verdict:
    """Guesses, evidence and verified slices of the attention parameters of a model.

    ``guesses`` has every parameter in a scope. ``verified`` has the slices that the probe confirmed (decided
    by ``name+probe``, ``registry+probe``) or decided otherwise (``probe``). ``linear`` are the blocks that
    mix positions without a softmax. ``unused`` are fused weights that reach nothing, in a block whose q, k
    and v come from others.
    """

    scopes: dict[str, Scope]
    guesses: dict[str, Guess | None]
    evidence: Evidence = field(default_factory=Evidence)
    verified: dict[str, tuple[Slice, ...]] = field(default_factory=dict)
    linear: dict[str, nn.Module] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def scope_of(self, parameter: str) -> Scope | None:
        """The scope that holds the parameter."""
        return nearest(parameter, self.scopes)

    def is_linear(self, parameter: str) -> bool:
        """Whether the parameter belongs to a block without a softmax over queries and keys."""
        return nearest(parameter, self.linear) is not None

    def open(self) -> list[str]:
        """Parameters without a label, and fused weights with an unconfirmed layout."""
        return [
            name
            for name, guessed in self.guesses.items()
            if name not in self.verified
            and (guessed is None or not guessed.certain)
            and not self.is_linear(name)
        ]

    def slices(self, name: str, heads: bool) -> tuple[Slice, ...]:
        """The slices of a parameter in a scope; with ``heads``, with the heads of its layout."""
        scope, guessed = self.scope_of(name), self.guesses[name]
        slices = self.verified.get(name) or (guessed.slices if guessed else ())
        assert scope is not None and slices  # open parameters have been refused
        if not heads or scope.path in self.evidence.heads:  # the heads that the probe saw take precedence
            slices = tuple(replace(part, head=None) for part in slices)
        return tuple(replace(part, layer=scope.layer) for part in slices)

    def confirm(self, name: str) -> None:
        """The probe agrees with the guess."""
        guessed = self.guesses[name]
        assert guessed is not None
        self.verified[name] = tuple(
            replace(part, decided_by=part.decided_by + "+probe") for part in guessed.slices
        )

    def decide(self, name: str, role: Role, numel: int) -> None:
        """The probe gives the whole parameter one role."""
        self.verified[name] = (replace(whole_slice(name, numel), role=role, decided_by="probe"),)

    def confirmed(self, name: str) -> bool:
        """Whether the probe agrees with the guess; False if it decided otherwise or saw nothing."""
        return name in self.verified and self.verified[name][0].decided_by != "probe"


# --- Guesses, and a probe of the model ---


def first_guesses(model: nn.Module, scopes: dict[str, Scope] | None = None) -> Verdict:
    """Scopes and guesses, before any probe."""
    verdict = Verdict(find_scopes(model) if scopes is None else scopes, {})
    for name, parameter in parameters_by_module(model):
        scope = verdict.scope_of(name)
        if scope is not None:
            verdict.guesses[name] = guess(model, scope, name, parameter)
    return verdict


def probed(model: nn.Module, run: Callable[[nn.Module], Any], heads: bool = False) -> Verdict:
    """The verdict on ``model`` after a probe while ``run`` runs it.

    In a large model, the probe of one block per stack holds for the whole stack.
    """
    large = is_large(model)
    verdict = first_guesses(model)
    for _ in range(2):
        alike = stacks(model, verdict.scopes) if large else {path: [path] for path in verdict.scopes}
        evidence = probe(model, run, list(alike), verdict.scopes, heads)
        if not evidence.elsewhere:
            break
        verdict = first_guesses(model, with_discovered(model, verdict.scopes, evidence.elsewhere))
    _spread(evidence, alike)
    return settle(verdict, evidence, dict(parameters_by_module(model)))


def _spread(evidence: Evidence, alike: dict[str, list[str]]) -> None:
    """Let the evidence for the first block of each stack hold for all of its blocks."""
    for first, paths in alike.items():

        def moved(table: dict[str, Any], path: str, first: str = first) -> dict[str, Any]:
            inside = (name for name in table if name == first or name.startswith(first + "."))
            return {path + name.removeprefix(first): table[name] for name in list(inside)}

        for path in paths[1:]:
            for blocks in (evidence.ran, evidence.complete, evidence.silent, evidence.irregular):
                blocks |= {path} if first in blocks else set()
            for table in (evidence.heads, evidence.head_lines, evidence.foreign):
                table |= moved(table, path)
            for name, finding in moved(evidence.findings, path).items():
                slices = tuple(replace(part, parameter=name) for part in finding.slices)
                evidence.findings[name] = replace(finding, slices=slices)
            if first in evidence.reached:
                evidence.reached[path] = [moved(softmax, path) for softmax in evidence.reached[first]]


# --- Guess against evidence ---


def settle(guesses: Verdict, evidence: Evidence, parameters: dict[str, nn.Parameter]) -> Verdict:
    """Confirm guesses by the evidence, or decide otherwise."""
    verdict = Verdict(guesses.scopes, guesses.guesses, evidence)
    meeting = {path: _meet(verdict, path) for path in evidence.reached}
    evidence.complete |= {path for path, meet in meeting.items() if meet}
    evidence.silent |= {path for path, meet in meeting.items() if meet is False}
    for name, guessed in verdict.guesses.items():
        finding, scope = evidence.findings.get(name), verdict.scope_of(name)
        if finding is None or scope is None or scope.path not in evidence.ran:
            continue
        role = None if guessed is None else guessed.role
        complete = scope.path in evidence.complete
        # A weight named `value` that attention never multiplies belongs to the output.
        beside = role == "v" and finding.role == "o" and _has_all(verdict, scope)
        if guessed is not None and agree(guessed, finding) and not beside:
            verdict.confirm(name)
        elif not complete and role in ("q", "k"):
            # This softmax does not depend on the parameters called queries and keys.
            evidence.silent.add(scope.path)
        elif guessed is None and _is_feed_forward(verdict, scope, name, parameters):
            verdict.decide(name, "rest", parameters[name].numel())
        elif _overrules(guessed, finding, scope, parameters[name], complete):
            verdict.verified[name] = finding.slices
    evidence.ran -= evidence.silent
    _biases_follow(verdict, parameters)
    for name in verdict.open():
        scope = verdict.scope_of(name)
        if scope is not None and name not in evidence.findings and _has_all(verdict, scope):
            verdict.decide(name, "rest", parameters[name].numel())
            verdict.unused.append(name)
    return verdict


def agree(guessed: Guess, finding: Finding) -> bool:
    """Whether guess and finding put every row into the same circuit.

    The probe decides between v and o: a weight called ``dense_3`` may make values.
    """
    if guessed.role is not None:
        same = {part.circuit for part in finding.slices} == {CIRCUIT_OF_ROLE[guessed.role]}
        return same and not (guessed.role == "o" and finding.role == "v")
    if not guessed.slices or guessed.slices[0].axis != finding.slices[0].axis:
        return False
    # A name does not tell rows of queries from rows of keys.
    by_role = guessed.slices[0].decided_by == "name" and {"q", "k"} <= finding.roles
    return _ends(guessed.slices, by_role) == _ends(finding.slices, by_role)


def _ends(slices: Sequence[Slice], by_role: bool) -> list[tuple[str, int | None]]:
    """The roles or circuits of neighbouring rows, and where they end."""

    def kind(part: Slice) -> str:
        return part.role if by_role else part.circuit

    return [(kind(part), part.stop) for part in joined(slices, kind)]


def _overrules(
    guessed: Guess | None, finding: Finding, scope: Scope, parameter: nn.Parameter, complete: bool
) -> bool:
    """Whether the finding replaces the guess it disagrees with."""
    if guessed is None:
        return True
    if guessed.role == "rest":
        # Both circuits reach a norm in front of attention, which is in neither; a block that is not called
        # attention may hold other parts. A parameter that acts on a context itself is output, one that acts
        # on scores or probabilities only is in the QK circuit.
        looks = bool(finding.roles & {"q", "k", "v"}) or finding.latent
        looks = looks and (guessed.open or not scope.named) and (complete or parameter.dim() > 1)
        return looks or finding.on_scores or (finding.direct and finding.role == "o")
    # The softmax cancels a bias of the keys, so the probe sees rounding errors.
    return not (guessed.firm or (parameter.dim() == 1 and guessed.role is not None and finding.role is None))


def _has_all(verdict: Verdict, scope: Scope) -> bool:
    """Whether queries, keys and values of a block that attends come from parameters that were seen."""
    findings = verdict.evidence.findings
    roles = {role for name in findings if verdict.scope_of(name) is scope for role in findings[name].roles}
    return scope.path in verdict.evidence.complete and {"q", "k", "v"} <= roles


def _is_feed_forward(verdict: Verdict, scope: Scope, name: str, parameters: dict[str, nn.Parameter]) -> bool:
    """Whether a matrix (or its bias) reaches the output without acting on a context, beside one that does."""
    findings = verdict.evidence.findings
    weight = name if parameters[name].dim() > 1 else name.removesuffix("bias") + "weight"
    finding = findings.get(weight)
    if finding is None or finding.role != "o" or finding.direct or parameters[weight].dim() < 2:
        return False
    inside = (findings[other] for other in findings if verdict.scope_of(other) is scope)
    return any(other.direct and other.role == "o" for other in inside)


def _meet(verdict: Verdict, path: str) -> bool | None:
    """Whether parameters called queries and keys reach one softmax; None without such names.

    Linear attention has softmaxes of keys alone, over positions, and of queries alone.
    """
    named = {
        name: guessed.slices
        for name, guessed in verdict.guesses.items()
        if guessed is not None and verdict.scope_of(name) is verdict.scopes[path]
    }
    if not {"q", "k"} <= {part.role for slices in named.values() for part in slices}:
        return None

    def reaches(softmax: dict[str, Tensor], role: Role) -> bool:
        return any(
            bool(part.view(entries).any())
            for name, entries in softmax.items()
            for part in named.get(name, ())
            if part.role == role and (part.axis is not None or entries.dim() > 1)
        )

    return any(reaches(softmax, "q") and reaches(softmax, "k") for softmax in verdict.evidence.reached[path])


def _biases_follow(verdict: Verdict, parameters: dict[str, nn.Parameter]) -> None:
    """Slice the bias of a fused weight like the weight.

    The softmax cancels a bias of the keys, so probabilities alone show only rounding errors of it.
    """
    for name in [name for name in verdict.guesses if name.endswith("bias")]:
        weight, bias = name.removesuffix("bias") + "weight", parameters[name]
        if weight not in verdict.guesses or bias.dim() != 1 or verdict.confirmed(name):
            continue
        finding = verdict.evidence.findings.get(weight)
        if finding is None or len(finding.slices) == 1 or finding.slices[-1].stop != len(bias):
            continue
        if verdict.confirmed(weight):
            verdict.confirm(name)
        elif weight in verdict.verified:
            parts = [(p.role, (p.stop or 0) - (p.start or 0), None) for p in verdict.verified[weight]]
            verdict.verified[name] = whole_slice(name, bias.numel()).split(0, parts, "probe")


# --- From the verdict on a small copy to the full model ---


def transfer(small: Verdict, model: nn.Module) -> tuple[Verdict, bool]:
    """The verdict on ``model`` from the one on a small copy, and whether it settles everything.

    Parameters correspond by name without layer numbers and by guess, as layers of one stack may differ.
    Slices that the probe found against the guess do not carry over: the rows of the copy are others. Blocks
    that run other code than the copy (an instance that overrides ``forward``) are left out.
    """
    scopes = find_scopes(model)
    discovered = {stack_of(path) for path in small.scopes} - {stack_of(path) for path in scopes}
    scopes = with_discovered(
        model, scopes, [path for path, _ in model.named_modules() if stack_of(path) in discovered]
    )
    verdict = first_guesses(model, scopes)
    parameters = dict(parameters_by_module(model))
    # If layers of one kind differ, decisions of the probe take precedence over confirmations.
    names = sorted(small.verified, key=small.confirmed, reverse=True)
    verified = {_kind(small, name): name for name in names}
    running: dict[str, set[Any]] = {}
    for path, scope in small.scopes.items():
        running.setdefault(stack_of(path), set()).update(_code(scope.module))
    patched = {
        path
        for path, scope in scopes.items()
        if not _code(scope.module) <= running.get(stack_of(path), set())
    }
    settled = not patched
    for name in verdict.guesses:
        holder, counterpart = verdict.scope_of(name), verified.get(_kind(verdict, name))
        if counterpart is None or (holder is not None and holder.path in patched):
            continue
        slices = small.verified[counterpart]
        if small.confirmed(counterpart):
            verdict.confirm(name)
        elif slices[0].axis is None:
            verdict.decide(name, slices[0].role, parameters[name].numel())
        else:
            settled = False

    def corresponding(paths: set[str]) -> set[str]:
        # A hybrid may have attention and another mixer under one name.
        kinds = {(stack_of(path), type(small.scopes[path].module).__name__) for path in paths}
        alike = {p for p, scope in scopes.items() if (stack_of(p), type(scope.module).__name__) in kinds}
        return alike - patched

    evidence = verdict.evidence
    evidence.silent = corresponding(small.evidence.silent)
    evidence.ran = corresponding(small.evidence.ran) - evidence.silent
    evidence.complete = corresponding(small.evidence.complete)
    foreign = {stack_of(path): factor for path, factor in small.evidence.foreign.items()}
    evidence.foreign = {path: foreign[stack_of(path)] for path in scopes if stack_of(path) in foreign}
    evidence.failure = small.evidence.failure
    return verdict, settled and not verdict.open()


def _code(block: nn.Module) -> set[Any]:
    return {(stack_of(name), code_of(module)) for name, module in block.named_modules()}


def _kind(verdict: Verdict, name: str) -> tuple[str, tuple[Role, ...]]:
    """The name without layer numbers, and the distinct roles of the guess."""
    guessed = verdict.guesses[name]
    return stack_of(name), tuple(dict.fromkeys(part.role for part in guessed.slices)) if guessed else ()


# --- Slices of one block, and head by head ---


def slices_by_evidence(
    model: nn.Module, scope: Scope, evidence: Evidence, heads: bool
) -> dict[str, list[Slice]] | None:
    """The slices of one block that the evidence shows, by parameter; None if it shows no attention."""
    parameters = dict(parameters_by_module(model))
    verdict = settle(first_guesses(model, {scope.path: scope}), evidence, parameters)
    if scope.path not in evidence.ran & evidence.complete:
        return None
    slices = {}
    for name in verdict.guesses:
        if name in verdict.verified:
            parts: Sequence[Slice] = verdict.slices(name, heads)
            if heads:
                parts = slices_by_head(model, scope, parameters[name], parts, evidence)
            slices[name] = joined(parts)
    return slices


def slices_by_head(
    model: nn.Module, scope: Scope, parameter: nn.Parameter, slices: Sequence[Slice], evidence: Evidence
) -> Sequence[Slice]:
    """The slices of one parameter head by head: as the probe saw them, else by attributes of the module."""
    if scope.path in evidence.irregular:
        raise InputError(
            f"heads=True, but in {scope.path or type(model).__name__} the query heads that share a key head "
            "are not neighbours, so its heads have no order; give one ratio for all heads of a layer, or, if "
            "the code keeps batch and heads in one axis, inputs= of one example"
        )
    counts = evidence.heads.get(scope.path)
    axis, heads = evidence.head_lines.get(slices[0].parameter, (None, ()))
    whole = slices[0].axis is None
    if counts is not None and not whole:
        # A single head of keys or values in a fused weight.
        single = {role for role, number in (("k", counts[1]), ("v", counts[3])) if number == 1}
        slices = [replace(part, head=0) if part.role in single else part for part in slices]
    labelled = slices[0].decided_by == "label"
    if counts is None or axis is None or labelled or not (whole or slices[0].axis == axis):
        return slice_by_head(model, scope, parameter, slices, counts)
    by_head = []
    for part in slices:
        lines = range(len(heads)) if whole else range(part.start or 0, part.stop or 0)
        for head, neighbours in groupby(lines, lambda line: heads[line]):
            same = list(neighbours)
            numel = parameter.numel() // len(heads) * len(same)
            span = replace(part, axis=axis, start=same[0], stop=same[-1] + 1, numel=numel)
            by_head.append(replace(span, head=part.head if head is None else head))
    return by_head
