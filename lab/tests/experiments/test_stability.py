"""Stability: its cells, sensitivity, intervals and files, from made-up cells; training has its own tests."""

import doctest
import json
import math
from pathlib import Path

import pytest

from fasterqk_lab.cli.main import main
from fasterqk_lab.compare import read_values
from fasterqk_lab.experiments import stability as module
from fasterqk_lab.experiments.stability import (
    METHODS,
    RATES,
    SLOWER,
    method_effects,
    over_rates,
    rate_rows,
    sensitivity,
    stability_cells,
)


def result_of(cell):
    """A made-up cell: losses rise with the rate, less with a slow circuit; a fast one diverges at the top."""
    rise = 0.2 * math.log10(cell.lr / 1e-3) * cell.qk_ratio**0.25 + 0.01 * cell.seed * cell.lr**0.5
    diverged = cell.qk_ratio == 10 and cell.lr == 0.1
    loss = None if diverged else 2.4 + rise
    return {
        "initial_loss": 5.5,
        "null_entropy": 3.9,
        "largest_logit": 10.0 * cell.lr * 1e3,
        "largest_logit_by_layer": {"1": 1.0, "2": 10.0 * cell.lr * 1e3},
        "diverged": diverged,
        "loss": loss,
        "validation_loss": loss,
        "entropy": None if diverged else 3.0,
        "entropy_by_layer": None if diverged else {"1": 2.9, "2": 3.1},
        "along": [],
    }


def results_of(**options):
    return {key: result_of(cell) for key, cell in stability_cells(**options).items()}


def test_examples_in_docstrings():
    assert doctest.testmod(module).failed == 0


def test_the_cells_and_their_order():
    cells = list(stability_cells())
    everywhere = [name for name in METHODS if not name.startswith("qk_vo")]
    against = len(METHODS) - len(everywhere)
    assert len(set(cells)) == len(cells) == len(everywhere) * 5 * 3 + against * 2 * 3 + 2 * 2 * 3 * 3
    first = cells[:30]
    assert {method for method, *_ in first} == {"plain", SLOWER}
    seeds = [seed for name, width, _, seed in cells[30:] if width == 96 and name in everywhere]
    assert seeds == sorted(seeds)


def test_sensitivity_is_the_mean_loss_above_the_best():
    losses = [2.5, 2.4, 2.45, 2.6, 2.9]
    assert sensitivity(losses, 5.5) == pytest.approx(sum(x - 2.4 for x in losses) / 5)
    assert sensitivity([*losses[:4], 7.0], 5.5) == sensitivity([*losses[:4], None], 5.5)
    assert sensitivity([*losses[:4], None], 5.5) == pytest.approx((0.1 + 0 + 0.05 + 0.2 + 3.1) / 5)
    assert sensitivity([None] * 5, 5.5) == 0  # nothing trains: the best loss, beside it, says so


def table_of(**options):
    return over_rates(results_of(**options))


def test_differences_are_paired_and_corrected():
    table = table_of()
    [deciding], others = method_effects(table)
    slower, plain = (table.interval(name, "sensitivity", "5 rates") for name in (SLOWER, "plain"))
    assert deciding.value.mean == pytest.approx(slower.mean - plain.mean)
    assert deciding.p == deciding.p_value  # it stands alone
    assert deciding.corrected == "against"  # less sensitive
    assert sum(effect.score == "sensitivity" for effect in others) == len(METHODS) - 3 - 2 + 3
    assert all(not effect.p < effect.p_value for effect in others)
    [narrow] = [effect for effect in others if "width 64" in effect.label and effect.score == "sensitivity"]
    assert (narrow.at, narrow.second) == (
        "3 rates",
        table.interval("plain, width 64", "sensitivity", "3 rates"),
    )
    assert method_effects(table_of(seeds=1))[0][0].corrected == "open"
    assert method_effects(table_of(methods=["plain"])) == ([], [])


def test_a_diverged_cell_is_listed_and_counts_as_untrained():
    results = results_of(methods=["plain", "qk_ratio=10"])
    rates = {(row["method"], row["rate"]): row for row in rate_rows(results)}
    assert rates["qk_ratio=10", 0.1]["capped"] == "0 1 2"
    assert math.isnan(rates["qk_ratio=10", 0.1]["loss"].mean)
    assert rates["plain", 0.1]["capped"] == ""
    values = over_rates(results).of("qk_ratio=10", "sensitivity", "5 rates")
    losses = [results["qk_ratio=10", 96, rate, 0]["loss"] for rate in RATES[:4]]
    assert values[0] == pytest.approx((sum(losses) + 5.5) / 5 - min(losses))


def test_the_command(tmp_path, monkeypatch, capsys):
    """Tables, values and figure from cells, and the values again from the exported ones."""
    monkeypatch.setattr(
        "fasterqk_lab.experiments._registry.sweep",
        lambda configs, function, out, **options: [result_of(cell) for cell in configs],
    )
    words = ["reproduce", "stability", "--seeds", "2", "--methods", f"plain,{SLOWER},qk_ratio=10"]
    file = tmp_path / "cells.jsonl.xz"
    assert main([*words, "--out", str(tmp_path / "a"), "--export", str(file), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [row["stands"] for row in first["minus_plain_what_decides"]] == ["less"]
    monkeypatch.setattr(module, "save", lambda *_: first["files"])  # drawn once
    assert main([*words, "--out", str(tmp_path / "b"), "--cells", str(file)]) == 0
    assert "minus plain what decides" in capsys.readouterr().out
    one, two = (list(read_values(tmp_path / place / "results" / "stability.csv")) for place in "ab")
    assert len(one) == len(two)
    assert {value.experiment for value in one} == {"stability", "stability-methods"}
    assert {value.arm for value in one} >= {"plain", f"{SLOWER}, width 128", "plain, rate 0.001"}
    assert Path(first["files"]["figure"]["svg"]).stat().st_size > 10_000
    assert main(["reproduce", "stability", "--methods", "norm", "--out", str(tmp_path / "c")]) == 2
    assert "methods 'norm' is not one of plain, qk_norm" in capsys.readouterr().err
