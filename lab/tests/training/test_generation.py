"""Answer generators as a trainable, against the plain way: padded texts, the head on every position."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fasterqk.attention import Aggregation
from fasterqk.errors import InputError
from fasterqk.files import canonical_json
from fasterqk_lab.benchmarks.training import IGNORED, PlainGenerator, padded
from fasterqk_lab.tasks import AnswerTask, Questions
from fasterqk_lab.training import TrainConfig, train
from fasterqk_lab.training import _steps as module
from fasterqk_lab.training._generation import MeasuredGenerator, answered_instances, measure_steps
from fasterqk_lab.training._loop import load_trained
from fasterqk_lab.training._steps import Steps, build_trainable

TOKENS = 21


def questions(draw, count, name):
    """A question names a letter; the answer repeats the letters that follow it in the text."""
    prompts, answers, relevance = [], [], []
    for _ in range(count):
        text = draw.permutation(np.arange(3, TOKENS))[: draw.integers(5, 12)]
        size = draw.integers(1, 4)
        place = draw.integers(0, len(text) - size)
        prompts.append(np.array([1, text[place], 2, *text, 1]))
        answers.append(np.array([*text[place + 1 : place + 1 + size], 0]))
        spot = np.arange(len(prompts[-1])) - 3 - place - 1
        relevance.append(((spot >= 0) & (spot < size)) * 1.0)
    gold = tuple((" ".join(map(str, answer[:-1])),) for answer in answers)
    ids = tuple(f"{name}-{n}" for n in range(count))
    return Questions(ids, tuple(prompts), tuple(answers), tuple(relevance), gold)


@pytest.fixture(autouse=True)
def task(monkeypatch):
    draw = np.random.default_rng(0)
    made = AnswerTask(
        name="made up",
        splits={
            name: questions(draw, count, name)
            for name, count in (("train", 83), ("validation", 9), ("test", 12))
        },
        vocabulary=tuple(map(str, range(TOKENS))),
        end=0,
        text=lambda ids: " ".join(map(str, ids)),
        files={"made": "up"},
        skipped={"no answer": 2},
    )
    monkeypatch.setattr(module, "load_task", lambda *_, **__: made)
    return made


@pytest.fixture
def config():
    return TrainConfig(
        "kvqa",
        epochs=2,
        batch_size=8,
        bucket=3,
        width=12,
        heads=2,
        head_width=6,
        mlp_width=16,
        context=24,
        qk_ratio=5,
        train_subset=20,
        along_subset=6,
        answer_tokens=4,
        label_smoothing=0.1,
    )


def in_double_precision(trainable):
    """Adam divides rounding by rounding where a gradient is zero, as that of key biases is; not so here."""
    trainable.model.double()
    return trainable


def plain_loss(model, trainable, chosen, smoothing):
    tokens, labels = padded(trainable.train, chosen, trainable.config.model.context)
    return cross_entropy(
        model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing
    )


def test_loss_and_gradients_are_those_of_padded_texts_with_the_head_everywhere(config):
    trainable = build_trainable(config)
    plain = PlainGenerator(trainable.model)
    chosen = torch.arange(3, 40, 4)
    loss, reference = trainable.loss(chosen, 0), plain_loss(plain, trainable, chosen, 0.1)
    assert loss.item() == pytest.approx(reference.item(), abs=1e-5)
    loss.backward()
    reference.backward()
    pairs = [
        (trainable.model.embedding.weight, plain.embedding),
        (trainable.model.head_bias, plain.head_bias),
    ]
    pairs += [(trainable.model.positions.weight, plain.positions)]
    pairs += list(zip(trainable.model.norm.parameters(), plain.norm.parameters(), strict=True))
    for own, theirs in zip(trainable.model.blocks, plain.blocks, strict=True):
        pairs += list(zip(own.parameters(), theirs.block.parameters(), strict=True))
    assert len(pairs) == len(list(trainable.model.parameters()))
    for own, theirs in pairs:
        assert not own.grad.is_sparse
        torch.testing.assert_close(own.grad, theirs.grad, atol=1e-6, rtol=1e-5)


def test_a_run_takes_the_steps_of_the_plain_way(config):
    config = config.replace(qk_ratio=1, weight_decay=0.0, warmup=0, schedule="constant")
    trainable = in_double_precision(build_trainable(config))
    plain = PlainGenerator(trainable.model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=config.optimisation.lr, weight_decay=0.0)
    steps = Steps(config, trainable)
    for chosen in trainable.batches(0)[:6]:
        optimizer.zero_grad()
        loss = plain_loss(plain, trainable, chosen, 0.1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        assert steps.step() == pytest.approx(loss.item(), abs=1e-9)
    torch.testing.assert_close(trainable.model.embedding.weight, plain.embedding, atol=1e-9, rtol=1e-7)


def test_accumulated_batches_are_one_large_batch(config):
    small = config.replace(bucket=1, accumulate=4, batch_size=8)
    large = small.replace(accumulate=1, batch_size=32)
    few, many = (Steps(each, in_double_precision(build_trainable(each))) for each in (large, small))
    order = many.trainable.batches(0)
    assert (len(order), many.per_epoch) == (11, 3)  # the last step takes the three batches that are left
    groups = [torch.cat(order[place : place + 4]) for place in (0, 4, 8)]
    few.trainable.batches = lambda epoch: groups
    few.total = many.total
    for _ in range(3):
        assert many.step() == pytest.approx(few.step(), abs=1e-9)
    for own, theirs in zip(many.trainable.model.parameters(), few.trainable.model.parameters(), strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-9, rtol=1e-7)
    assert sum(len(group) for group in groups) == 83


def test_dropout_is_drawn_by_the_batch_and_off_when_measuring(config):
    trainable = build_trainable(config.replace(dropout=0.3))
    chosen = torch.arange(8)
    first = trainable.loss(chosen, 3)
    assert torch.equal(first, trainable.loss(chosen, 3))
    assert not torch.equal(first, trainable.loss(chosen, 4))
    assert trainable.evaluate() == trainable.evaluate()


@pytest.mark.parametrize("changes", [{"dropout": 0.2}, {"accumulate": 3, "embedding_ratio": 0.1}])
def test_a_killed_run_ends_as_one_that_was_not(config, tmp_path, changes):
    config = config.replace(**changes)
    whole = train(config, folder=tmp_path / "whole")

    class Enough(Exception):
        pass

    def stop(done, total, note):
        if done > total / 2:
            raise Enough

    with pytest.raises(Enough):
        train(config.replace(), folder=tmp_path / "killed", progress=stop)
    resumed = train(config, folder=tmp_path / "killed")
    assert canonical_json(resumed) == canonical_json(whole)
    one, other = (load_trained(config, tmp_path / name).model for name in ("whole", "killed"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_results_have_what_tables_need(config):
    result = train(config)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    record = result.history[-1]
    for key in ("validation_accuracy", "validation_loss", "validation_f1", "test_f1", "train_f1", "mrta"):
        assert np.isfinite(record[key])
    assert {"null_mrta", "average_mrta", "layer_1_mrta", "layer_2_null_mrta", "sufficiency_5"} <= set(record)
    assert "train_loss" not in record
    test = result.test
    assert {"accuracy", "f1", "probability", "answer_probability", "dtap", "layer", "average"} <= set(test)
    assert set(test["null"]) >= {"mrta", "ac", "acmc", "entropy", "sufficiency", "comprehensiveness"}
    assert result.skipped == {"no answer": 2}
    assert result.data_checksums == {"made": "up"}


def test_a_run_judged_by_its_fit_measures_no_attention(config):
    result = train(config.replace(epochs=1, protocol="fit"))
    assert "mrta" not in result.test
    assert not any("mrta" in record for record in result.history)
    with pytest.raises(InputError, match="answers have no evaluation 'mine'; choose from paper, fit"):
        build_trainable(config.replace(protocol="mine"))


@pytest.mark.parametrize(
    "aggregation", [Aggregation("layer", 0), Aggregation("layer", 1), Aggregation("mean")]
)
def test_steps_of_answers_of_different_lengths_are_read_together_as_alone(config, task, aggregation):
    model = build_trainable(config).model
    chosen = task.splits["test"].take(np.arange(4))
    written = [[5], [7, 8, 0], [3, 4, 5, 6], [9, 0]]
    instances = answered_instances(chosen, written)
    generator = MeasuredGenerator(model, np.zeros(4), np.zeros(4, dtype=bool))

    def importance(some):
        return measure_steps(generator, some, aggregation=aggregation).importance

    for one, instance in zip(importance(instances), instances, strict=True):
        [alone] = importance([instance])
        np.testing.assert_allclose(one, alone, atol=1e-6)
        assert one.sum() == pytest.approx(1, abs=1e-5)


def test_prompts_too_long_are_left_out_and_counted(config, task):
    lengths = np.concatenate([split.lengths for split in task.splits.values()])
    result = train(config.replace(context=13, epochs=1))
    too_long = int((lengths > 13).sum())
    assert 0 < too_long < len(lengths)
    assert result.skipped["a prompt too long for a context of 13 tokens"] == too_long
    with pytest.raises(InputError, match="no train question fits a context of 5 tokens"):
        build_trainable(config.replace(context=5))


def test_the_embedding_can_learn_at_a_rate_of_its_own(config):
    steps = Steps(config.replace(embedding_ratio=0.1, weight_decay=0.3), build_trainable(config))
    groups = {name: group for group in steps.optimizer.param_groups for name in group["param_names"]}
    assert groups["embedding.weight"]["lr"] == pytest.approx(0.1 * config.optimisation.lr)
    assert groups["embedding.weight"]["weight_decay"] == 0
    assert groups["positions.weight"]["lr"] == pytest.approx(config.optimisation.lr)
    assert groups["blocks.0.attention.query.weight"]["lr"] == pytest.approx(5 * config.optimisation.lr)


def test_word_vectors_start_the_embedding(config, task, monkeypatch):
    vectors = np.random.default_rng(0).normal(size=(TOKENS, 7)).astype(np.float32)
    with_vectors = AnswerTask(**{**vars(task), "vectors": vectors})
    monkeypatch.setattr(module, "load_task", lambda *_, **__: with_vectors)
    ours, without = build_trainable(config).model, build_trainable(config.replace(word_vectors=False)).model
    rows = ours.embedding.weight.detach().numpy()
    np.testing.assert_allclose(rows @ rows.T, vectors @ vectors.T, atol=1e-4)  # turned, not changed
    assert not torch.equal(ours.embedding.weight, without.embedding.weight)
    assert torch.equal(ours.blocks[0].mlp.inward.weight, without.blocks[0].mlp.inward.weight)


def test_a_scaled_start_is_the_same_function(config):
    tokens = torch.arange(3, 9)[None]
    plain, scaled = (build_trainable(config.replace(qk_imbalance=each)).model for each in (1.0, 4.0))
    torch.testing.assert_close(plain(tokens), scaled(tokens), atol=1e-5, rtol=1e-4)
    assert not torch.equal(plain.blocks[0].attention.query.weight, scaled.blocks[0].attention.query.weight)
