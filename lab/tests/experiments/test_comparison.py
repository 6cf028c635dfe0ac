"""A comparison from its arms to its files: effects, the table, layers and groups, and the terminal."""

import json
from dataclasses import replace
from math import exp

import numpy as np
import pytest
import torch

from fasterqk.attention.scores import SCORES, Score
from fasterqk.files import canonical_json
from fasterqk_lab.cli.reproduce import show_comparison
from fasterqk_lab.compare import BEST, Value, measured, read_values
from fasterqk_lab.experiments._comparison import (
    BASELINE,
    FASTER,
    Comparison,
    Outcome,
    layer_scores,
    run_arms,
    run_comparison,
    two_arms,
)
from fasterqk_lab.experiments._examples import ANSWER, answer_examples
from fasterqk_lab.experiments._registry import CellRunner
from fasterqk_lab.models._classifier import attention_rows, head_rows
from fasterqk_lab.tasks import _registry, kvqa
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._steps import build_trainable

SEEDS = (3, 4, 5)
PRINTED = {"paper": {FASTER: {"test_accuracy": 0.9, "sufficiency_5": 0.32}}}


def result(arm, seed):
    """Loss exp(-epoch) at equal rates and its square with faster QK; validation is best at epoch 2."""
    mass, shift = (0.7, 0.01 * seed) if arm == FASTER else (0.3, 0.01 * seed)
    history = [
        {
            "epoch": epoch,
            "step": epoch,
            "loss": exp(-epoch * (2 if arm == FASTER else 1)),
            "validation_loss": abs(epoch - 2),
            "mrta": 0.2 + epoch * (mass - 0.2) / 4 + shift,
            "test_accuracy": 0.5 + 0.05 * epoch,
            "sufficiency_5": 0.3,
            "null_mrta": 0.2,
            "permuted_mrta": 0.1 * epoch,
            "layer_1_mrta": 0.4,
            "layer_2_mrta": 0.4 + 0.1 * epoch,
            "layer_2_null_mrta": 0.35,
        }
        for epoch in range(5)
    ]
    test = {
        "loss": 0.4,
        "accuracy": 0.8 + shift,
        "mrta": mass + shift,
        "dtap": [[0.0, 0.0], [100 - 100 * mass, 100 * mass]],
        "dtap_edges": [0.0, 0.5, 1.0],
        "sufficiency": {"5": 0.3, "50": 0.1},
        "plausibility": {"auprc": 0.6},
        "null": {"mrta": 0.2, "sufficiency": {"5": 0.35}},
        "permuted": {"mrta": 0.3},
        "majority_accuracy": 0.5,
        "groups": {"attractors": {"0": {"n": 10, "accuracy": 0.9, "majority_accuracy": 0.6}}},
        "layer": {"1": {"mrta": 0.4}, "2": {"mrta": mass, "null": {"mrta": 0.35}}},
    }
    splits = {"train": {"accuracy": 0.9}, "validation": {"accuracy": 0.75}, "test": test}
    end = {"loss": history[-1]["loss"], "best": history[2], "history": history, "skipped": {}}
    return {"task": "agreement", "seed": seed, "diverged": False, **splits, **end}


def outcome_of(comparison, more=(), **changed):
    """The comparison with made-up results; ``changed`` ones by the name of their arm and seed."""
    results = {
        (arm, seed): changed.get(f"{arm}_{seed}", result(arm, seed)) for arm, seed in comparison.cells()
    }
    values = measured(comparison.key, results, baselines=comparison.baselines, more=more)
    return Outcome(comparison, results, values)


@pytest.fixture
def comparison():
    return two_arms("table-agreement", "A table", TrainConfig("agreement", epochs=4), 30, SEEDS, PRINTED)


@pytest.fixture
def deep(comparison):
    arms = {arm: config.replace(layers=2) for arm, config in comparison.arms.items()}
    return replace(comparison, arms=arms)


def rows_of(outcome, at="equal loss", arm=FASTER):
    return {row["score"]: row for row in outcome.rows if (row["at"], row["arm"]) == (at, arm)}


