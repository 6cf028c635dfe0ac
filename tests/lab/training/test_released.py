import dataclasses

import numpy as np
import pytest
import torch
from benchmarks.plain import PlainClassifier

from fasterqk.lab.training._measure import scores_json
from fasterqk.lab.training._released import PADDED_TO, measure_released
from fasterqk.lab.training._steps import build_trainable


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
