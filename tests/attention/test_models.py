"""Wrapping any PyTorch classifier, ours among them."""

import numpy as np
import pytest
import torch
from torch import nn

from fasterqk.attention import Batch, Instance, TorchClassifier, collate, measure
from fasterqk.errors import InputError
from fasterqk.lab.models import Classifier, ClassifierConfig


class Encoder(nn.Module):
    """torch's own encoder with a linear head on the first token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 2)

    def forward(self, tokens, visible):
        return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=~visible)[:, 0])


def instances(lengths=(3, 7, 5), seed=0):
    generator = np.random.default_rng(seed)
    return [
        Instance(generator.integers(1, 20, n), np.arange(n) > 0, (np.arange(n) == 2) * 1.0, label=n % 2)
        for n in lengths
    ]


def compare(model, data):
    single, batched = (
        measure(model, data, generator=np.random.default_rng(0), batch_size=size, percents=[20, 50])
        for size in (1, 3)
    )
    for name in ("mass", "null_mass", "probability", "entropy"):
        assert batched.columns[name] == pytest.approx(single.columns[name], abs=1e-6), name
    assert batched.faithfulness.sufficiency == pytest.approx(single.faithfulness.sufficiency, abs=1e-6)


def test_torchs_own_encoder_in_evaluation_mode():
    torch.manual_seed(0)
    model = TorchClassifier(Encoder().train(), classes=("even", "odd"))
    assert not model.model.training
    compare(model, instances())


@pytest.mark.parametrize("layers", [1, 2])
def test_the_papers_classifier_that_computes_its_read_row_alone(layers):
    config = ClassifierConfig(
        vocabulary_size=20, classes=2, layers=layers, width=16, head_width=8, init_scale=0.3
    )
    own = Classifier(config, torch.Generator().manual_seed(0)).double()

    def inputs(batch: Batch):
        return torch.from_numpy(batch.tokens), torch.from_numpy(batch.last)

    model = TorchClassifier(own, classes=("even", "odd"), inputs=inputs, read="last")
    reading = model.read(collate(instances()))
    assert len(reading.layers) == layers
    assert reading.read.tolist() == [2, 6, 4]
    compare(model, instances())


def test_logits_may_be_anywhere_in_the_output():
    class Wrapped(nn.Module):
        def forward(self, tokens, visible):
            return {"scores": torch.tensor([[0.0, 1.0]]).expand(len(tokens), 2)}

    model = TorchClassifier(Wrapped(), classes="ab", logits=lambda outputs: outputs["scores"])
    expected = [1 / (1 + np.e), np.e / (1 + np.e)]
    assert model.predict(collate(instances()))[0] == pytest.approx(expected)


def test_an_embedding_that_is_never_called():
    model = TorchClassifier(Encoder(), classes="ab", embedding=nn.Embedding(2, 2))
    with pytest.raises(InputError, match="was not called"):
        model.gradient_times_input(collate(instances()))