def test_cells_are_every_arm_and_seed_one_seed_after_the_other(comparison):
    assert list(comparison.cells()) == [(arm, seed) for seed in SEEDS for arm in (BASELINE, FASTER)]
    assert comparison.cells()[FASTER, 4] == comparison.arms[FASTER].replace(seed=4)
    assert comparison.key == "table-agreement-paper"


def test_the_score_that_decides_is_read_where_the_baseline_is_best(comparison):
    outcome = outcome_of(comparison)
    [effect] = outcome.effects
    assert (effect.score, effect.label, effect.loss) == ("mrta", FASTER, pytest.approx(exp(-2), rel=1e-5))
    # The baseline is at epoch 2, the faster arm at epoch 1; seeds shift both alike.
    assert effect.value.mean == pytest.approx(0.125 - 0.05, rel=1e-3)
    assert effect.progress == pytest.approx((0.25, 0.5), rel=1e-4)
    assert (effect.corrected, effect.null) == ("supports", pytest.approx(0.2))
    assert {other.score for other in outcome.explored} == {"test_accuracy", "sufficiency_5"}  # no nulls


def test_every_score_has_its_interval_null_difference_and_the_printed_number(comparison):
    end = rows_of(outcome_of(comparison), "end")
    accuracy = end["test accuracy"]
    assert (accuracy["value"]["mean"], accuracy["value"]["n"]) == (pytest.approx(0.84), 3)
    # 4.3027 is the 97.5% quantile of t with two degrees of freedom.
    assert accuracy["value"]["half_width"] == pytest.approx(4.3027 * 0.01 / 3**0.5, rel=1e-4)
    assert (accuracy["null"], accuracy["paper"], accuracy["difference"]["mean"]) == (0.5, 0.9, 0)
    assert (end["sufficiency, top 5%"]["null"], end["sufficiency, top 5%"]["paper"]) == (
        pytest.approx(0.35),
        0.32,
    )
    assert end["MRTA"]["difference"]["mean"] == pytest.approx(0.4)
    assert end["MRTA, permuted null"]["value"]["mean"] == pytest.approx(0.3)
    assert "p" not in end["MRTA"]
    assert "paper" not in rows_of(outcome_of(comparison), "end", BASELINE)["test accuracy"]
    decided = rows_of(outcome_of(comparison))["MRTA"]
    assert (decided["kind"], decided["stands"], decided["levels"]) == ("decides", "more", 0.96)
    assert rows_of(outcome_of(comparison), "best validation epoch")["MRTA"]["value"]["n"] == 3


def test_accuracy_by_group_is_rows_of_the_end_beside_the_most_frequent_class(comparison):
    row = rows_of(outcome_of(comparison), "end")["test accuracy, 0 attractors (10 instances)"]
    assert (row["value"]["mean"], row["null"]) == (pytest.approx(0.9), pytest.approx(0.6))


def test_layers_are_rows_of_the_same_table(deep, comparison):
    outcome = outcome_of(deep)
    row = rows_of(outcome)["layer 2: MRTA"]
    assert (row["value"]["mean"], row["null"]) == (pytest.approx(0.5, rel=1e-4), pytest.approx(0.35))
    assert rows_of(outcome, "end")["layer 2: MRTA"]["difference"]["mean"] == pytest.approx(0.4)
    assert "layer 3: MRTA" not in rows_of(outcome)
    assert [effect.label for effect in outcome.by_layer()] == ["rollout", "layer 1", "layer 2"]
    assert layer_scores(2)["layer_2_permuted_ac"] == "layer 2: AC, %, permuted null"
    shallow = outcome_of(comparison)
    assert not shallow.by_layer()
    assert "layer 1: MRTA" not in rows_of(shallow)


def test_a_score_that_is_registered_is_in_the_table(comparison, monkeypatch):
    monkeypatch.setitem(SCORES, "calm", Score("calm", "calm of attention", "made up", null="uniform"))
    changed = {}
    for arm, seed in comparison.cells():
        changed[f"{arm}_{seed}"] = cell = result(arm, seed)
        cell["test"] |= {"calm": 0.25, "null": {"calm": 0.125}}
        for record in cell["history"]:
            record["calm"] = 0.5
    outcome = outcome_of(comparison, **changed)
    end = rows_of(outcome, "end")["calm of attention"]
    assert (end["value"]["mean"], end["null"]) == (0.25, 0.125)
    assert rows_of(outcome)["calm of attention"]["value"]["mean"] == 0.5


