"""The covert channel: its arms, the predicted gain, what is written."""

import doctest
import json
import math

import numpy as np
import pytest
from scipy.integrate import quad

from fasterqk.theory import Setting
from fasterqk_lab.cli.main import main
from fasterqk_lab.experiments import covert as module
from fasterqk_lab.experiments.covert import PARTS, arms, covert_gain, separation
from fasterqk_lab.synthetic import Language
from fasterqk_lab.theory import Population, gradients


def test_examples_in_docstrings():
    assert doctest.testmod(module).failed == 0


def test_the_arms():
    every = arms()
    assert {arm.about["part"] for arm in every} == set(PARTS)
    assert len({arm.cell for arm in every}) == len({arm.name for arm in every}) == len(every)
    assert all(arm.cell.language.blind == (arm.about["part"] == "blind") for arm in every)
    assert all(arm.cell.closed == (arm.about["part"] == "threshold") for arm in every)


def test_the_gain_stays_below_the_bound_of_the_page():
    """Large ratios: b/(C rho) sqrt(M / (2 k (M-1))) integral (e^-q + rho) / sqrt(q + rho (e^q - 1)) dq."""
    for gamma in (0.1, 0.2, 0.5):
        m = round(63 * gamma)
        rho = m / (63 - m)

        def slope(x, rho=rho):  # q = x^2
            q = x * x
            return 2 * x * (math.exp(-q) + rho) / math.sqrt(q + rho * math.expm1(q))

        bound = 10 / (10 * rho) * math.sqrt(4 / 6 / 2) * quad(slope, 0, 6)[0]
        assert bound - 1.3 < covert_gain(Language(gamma=gamma), 1e6, 1e-3) < bound
    assert covert_gain(Language(common=40), 1.0, 1e-3) < covert_gain(Language(), 1.0, 1e-3) / 3


def test_the_linear_equations_are_those_of_a_population():
    """Derivatives of the flow against disturbances of common tokens that differ between classes."""
    classes, own, common, n, mu, q = 2, 1, 2, 14, 5.0, 2.0
    population = Population.of(Setting(classes, own, 2, n, "fixed", common))
    alpha = 1 / (1 + n / 2 * math.exp(-q))
    tokens = slice(classes * own, classes * own + common)
    queries = slice(tokens.stop, tokens.stop + classes)
    change = np.array([[1, -1], [-1, 1]]) / 2  # of a token for a class; sums to zero over both

    def flow(score, value):
        w_ov, w_qk = mu * population.ov_direction, q * population.qk_direction
        w_qk[tokens, queries] += score * change
        w_ov[:, tokens] += value * change.T
        slopes = gradients(population, {"ov": w_ov, "qk": w_qk})
        return -slopes["ov"], -slopes["qk"]

    def slope(score, value):
        ahead, behind = flow(score, value), flow(-score, -value)
        return [(one - other) / 2e-4 for one, other in zip(ahead, behind, strict=True)]

    still = flow(0, 0)
    clock = still[0][0, 0] / population.ov_direction[0, 0]  # dmu/dt
    falls = still[1][tokens, queries].mean()  # the score of every common token, b/(b + C) of dq/dt
    rises = still[1][population.qk_direction > 0].mean()
    assert falls == pytest.approx(-own / (own + common) * (rises - falls))
    by_score, by_value = slope(1e-4, 0), slope(0, 1e-4)
    drive = clock * own * (1 - alpha) / (common * alpha)
    # To order 1/n: n = 14 background tokens.
    assert (by_score[0][:, tokens] * change.T).sum() == pytest.approx(drive, rel=1 / n)
    assert (by_value[1][tokens, queries] * change).sum() == pytest.approx(drive, rel=1 / n)
    assert (by_score[1][tokens, queries] * change).sum() == pytest.approx(falls, rel=1 / n)
    assert abs((by_value[0][:, tokens] * change.T).sum()) < drive / n


def test_separation_counts_errors():
    pairs = [(1.0, 0.1), (4.0, 0.0), (5.5, 0.2), (7.0, 1.9), (9.0, 2.0)]
    split = separation(pairs)
    assert split["right"] == 1.0
    assert split["threshold"] == pytest.approx(6.25)
    assert split["right_by_constant"] == pytest.approx(0.6)
    assert separation([*pairs, (8.0, 0.0)])["right"] == pytest.approx(5 / 6)
    assert separation([]) is None


def test_the_command(tmp_path, monkeypatch, capsys, in_process):
    """Few short cells: the numbers of every cell, and all of it again from the exported cells."""
    monkeypatch.setattr(module, "GAMMAS", (0.2,))
    monkeypatch.setattr(module, "SCALES", (1e-3,))
    monkeypatch.setattr(module, "RATIOS", (1.0,))
    monkeypatch.setattr(module, "LITERAL_GAMMAS", (0.355,))
    monkeypatch.setattr(module, "LITERAL_MODELS", (("CACO", "adam"),))
    monkeypatch.setattr(module, "MOST_STEPS", 20)
    file = tmp_path / "cells.jsonl"
    words = ["reproduce", "covert-channel", "--parts", "threshold,blind", "--seeds", "1"]
    assert (
        main([*words, "--out", str(tmp_path / "a"), "--workers", "1", "--export", str(file), "--json"]) == 0
    )
    first = json.loads(capsys.readouterr().out)
    assert len(first["arms"]) == 3 + 4 + 3
    assert all((arm["gain"] is not None) == (arm["part"] == "threshold") for arm in first["arms"])
    monkeypatch.setattr(module, "save", lambda *_: first["files"])  # drawn once
    assert main([*words, "--out", str(tmp_path / "b"), "--cells", str(file)]) == 0
    assert "separation: cells" in capsys.readouterr().out
    one, two = ((tmp_path / place / "results" / "covert-channel.csv").read_text() for place in "ab")
    assert one == two
    assert one.count(",covert_null_bits,") == one.count(",reached,") == 10
