import numpy as np
import pytest
import torch

from fasterqk.lab.models import Classifier, ClassifierConfig
from fasterqk.lab.tasks import LabelledInstance, LabelledInstances
from fasterqk.lab.training._batches import pad_instances
from fasterqk.lab.training._measure import scores_json
from fasterqk.lab.training._released import PADDED_TO, measure_released_sva

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


def literal(model, tokens, relevance):
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
        literal(
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
