"""Verdicts: the guesses of registry and names, and the evidence of a probe, brought together.

A *guess* is what registry and names say of a parameter (``names``), *evidence* what the probe saw
(``probe``). A ``Verdict`` holds both for a whole model, and the slices that the probe confirmed or decided
otherwise:

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
    layer_numbers,
    nearest,
    slice_by_head,
    stacks,
)
from fasterqk.labels.probe import Evidence, is_large, probe
from fasterqk.labels.slices import CIRCUIT_OF_ROLE, Circuits, Role, Slice, joined, whole_slice
from fasterqk.trace.modules import parameters_by_module, says_attention, stack_of


@dataclass
class Verdict:
    """What is known of the attention parameters of a model.

    ``guesses`` has every parameter in a scope. ``verified`` has the slices that the probe confirmed (decided
    by ``name+probe``, ``registry+probe``) or decided otherwise (``probe``). ``linear``: the blocks that mix
    positions without a softmax. ``unused``: fused weights beside which all of q, k and v were seen, and that
    reach nothing.
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
        return bool(self.linear) and ("" in self.linear or nearest(parameter, self.linear) is not None)

    def open(self) -> list[str]:
        """Parameters without a label, and fused ones whose layout is unconfirmed."""
        return [
            name
            for name, guessed in self.guesses.items()
            if name not in self.verified
            and (guessed is None or not guessed.certain)
            and not self.is_linear(name)
        ]

    def slices(self, name: str, heads: bool) -> tuple[Slice, ...]:
        """The slices of a parameter in a scope; ``heads``: with the heads that a layout states."""
        scope, guessed = self.scope_of(name), self.guesses[name]
        slices = self.verified.get(name) or (guessed.slices if guessed else ())
        assert scope is not None and slices  # what is open has been refused
        if not heads or scope.path in self.evidence.heads:  # the probe has seen which head they are
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
        """Whether the probe agrees with the guess; False where it decided otherwise or saw nothing."""
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
    """The verdict on ``model`` with what the probe sees while ``run`` runs it.

    Of a large model one block per stack is probed, for all of the stack.
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


def with_discovered(model: nn.Module, scopes: dict[str, Scope], paths: Sequence[str]) -> dict[str, Scope]:
    """The scopes, and the modules whose attention only the probe has seen."""
    layers = layer_numbers(list(paths), model)
    discovered = {}
    for path in paths:
        if not any(known == path or known.startswith(path + ".") for known in scopes):
            module = model.get_submodule(path)
            discovered[path] = Scope(path, path, module, layers[path], says_attention(module))
    return scopes | discovered


def scopes_of(model: nn.Module, circuits: Circuits) -> dict[str, Scope]:
    """The attention blocks of ``model``: those that names show, and those that only the probe has seen."""
    named = find_scopes(model)
    paths = {path for path, _ in model.named_modules()}
    return with_discovered(model, named, [p for p in circuits.blocks if p not in named and p in paths])


def _spread(evidence: Evidence, alike: dict[str, list[str]]) -> None:
    """Let what was seen of the first block of each stack hold for all of its blocks."""
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
    """Which guesses the evidence confirms, and what it decides otherwise."""
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
            # A softmax that does not depend on what is called queries and keys is not over their scores.
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

    Between v and o the probe is trusted: what is called ``dense_3`` may make values.
    """
    if guessed.role is not None:
        same = {part.circuit for part in finding.slices} == {CIRCUIT_OF_ROLE[guessed.role]}
        return same and not (guessed.role == "o" and finding.role == "v")
    if not guessed.slices or guessed.slices[0].axis != finding.slices[0].axis:
        return False
    # A name does not say which of its rows are queries and which keys.
    by_role = guessed.slices[0].decided_by == "name" and {"q", "k"} <= finding.roles
    return _ends(guessed.slices, by_role) == _ends(finding.slices, by_role)


