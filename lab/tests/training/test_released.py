"""What the released notebooks measure, worked out by hand."""

import dataclasses

import numpy as np
import pytest
import torch

from fasterqk_lab.benchmarks.training import PlainClassifier
from fasterqk_lab.models import Classifier, ClassifierConfig
from fasterqk_lab.tasks import LabelledInstance, LabelledInstances
from fasterqk_lab.training._batches import pad_instances
from fasterqk_lab.training._classification import scores_json
from fasterqk_lab.training._readings import PADDED_TO, measure_released, measure_released_sva
from fasterqk_lab.training._steps import build_trainable


@pytest.fixture
def trainable(config):
    return build_trainable(config.replace(context=PADDED_TO, init_scale=0.5))


def literal(plain, attention, tokens, relevance, k):
    """The notebooks' computation for one post: padded to 128, last row, argpartition, first padding."""

    def probabilities(ids):
        ids = np.asarray(ids)
        read = int((ids == 0).argmax())
        with torch.no_grad():
            return plain(torch.tensor(ids)[None], torch.tensor([read]))[0].double().softmax(0).numpy()

    padded = np.array(tokens + [0] * (PADDED_TO - len(tokens)))
    row = attention(padded)
    whole = probabilities(padded)
    predicted = whole.argmax()
    count = int(np.ceil(k / 100 * PADDED_TO))
    top = np.argpartition(row, -count)[-count:]
    suff = whole[predicted] - probabilities(padded[top])[predicted]
    comp = whole[predicted] - probabilities(np.delete(padded, top))[predicted]
    return float(row[: len(tokens)] @ relevance), whole, suff, comp


def test_equals_the_notebooks_computation_post_by_post(trainable):
    model, split = trainable.model, trainable.splits["test"]
    plain = PlainClassifier(model)
    block = model.blocks[0].attention

    def attention(padded):
        stream = model.embedding(torch.tensor(padded)) + model.positions
        query = torch.einsum("d,hde->he", stream[-1], block.W_Q) + block.b_Q
        keys = torch.einsum("td,hde->hte", stream, block.W_K)
        scores = torch.einsum("hte,he->ht", keys, query) / block.W_Q.shape[2] ** 0.5
        return scores.softmax(1).mean(0).detach().numpy()

    measured = [
        literal(
            plain,
            attention,
            split.tokens[i, : split.lengths[i]].tolist(),
            split.relevance[i, : split.lengths[i]].numpy(),
            5,
        )
        for i in range(len(split))
    ]
    scores = scores_json(measure_released(model, split, (5,)))
    assert scores["mrta"] == pytest.approx(np.mean([mass for mass, *_ in measured]), rel=1e-5)
    comprehensiveness = np.mean([comp for *_, comp in measured])
    assert scores["comprehensiveness"]["5"] == pytest.approx(comprehensiveness, abs=1e-4)
    sufficiency = np.mean([suff for *_, suff, _ in measured])
    assert scores["sufficiency"]["5"] == pytest.approx(sufficiency, abs=1e-4)
    assert len(scores["dtap"]) == 3


def test_instances_without_rationale_count_as_zero(trainable):
    split = trainable.splits["test"]
    half = dataclasses.replace(split, relevance=split.relevance.clone())
    half.relevance[::2] = 0
    whole_scores = scores_json(measure_released(trainable.model, split, (5,)))
    half_scores = scores_json(measure_released(trainable.model, half, (5,)))
    assert 0 < half_scores["mrta"] < whole_scores["mrta"]


def test_uniform_attention_gives_the_number_of_relevant_tokens_over_128(trainable):
    with torch.no_grad():
        trainable.model.blocks[0].attention.W_K.zero_()
    split = trainable.splits["test"]
    scores = scores_json(measure_released(trainable.model, split, (5,)))
    assert scores["mrta"] == pytest.approx(float(split.relevance.sum(1).mean()) / PADDED_TO, rel=1e-5)
    assert scores["null"]["mrta"] == pytest.approx(scores["mrta"], rel=1e-5)


