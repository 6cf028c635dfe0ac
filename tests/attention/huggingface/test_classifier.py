"""Sequence classifiers: where they read, and that batches change nothing."""

import numpy as np
import pytest
import torch
import transformers

from fasterqk.attention import Instance, Removal, collate, measure
from fasterqk.attention._models import HuggingFaceClassifier
from fasterqk.errors import InputError

ENCODERS = [
    ("BertForSequenceClassification", "BertConfig"),
    ("RobertaForSequenceClassification", "RobertaConfig"),
]
DECODERS = [
    ("GPT2ForSequenceClassification", "GPT2Config"),
    ("LlamaForSequenceClassification", "LlamaConfig"),
]


def instances(count=5, seed=0):
    generator = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = int(generator.integers(3, 12))
        special = np.arange(length) == 0
        relevance = (np.arange(length) == 1) * 1.0
        tokens = generator.integers(2, 40, length)
        made.append(Instance(tokens, ~special, relevance, label=int(generator.integers(2)), id=str(number)))
    return made


@pytest.mark.parametrize(("head", "config"), ENCODERS)
def test_encoders_read_their_first_token(make_model, head, config):
    assert HuggingFaceClassifier(make_model(head, config)).reads == "first"


@pytest.mark.parametrize(("head", "config"), DECODERS)
def test_decoders_read_their_last_token(make_model, head, config):
    model = make_model(head, config)
    assert HuggingFaceClassifier(model).reads == "last"


@pytest.mark.parametrize(("head", "config"), [ENCODERS[0], *DECODERS])
@pytest.mark.parametrize("removal", [Removal(), Removal("attention")])
def test_batched_equals_single_on_both_sides(make_model, head, config, removal):
    model = HuggingFaceClassifier(make_model(head, config))
    data = instances()
    options = {"percents": [10, 50], "removal": removal}
    single = measure(model, data, generator=np.random.default_rng(0), batch_size=1, **options)
    for side in ("right", "left"):
        batched = measure(model, data, generator=np.random.default_rng(0), batch_size=5, side=side, **options)
        for name in ("mass", "null_mass", "probability", "correct", "entropy", "first_token_share"):
            assert batched.columns[name] == pytest.approx(single.columns[name], abs=1e-6), name
        for scores, others in (
            (single.faithfulness, batched.faithfulness),
            (single.random_faithfulness, batched.random_faithfulness),
        ):
            assert others.sufficiency == pytest.approx(scores.sufficiency, abs=1e-6)
            assert others.comprehensiveness == pytest.approx(scores.comprehensiveness, abs=1e-6)


@pytest.mark.parametrize(("head", "config"), [ENCODERS[0], *DECODERS])
@pytest.mark.parametrize("side", ["right", "left"])
def test_read_rows_are_those_of_the_whole(make_model, head, config, side):
    model, batch = HuggingFaceClassifier(make_model(head, config)), collate(instances(), side)
    whole, rows = model.read(batch), model.read(batch, read_only=True)
    read = whole.read
    assert torch.equal(read, rows.read)
    for layer, row in zip(whole.layers, rows.layers, strict=True):
        torch.testing.assert_close(row, layer[torch.arange(len(read)), :, read].unsqueeze(2), rtol=0, atol=0)


@pytest.mark.parametrize(("head", "config"), [*ENCODERS, *DECODERS])
def test_probabilities_are_the_models_own(make_model, head, config):
    own = make_model(head, config, pad_token_id=1)
    model = HuggingFaceClassifier(own)
    (instance,) = instances(1)
    with torch.no_grad():
        expected = own(input_ids=torch.tensor([instance.tokens.tolist()])).logits.softmax(-1)
    assert model.predict(collate([instance]))[0] == pytest.approx(expected[0].numpy(), abs=1e-6)
    answer = model.read(collate([instance])).answer
    assert answer.probability[0] == pytest.approx(float(expected[0, instance.label]), abs=1e-6)
    assert answer.correct[0] == (int(expected.argmax()) == instance.label)


