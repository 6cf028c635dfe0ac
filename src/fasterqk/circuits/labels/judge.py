"""Guesses and the probe brought together: what is confirmed, what the probe decides, what stays open."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fasterqk.capture.modules import says_attention, stack_of
from fasterqk.circuits.labels.guess import Guess, guess
from fasterqk.circuits.labels.layouts import merged
from fasterqk.circuits.labels.probe import probe
from fasterqk.circuits.labels.reading import Finding
from fasterqk.circuits.labels.scopes import Scope, find_scopes, layer_numbers, nearest
from fasterqk.circuits.slices import CIRCUIT_OF_ROLE, Role


@dataclass
class Judgement:
    """What is known of the attention parameters of a model.

    ``guesses`` has every parameter in a scope; ``confirmed`` those the probe agrees with; ``found`` what
    the probe decides otherwise. ``ran`` are the scopes the probe saw attending, ``silent`` those that ran
    without a softmax; in ``complete`` ones queries were seen meeting keys; ``foreign`` ones are given
    queries or keys that are made outside of them.
    """

    scopes: dict[str, Scope]
    guesses: dict[str, Guess | None]
    confirmed: set[str] = field(default_factory=set)
    found: dict[str, Finding] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    complete: set[str] = field(default_factory=set)
    heads: dict[str, int] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)
    failure: str = ""

    def scope_of(self, parameter: str) -> Scope | None:
        """The scope that holds the parameter."""
        return nearest(parameter, self.scopes)

    def open(self) -> list[str]:
        """Parameters without a label, and fused ones whose layout nobody has seen."""
        return [
            name
            for name, own in self.guesses.items()
            if name not in self.confirmed and name not in self.found and (own is None or not own.certain)
        ]


def first_guesses(model: nn.Module, scopes: dict[str, Scope] | None = None) -> Judgement:
    """Scopes and guesses, before any probe."""
    judgement = Judgement(find_scopes(model) if scopes is None else scopes, {})
    for name, parameter in model.named_parameters():
        scope = judgement.scope_of(name)
        if scope is not None:
            judgement.guesses[name] = guess(model, scope, name, parameter)
    return judgement


def judge(model: nn.Module, run: Callable[[nn.Module], Any]) -> Judgement:
    """Guesses of ``model`` with what the probe sees while ``run`` runs a copy of it."""
    judgement = first_guesses(model)
    evidence = probe(model, run, list(judgement.scopes))
    if evidence.elsewhere:
        scopes = _with_discovered(model, judgement.scopes, evidence.elsewhere)
        judgement = first_guesses(model, scopes)
        evidence = probe(model, run, list(judgement.scopes))
    judgement.ran = set(evidence.attending)
    judgement.silent = set(evidence.silent)
    judgement.complete = set(evidence.attending - evidence.doubtful)
    judgement.heads = evidence.heads
    judgement.foreign = evidence.foreign
    judgement.failure = evidence.failure
    parameters = dict(model.named_parameters())
    for name, own in judgement.guesses.items():
        finding = evidence.findings.get(name)
        scope = judgement.scope_of(name)
        if finding is None or scope is None or scope.path not in judgement.ran:
            continue
        if own is not None and agree(own, finding):
            judgement.confirmed.add(name)
        elif scope.path in evidence.doubtful and own is not None and own.role in ("q", "k"):
            # A softmax that does not depend on what is called queries and keys is not over their scores.
            judgement.silent.add(scope.path)
        elif _decides(own, finding, scope, parameters[name]):
            judgement.found[name] = finding if scope.named else _attention_only(finding)
    _biases_follow(judgement, evidence.findings, parameters)
    return judgement


def transfer(twin: Judgement, model: nn.Module) -> tuple[Judgement, bool]:
    """What a judgement of a small twin says about ``model``, and whether that settles everything.

    Parameters correspond by name with the layer numbers taken out. A split that the twin's probe found
    against its guess cannot be carried over: its rows are other rows.
    """
    scopes = find_scopes(model)
    discovered = {stack_of(path) for path in twin.scopes} - {stack_of(path) for path in scopes}
    scopes = _with_discovered(
        model, scopes, [path for path, _ in model.named_modules() if stack_of(path) in discovered]
    )
    judgement = first_guesses(model, scopes)
    confirmed = {stack_of(name) for name in twin.confirmed}
    found = {stack_of(name): finding for name, finding in twin.found.items()}
    settled = True
    for name in judgement.guesses:
        pattern = stack_of(name)
        finding = found.get(pattern)
        if finding is not None and finding.axis is None:
            judgement.found[name] = finding
        elif finding is not None:
            settled = False
        elif pattern in confirmed:
            judgement.confirmed.add(name)
    ran, silent = {stack_of(path) for path in twin.ran}, {stack_of(path) for path in twin.silent}
    complete = {stack_of(path) for path in twin.complete}
    judgement.ran = {path for path in scopes if stack_of(path) in ran}
    judgement.complete = {path for path in scopes if stack_of(path) in complete}
    judgement.silent = {path for path in scopes if stack_of(path) in silent - ran}
    foreign = {stack_of(path): made for path, made in twin.foreign.items()}
    judgement.foreign = {path: foreign[stack_of(path)] for path in scopes if stack_of(path) in foreign}
    judgement.failure = twin.failure
    return judgement, settled and not judgement.open()


def agree(own: Guess, finding: Finding) -> bool:
    """Whether guess and finding put every row into the same circuit.

    Between v and o the probe is trusted: what is called ``dense_3`` may make values.
    """
    if own.role == "o" and finding.role == "v":
        return False
    if own.role is not None:
        return {CIRCUIT_OF_ROLE[role] for _, _, role in finding.runs} == {CIRCUIT_OF_ROLE[own.role]}
    if own.axis != finding.axis:
        return False
    return _circuits(tuple(merged(own.blocks))) == _circuits(finding.runs)


def _circuits(runs: Any) -> list[tuple[int, int, str]]:
    joined: list[tuple[int, int, str]] = []
    for start, stop, role in runs:
        circuit = CIRCUIT_OF_ROLE[role]
        if joined and joined[-1][2] == circuit:
            joined[-1] = (joined[-1][0], stop, circuit)
        else:
            joined.append((start, stop, circuit))
    return joined


def _decides(own: Guess | None, finding: Finding, scope: Scope, parameter: nn.Parameter) -> bool:
    """Whether the finding replaces the guess it disagrees with."""
    if own is None:
        return True
    if own.firm or (parameter.dim() == 1 and own.role is not None and finding.role is None):
        # The softmax forgets a bias of the keys: what the probe sees of it is rounding noise.
        return False
    if own.role == "rest":
        # A norm in front of attention reaches both circuits and is still not part of them; a block that
        # is not called attention holds other things too. What acts on a context itself is output.
        looks = any(role in ("q", "k", "v") for _, _, role in finding.runs) and not scope.named
        return looks or (finding.direct and finding.role == "o")
    return True


def _attention_only(finding: Finding) -> Finding:
    """In a block that is not called attention, rows that only reach its output are something else."""
    if finding.axis is None or finding.direct:
        return finding
    runs: list[tuple[int, int, Role]] = [
        (start, stop, "rest" if role == "o" else role) for start, stop, role in finding.runs
    ]
    return replace(finding, runs=tuple(runs))


def _biases_follow(
    judgement: Judgement, findings: dict[str, Finding], parameters: dict[str, nn.Parameter]
) -> None:
    """The bias of a fused weight is cut as its weight is.

    The softmax forgets a bias of the keys; where only the probabilities were seen, all the probe sees of
    it is rounding noise.
    """
    for name in [name for name in judgement.guesses if name.endswith("bias")]:
        weight = name.removesuffix("bias") + "weight"
        if weight not in judgement.guesses or parameters[name].dim() != 1 or name in judgement.confirmed:
            continue
        runs = findings[weight].runs if weight in findings else ()
        if len(runs) > 1 and runs[-1][1] == len(parameters[name]):
            if weight in judgement.confirmed:
                judgement.found.pop(name, None)
                judgement.confirmed.add(name)
            elif weight in judgement.found:
                judgement.found[name] = replace(judgement.found[weight], axis=0)


def _with_discovered(model: nn.Module, scopes: dict[str, Scope], paths: Sequence[str]) -> dict[str, Scope]:
    """The scopes, and modules whose attention only the probe has seen."""
    layers = layer_numbers(list(paths))
    found = dict(scopes)
    for path in paths:
        if not any(own == path or own.startswith(path + ".") for own in scopes):
            module = model.get_submodule(path)
            found[path] = Scope(path, path, module, layers[path], says_attention(module))
    return found