PAD = 0
LARGE = -1e5


@pytest.fixture
def model():
    config = ClassifierConfig(20, 3, width=8, heads=3, head_width=4, mlp_width=0, context=130, residual=False)
    generator = torch.Generator().manual_seed(1)
    model = Classifier(config, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture
def split():
    draw = np.random.default_rng(2)
    examples = []
    for number, length in enumerate([3, 7, 8, 12, 20, 40]):
        relevance = np.zeros(length)
        relevance[draw.choice(length, 2, replace=False)] = 1
        tokens = draw.integers(1, 20, length)
        examples.append(LabelledInstance(str(number), tokens, int(number % 2), relevance))
    return pad_instances(LabelledInstances.collect(examples), context=130, read="last", pad=PAD)


def forward(model, ids):
    """The notebooks' model on one padded text: attention (head, row, key) and the probabilities."""
    block = model.blocks[0].attention
    stream = model.embedding(torch.tensor(ids)) + model.positions[: len(ids)]
    query, key, value = (
        torch.einsum("td,hde->hte", stream, weight) + bias[:, None]
        for weight, bias in ((block.W_Q, block.b_Q), (block.W_K, block.b_K), (block.W_V, block.b_V))
    )
    scores = query @ key.transpose(1, 2) / key.shape[2] ** 0.5
    hidden = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1) | (torch.tensor(ids) == PAD)
    attention = scores.masked_fill(hidden, LARGE).softmax(2)
    read = int((np.asarray(ids) == PAD).argmax()) - 1
    mixed = torch.einsum("hte,hed->td", attention @ value, block.W_O) + block.b_O
    return attention.detach().numpy(), (mixed[read] @ model.W_U + model.b_U).detach().softmax(0).numpy()


def released_sva_literal(model, tokens, relevance):
    """Head 0's and the mean mass, the probabilities, sufficiency and comprehensiveness of one sentence."""
    padded = np.array([*tokens, *[PAD] * (PADDED_TO - len(tokens))])
    attention, whole = forward(model, padded)
    row = attention[:, -1].mean(0)
    count = 7
    top = np.argpartition(row, -count)[-count:]
    answer = whole.argmax()
    suff = whole[answer] - forward(model, padded[top])[1][answer]
    comp = whole[answer] - forward(model, np.delete(padded, top))[1][answer]
    weights = np.append(relevance, np.zeros(PADDED_TO - len(tokens)))
    return attention[0, -1] @ weights, row @ weights, whole, suff, comp


def test_equals_the_notebooks_computation_sentence_by_sentence(model, split):
    scores = scores_json(measure_released_sva(model, split, (5,)))
    measured = [
        released_sva_literal(
            model,
            split.tokens[i, : split.lengths[i]].tolist(),
            split.relevance[i, : split.lengths[i]].numpy(),
        )
        for i in range(len(split))
    ]
    first, mass, whole, suff, comp = zip(*measured, strict=True)
    right = np.array([p[label] for p, label in zip(whole, split.labels.tolist(), strict=True)])
    above = np.array(first) >= 0.1
    assert scores["mrta"] == pytest.approx(np.mean(mass), rel=1e-5)
    assert scores["ac"] == pytest.approx(100 * np.mean(above & (right >= 0.1)))
    assert scores["acmc"] == pytest.approx(100 * np.mean(above & (right >= 0.5)))
    assert scores["comprehensiveness"]["5"] == pytest.approx(np.mean(comp), abs=1e-5)
    assert scores["sufficiency"]["5"] == pytest.approx(np.mean(suff), abs=1e-5)
    assert np.sum(scores["dtap"]) == pytest.approx(100)


def test_the_null_is_uniform_over_the_sentence(model, split):
    null = scores_json(measure_released_sva(model, split, (5,)))["null"]
    assert null["mrta"] == pytest.approx(np.mean(2 / split.lengths.numpy()))
