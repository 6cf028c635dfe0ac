"""Predictions that take the first token alone through the end of an encoder are those of the whole model."""

import numpy as np
import pytest
import torch
from torch import nn

from fasterqk.attention import HuggingFaceClassifier, Nulls, measure
from fasterqk.attention._huggingface import find_first_token_end, first_token_from
from fasterqk.attention.instances import collate

# Where it begins: behind the attention of the last layer.
ENCODERS = {
    "Bert": ({}, "bert.encoder.layer.1.attention.output"),
    "Roberta": ({}, "roberta.encoder.layer.1.attention.output"),
    "Electra": ({"embedding_size": 16}, "electra.encoder.layer.1.attention.output"),
    "DebertaV2": ({}, "deberta.encoder.layer.1.attention.output"),
    "DistilBert": (
        {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
        "distilbert.transformer.layer.1.sa_layer_norm",
    ),
    # Its residual stream is not cut: the sum with one token is right at the first and nowhere else.
    "ModernBert": (
        dict.fromkeys(["pad_token_id", "cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"], 0),
        "model.layers.1.mlp_norm",
    ),
    # All its layers are one module, so that nothing is left out.
    "Albert": ({"embedding_size": 16}, None),
}


def classifier(make_model, name):
    head, config = f"{name}ForSequenceClassification", f"{name}Config"
    return HuggingFaceClassifier(make_model(head, config, num_labels=3, **ENCODERS[name][0]))


@pytest.mark.parametrize("name", ENCODERS)
def test_it_begins_behind_the_last_attention_and_changes_nothing(make_model, some_instances, name):
    model, instances = classifier(make_model, name), some_instances(8)
    model.model.double()
    names = [own for own, module in model.model.named_modules() if module is model._end]
    assert names == ([ENCODERS[name][1]] if ENCODERS[name][1] else [])
    found, read = measure(model, instances, nulls=Nulls(draws=0)), model.read(collate(instances))
    model._end = None
    plain, whole = measure(model, instances, nulls=Nulls(draws=0)), model.read(collate(instances))
    assert found.faithfulness.sufficient == pytest.approx(plain.faithfulness.sufficient, abs=1e-12)
    assert found.faithfulness.comprehensive == pytest.approx(plain.faithfulness.comprehensive, abs=1e-12)
    assert read.answer.outcomes == pytest.approx(whole.answer.outcomes, abs=1e-12)
    for one, other in zip(read.layers, whole.layers, strict=True):
        assert (one == other).all()


def test_less_is_computed_and_no_hook_stays(make_model, some_instances):
    model, batch = classifier(make_model, "Bert"), collate(some_instances(5))
    widths = []
    dense = model.model.bert.encoder.layer[1].intermediate.dense
    with dense.register_forward_pre_hook(lambda module, inputs: widths.append(inputs[0].shape[1])):
        model.predict(batch)
        model.read(batch)
        model.model(**model._keywords(batch))
    assert widths == [1, 1, batch.tokens.shape[1]]


@pytest.mark.parametrize("reason", ["half", "last"])
def test_where_it_cannot_be_told_nothing_is_cut(make_model, reason):
    if reason == "half":
        model = make_model("BertForSequenceClassification", "BertConfig", num_labels=3).bfloat16()
    else:
        model = make_model("GPT2ForSequenceClassification", "GPT2Config", num_labels=3)
    assert HuggingFaceClassifier(model)._end is None


class Mixing(nn.Module):
    """Attention, then a layer that mixes tokens, then two that do not; class scores at the first token."""

    def __init__(self):
        super().__init__()
        self.attention, self.projection = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)
        self.mixer, self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, stream):
        stream = self.projection(self.attention(stream, stream, stream, need_weights=False)[0])
        stream = self.mixer(stream).cumsum(1).flip(1)
        return self.head(self.inner(stream)[:, 0])


def test_tokens_that_are_mixed_behind_the_last_attention():
    torch.manual_seed(0)
    model, stream = Mixing().double().eval(), torch.randn(2, 5, 8, dtype=torch.double)
    with torch.no_grad():
        end = find_first_token_end(model, [model.attention], lambda: model(stream))
        assert end is model.inner
        with first_token_from(end):
            cut = model(stream)
        assert np.allclose(cut, model(stream), atol=1e-12)
        # Without the attention modules nothing says where the last one is.
        assert find_first_token_end(model, [], lambda: model(stream)) is None
