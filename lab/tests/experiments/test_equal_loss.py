"""Arms at equal loss, score by score, by hand; and the experiments that are made of them."""

import csv
import math
import sys
from dataclasses import replace

import pytest

from fasterqk.files import config_values
from fasterqk_lab.experiments import find_experiment, reproduce
from fasterqk_lab.experiments._equal_loss import (
    compare_at_equal_loss,
    corrected,
    paired_rows,
    per_seed_at,
    save_panels,
    save_rows,
)
from fasterqk_lab.experiments.carried_kvqa import carried_kvqa
from fasterqk_lab.experiments.depth_hatexplain import depth_hatexplain
from fasterqk_lab.experiments.faithfulness import DATA, faithfulness
from fasterqk_lab.experiments.future_work import OPTIMIZERS, PROTOCOLS, hatexplain_arms, toy_arms
from fasterqk_lab.experiments.table_kvqa import steps_until_learnt
from fasterqk_lab.training import TrainResult


def history(end, null=0.3):
    return [{"loss": math.exp(-n), "mrta": end * n / 2, "null_mrta": null, "entropy": 1.0} for n in range(3)]


ENDS = {("equal", 0): 0.4, ("equal", 1): 0.5, ("QK", 0): 0.6, ("QK", 1): 0.8}
HISTORIES = {cell: history(end) for cell, end in ENDS.items()}
SCORES = {"mrta": "MRTA", "entropy": "entropy"}


def found(histories=HISTORIES, **options):
    options = {"decides": ["mrta"], "nulls": {"mrta": "null_mrta"}} | options
    return compare_at_equal_loss(histories, SCORES, **options)


def test_values_nulls_and_paired_differences():
    summary = found()
    row = next(row for row in summary["rows"] if (row["score"], row["arm"]) == ("MRTA", "QK"))
    assert summary["loss"] == row["loss"] == pytest.approx(math.exp(-2))
    assert (row["kind"], row["null"]) == ("decides", pytest.approx(0.3))
    assert row["value"]["mean"] == pytest.approx(0.7)
    assert row["difference"]["mean"] == pytest.approx(0.25)
    # One deciding comparison alone: nothing to correct. Two seeds: the t distribution of one degree.
    assert row["p"] == pytest.approx(2 / math.pi * math.atan(0.05 / 0.25), rel=1e-6)
    first = next(row for row in summary["rows"] if row["arm"] == "equal")
    assert first["difference"] is None
    assert len(summary["rows"]) == 3 * 2 * 2
    assert all(row["p"] is None for row in summary["rows"] if row["loss"] != summary["loss"])


def test_a_family_is_corrected_by_itself():
    third = HISTORIES | {("both", seed): history(0.5) for seed in (0, 1)}
    alone, among = (
        next(row["p"] for row in summary["rows"] if (row["arm"], row["score"]) == ("QK", "MRTA"))
        for summary in (found(), found(third))
    )
    assert among == pytest.approx(2 * alone)


def test_a_cell_without_a_loss_is_listed_and_files_are_written(tmp_path):
    summary = found(HISTORIES | {("QK", 1): []})
    assert summary["missing"] == [["QK", 1]]
    words = {"title": "t", "caption": "c"}
    save_rows(summary["rows"], tmp_path, "x", **words)
    save_panels(summary["rows"], ["MRTA"], tmp_path, "x", **words, see="s")
    assert (tmp_path / "tables/x.csv").exists()
    assert (tmp_path / "figures/x.svg").exists()
    rows = per_seed_at(HISTORIES, ["mrta"], [math.exp(-2)])
    assert [row["value"] for row in rows] == pytest.approx(list(ENDS.values()))


def test_an_arm_that_never_came_has_a_row():
    summary = found(HISTORIES | {("lost", seed): [] for seed in (0, 1)})
    lost = next(row for row in summary["rows"] if row["arm"] == "lost")
    assert (lost["value"], lost["difference"], lost["null"], lost["missing"]) == (None, None, None, 2)
    assert {row["missing"] for row in summary["rows"] if row["arm"] != "lost"} == {0}


def test_rows_of_two_tables_are_one_family():
    steps = {"equal": {0: 100.0, 1: 200.0}, "QK": {0: 50.0, 1: 149.0}}
    summary, learnt = found(), paired_rows(steps, "steps", "decides")
    rows = corrected([*learnt, *summary["rows"]], summary["loss"])
    deciding = [row["p"] for row in rows if row["p"] is not None and row["kind"] == "decides"]
    before = [row["p"] for row in [*learnt, *summary["rows"]] if row["p"] and row["kind"] == "decides"]
    assert sorted(deciding) == pytest.approx(sorted([min(before) * 2, max(before)]))


