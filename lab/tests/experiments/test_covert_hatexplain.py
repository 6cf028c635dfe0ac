"""The covert channel in classifiers: seen where it was planted, and not where the query cannot know."""

import pytest
import torch

from fasterqk_lab.cli.reproduce import show_summary
from fasterqk_lab.experiments import _examples, find_experiment
from fasterqk_lab.experiments.covert import SCORES, covert_hatexplain
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._loop import build_trainable


@pytest.fixture(scope="module")
def trainable():
    built = build_trainable(TrainConfig("agreement", train_limit=64, train_subset=64, init_scale=0.5))
    built.splits["test"] = built.splits["test"].take(torch.arange(150))
    with torch.no_grad():  # so that the query of the read position does not know the length of its text
        built.model.positions.zero_()
    return built


@pytest.mark.parametrize("planted", [False, True])
def test_the_choice_of_a_word_says_the_class_only_where_the_query_knows_it(trainable, planted, monkeypatch):
    model, stream_of = trainable.model, _examples._stream

    def knowing(model, tokens):
        """The answer to a text, added to all of its positions: keys of one text do not see it."""
        read = (tokens != trainable.splits["test"].pad).sum(1).clamp(max=tokens.shape[1] - 1)
        answer = model(tokens, read).argmax(1)
        return (
            stream_of(model, tokens) + 3.0 * torch.eye(tokens.shape[1], model.config.width)[answer][:, None]
        )

    if planted:
        monkeypatch.setattr(_examples, "_stream", knowing)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    scores = _examples.measure_covert(trainable)
    assert set(SCORES) <= set(scores)
    if planted:
        assert scores["bits_above_null"] > 0.1
    else:
        assert abs(scores["bits_above_null"]) < 1e-6
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())


def test_bits_are_compared_with_those_of_shuffled_classes(rebuilt, capsys):
    comparison = covert_hatexplain(seeds=2)
    facts = {
        f"{arm} {seed}": dict.fromkeys(SCORES, 0.5)
        | {"bits": bits + seed / 1e5, "null_bits": 0.01, "drop": float("nan")}
        for seed in comparison.seeds
        for arm, bits in (dict.fromkeys(comparison.arms, 0.0) | {"two layers, faster QK": 0.8}).items()
    }
    history = [{"loss": 1.0, "mrta": 0.4}, {"loss": 0.5, "mrta": 0.5}]
    summary = rebuilt("covert-hatexplain", [comparison], lambda *_: history, facts, seeds=2)
    last = summary["bits_above_those_of_shuffled_classes"][-1]
    assert (last["arm"], last["difference"]["n"]) == ("two layers, faster QK", 2)
    assert last["difference"]["mean"] == pytest.approx(0.79 + 1234.5e-5, rel=1e-4)
    titles = {row["score"] for row in summary["rows"]}
    assert titles == {title for score, title in SCORES.items() if score != "drop"}
    show_summary(find_experiment("covert-hatexplain").shown(summary))
    assert "shuffled classes" in capsys.readouterr().out
