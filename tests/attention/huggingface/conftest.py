"""Tiny Hugging Face models and tokenizers, made on the spot."""

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = ["the", "a", "cat", "dog", "sat", "on", "mat", "film", "was", "good", "bad", "fine", "very", "not"]
SIZE = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}


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