def test_paired_rows_leave_out_and_list_what_never_came():
    rows = paired_rows(
        {"equal": {0: 100.0, 1: 200.0, 2: None}, "QK": {0: 50.0, 1: 120.0, 2: 70.0}}, "steps", "decides"
    )
    assert (rows[0]["missing"], rows[0]["never"]) == (1, [2])
    assert rows[1]["difference"]["mean"] == pytest.approx(-65)
    assert rows[1]["difference"]["n"] == 2
    assert rows[1]["value"]["mean"] == pytest.approx(80)


def test_steps_until_learnt():
    records = [{"step": 10 * n, "validation_accuracy": value} for n, value in enumerate((0, 0.9, 1.0, 0.9))]
    assert steps_until_learnt(records) == pytest.approx(15)
    assert steps_until_learnt(records[:2]) is None
    assert steps_until_learnt(records[2:]) == 20


def changed(arms):
    """What each arm changes in the first."""
    first, *others = (dict(config_values(arm)) for arm in arms.values())
    return [{name for name in other if other[name] != first[name]} for other in others]


def test_arms_change_what_their_names_say():
    assert changed(carried_kvqa().arms) == [{"qk_ratio"}] * 2
    for layers in (2, 4):
        assert changed(depth_hatexplain(layers).arms) == [{"qk_ratio"}]
        options = depth_hatexplain(layers).arms["QK ×3"].optimisation
        assert 5e-4 <= options.lr * options.qk_ratio <= 1e-3
    for data in DATA:
        assert changed(faithfulness(data).arms) == [{"qk_ratio"}]
    ways = [{"qk_ratio"}, {"circuit_imbalance"}, {"ov_decay"}, {"qk_decay"}, {"gradient_norm"}]
    for optimizer in OPTIMIZERS:
        assert changed(hatexplain_arms(optimizer).arms) == ways
    for protocol in PROTOCOLS:
        for optimizer in ("SGD", "Adam"):
            arms = list(toy_arms(protocol, optimizer).values())
            assert len({replace(arm, seed=1) for arm in arms}) == len(arms) == 8
            assert [arm.qk_init.scale * arm.ov_init.scale for arm in arms] == pytest.approx([1e-6] * 8)


class EveryScore(dict):
    """A record that has any score that is asked for."""

    def get(self, name, default=None):
        return self[name] if name in self else self["mrta"]

    def __contains__(self, name):
        return super().__contains__(name) or name.endswith(("comprehensiveness", "sufficiency"))

    def __missing__(self, name):
        return self["mrta"]


def made_up(comparison, runner):
    def records(ratio, seed):
        return [
            EveryScore(step=100 * n, loss=math.exp(-n), mrta=0.1 * n * ratio**0.1 + 0.01 * seed % 1)
            for n in range(1, 11)
        ]

    return {
        (arm, seed): TrainResult(
            "kvqa", seed, 1.0, False, 10, 0.1, history=records(config.optimisation.qk_ratio, seed)
        )
        for (arm, seed), config in comparison.cells().items()
    }


@pytest.mark.parametrize(
    ("name", "options", "files"),
    [
        ("carried-kvqa", {"seeds": 2}, ["carried-kvqa"]),
        ("faithfulness", {"seeds": 2}, ["faithfulness-hatexplain"]),
        ("depth-hatexplain", {"seeds": 2}, ["depth-hatexplain-2", "depth-hatexplain-4"]),
        (
            "future-work",
            {"seeds": 2, "parts": ["hatexplain"]},
            ["future-work-hatexplain-adamw", "future-work-hatexplain-sgd"],
        ),
    ],
)
def test_from_results_to_tables(name, options, files, tmp_path, monkeypatch, capsys):
    experiment = find_experiment(name)
    monkeypatch.setattr(sys.modules[experiment.run.__module__], "run_arms", made_up)
    summary = reproduce(name, out=tmp_path, workers=1, **options)
    for file in files:
        with (tmp_path / "tables" / f"{file}.csv").open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        decided = [row for row in rows if row["kind"] == "decides" and row["difference"]]
        assert decided
        assert all(float(row["difference_n"]) == 2 for row in decided)
    experiment.show(summary)
    assert "differences to the first arm, paired by seed" in capsys.readouterr().out
