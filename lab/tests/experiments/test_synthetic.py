"""Grids over the toy language: fig2-init and phase, with cells that take no time."""

from dataclasses import replace
from pathlib import Path

import pytest

from fasterqk.errors import InputError
from fasterqk_lab.experiments import phase, reproduce
from fasterqk_lab.experiments._registry import CellRunner
from fasterqk_lab.experiments._synthetic import Panel, with_scale
from fasterqk_lab.experiments.phase import grid_arm, read_grid
from fasterqk_lab.synthetic import Language, SyntheticCell

QUICK = SyntheticCell(
    "FAFO",
    lr=0.5,
    batches=20,
    max_steps=600,
    target_loss=0.5,
    evaluated=100,
    closed=True,
    language=Language(context=15, gamma=0.4),
)


@pytest.fixture
def quick_panels(monkeypatch):
    def panels(protocol, names):
        return [Panel(names[0], "quick", QUICK)]

    monkeypatch.setattr(phase, "panels", panels)


def test_arms_of_a_group_are_read_at_one_loss(tmp_path):
    cells = [replace(QUICK, qk_ratio=ratio) for ratio in (1.0, 30.0)]
    never = replace(QUICK, lr=1e-6, language=replace(QUICK.language, gamma=0.3))
    lost = replace(QUICK, lr=1e5, qk_ratio=100.0)
    arms = [grid_arm("closed", cell) for cell in (*cells, never, lost)]
    runner = CellRunner(tmp_path, workers=0, experiment="grid")
    slow, fast, stuck, gone = read_grid("grid", arms, "protocol", runner, seeds=2, title="")
    assert slow["loss"] == fast["loss"] == stuck["loss"] <= 0.5
    assert slow["attention"].n == fast["attention"].n == 2
    assert fast["attention"].mean > slow["attention"].mean
    assert (stuck["attention"], stuck["missing_seeds"]) == (None, "0 1")
    assert gone["diverged"] and not slow["diverged"]
    assert slow["init_scale"] == 1e-3
    # The faster arm is also read where the same arm with equal rates ends.
    rows = (tmp_path / "results" / "grid.csv") if runner.write_results() else None
    assert sum("QK x30" in line and ",level," in line for line in rows.read_text().splitlines()) >= 2


def test_with_scale_scales_both_circuits():
    cell = with_scale(QUICK, 0.5)
    assert cell.qk_init == cell.ov_init
    assert cell.ov_init.scale == 0.5
    assert cell.ov_init.kind == QUICK.ov_init.kind


def test_fig2_init_has_a_point_for_every_setting(tmp_path, quick_panels, monkeypatch):
    monkeypatch.setattr(phase, "INIT_SCALES", (1e-3, 0.1))
    summary = phase.run_init(CellRunner(tmp_path, workers=0), "four-tokens", seeds=2)
    assert len(summary["points"]) == 4 * 2 * 2
    assert summary["uniform"] == pytest.approx(0.4)
    assert summary["files"]["csv"].endswith("fig2-init-four-tokens.csv")


@pytest.mark.parametrize("over", phase.OVER)
def test_phase_has_grid_adam_and_theory(tmp_path, quick_panels, monkeypatch, over):
    monkeypatch.setattr(phase, "RATIOS", (1.0, 10.0))
    monkeypatch.setattr(phase, "VALUES", {"scale": (0.01, 0.1), "gamma": (0.3, 0.5)})
    runner = CellRunner(tmp_path, workers=0, experiment="phase")
    summary = phase.run(runner, "four-tokens", seeds=1, over=over)
    rows = summary["points"]
    assert sum(row["optimizer"] == "sgd" for row in rows) == 4 * 2 * 2
    assert sum(row["optimizer"] == "adam" for row in rows) == 4 * 2
    caco = [row for row in rows if row["theory"] is not None]
    assert {(row["parameterization"], row["optimizer"]) for row in caco} == {("CACO", "sgd")}
    by_ratio = {row["qk_ratio"]: row["theory"] for row in caco if row["gamma"] == caco[0]["gamma"]}
    assert by_ratio[1.0] < by_ratio[10.0]  # the theory knows no way back
    assert summary["files"]["png"].endswith(f"phase-{over}-four-tokens.png")
    assert "theory_alpha" in Path(runner.write_results()).read_text()


@pytest.mark.parametrize("choice", [{"over": "depth"}, {"protocol": "all"}])
def test_unknown_choices_are_quoted(tmp_path, choice):
    with pytest.raises(InputError, match=repr(*choice.values())):
        reproduce("phase", tmp_path, **choice)