def test_a_score_with_a_moment_of_its_own_is_a_row_there(comparison):
    more = [
        Value(comparison.key, arm, seed, "exact match 0.95", None, "steps until learnt", steps + seed)
        for arm, steps in ((BASELINE, 1000.0), (FASTER, 500.0))
        for seed in SEEDS
    ]
    decides = replace(comparison, decides=("steps until learnt",))
    outcome = outcome_of(decides, more)
    [effect] = outcome.effects
    assert (effect.at, effect.value.mean, effect.margin) == ("exact match 0.95", -500, pytest.approx(50.2))
    row = rows_of(outcome, "exact match 0.95")["steps until learnt"]
    assert (row["stands"], row["kind"]) == ("less", "decides")
    assert outcome_of(comparison, more).explored[-1].score == "steps until learnt"


def test_a_comparison_may_be_decided_at_the_best_epoch(comparison):
    outcome = outcome_of(replace(comparison, at=BEST))
    [effect] = outcome.effects
    assert (effect.at, effect.value.mean) == (BEST, pytest.approx(0.2))
    assert "p" in rows_of(outcome, "best validation epoch")["MRTA"]
    row = rows_of(outcome)["MRTA"]
    assert ("p" not in row, row["loss"]) == (True, pytest.approx(exp(-2), rel=1e-5))


def test_seeds_that_were_added_later_are_left_out(comparison):
    outcome = outcome_of(replace(comparison, planned=2))
    assert outcome.effects[0].value.n == rows_of(outcome, "end")["MRTA"]["value"]["n"] == 2
    assert "2 seeds (1 added later left out)" in outcome.setting()
    assert {value.seed for value in outcome.measured.values} == set(SEEDS)


def test_arms_have_baselines_of_their_own(comparison):
    base = comparison.arms[BASELINE]
    names = ("slow", "slow x3", "fast", "fast x3")
    grid = replace(
        comparison,
        arms={name: base.replace(lr=place + 1) for place, name in enumerate(names)},
        baselines={"slow x3": "slow", "fast x3": "fast"},
    )
    outcome = outcome_of(grid)
    assert [effect.label for effect in outcome.effects] == ["slow x3", "fast x3"]
    assert {arm for arm in names if arm in {row["arm"] for row in outcome.rows}} == set(names)


def test_a_diverged_cell_is_listed_and_the_others_are_compared(comparison, capsys, tmp_path):
    lost = {"diverged": True, "history": [{"loss": None}], "seed": 4}
    outcome = outcome_of(comparison, **{f"{FASTER}_4": lost})
    summary = {**outcome.summary(), "files": outcome.save(tmp_path)}
    assert summary["arms"][FASTER]["diverged"] == [4]
    assert rows_of(outcome, "end")["MRTA"]["value"]["n"] == 2
    assert summary["effects"][0]["missing"] == ["faster_qk, seed 4"]
    show_comparison(summary)
    text = capsys.readouterr().out
    assert "diverged: {'faster_qk': [4]}" in text
    assert "the lowest common loss decides, because these never reach the level: faster_qk, seed 4" in text


def test_everything_that_shows_it_is_written(deep, tmp_path, capsys):
    outcome = outcome_of(deep)
    files = outcome.save(tmp_path)
    assert set(files) == {"table", "forest", "curve", "layers", "dtap"}
    for kind in ("", "-curve", "-by-layer", "-dtap"):
        assert (tmp_path / "figures" / f"table-agreement-paper{kind}.svg").exists()
    for folder in ("tables", "effects"):
        assert (tmp_path / folder / "table-agreement-paper.json").exists()
    assert outcome.dtaps[FASTER]["mean"][1] == pytest.approx([30, 70])
    show_comparison({**json.loads(canonical_json(outcome.summary())), "files": files})
    text = capsys.readouterr().out
    assert "at equal loss (training loss 0.135)" in text
    assert "layer 2: MRTA" in text
    assert "paper, faster QK" in text
    assert "top 5%" not in text
    assert "permuted null" not in text
    assert "best validation epoch" not in text


