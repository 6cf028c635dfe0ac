import json
from itertools import pairwise

import pytest
import torch

from fasterqk.errors import InputError
from fasterqk.files import canonical_json
from fasterqk_lab.training import TrainResult, train
from fasterqk_lab.training import _loop as checkpoint
from fasterqk_lab.training._steps import build_optimizer, build_trainable


class StopAfter:
    """Progress that stops the run, as a kill would, when so many steps are done."""

    def __init__(self, steps):
        self.steps = steps
        self.notes = []

    def __call__(self, done, total, note=""):
        self.notes.append((done, total, note))
        if done >= self.steps:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def long_config(config):
    """Enough epochs to learn the little task."""
    return config.replace(epochs=25, lr=5e-3)


@pytest.fixture(scope="module")
def long_run(long_config):
    """Its result, which tests share."""
    return train(long_config)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The result and the folder of a training that nothing disturbed; each is done once."""
    done = {}

    def run(config):
        if config not in done:
            folder = tmp_path_factory.mktemp("undisturbed")
            done[config] = train(config, folder=folder), folder
        return done[config]

    return run


def final_state(config, folder):
    trainable = build_trainable(config)
    optimizer = build_optimizer(trainable.model, config)
    checkpoint.load_checkpoint(folder, model=trainable.model, optimizer=optimizer, config=config)
    return trainable.model.state_dict(), optimizer.state_dict()["state"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "sgd", "momentum": 0.9, "lr": 0.02},
        {"frozen": ("*.mlp.*",), "stale_gradients": True, "clip": 0.05},
        {"evaluations_per_epoch": 3, "layers": 2, "bucket": 1},
        {"evaluate_at_fall": 0.9, "lr": 0.02},
        {"patience": 2, "epochs": 9},
    ],
)
def test_a_killed_run_ends_as_one_that_was_not(config, tmp_path, changes, undisturbed):
    config = config.replace(**changes)
    whole, folder = undisturbed(config)
    for steps in (1, 14, 26):
        with pytest.raises(KeyboardInterrupt):
            train(config, folder=tmp_path, progress=StopAfter(steps))
    resumed = train(config, folder=tmp_path)
    assert canonical_json(resumed) == canonical_json(whole)
    weights, state = final_state(config, folder)
    other_weights, other_state = final_state(config, tmp_path)
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    for index, entries in state.items():
        assert all(torch.equal(entries[key], other_state[index][key]) for key in entries)
    assert (folder / "history.jsonl").read_bytes() == (tmp_path / "history.jsonl").read_bytes()


def test_the_run_does_not_depend_on_global_random_numbers_or_on_its_folder(config, undisturbed):
    notes = StopAfter(10**9)
    torch.manual_seed(123)
    assert canonical_json(train(config, progress=notes)) == canonical_json(undisturbed(config)[0])
    # Its progress tells loss, accuracy and mass.
    done, total, note = notes.notes[-1]
    assert done == total == 3 * len(build_trainable(config).batches(0))
    for word in ("loss", "accuracy", "mass"):
        assert word in note


def test_another_seed_is_another_run(config, undisturbed):
    other = train(config.replace(seed=5, epochs=1)).history[1]
    assert other["loss"] != undisturbed(config)[0].history[1]["loss"]


def test_history_starts_before_training_and_has_every_evaluation(config, undisturbed):
    result, folder = undisturbed(config.replace(evaluations_per_epoch=2))
    assert [record["epoch"] for record in result.history] == pytest.approx(
        [0, 0.5, 1, 1.5, 2, 2.5, 3], abs=0.05
    )
    lines = (folder / "history.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == result.history
    assert result.history[-1]["loss"] == result.loss
    best = max(record["validation_accuracy"] for record in result.history)
    assert result.best["validation_accuracy"] == best
    assert result.history[-1]["test_accuracy"] == result.test["accuracy"]
    assert result.history[-1]["mrta"] == result.test["mrta"]


def test_a_falling_loss_is_looked_at_more_often(long_config, long_run):
    plain = long_run.history
    often = train(long_config.replace(evaluate_at_fall=0.7)).history
    regular = [record["step"] for record in plain]
    extra = [record["step"] for record in often if record["step"] not in regular]
    assert extra
    assert [record for record in often if record["step"] in regular] == plain
    # Evaluating changes nothing in the training itself, and leaves smaller gaps in the loss.
    widest = [max(one["loss"] / next_["loss"] for one, next_ in pairwise(rows)) for rows in (often, plain)]
    assert widest[0] < widest[1]
    assert regular[1] in [record["step"] for record in often[1:3]]


def test_a_run_with_patience_ends_when_validation_no_longer_gets_better(config):
    config = config.replace(epochs=12, lr=0.02)
    whole = train(config).history
    patience = 2

    def stalled(records):
        accuracies = [record["validation_accuracy"] for record in records]
        losses = [record["validation_loss"] for record in records]
        before = slice(None, -patience)
        return len(records) > patience and (
            max(accuracies[-patience:]) <= max(accuracies[before])
            and min(losses[-patience:]) >= min(losses[before])
        )

    last = next(end for end in range(1, len(whole)) if stalled(whole[:end]))
    stopped = train(config.replace(patience=patience)).history
    assert len(stopped) == last < len(whole)
    assert canonical_json(stopped) == canonical_json(whole[:last])


def test_a_plateau_on_which_the_loss_still_falls_is_no_reason_to_stop(config):
    result = train(config.replace(epochs=4, lr=1e-6, patience=1))
    accuracies = {record["validation_accuracy"] for record in result.history}
    assert len(accuracies) == 1
    assert len(result.history) == 5


def test_a_run_judged_by_its_fit_measures_no_attention(config):
    result = train(config.replace(epochs=1, protocol="fit"))
    assert result.validation.keys() == {"loss", "accuracy"}
    assert not any("mrta" in record for record in result.history)


def test_the_best_evaluation_is_that_of_accuracy_or_of_loss(long_config, long_run):
    result, by_loss = long_run, train(long_config.replace(best_by="validation_loss"))
    highest = max(record["validation_accuracy"] for record in result.history)
    lowest = min(record["validation_loss"] for record in result.history)
    assert (result.best["validation_accuracy"], by_loss.best["validation_loss"]) == (highest, lowest)
    assert result.best["epoch"] != by_loss.best["epoch"]
    with pytest.raises(InputError, match="best_by 'loss' is not one of validation_accuracy, "):
        long_config.replace(best_by="loss")


def test_the_little_task_is_learnt_and_attention_goes_to_the_reason(long_run):
    assert long_run.train["accuracy"] > 0.95
    assert long_run.test["accuracy"] > 0.8
    assert long_run.test["mrta"] > long_run.test["null"]["mrta"] + 0.1
    assert long_run.test["majority_accuracy"] < 0.8


def test_divergence_is_reported_and_not_hidden(config, tmp_path):
    config = config.replace(optimizer="sgd", lr=1e6, warmup=0, clip=None, schedule="constant", epochs=30)
    result = train(config, folder=tmp_path)
    assert result.diverged
    assert result.loss is None
    assert result.test == {}
    written = result.to_json()
    assert [written[name] for name in ("train", "validation", "test", "best")] == [None] * 4
    assert TrainResult.from_json(json.loads(canonical_json(written))) == result
    assert result.steps < 30 * 12
    assert result.history[-1]["diverged"]
    canonical_json(result)


def test_a_finite_but_exploded_loss_is_divergence(config, undisturbed):
    result, _ = undisturbed(config.replace(lr=1e4, warmup=0, schedule="constant"))
    assert result.diverged


def test_checkpoint_of_another_run_is_refused(config, undisturbed):
    with pytest.raises(InputError, match="another configuration"):
        train(config.replace(lr=1.0), folder=undisturbed(config)[1])


def test_unknown_evaluation_is_an_error(config):
    with pytest.raises(InputError, match="unknown evaluation 'mine'; choose from paper"):
        train(config.replace(protocol="mine"))


def test_a_file_that_changed_since_is_refused(config):
    with pytest.raises(InputError, match="has changed: its checksum"):
        train(config.replace(checksum="0" * 64))
