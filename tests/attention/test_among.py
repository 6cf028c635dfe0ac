"""Attention among words: special tokens neither hide nor make a difference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fasterqk.attention import Aggregation, HuggingFaceClassifier, Instance, Passes, Removal, measure
from fasterqk.errors import InputError

NOTHING_REMOVED = Removal(percents=())


@pytest.fixture
def measured(small_model, some_instances):
    def measured(among, **options):
        aggregation = Aggregation("mean", among=among)
        return measure(
            small_model(), some_instances(), aggregation=aggregation, removal=NOTHING_REMOVED, **options
        )

    return measured


def test_special_tokens_hide_that_the_right_words_are_read(make_model):
    """[CLS] has most of the attention: MRTA is below its null, among words it is above."""
    own = make_model(
        "BertForSequenceClassification", "BertConfig", num_hidden_layers=1, num_attention_heads=1
    )
    attention = own.bert.encoder.layer[0].attention.self
    for layer in (attention.query, attention.key):
        layer.weight.data.zero_()
        layer.bias.data.zero_()
    attention.query.bias.data[0] = 4.0  # the logit of a key is what its first feature says
    attention.key.weight.data[0] = 0.0
    tokens = np.array([2, 10, 11, 12, 13, 3])
    states = own.bert.embeddings(input_ids=torch.tensor(tokens[None])).detach()[0]
    wanted = np.array([4.0, 2.0, 0.0, 0.0, 0.0, 3.0])  # [CLS], the relevant word, other words, [SEP]
    attention.key.weight.data[0] = torch.linalg.lstsq(
        states, torch.tensor(wanted, dtype=states.dtype)
    ).solution
    rankable, relevance = np.isin(tokens, [2, 3], invert=True), (tokens == 10) * 1.0
    instance = Instance(tokens, rankable, relevance, label=0)
    measurement = measure(HuggingFaceClassifier(own), [instance], aggregation="mean", removal=NOTHING_REMOVED)
    summary = measurement.summary()
    assert summary["mrta"] < summary.null["mrta"] == pytest.approx(1 / 6)
    assert summary["mrta_among_words"] > 2 * summary.null["mrta_among_words"] == pytest.approx(0.5)
    share = summary["special_share"]
    special, first, hidden = summary.measured["notes"]
    assert share > 0.8 and special.startswith(f"{share:.2%} of the aggregated attention is on special tokens")
    assert first.startswith(f"{summary['first_token_share']:.2%} of the aggregated attention is on the first")
    values = f"({summary['mrta']:.2g} against 0.17), but not among words ({summary['mrta_among_words']:.2g}"
    assert hidden.startswith(f"MRTA is below its null {values} against 0.25)")


def test_among_words_is_the_share_of_words_for_every_score(measured):
    everything, words = (
        measured("all", passes=Passes(by_layer=True)),
        measured("words", passes=Passes(by_layer=True)),
    )
    for one, other in zip(everything.importance, words.importance, strict=True):
        rankable = np.arange(len(one)) > 0
        assert other == pytest.approx(np.where(rankable, one, 0) / one[rankable].sum())
    summary = words.summary()
    assert summary["mrta"] == pytest.approx(everything.summary()["mrta_among_words"])
    assert summary.null["mrta"] == pytest.approx(everything.summary().null["mrta_among_words"])
    assert summary["mrta"] == pytest.approx(summary["mrta_among_words"]) and summary["special_share"] == 0
    # Permuted and sharp attention stay among words, and so does every layer.
    uniform = np.mean([x.relevance.sum() / x.rankable.sum() for x in words.instances if x.relevant])
    assert summary.null["mrta"] == pytest.approx(uniform)
    assert summary.stronger_nulls["permuted"]["mrta"] == pytest.approx(uniform)
    assert summary.layers["1"]["null"]["mrta"] == pytest.approx(uniform)
    assert words.settings["aggregation"]["among"] == "words" and list(words.rankings) == ["mean/words"]


def test_without_special_tokens_nothing_changes(small_model, some_instances):
    instances = [replace(x, rankable=np.ones(len(x.tokens), dtype=bool)) for x in some_instances()]
    measurement = measure(small_model(), instances, removal=NOTHING_REMOVED)
    summary = measurement.summary()
    assert summary["mrta_among_words"] == pytest.approx(summary["mrta"])
    assert not any("special" in note for note in measurement.notes)


def test_the_first_token_of_a_causal_model_is_not_among_the_words(small_model, some_instances):
    """Attention sinks gather there; it can still be ranked and removed. A text of one word keeps its word."""
    every = [replace(x, rankable=np.ones(len(x.tokens), dtype=bool)) for x in some_instances()]
    single = Instance(every[0].tokens[:1], np.ones(1, bool), np.ones(1), label=0)
    how = Aggregation("mean", among="words")
    words = measure(small_model(causal=True), [*every, single], aggregation=how, removal=NOTHING_REMOVED)
    for importance in words.importance[:-1]:
        assert importance[0] == 0 and importance.sum() == pytest.approx(1)
    assert words.importance[-1].tolist() == [1]
    assert words.columns["null_mass"][0] == pytest.approx(every[0].relevance[1:].mean())
    relevant_first = replace(every[0], relevance=np.eye(1, len(every[0].tokens))[0])
    lost = measure(small_model(causal=True), [relevant_first], aggregation=how, removal=NOTHING_REMOVED)
    assert any("in 1 of 1 instances the first token is relevant" in note for note in lost.notes)


def test_rounding_is_no_disagreement_between_mrta_and_mrta_among_words(small_model, some_instances):
    found = measure(small_model(), some_instances())
    for sign in (1e-6, 1e-2):
        columns = dict(found.columns)
        for name in ("mass", "mrta_among_words"):
            columns[name] = columns[f"null_{name}"] + sign
            sign = -sign
        said = any("but not among words" in note for note in replace(found, columns=columns).notes)
        assert said == (abs(sign) > 1e-4)


def test_layers_of_uniform_attention_among_words_have_the_entropy_of_their_null(small_model, some_instances):
    model, words = small_model(), Aggregation("mean", among="words")
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.q_proj.weight)
        torch.nn.init.zeros_(layer.q_proj.bias)
    found = measure(model, some_instances(), aggregation=words, passes=Passes(by_layer=True))
    for layer in found.layers:
        for name in ("entropy", "mass"):
            assert layer.columns[name] == pytest.approx(layer.columns[f"null_{name}"], abs=1e-6)


def test_unknown_tokens_to_be_among():
    with pytest.raises(InputError, match="unknown among 'letters'; choose from all, words"):
        Aggregation(among="letters")
