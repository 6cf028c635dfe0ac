"""The main table: rows of every data set, effects beside the paper's differences, table and forest."""

import pytest

from fasterqk_lab.compare import measured
from fasterqk_lab.experiments._comparison import BASELINE, FASTER, Outcome, two_arms
from fasterqk_lab.experiments.table_main import main_effects, main_rows
from fasterqk_lab.training import TrainConfig


def result(mass):
    history = [
        {"step": n, "loss": 1 / (n + 1), "mrta": mass * n, "ac": 10 * mass * n, "test_accuracy": 0.6}
        for n in range(3)
    ]
    test = {"accuracy": 0.6, "mrta": mass, "ac": 50.0, "null": {"mrta": 0.1}, "majority_accuracy": 0.5}
    test |= {"permuted": {"ac": 35.0}, "entropy": 1.0, "sufficiency": {"5": 0.2, "10": 0.1}}
    splits = {"train": {"accuracy": 0.9}, "validation": {"accuracy": 0.7}, "test": test}
    return {"diverged": False, "loss": 1 / 3, "best": history[2], "history": history, **splits}


@pytest.fixture
def outcomes():
    scores = ("train_accuracy", "test_accuracy", "ac", "mrta", "sufficiency_5", "comprehensiveness_5")
    rows = {BASELINE: (0.88, 0.5, 1.0, 0.02, 0.4, 0.4), FASTER: (0.89, 0.6, 44.0, 0.3, 0.3, 0.5)}
    printed = {arm: dict(zip(scores, row, strict=True)) for arm, row in rows.items()}
    comparison = two_arms("t", "T", TrainConfig("agreement"), 30, (0, 1, 2), {"paper": printed})
    results = {(arm, seed): result(0.4 if arm == FASTER else 0.2) for arm, seed in comparison.cells()}
    outcome = Outcome(comparison, results, measured(comparison.key, results))
    return dict.fromkeys(("A", "B"), outcome)


def test_every_data_set_has_the_papers_scores_at_equal_loss_and_at_the_end(outcomes):
    rows = main_rows(outcomes)
    places = {(row["data set"], row["at"]) for row in rows}
    assert places == {(dataset, at) for dataset in "AB" for at in ("equal loss", "end")}
    end = {row["score"]: row for row in rows if (row["data set"], row["at"]) == ("B", "end")}
    assert set(end) == {
        "train accuracy",
        "test accuracy",
        "AC, %",
        "AC, %, permuted null",
        "MRTA",
        "sufficiency, top 5%",
    }
    mass = end["MRTA"]
    assert (mass["baseline"]["mean"], mass["faster QK"]["mean"]) == pytest.approx((0.2, 0.4))
    assert (mass["null"], mass["paper, baseline"], mass["paper, faster QK"]) == pytest.approx(
        (0.1, 0.02, 0.3)
    )
    assert mass["difference"]["mean"] == pytest.approx(0.2)
    assert end["test accuracy"]["null"] == 0.5
    at_loss = next(row for row in rows if (row["score"], row["at"]) == ("MRTA", "equal loss"))
    assert (at_loss["stands"], at_loss["training loss"]) == ("more", pytest.approx(1 / 3, rel=1e-5))


def test_the_papers_differences_stand_below_ours(outcomes):
    effects = {(effect.label, effect.score): effect for effect in main_effects(outcomes)}
    assert list(dict.fromkeys(label for label, _ in effects)) == ["A", "A, the paper", "B", "B, the paper"]
    ours, papers = effects["A", "ac"], effects["A, the paper", "ac"]
    assert (ours.value.n, ours.corrected) == (3, "supports")
    assert (papers.value.mean, papers.value.n, papers.corrected, papers.margin) == (43.0, 0, "open", 2.0)
    assert effects["A, the paper", "comprehensiveness_5"].value.mean == pytest.approx(0.1)
    assert ("A", "comprehensiveness_5") not in effects
