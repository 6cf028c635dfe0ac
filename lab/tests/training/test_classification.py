import dataclasses

import numpy as np
import pytest
import torch

from fasterqk.attention.faithfulness import percent_count
from fasterqk.errors import InputError
from fasterqk.trace import capture
from fasterqk_lab.benchmarks.training import PlainClassifier
from fasterqk_lab.models._classifier import attention_rows
from fasterqk_lab.training._batches import EVALUATION_BATCH
from fasterqk_lab.training._classification import measure_fit, scores_json, summarize_attention
from fasterqk_lab.training._steps import build_trainable


@pytest.fixture
def trainable(config):
    return build_trainable(config.replace(init_scale=1.0))


def single_examples(trainable, split="test"):
    """Every text alone, as token list, with its read position, label and relevance."""
    padded = trainable.splits[split]
    for number in range(len(padded)):
        length = int(padded.lengths[number])
        yield (
            padded.tokens[number, :length].tolist(),
            int(padded.labels[number]),
            padded.relevance[number, :length].numpy(),
        )


def read_alone(plain, tokens, pad=0):
    with torch.no_grad():
        logits = plain(torch.tensor([[*tokens, pad]]), torch.tensor([len(tokens)]))
    return logits.double().softmax(1)[0].numpy()


def row_alone(trainable, tokens, pad=0):
    """The head mean of the read row, worked out by hand from the weights."""
    model = trainable.model
    block = model.blocks[0].attention
    stream = model.embedding(torch.tensor([*tokens, pad])) + model.positions[: len(tokens) + 1]
    rows = []
    for head in range(model.config.heads):
        query = stream[-1] @ block.W_Q[head] + block.b_Q[head]
        keys = stream @ block.W_K[head] + block.b_K[head]
        rows.append((keys @ query / model.config.head_width**0.5).softmax(0))
    return torch.stack(rows).mean(0).detach().numpy()


def test_losses_on_attention_equal_the_hand_worked_ones(config):
    plain = build_trainable(config.replace(init_scale=1.0))
    shown = build_trainable(config.replace(init_scale=1.0, attention_loss=2.0))
    penalised = build_trainable(config.replace(init_scale=1.0, entropy_loss=3.0))
    chosen = torch.arange(6)
    terms, entropies = [], []
    for tokens, _, relevance in list(single_examples(plain, "train"))[:6]:
        row = row_alone(plain, tokens)
        target = relevance / relevance.sum() if relevance.any() else relevance
        terms.append(-(target * np.log(row[:-1])).sum())
        read = torch.tensor([len(tokens)])
        heads = capture(plain.model, {"tokens": torch.tensor([[*tokens, 0]]), "read": read})[0][0, :, 0]
        entropies.append(float(-(heads * heads.log()).sum(1).mean()))
    loss = plain.loss(chosen, 0).item()
    assert shown.loss(chosen, 0).item() == pytest.approx(loss + 2 * np.mean(terms), rel=1e-5)
    assert penalised.loss(chosen, 0).item() == pytest.approx(loss + 3 * np.mean(entropies), rel=1e-5)


@pytest.mark.parametrize("option", ["attention_loss", "entropy_loss"])
def test_losses_on_attention_have_finite_gradients_beside_hidden_positions(config, option):
    trainable = build_trainable(config.replace(init_scale=1.0, **{option: 1.0}))
    chosen = trainable.splits["train"].lengths.argsort()[[0, -1]]  # the shorter text has positions to hide
    trainable.loss(chosen, 0).backward()
    gradients = [p.grad for p in trainable.model.parameters() if p.grad is not None]
    assert gradients and all(bool(gradient.isfinite().all()) for gradient in gradients)
    plain = build_trainable(config.replace(init_scale=1.0))
    plain.loss(chosen, 0).backward()
    queries = (model.blocks[0].attention.W_Q.grad for model in (trainable.model, plain.model))
    assert not torch.allclose(*queries)


def test_losses_on_attention_are_for_one_layer(config):
    with pytest.raises(InputError, match="one layer"):
        build_trainable(config.replace(layers=2, entropy_loss=1.0))


