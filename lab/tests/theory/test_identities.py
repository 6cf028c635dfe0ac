"""Every registered identity holds, and one that does not is noticed."""

import dataclasses
import json

import numpy as np
import pytest

from fasterqk import theory
from fasterqk.errors import InputError
from fasterqk_lab.cli.main import main
from fasterqk_lab.theory import _identities as check
from fasterqk_lab.theory import collapsed
from fasterqk_lab.theory._identities import CHECKS, Identity, check_identities, largest_error


@pytest.mark.parametrize("name", CHECKS)
def test_identity(name):
    _, tolerance, function = CHECKS[name]
    assert largest_error(function) <= tolerance


def test_progress_and_failures_are_reported(monkeypatch):
    fake = {"fine": ("holds", 1e-3, lambda: [1e-4]), "broken": ("does not", 1e-3, lambda: [1e-2])}
    monkeypatch.setattr(check, "CHECKS", fake)
    seen = []
    identities = check_identities(lambda done, total: seen.append((done, total)))
    assert [identity.ok for identity in identities] == [True, False]
    assert seen == [(1, 2), (2, 2)]


def test_not_a_number_is_not_ok():
    assert not Identity("x", "y", np.nan, 1.0).ok


@pytest.mark.parametrize("name", ["matched_loss", "growth_rates", "saturation"])
def test_not_a_number_among_the_states_is_noticed(name, monkeypatch):
    """One bad state in many must show, whatever order the cases come in."""
    calls = []

    def solve_once_badly(*arguments, **options):
        state = theory.solve(*arguments, **options)
        calls.append(state)
        return dataclasses.replace(state, mu_qk=state.mu_qk * np.nan) if len(calls) == 3 else state

    monkeypatch.setattr(check, "solve", solve_once_badly)
    says, tolerance, function = CHECKS[name]
    if name == "saturation":  # the law itself takes no such number
        with pytest.raises(InputError, match="mu_qk = nan"):
            largest_error(function)
    else:
        assert not Identity(name, says, largest_error(function), tolerance).ok


def test_a_wrong_sign_would_be_caught(monkeypatch):
    """The appendix's transposed QK gradient fails the check that the right one passes."""
    right = check.gradients

    def transposed(population, matrices):
        slopes = right(population, matrices)
        on_qk = right(population, {name: collapsed(matrices, name) for name in ("ov", "qk")})["qk"].T
        return slopes | {"k": on_qk @ matrices["q"], "q": on_qk.T @ matrices["k"]}

    monkeypatch.setattr(check, "gradients", transposed)
    _, tolerance, function = CHECKS["propositions_1_2"]
    assert largest_error(function) > tolerance


def test_the_command_lists_the_identities_and_fails_when_one_does(capsys, monkeypatch, tmp_path):
    words = ["reproduce", "identities", "--out", str(tmp_path)]
    fine = {"one": ("holds", 1e-3, lambda: [1e-4])}
    monkeypatch.setattr(check, "CHECKS", fine)
    assert main([*words, "--json"]) == 0
    [identity] = json.loads(capsys.readouterr().out)["identities"]
    assert identity == {"name": "one", "says": "holds", "error": 1e-4, "tolerance": 1e-3}
    assert main(words) == 0
    assert "every identity holds" in capsys.readouterr().out
    monkeypatch.setattr(check, "CHECKS", fine | {"two": ("does not", 1e-3, lambda: [float("nan")])})
    assert main(words) != 0
    assert "not every identity holds: two (error nan" in capsys.readouterr().err
