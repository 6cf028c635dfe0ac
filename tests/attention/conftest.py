"""Small models that hand over their attention, ours and of Hugging Face, with instances and tokenizers."""

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import nn

from fasterqk.attention import Instance, TorchClassifier
from fasterqk.trace import record

VOCABULARY = 30
WORDS = ["the", "a", "cat", "dog", "sat", "on", "mat", "film", "was", "good", "bad", "fine", "very", "not"]
SIZE = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}


class SmallAttention(nn.Module):
    """One head of attention over visible tokens."""

    def __init__(self, width, causal):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.causal = causal

    def forward(self, stream, visible):
        scores = self.q_proj(stream) @ self.k_proj(stream).transpose(1, 2)
        pairs = visible.unsqueeze(1).expand_as(scores)
        pairs = pairs.tril() if self.causal else pairs
        weights = scores.masked_fill(~pairs, torch.finfo(scores.dtype).min).softmax(-1)
        record(self, weights.unsqueeze(1))
        return stream + weights @ self.v_proj(stream)


class SmallClassifier(nn.Module):
    """Embedding, positions (unless it shall not know them), two layers, class scores at one token."""

    def __init__(self, *, causal=False, positions=True, width=8, layers=2, classes=3):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(40, width)) if positions else None
        self.layers = nn.ModuleList(SmallAttention(width, causal) for _ in range(layers))
        self.head = nn.Linear(width, classes)
        self.causal = causal

    def forward(self, tokens, visible, place):
        stream = self.embedding(tokens)
        if self.positions is not None:
            stream = stream + self.positions[place]
        for layer in self.layers:
            stream = layer(stream, visible)
        visible_places = torch.where(visible, torch.arange(tokens.shape[1]), -1)
        last = visible_places.amax(1)
        first = visible.int().argmax(1)
        return self.head(stream[torch.arange(len(tokens)), last if self.causal else first])


def small_inputs(batch):
    """Arguments of SmallClassifier: positions count real tokens, on whichever side the padding is."""
    place = np.maximum(batch.real.cumsum(1) - 1, 0)
    return tuple(torch.from_numpy(x) for x in (batch.tokens, batch.visible, place))


@pytest.fixture
def small_model():
    """A function that makes a wrapped small classifier, in double precision, always the same."""

    def make(*, causal=False, positions=True, layers=2):
        torch.manual_seed(0)
        model = SmallClassifier(causal=causal, positions=positions, layers=layers).double()
        return TorchClassifier(
            model,
            classes=("a", "b", "c"),
            inputs=small_inputs,
            read="last" if causal else "first",
            embedding=model.embedding,
        )

    return make


@pytest.fixture
def some_instances():
    """A function that makes instances of different lengths; the first token is special."""

    def make(count=7, seed=0, label=True):
        generator = np.random.default_rng(seed)
        made = []
        for number in range(count):
            length = int(generator.integers(3, 13))
            rankable = np.arange(length) > 0
            relevance = (generator.random(length) < 0.4) * rankable * 1.0
            made.append(
                Instance(
                    tokens=generator.integers(1, VOCABULARY, length),
                    rankable=rankable,
                    relevance=relevance,
                    label=int(generator.integers(3)) if label else None,
                    pieces=tuple(f"<w{place}>" for place in range(length)),
                    id=str(number),
                )
            )
        return made

    return make


@pytest.fixture(scope="session")
def word_pieces():
    """WordPiece with [CLS] and [SEP], as BERT has it; "cats" and "awful" fall into pieces."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s", "aw", "##ful"]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    )


@pytest.fixture(scope="session")
def bytes_with_blanks():
    """Byte-level tokens as GPT-2 has them: "Ġca" carries the blank before it; no special tokens are added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "Ġc", "Ġca", "Ġcat", "at"]
    merges = [("Ġ", "c"), ("Ġc", "a"), ("a", "t"), ("Ġca", "t")]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="session")
def make_model():
    """A function that makes a tiny model with large random weights, always the same."""

    def make(head, config, **changes):
        torch.manual_seed(0)
        known = {"vocab_size": 40, "max_position_embeddings": 64, "initializer_range": 0.5, **SIZE, **changes}
        return getattr(transformers, head)(getattr(transformers, config)(**known)).eval()

    return make
