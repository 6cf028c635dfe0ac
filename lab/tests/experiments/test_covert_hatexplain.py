"""The covert channel in classifiers: seen where it was planted, and not where the query cannot know."""

import pytest
import torch

from fasterqk_lab.experiments import covert_hatexplain
from fasterqk_lab.experiments.covert_hatexplain import SCORES, measure_covert
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._loop import build_trainable


@pytest.fixture(scope="module")
def trainable():
    found = build_trainable(TrainConfig("agreement", train_limit=64, train_subset=64, init_scale=0.5))
    found.splits["test"] = found.splits["test"].take(torch.arange(150))
    with torch.no_grad():  # so that the query of the read position does not know the length of its text
        found.model.positions.zero_()
    return found


@pytest.mark.parametrize("planted", [False, True])
def test_the_choice_of_a_word_says_the_class_only_where_the_query_knows_it(trainable, planted, monkeypatch):
    model, stream_of = trainable.model, covert_hatexplain._stream

    def knowing(model, tokens):
        """The answer to a text, added to all of its positions: keys of one text do not see it."""
        read = (tokens != trainable.splits["test"].pad).sum(1).clamp(max=tokens.shape[1] - 1)
        answer = model(tokens, read).argmax(1)
        return (
            stream_of(model, tokens) + 3.0 * torch.eye(tokens.shape[1], model.config.width)[answer][:, None]
        )

    if planted:
        monkeypatch.setattr(covert_hatexplain, "_stream", knowing)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    found = measure_covert(trainable, torch.Generator().manual_seed(0))
    assert set(SCORES) <= set(found)
    if planted:
        assert found["bits_above_null"] > 0.1
    else:
        assert abs(found["bits_above_null"]) < 1e-6
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())
