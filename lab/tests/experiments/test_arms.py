import json
import math

import numpy as np
import pytest
import torch
from fasterqk_lab.experiments._arm_tables import end_rows, matched_rows, save_arms
from fasterqk_lab.experiments._arms import (
    ANSWER,
    BASELINE,
    FASTER,
    Comparison,
    answer_examples,
    run_arms,
    summarize_arms,
)

from fasterqk.attention import SCORES, Score
from fasterqk.files import canonical_json
from fasterqk_lab.experiments._registry import CellRunner
from fasterqk_lab.figures._documents import comparison_table, load_documents
from fasterqk_lab.models._classifier import attention_rows, head_rows
from fasterqk_lab.page import write_page
from fasterqk_lab.tasks import _registry, kvqa
from fasterqk_lab.training import TrainConfig, TrainResult
from fasterqk_lab.training._steps import build_trainable

SEEDS = (3, 4, 5)


def measured(mass, accuracy, seed):
    shift = 0.01 * (seed - 4)
    return {
        "loss": 0.4,
        "accuracy": accuracy + shift,
        "mrta": mass + shift,
        "ac": 100 * mass,
        "acmc": 50 * mass,
        "dtap": [[0.0, 0.0], [100 - 100 * mass, 100 * mass]],
        "dtap_edges": [0.0, 0.5, 1.0],
        "entropy": 1.0,
        "sufficiency": {"5": 0.3, "50": 0.1},
        "comprehensiveness": {"5": 0.2, "50": 0.4},
        "aopc": {"sufficiency": 0.2, "comprehensiveness": 0.3},
        "plausibility": {"auprc": 0.6, "token_f1": 0.5, "iou_f1": 0.4},
        "null": {"mrta": 0.2, "ac": 10.0, "acmc": 5.0, "entropy": 2.0, "sufficiency": {"5": 0.35, "50": 0.2}},
        "majority_accuracy": 0.5,
        "groups": {"attractors": {"0": {"n": 10, "accuracy": 0.9, "majority_accuracy": 0.6}}},
    }


def result(arm, seed):
    mass = 0.7 if arm == FASTER else 0.3
    test = measured(mass, 0.8, seed)
    history = [
        {
            "epoch": epoch,
            "loss": math.exp(-epoch * (2 if arm == FASTER else 1)),
            "mrta": 0.2 + epoch * (mass - 0.2) / 4,
            "test_accuracy": 0.5 + 0.05 * epoch,
            "validation_accuracy": 0.5 + (0.1 if epoch == 2 else 0.01 * epoch),
            "train_accuracy": 0.5 + 0.1 * epoch,
            "sufficiency_5": 0.3,
            "null_mrta": 0.2,
        }
        for epoch in range(5)
    ]
    return TrainResult(
        task="agreement",
        seed=seed,
        qk_ratio=1.0,
        diverged=False,
        steps=4,
        loss=history[-1]["loss"],
        train={"accuracy": 0.9},
        validation=measured(mass, 0.75, seed),
        test=test,
        best=history[2],
        history=history,
    )


def diverged(seed):
    history = [{"epoch": 0, "loss": 1.0, "mrta": 0.2}, {"epoch": 1, "loss": None, "diverged": True}]
    return TrainResult("agreement", seed, 1.0, diverged=True, steps=1, loss=None, history=history)


@pytest.fixture
def experiment():
    base = TrainConfig("agreement", epochs=4)
    return Comparison(
        name="table-agreement",
        title="A table",
        protocol="paper",
        arms={BASELINE: base, FASTER: base.replace(qk_ratio=30)},
        seeds=SEEDS,
        printed={"paper": {FASTER: {"test_accuracy": 0.9, "sufficiency_5": 0.32}}},
    )


@pytest.fixture
def results(experiment):
    return {(arm, seed): result(arm, seed) for arm, seed in experiment.cells()}


def test_cells_are_every_arm_and_seed_one_seed_after_the_other(experiment):
    assert list(experiment.cells()) == [(arm, seed) for seed in SEEDS for arm in (BASELINE, FASTER)]
    assert experiment.cells()[FASTER, 4] == experiment.arms[FASTER].replace(seed=4)


def test_every_metric_has_mean_interval_null_and_the_printed_number(experiment, results):
    summary = summarize_arms(experiment, results)
    faster = summary["arms"][FASTER]
    accuracy = faster["test_accuracy"]
    assert accuracy["mean"] == pytest.approx(0.8)
    # 4.3027 is the 97.5% quantile of t with two degrees of freedom.
    assert accuracy["half_width"] == pytest.approx(4.3027 * 0.01 / 3**0.5, rel=1e-4)
    assert (accuracy["n"], accuracy["paper"]) == (3, 0.9)
    assert faster["mrta"]["null"] == pytest.approx(0.2)
    assert faster["null"] == pytest.approx({"mrta": 0.2, "ac": 10.0, "acmc": 5.0})
    assert faster["sufficiency"]["5"]["paper"] == 0.32
    assert faster["sufficiency"]["5"]["null"] == pytest.approx(0.35)
    assert faster["sufficiency"]["50"]["mean"] == pytest.approx(0.1)
    assert faster["plausibility"]["auprc"]["mean"] == pytest.approx(0.6)
    assert faster["validation_accuracy"]["mean"] == pytest.approx(0.75)
    assert faster["train_accuracy"]["mean"] == pytest.approx(0.9)
    assert "paper" not in summary["arms"][BASELINE]["test_accuracy"]
    json.loads(canonical_json(summary))