def test_fit_equals_one_text_at_a_time(trainable):
    plain = PlainClassifier(trainable.model)
    answers = [(read_alone(plain, tokens), label) for tokens, label, _ in single_examples(trainable)]
    fit = measure_fit(trainable.model, trainable.splits["test"])
    assert fit["loss"] == pytest.approx(np.mean([-np.log(p[label]) for p, label in answers]), rel=1e-5)
    assert fit["accuracy"] == np.mean([p.argmax() == label for p, label in answers])


def test_mass_and_its_null_equal_the_hand_worked_ones(trainable):
    scores = scores_json(summarize_attention(trainable.model, trainable.splits["test"], (20,)))
    masses, nulls = [], []
    for tokens, _, relevance in single_examples(trainable):
        masses.append(float(row_alone(trainable, tokens)[: len(tokens)] @ relevance))
        nulls.append(relevance.sum() / (len(tokens) + 1))
    assert scores["mrta"] == pytest.approx(np.mean(masses), rel=1e-5)
    assert scores["null"]["mrta"] == pytest.approx(np.mean(nulls), rel=1e-6)
    assert scores["ac"] == pytest.approx(100 * np.mean(np.array(masses) >= 0.5))
    assert np.sum(scores["dtap"]) == pytest.approx(100)


def test_faithfulness_equals_deleting_tokens_by_hand(trainable):
    plain = PlainClassifier(trainable.model)
    k = 40
    sufficiency, comprehensiveness = [], []
    for tokens, _, _ in single_examples(trainable):
        whole = read_alone(plain, tokens)
        row = row_alone(trainable, tokens)[: len(tokens)]
        top = set(np.argsort(-row, kind="stable")[: percent_count(k, len(tokens))].tolist())
        kept = [token for place, token in enumerate(tokens) if place in top]
        rest = [token for place, token in enumerate(tokens) if place not in top]
        sufficiency.append(whole.max() - read_alone(plain, kept)[whole.argmax()])
        comprehensiveness.append(whole.max() - read_alone(plain, rest)[whole.argmax()])
    scores = scores_json(summarize_attention(trainable.model, trainable.splits["test"], (k,)))
    assert scores["sufficiency"][str(k)] == pytest.approx(np.mean(sufficiency), abs=1e-5)
    assert scores["comprehensiveness"][str(k)] == pytest.approx(np.mean(comprehensiveness), abs=1e-5)


def test_uniform_attention_scores_its_own_null(trainable):
    with torch.no_grad():
        trainable.model.blocks[0].attention.W_Q.zero_()
        trainable.model.blocks[0].attention.b_Q.zero_()
    scores = scores_json(summarize_attention(trainable.model, trainable.splits["test"], (20,)))
    for name in ("mrta", "ac", "acmc", "entropy"):
        assert scores[name] == pytest.approx(scores["null"][name], rel=1e-5)


def test_rows_of_deeper_models_are_distributions_over_what_is_seen(config):
    trainable = build_trainable(config.replace(layers=2, init_scale=1.0))
    split = trainable.splits["test"]
    tokens, read, _ = split.batch(torch.arange(len(split)))
    _, rows, null = attention_rows(trainable.model, tokens, read)
    seen = torch.arange(tokens.shape[1]) <= read[:, None]
    assert torch.allclose(rows.sum(1), torch.ones(len(split)), atol=1e-5)
    assert not rows[~seen].any()
    assert torch.allclose(null.sum(1), torch.ones(len(split)), atol=1e-5)