def test_one_arm_alone_has_values_and_no_effects(comparison, tmp_path, capsys):
    alone = replace(comparison, arms={FASTER: comparison.arms[FASTER]})
    outcome = outcome_of(alone)
    files = outcome.save(tmp_path)
    assert not outcome.effects
    assert "forest" not in files
    assert rows_of(outcome, "end")["MRTA"]["value"]["n"] == 3
    show_comparison({**outcome.summary(), "files": files})
    assert "MRTA" in capsys.readouterr().out


def test_what_else_differs_between_the_arms_is_said(comparison):
    base = TrainConfig("agreement", lr=5e-4, epochs=70)
    arms = {BASELINE: base, FASTER: base.replace(lr=5e-5, qk_ratio=20, epochs=100)}
    changed = Comparison("t", "T", "released", arms, (3,))
    assert outcome_of(changed).setting() == (
        "t-released: 2 arms, 70 epochs, 1 seed, QK learning rate times 20 in the faster arm, base rate 5e-05 "
        "instead of 0.0005, 100 epochs instead of 70"
    )


def test_cells_go_through_the_store_and_are_not_done_again(tmp_path):
    path = tmp_path / "little.jsonl"
    lines = [
        {"id": str(i), "tokens": ["it", "is", "x" if i % 2 else "y"], "relevance": [0, 0, 1], "label": i % 2}
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    base = TrainConfig("jsonl", file=str(path), epochs=1, rationale_k=(50,), width=8, head_width=4)
    little = two_arms("t", "T", base, 9, (0,))
    runner = CellRunner(tmp_path, experiment="t", workers=0)
    first = run_comparison(replace(little, examples=True), runner)
    assert (tmp_path / "examples" / "t-paper.json").exists()
    cells = sorted((tmp_path / "runs").iterdir())
    before = [(cell / "result.json").stat().st_mtime_ns for cell in cells]
    again = run_arms(little, CellRunner(tmp_path, experiment="t", workers=0))
    assert [(cell / "result.json").stat().st_mtime_ns for cell in cells] == before
    assert canonical_json(again.rows) == canonical_json(first["rows"])
    # Values of another protocol stay in the table of the experiment, those of the same are replaced.
    for protocol in ("released", "released"):
        more = CellRunner(tmp_path, experiment="t", workers=0)
        run_arms(replace(little, protocol=protocol), more)
        runner.write_results()
        more.write_results()
    experiments = [value.experiment for value in read_values(tmp_path / "results" / "t.csv")]
    assert experiments.count("t-paper") == experiments.count("t-released") > 0


# --- Single examples ---


@pytest.fixture
def workload(monkeypatch):
    monkeypatch.setattr(kvqa, "COUNTS", {"train": 8, "validation": 8, "test": 8})
    _registry._load.cache_clear()
    yield build_trainable(TrainConfig("kvqa", answer_tokens=4))
    _registry._load.cache_clear()


def test_an_examples_masses_are_those_that_are_measured(workload):
    examples = answer_examples({"baseline": workload}, 8)
    scores = workload.results()["test"]
    for example in examples:
        weights = example["arms"]["baseline"]["layers"]["rollout"]
        assert len(weights) == len(example["tokens"]) == len(example["relevance"])
        assert sum(weights) == pytest.approx(1, abs=1e-5)
        assert (example["tokens"][0], example["tokens"][-1]) == ("Q:", ANSWER)
    masses = [
        np.dot(example["arms"]["baseline"]["layers"]["rollout"], example["relevance"]) for example in examples
    ]
    assert np.mean(masses) == pytest.approx(scores["mrta"], abs=1e-5)
    # The answers that an untrained model writes have fewer steps than the gold ones.
    nulls = [example["null"] for example in examples]
    assert np.mean(nulls) == pytest.approx(scores["null"]["mrta"], rel=0.1)
    for example in examples[:2]:
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