def test_difference_is_faster_minus_baseline_paired_by_seed(experiment, results):
    difference = summarize_arms(experiment, results)["difference"]
    assert difference["mrta"]["mean"] == pytest.approx(0.4)
    # Seeds shift both arms alike, so the paired difference has no spread.
    assert difference["mrta"]["half_width"] == pytest.approx(0, abs=1e-12)
    assert difference["comprehensiveness"]["5"]["mean"] == pytest.approx(0)


def test_best_epoch_and_matched_loss_come_from_the_histories(experiment, results):
    summary = summarize_arms(experiment, results)
    best = summary["arms"][BASELINE]["at_best_validation"]
    assert best["epochs"] == [2, 2, 2]
    assert best["test_accuracy"]["mean"] == pytest.approx(0.6)
    lowest = summary["matched"][0]
    assert lowest["loss"] == pytest.approx(math.exp(-4))
    assert lowest["arms"][BASELINE]["mrta"]["mean"] == pytest.approx(0.3)
    assert lowest["arms"][FASTER]["mrta"]["mean"] == pytest.approx(0.45)
    assert lowest["difference"][FASTER]["mrta"]["mean"] == pytest.approx(0.15)
    assert len(summary["matched"]) == 3


def test_a_score_that_is_registered_is_in_the_tables(experiment, results, monkeypatch):
    monkeypatch.setitem(SCORES, "calm", Score("calm", "calm of attention", "made up", null="uniform"))
    for found in results.values():
        found.test["calm"] = 0.25
        found.test["null"]["calm"] = 0.125
        for point in found.history:
            point["calm"] = 0.5
    summary = summarize_arms(experiment, results)
    end = next(row for row in end_rows(summary) if row["metric"] == "calm of attention")
    assert (end[FASTER]["mean"], end["null, faster_qk"], end["difference"]["mean"]) == (0.25, 0.125, 0)
    matched = [row for row in matched_rows(summary) if row["metric"] == "calm of attention"]
    assert [row[BASELINE]["mean"] for row in matched] == [0.5] * len(summary["matched"])


def test_the_stronger_nulls_are_in_the_tables(experiment, results, tmp_path):
    for (arm, _), found in results.items():
        found.test["permuted"] = {"ac": 40.0 if arm == FASTER else 30.0}
        found.test["sharp"] = {"ac": 20.0}
        for point in found.history:
            point |= {"permuted_ac": 10.0 * point["epoch"], "sharp_ac": 20.0}
    summary = summarize_arms(experiment, results)
    save_arms(summary, results, tmp_path, title="A table")
    rows = json.loads((tmp_path / "tables" / "table-agreement-paper-end.json").read_text())["rows"]
    end = {row["metric"]: row for row in rows}
    assert end["AC, %, permuted null"][FASTER]["mean"] == 40
    assert end["AC, %, permuted null"]["difference"]["mean"] == 10
    assert end["AC, %, sharp null"][BASELINE]["mean"] == 20
    matched = [row for row in matched_rows(summary) if row["metric"] == "AC, %, permuted null"]
    assert len(matched) == len(summary["matched"])
    assert matched[0]["difference"]["mean"] == pytest.approx(-20)  # two epochs earlier
    assert "AC, %, permuted null" in write_page(tmp_path).read_text()


def test_a_score_that_is_registered_is_on_the_page(experiment, results, monkeypatch, tmp_path):
    monkeypatch.setitem(SCORES, "calm", Score("calm", "calm of attention", "made up", null="uniform"))
    for found in results.values():
        found.test["calm"] = 0.25
        found.test["null"]["calm"] = 0.125
    save_arms(summarize_arms(experiment, results), results, tmp_path, title="A table")
    page = write_page(tmp_path).read_text()
    assert "calm of attention" in page
    [comparison] = load_documents(tmp_path, "comparisons")
    rows = {row["score"]: row for row in comparison_table(comparison)["rows"]}
    row = rows["calm of attention"]
    assert (row["metrics.1"]["mean"], row["null.1"]) == (0.25, 0.125)


def test_dtap_is_averaged_over_seeds(experiment, results):
    table = summarize_arms(experiment, results)["arms"][FASTER]["dtap"]
    assert table["mean"][1] == pytest.approx([30, 70])
    assert table["edges"] == [0.0, 0.5, 1.0]


