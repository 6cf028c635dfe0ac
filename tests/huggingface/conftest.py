"""Tiny real models and data that every integration trains."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

VOCABULARY, LENGTH = 20, 8


@pytest.fixture
def gpt2():
    """A causal model whose queries, keys and values are one weight."""

    def make(seed=0, dropout=0.0):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_layer=2,
                n_head=2,
                n_embd=16,
                n_positions=LENGTH,
                bos_token_id=0,
                eos_token_id=1,
                attn_pdrop=dropout,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
            )
        )

    return make


@pytest.fixture
def bert():
    """A classifier whose projections are separate."""

    def make(seed=0):
        torch.manual_seed(seed)
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=VOCABULARY,
                num_hidden_layers=2,
                num_attention_heads=2,
                hidden_size=16,
                intermediate_size=24,
                max_position_embeddings=LENGTH,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )

    return make


@pytest.fixture
def texts():
    """Examples for a causal model: token ids that are their own labels."""
    ids = torch.randint(0, VOCABULARY, (64, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]
