"""The summary says what the numbers say: sharper, not sharper, unknown; against the null; at which cost."""

from dataclasses import dataclass

import pytest

from fasterqk.lab.report._summary import comparison_sentences, what_was_run
from fasterqk.lab.runs import Store


def interval(mean, half_width=0.01, n=5):
    return {"mean": mean, "half_width": half_width, "n": n}


def comparison(mrta=0.4, null=0.1, difference=None, missing=(), **more):
    baseline = {"arm": "baseline", "qk_ratio": 1, "metrics": {"mrta": interval(0.2), "accuracy": 0.9}}
    faster = {"arm": "faster", "qk_ratio": 10, "metrics": {"mrta": interval(mrta), "accuracy": 0.88}, **more}
    level = {"loss": 0.05, "difference": {"faster": {"mrta": difference}}, "missing": list(missing)}
    return {
        "name": "demo",
        "arms": [baseline, {**faster, "null": {"mrta": null}}],
        "matched": [level] if difference else None,
    }


def test_it_tells_the_means_the_null_and_the_cost():
    [sentence] = comparison_sentences(comparison())
    assert sentence == (
        "With faster (query-key ratio 10), mean attention on relevant tokens is 0.400 ± 0.010 against"
        " 0.200 ± 0.010 with baseline (query-key ratio 1); uniform attention would give 0.100."
        " What it costs: test accuracy 0.880 instead of 0.900."
    )


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [
        (interval(0.2, 0.05), "sharper, beyond the noise"),
        (interval(-0.2, 0.05), "less sharp, beyond the noise"),
        (interval(0.2, 0.25), "no difference beyond the noise"),
        (interval(0.2, None, 1), "one seed, so nothing is known"),
    ],
)
def test_the_verdict_at_matched_loss_is_that_of_the_interval(difference, verdict):
    [sentence] = comparison_sentences(comparison(difference=difference))
    assert "At the same training loss (0.05)" in sentence
    assert verdict in sentence


def test_cells_that_never_got_there_are_counted():
    missing = [["faster", 3], ["baseline", 1], ["another", 2]]
    [sentence] = comparison_sentences(comparison(difference=interval(0.2), missing=missing))
    assert "2 cells never got there" in sentence


def test_attention_below_the_null_is_said():
    [sentence] = comparison_sentences(comparison(mrta=0.05))
    assert "no sharper than that" in sentence


def test_a_diverged_arm_has_no_number():
    [sentence] = comparison_sentences(comparison(mrta=None))
    assert sentence.startswith("With faster (query-key ratio 10) there is no number for")


@dataclass(frozen=True)
class Training:
    seed: int = 0


def test_what_was_run_is_counted_from_the_store(tmp_path):
    assert what_was_run(tmp_path) == ("", "")
    store = Store(tmp_path)
    for seed in range(3):
        store.save(Training(seed), {"loss": 0.5})
    assert "3 cells in the store (3 Training), 3 finished" in what_was_run(tmp_path)[0]
    assert what_was_run(tmp_path)[1] == ""
    store.begin(Training(9))
    assert what_was_run(tmp_path)[1] == "Of 4 cells, 3 are done; not on this page: 1 stopped."