def test_a_diverged_cell_is_listed_and_leaves_no_mean(experiment, results):
    results[FASTER, 4] = diverged(4)
    summary = summarize_arms(experiment, results)
    faster = summary["arms"][FASTER]
    assert faster["diverged"] == [4]
    assert faster["test_accuracy"]["mean"] is None
    assert summary["arms"][BASELINE]["test_accuracy"]["mean"] == pytest.approx(0.8)
    assert [FASTER, 4] in summary["matched"][0]["missing"]


def test_everything_that_shows_it_is_written(experiment, results, tmp_path):
    results[FASTER, 4] = diverged(4)
    summary = summarize_arms(experiment, results)
    files = save_arms(summary, results, tmp_path, title="A table")
    for suffix in ("svg", "png", "csv"):
        assert (tmp_path / "figures" / f"table-agreement-paper-dtap.{suffix}").exists()
        assert (tmp_path / "figures" / f"table-agreement-paper-loss.{suffix}").exists()
    rows = json.loads((tmp_path / "tables" / "table-agreement-paper-end.json").read_text())["rows"]
    named = {row["metric"]: row for row in rows}
    assert named["sufficiency, top 5%"]["paper, faster_qk"] == 0.32
    assert named["MRTA"]["null, baseline"] == pytest.approx(0.2)
    assert set(files) == {"dtap", "loss", "tables"}
    assert (tmp_path / "tables" / "table-agreement-paper-attractors.csv").exists()
    assert (tmp_path / "curves" / "table-agreement-paper.json").exists()
    assert (tmp_path / "comparisons" / "table-agreement-paper.json").exists()


def test_runs_go_through_the_store_and_are_not_done_again(tmp_path):
    path = tmp_path / "little.jsonl"
    lines = [
        {"id": str(i), "tokens": ["it", "is", "x" if i % 2 else "y"], "relevance": [0, 0, 1], "label": i % 2}
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    base = TrainConfig("jsonl", file=str(path), epochs=1, rationale_k=(50,), width=8, head_width=4)
    experiment = Comparison("t", "T", "paper", {BASELINE: base, FASTER: base.replace(qk_ratio=9)}, (0,))
    first = run_arms(experiment, CellRunner(tmp_path, workers=0))
    cells = sorted((tmp_path / "runs").iterdir())
    before = [(cell / "result.json").stat().st_mtime_ns for cell in cells]
    second = run_arms(experiment, CellRunner(tmp_path, workers=0))
    assert canonical_json(list(first.values())) == canonical_json(list(second.values()))
    assert [(cell / "result.json").stat().st_mtime_ns for cell in cells] == before
    summary = summarize_arms(experiment, second)
    assert summary["arms"][FASTER]["test_accuracy"]["half_width"] is None


@pytest.fixture
def workload(monkeypatch):
    monkeypatch.setattr(kvqa, "COUNTS", {"train": 8, "validation": 8, "test": 8})
    _registry._load.cache_clear()
    yield build_trainable(TrainConfig("kvqa", answer_tokens=4))
    _registry._load.cache_clear()


def test_an_examples_masses_are_those_that_are_measured(workload):
    examples = answer_examples({"baseline": workload}, 8)
    measured = workload.results()["test"]
    for example in examples:
        weights = example["arms"]["baseline"]["layers"]["rollout"]
        assert len(weights) == len(example["tokens"]) == len(example["relevance"])
        assert sum(weights) == pytest.approx(1, abs=1e-5)
        assert example["tokens"][0] == "Q:"
        assert example["tokens"][-1] == ANSWER
    masses = [
        np.dot(example["arms"]["baseline"]["layers"]["rollout"], example["relevance"]) for example in examples
    ]
    assert np.mean(masses) == pytest.approx(measured["mrta"], abs=1e-5)
    # The answers that an untrained model writes have fewer steps than the gold ones.
    assert np.mean([example["null"] for example in examples]) == pytest.approx(
        measured["null"]["mrta"], rel=0.1
    )


def test_examples_have_every_layer_and_its_heads(workload):
    for example in answer_examples({"baseline": workload}, 2):
        reading = example["arms"]["baseline"]
        assert list(reading["layers"]) == ["rollout", "layer 1", "layer 2"]
        for layer, heads in reading["heads"].items():
            assert len(heads) == workload.config.model.heads
            assert np.mean(heads, axis=0) == pytest.approx(np.array(reading["layers"][layer]), abs=1e-6)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_heads_of_a_classifier_average_to_its_row(layers):
    torch.manual_seed(0)
    config = TrainConfig("agreement", layers=layers, width=16, head_width=4, heads=3)
    model = build_trainable(config).model
    tokens, read = torch.randint(5, (2, 7)), torch.tensor([4, 6])
    rows = head_rows(model, tokens, read)
    assert [tuple(row.shape) for row in rows] == [(2, 3, 7)] * layers
    for row in rows:
        assert row.sum(-1) == pytest.approx(torch.ones(2, 3), abs=1e-5)
        assert float(row[0, :, 5:].detach().abs().max()) == 0  # nothing after the read position
    if layers == 1:
        _, aggregated, _ = attention_rows(model, tokens, read)
        assert rows[0].mean(1).detach() == pytest.approx(aggregated.detach(), abs=1e-6)