def test_each_layer_of_a_deeper_model_is_scored_by_itself(config):
    trainable = build_trainable(config.replace(layers=2, init_scale=1.0))
    first = trainable.model.blocks[0].attention
    with torch.no_grad():
        first.W_Q.zero_()  # a first layer that does not look anywhere
    split = trainable.splits["test"]
    scores = scores_json(summarize_attention(trainable.model, split, (20,)))
    assert set(scores["layer"]) == {"1", "2"}
    uniform = np.mean([rel.sum() / (len(tokens) + 1) for tokens, _, rel in single_examples(trainable)])
    assert scores["layer"]["1"]["mrta"] == pytest.approx(uniform, rel=1e-5)
    tokens, read, _ = split.batch(torch.arange(len(split)))
    captured = capture(trainable.model, {"tokens": tokens, "read": read, "every_row": True})
    row = captured[1].mean(1)[torch.arange(len(split)), read]
    mass = (row * split.relevance[:, : tokens.shape[1]]).sum(1)
    assert scores["layer"]["2"]["mrta"] == pytest.approx(float(mass.mean()), rel=1e-5)
    for layer in scores["layer"].values():
        assert layer["null"]["mrta"] == pytest.approx(uniform, rel=1e-6)


def test_random_rankings_are_reproducible_and_find_what_chance_finds(trainable):
    train = trainable.splits["train"]
    one, again, other = (
        scores_json(summarize_attention(trainable.model, train, (20,), seed=seed))["null"]
        for seed in (0, 0, 1)
    )
    assert one == again != other
    # One relevant word a text, so that chance is right once in as many texts as there are words.
    chance = np.mean([1 / len(tokens) for tokens, _, _ in single_examples(trainable, "train")])
    assert one["plausibility"]["token_f1"] == pytest.approx(chance, abs=0.1)


def test_without_any_rationale_attention_scores_are_null(trainable):
    split = trainable.splits["test"]
    unrated = dataclasses.replace(split, rated=torch.zeros_like(split.rated))
    scores = scores_json(summarize_attention(trainable.model, unrated, (20,)))
    assert scores["mrta"] is None
    assert scores["dtap"] is None
    assert scores["plausibility"]["auprc"] is None
    assert scores["sufficiency"]["20"] is not None


def test_a_text_of_one_token_that_is_read_at_its_last_can_lose_it(config):
    """What is left then is padding alone, at the first position."""
    trainable = build_trainable(config.replace(read="last", init_scale=1.0))
    whole = trainable.splits["test"]
    split = dataclasses.replace(
        whole,
        tokens=whole.tokens[:, :2] * torch.tensor([1, 0]),
        lengths=torch.ones_like(whole.lengths),
        read=torch.zeros_like(whole.read),
        relevance=torch.tensor([1.0, 0.0]).expand(len(whole), -1),
    )
    scores = scores_json(summarize_attention(trainable.model, split, (100,)))
    plain = PlainClassifier(trainable.model)
    with torch.no_grad():
        one = plain(split.tokens[:, :1], split.read).double().softmax(1)
        none = plain(torch.zeros_like(split.tokens[:, :1]), split.read).double().softmax(1)
    lost = (one - none).gather(1, one.argmax(1, keepdim=True)).mean()
    assert scores["comprehensiveness"]["100"] == pytest.approx(float(lost), abs=1e-6)
    assert scores["sufficiency"]["100"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("layers", [1, 2])
def test_every_text_runs_once_and_then_without_some_tokens(config, layers):
    trainable = build_trainable(config.replace(layers=layers))
    percents = trainable.config.evaluation.rationale_k
    ran = []
    trainable.model.register_forward_hook(lambda *arguments: ran.append(1))

    def batches(name):
        return len(trainable.splits[name].by_length(EVALUATION_BATCH))

    fits = len(trainable.along["train"].by_length(EVALUATION_BATCH)) + batches("validation") + batches("test")
    once = 1 + 2 * len(percents)  # the whole text, and with the top k% alone and without them
    trainable.evaluate()
    # Texts without some tokens are short, so that fewer passes hold them all than one per batch and k.
    assert fits + batches("test") < len(ran) <= fits + once * batches("test")
    ran.clear()
    trainable.results()
    fits = sum(map(batches, trainable.splits)) + batches("test")  # by group
    # At the end random rankings are asked too; before, that took another pass over the whole texts.
    chance = 2 * len(percents) * batches("test")
    whole = batches("validation") + batches("test")
    assert fits + whole < len(ran) <= fits + once * whole + chance