def _ends(slices: Sequence[Slice], by_role: bool) -> list[tuple[str, int | None]]:
    """The roles or circuits of neighbouring rows, each with the row where it ends."""

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
        # A norm in front of attention is reached from both circuits without being part of them; a block
        # that is not called attention holds other things too. What acts on a context itself is output, and
        # what acts on scores or probabilities alone is part of where a model looks.
        looks = bool(finding.roles & {"q", "k", "v"}) or finding.latent
        looks = looks and (guessed.open or not scope.named) and (complete or parameter.dim() > 1)
        return looks or finding.on_scores or (finding.direct and finding.role == "o")
    # The softmax is blind to a bias of the keys: what the probe sees of it is rounding noise.
    return not (guessed.firm or (parameter.dim() == 1 and guessed.role is not None and finding.role is None))


def _has_all(verdict: Verdict, scope: Scope) -> bool:
    """Whether queries, keys and values of a block that attends come from parameters that were seen."""
    findings = verdict.evidence.findings
    roles = {role for name in findings if verdict.scope_of(name) is scope for role in findings[name].roles}
    return scope.path in verdict.evidence.complete and {"q", "k", "v"} <= roles


def _is_feed_forward(verdict: Verdict, scope: Scope, name: str, parameters: dict[str, nn.Parameter]) -> bool:
    """Whether a matrix (or the bias of one) reaches the output without acting on it, beside one that does."""
    findings = verdict.evidence.findings
    weight = name if parameters[name].dim() > 1 else name.removesuffix("bias") + "weight"
    finding = findings.get(weight)
    if finding is None or finding.role != "o" or finding.direct or parameters[weight].dim() < 2:
        return False
    inside = (findings[other] for other in findings if verdict.scope_of(other) is scope)
    return any(other.direct and other.role == "o" for other in inside)


def _meet(verdict: Verdict, path: str) -> bool | None:
    """Whether what is called queries and what is called keys reach one softmax; None if nothing is.

    Linear attention has softmaxes too: of the keys alone, over positions, and of the queries alone.
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
    """Slice the bias of a fused weight as its weight is.

    The softmax is blind to a bias of the keys; where only the probabilities were seen, the probe sees
    nothing but rounding noise of it.
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


# --- The verdict on a small copy, for the model that it is a copy of ---


def transfer(small: Verdict, model: nn.Module) -> tuple[Verdict, bool]:
    """What the verdict on a small copy says about ``model``, and whether that settles everything.

    Parameters correspond by name without the layer numbers and by guess: layers of one stack may differ.
    Slices that the probe found in the small copy against its guess cannot be carried over: their rows are
    other rows. Blocks that run other code than the copy (an instance with its own ``forward``) are left out.
    """
    scopes = find_scopes(model)
    discovered = {stack_of(path) for path in small.scopes} - {stack_of(path) for path in scopes}
    scopes = with_discovered(
        model, scopes, [path for path, _ in model.named_modules() if stack_of(path) in discovered]
    )
    verdict = first_guesses(model, scopes)
    parameters = dict(parameters_by_module(model))
    # Where copies of one kind differ, what the probe decided counts before what it confirmed.
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
        # A hybrid may keep attention and another mixer under one name.
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
    """The name without layer numbers, and the roles in the guess, repeated heads once."""
    guessed = verdict.guesses[name]
    return stack_of(name), tuple(dict.fromkeys(part.role for part in guessed.slices)) if guessed else ()


# --- Slices of one block, and head by head ---


def slices_by_evidence(
    model: nn.Module, scope: Scope, evidence: Evidence, heads: bool
) -> dict[str, list[Slice]] | None:
    """By parameter of one block the slices that the evidence shows; None if it shows no attention."""
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
    """The slices of one parameter head by head: as the probe saw them, else by what the module says."""
    if scope.path in evidence.irregular:
        raise InputError(
            f"heads=True, but in {scope.path or type(model).__name__} the query heads that share a key head "
            "are not neighbours, so its heads have no order; give one ratio for all heads of a layer"
        )
    counts = evidence.heads.get(scope.path)
    axis, heads = evidence.head_lines.get(slices[0].parameter, (None, ()))
    whole = slices[0].axis is None
    if counts is not None and not whole:
        # The only head of keys or values, in a weight that holds more than them.
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