def test_a_text_that_ends_in_the_padding_id_is_read_at_its_end(make_model):
    own = make_model("GPT2ForSequenceClassification", "GPT2Config", pad_token_id=7)
    one = Instance(np.array([5, 6, 7]), np.ones(3, bool), np.ones(3), label=0)
    longer = Instance(np.array([5, 6, 7, 8, 9]), np.ones(5, bool), np.ones(5), label=0)
    with torch.no_grad():
        hidden = own.transformer(torch.tensor([[5, 6, 7]])).last_hidden_state
        expected = own.score(hidden[0, -1]).softmax(-1).numpy()
    batch = collate([one, longer])
    assert HuggingFaceClassifier(own).predict(batch)[0] == pytest.approx(expected, abs=1e-6)
    assert own.config.pad_token_id == 7


def test_a_vocabulary_in_which_every_token_ends_some_text(make_model):
    own = make_model("GPT2ForSequenceClassification", "GPT2Config", vocab_size=3, pad_token_id=0)
    model = HuggingFaceClassifier(own)
    data = [Instance(np.array(x), np.ones(len(x), bool), np.ones(len(x))) for x in ([1, 0], [1], [2, 2, 2])]
    together = model.predict(collate(data))
    for row, instance in enumerate(data):
        assert together[row] == pytest.approx(model.predict(collate([instance]))[0], abs=1e-6)


def test_no_padding_id_is_needed_and_the_configuration_is_put_back(make_model):
    own = make_model("GPT2ForSequenceClassification", "GPT2Config", pad_token_id=None)
    assert HuggingFaceClassifier(own).predict(collate(instances())).shape == (5, 2)
    assert own.config.pad_token_id is None


def test_gradient_times_input_is_the_gradient(make_model):
    own = make_model("BertForSequenceClassification", "BertConfig")
    (instance,) = instances(1)
    tokens = torch.tensor([instance.tokens.tolist()])
    embedded = own.get_input_embeddings()(tokens).detach().requires_grad_()
    own(inputs_embeds=embedded).logits.log_softmax(-1).amax().backward()
    expected = (embedded.grad * embedded).sum(-1)[0].detach().numpy()
    for parameter in own.parameters():
        parameter.requires_grad_(False)
    found = HuggingFaceClassifier(own).gradient_times_input(collate([instance]))
    assert found[0] == pytest.approx(expected, abs=1e-5)


def test_gradient_times_input_knows_padding_on_the_left(make_model):
    model = HuggingFaceClassifier(make_model("BertForSequenceClassification", "BertConfig"))
    right, left = (collate(instances(3), side) for side in ("right", "left"))
    one, other = model.gradient_times_input(right), model.gradient_times_input(left)
    for row in range(3):
        assert other[row][left.real[row]] == pytest.approx(one[row][right.real[row]], abs=1e-5)


def test_heads_that_cannot_be_measured_are_refused(make_model):
    with pytest.raises(InputError, match="only classifiers"):
        HuggingFaceClassifier(make_model("BertForSequenceClassification", "BertConfig", num_labels=1))
    several = {"problem_type": "multi_label_classification"}
    with pytest.raises(InputError, match="multi_label"):
        HuggingFaceClassifier(make_model("BertForSequenceClassification", "BertConfig", **several))
    pooling = {"classifier_pooling": "mean", "pad_token_id": 0}
    with pytest.raises(InputError, match="no row of attention that makes the prediction"):
        HuggingFaceClassifier(
            make_model("ModernBertForSequenceClassification", "ModernBertConfig", **pooling)
        )
    xlnet = transformers.XLNetConfig(vocab_size=40, d_model=16, n_layer=1, n_head=2, d_inner=16)
    with pytest.raises(InputError, match="XLNetForSequenceClassification does not show the hidden states"):
        HuggingFaceClassifier(transformers.XLNetForSequenceClassification(xlnet))
