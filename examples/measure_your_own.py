"""Train a plain PyTorch transformer and measure how much it attends to the relevant tokens.

Any `nn.Module` that returns class logits can be measured: its attention is captured without a
change to the model. It runs in seconds.

    python examples/measure_your_own.py --qk-ratio 10
"""

import argparse

import numpy as np
import torch
from torch import nn

import fasterqk
from fasterqk.attention import Instance, Nulls, Removal, TorchClassifier, measure

VOCABULARY, STEPS = 40, 300


class Reader(nn.Module):
    """Embedding, one encoder layer, and a head on the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, tokens: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=~visible)[:, 0])


def make_instance(generator: np.random.Generator) -> Instance:
    """Token 1, then 8 to 16 words, three of which (10..14 or 15..19) decide the label."""
    length = int(generator.integers(9, 18))
    tokens = generator.integers(20, VOCABULARY, length)
    label = int(generator.integers(2))
    telling = 1 + generator.permutation(length - 1)[:3]
    tokens[0], tokens[telling] = 1, 10 + 5 * label + generator.integers(5, size=3)
    relevance = np.isin(np.arange(length), telling).astype(float)
    return Instance(tokens, rankable=np.arange(length) > 0, relevance=relevance, label=label)


def train(model: Reader, qk_ratio: float, generator: np.random.Generator) -> float:
    """Train for a few hundred steps; returns the last loss."""
    optimizer = fasterqk.make_optimizer(model, torch.optim.AdamW, lr=5e-4, qk_ratio=qk_ratio)
    for _ in range(STEPS):
        drawn = [make_instance(generator) for _ in range(64)]
        tokens = nn.utils.rnn.pad_sequence([torch.from_numpy(x.tokens) for x in drawn], batch_first=True)
        labels = torch.tensor([x.label for x in drawn])
        loss = nn.functional.cross_entropy(model(tokens, tokens > 0), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="train a small transformer and measure its attention")
    parser.add_argument("--qk-ratio", type=float, default=10.0)
    ratio = parser.parse_args().qk_ratio
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    model = Reader()
    print(f"loss {train(model, ratio, generator):.4f} with qk_ratio {ratio:g}")

    measurement = measure(
        TorchClassifier(model, classes=("first", "second"), embedding=model.embedding),
        [make_instance(generator) for _ in range(500)],
        aggregation="last",  # one layer: its own attention, without the residual stream
        removal=Removal(percents=(20,)),
        nulls=Nulls(seed=generator),
    )
    result = measurement.summary()
    print(f"accuracy {result['accuracy']:.3f}")
    for name in ("mrta", "ac"):
        print(f"{name} {result[name]:.3f}, uniform attention {result.null[name]:.3f}")
    for name in ("sufficiency_20", "comprehensiveness_20"):
        print(f"{name} {result[name]:.3f}, random ranking {result.null[name]:.3f}")


if __name__ == "__main__":
    main()
