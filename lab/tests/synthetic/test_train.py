"""A cell from start to end: stop rules, caps, divergence, and sameness."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from fasterqk_lab.synthetic import Init, Language, SyntheticCell
from fasterqk_lab.synthetic._train import Trainer, train

QUICK = SyntheticCell("FAFO", lr=0.5, closed=True, batches=50, evaluated=200)
KEYS = ("loss", "accuracy", "steps", "mrta", "ac", "acmc", "dtap", "null", "diverged", "history")


def test_a_cell_trains_to_its_loss():
    result = train(QUICK)
    assert set(KEYS) <= set(result)
    assert result["reached"]
    assert not result["diverged"]
    assert result["train_loss"] <= QUICK.target_loss
    assert result["accuracy"] == 1
    assert result["loss"] < 5 * QUICK.target_loss
    assert 0.3 < result["null"]["mrta"] < 0.4 < result["mrta"]
    assert np.sum(result["dtap"]) == pytest.approx(100)


def test_history_starts_at_chance_and_ends_at_the_end():
    result = train(QUICK)
    first, last = result["history"][0], result["history"][-1]
    assert first["step"] == 0
    assert first["loss"] == pytest.approx(np.log(4), abs=1e-3)
    assert first["mrta"] == pytest.approx(result["null"]["mrta"], abs=1e-3)
    assert last["step"] == result["steps"]
    assert last["mrta"] == pytest.approx(result["mrta"])


def test_an_open_softmax_starts_at_the_chance_of_fifty():
    history = train(SyntheticCell("CACO", max_steps=1, batches=1))["history"]
    assert history[0]["loss"] == pytest.approx(np.log(50), abs=1e-3)


@pytest.mark.parametrize("fresh", [False, True])
def test_the_same_seed_gives_the_same_numbers_whatever_runs_beside_it(fresh):
    cells = [replace(QUICK, seed=seed, fresh=fresh, max_steps=300) for seed in (0, 1, 0)]
    alone = [train(cell) for cell in cells[:2]]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(train, cells))
    assert together == [alone[0], alone[1], alone[0]]
    assert alone[0]["loss"] != alone[1]["loss"]


def test_the_cap_is_a_cap():
    result = train(replace(QUICK, target_loss=1e-9, max_steps=130))
    assert result["steps"] == 130
    assert not result["reached"]
    assert not result["diverged"]


def test_a_diverged_cell_says_so_and_has_no_numbers():
    result = train(replace(QUICK, lr=1e4, qk_ratio=100.0, max_steps=5000))
    assert result["diverged"]
    assert not result["reached"]
    assert [result[key] for key in ("loss", "accuracy", "mrta", "ac", "acmc", "dtap")] == [None] * 6
    assert np.isnan(result["history"][-1]["loss"])


def test_the_released_rule_adds_up_epochs_until_the_next_hundred():
    trainer = Trainer(replace(QUICK, stop="accumulated", target_loss=0.01))
    losses = [0.006] * 100 + [0.006, 0.006, 0.001]
    met = []
    for loss in losses:
        trainer.epoch_losses.append(loss)
        met.append(trainer._meets_rule(loss))
    # It is met by the first epoch alone, and again only by the first one after the reset at 100.
    assert [epoch for epoch, is_met in enumerate(met, start=1) if is_met] == [1, 101]


def test_a_rule_that_never_stops():
    result = train(replace(QUICK, stop="never", max_steps=500, target_loss=10.0))
    assert result["steps"] == 500
    assert not result["reached"]


def test_window_losses_are_means_of_a_hundred_epochs():
    cell = replace(QUICK, batches=1, stop="never", max_steps=250)
    trainer = Trainer(cell)
    windows = trainer.run()["window_losses"]
    assert windows == pytest.approx(np.reshape(trainer.epoch_losses[:200], (2, 100)).mean(1))


def test_an_attended_query_takes_attention_in_a_collapsed_model():
    attended = replace(QUICK, parameterization="CACO", closed=False, language=Language(attend_query=True))
    result = train(replace(attended, target_loss=0.01))
    assert result["reached"]
    assert result["query_mass"] > 0.5


def test_faster_qk_sharpens_when_only_next_tokens_compete_and_not_otherwise():
    """The project's own finding on the toy language: docs/synthetic.md."""
    closed = [train(replace(QUICK, qk_ratio=ratio))["mrta"] for ratio in (1.0, 10.0)]
    opened = [train(replace(QUICK, qk_ratio=ratio, closed=False))["mrta"] for ratio in (1.0, 10.0)]
    assert closed[0] < 0.95 < closed[1]
    assert opened[1] < 0.1 < 0.5 < opened[0]


def test_identity_init_at_a_millionth_keeps_attention_uniform_for_long():
    tiny = Init("identity", 1e-6)
    result = train(replace(QUICK, qk_init=tiny, max_steps=2000, stop="never", closed=False, lr=0.05))
    assert result["mrta"] == pytest.approx(result["null"]["mrta"], abs=0.01)


@pytest.mark.parametrize("name", ["FAFO", "CACO"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_decay_takes_its_share_of_one_circuit_off_before_the_step(name, optimizer):
    cell = SyntheticCell(name, lr=0.1, batches=1, evaluated=50, optimizer=optimizer)
    start = Trainer(cell)
    before = [part.copy() for part in start.weights]
    start.advance(1)
    decayed = Trainer(replace(cell, qk_decay=0.5, ov_decay=0.25))
    decayed.advance(1)
    # Scores of factorized attention are no weights, and are computed anew in every step.
    first = 0 if name == "CACO" else 1
    shares = (0.5, 0.5, 0.5, 0.25, 0.25)
    for part, plain, weights, share in list(zip(before, start.weights, decayed.weights, shares, strict=True))[
        first:
    ]:
        np.testing.assert_allclose(weights, plain - 0.1 * share * part, atol=1e-12)


@pytest.mark.parametrize("name", ["FAFO", "CACO"])
def test_gradients_of_both_circuits_get_one_norm(name):
    trainer = Trainer(SyntheticCell(name, lr=0.1, batches=1, evaluated=50, gradient_norm=0.5))
    trainer.advance(1)
    gradients = trainer.gradients
    qk = (gradients.scores,) if name == "CACO" else (gradients.keys, gradients.queries)
    for parts in (qk, (gradients.table, gradients.output)):
        assert np.sqrt(sum((part**2).sum() for part in parts)) == pytest.approx(0.5)
