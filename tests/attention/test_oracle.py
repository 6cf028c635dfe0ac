"""``measure`` against plain loops that share no code with it, on models with every kind of mask."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from fasterqk.attention import Instance, Nulls, Removal, TorchClassifier, measure

GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
WINDOW = {**GROUPED, "sliding_window": 4}
CHUNKS = {**GROUPED, "attention_chunk_size": 4, "num_hidden_layers": 4}
CHUNKS |= {"num_local_experts": 2, "head_dim": 8, "intermediate_size_mlp": 24}
MAMBA = {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}


def everything(layer, query, key):
    return True


def causal(layer, query, key):
    return key <= query


def window_of_4(layer, query, key):
    return query - 4 < key <= query


def chunks_of_4(layer, query, key):
    return key <= query and (layer == 3 or query // 4 == key // 4)


# Model, configuration, what a query may see in a layer, whether the last token is read, and the padding id.
MODELS = {
    "bert": ("BertForSequenceClassification", "BertConfig", {}, everything, False),
    "gpt2": ("GPT2ForSequenceClassification", "GPT2Config", {"pad_token_id": 0}, causal, True),
    "mistral": (
        "MistralForSequenceClassification",
        "MistralConfig",
        {**GROUPED, "sliding_window": 4},
        window_of_4,
        True,
    ),
    "llama, pad = eos": (
        "LlamaForSequenceClassification",
        "LlamaConfig",
        {**GROUPED, "pad_token_id": 3, "eos_token_id": 3},
        causal,
        True,
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        CHUNKS,
        chunks_of_4,
        True,
    ),
    "jamba": ("JambaForSequenceClassification", "JambaConfig", {**GROUPED, **MAMBA}, causal, True),
}


def run(model, tokens, target):
    """The model on one text, without padding: its attention as nested lists, and p of every outcome."""
    ids = [*tokens, *target]
    with torch.no_grad():
        outputs = model(torch.tensor([ids]), output_attentions=True)
    attention = [layer[0].double().tolist() for layer in outputs.attentions if layer is not None]
    if not target:
        return attention, outputs.logits[0].double().softmax(-1).tolist()
    rows = outputs.logits[0].double().softmax(-1)
    steps = [float(rows[len(tokens) - 1 + step, token]) for step, token in enumerate(target)]
    return attention, [sum(steps) / len(steps)]


def read_place(model, tokens, last):
    """Where transformers reads: the first token, or the last one that is not padding."""
    if not last:
        return 0
    pad = model.config.pad_token_id
    return max((place for place, token in enumerate(tokens) if token != pad), default=0)


def rolled_out(matrices, read, count):
    row = [float(place == read) for place in range(count)]
    for matrix in reversed(matrices):
        passed = [sum(row[i] * matrix[i][j] for i in range(count)) for j in range(count)]
        row = [0.5 * a + 0.5 * b for a, b in zip(passed, row, strict=True)]
    return row


def averaged(matrices, read, count):
    return [sum(matrix[read][j] for matrix in matrices) / len(matrices) for j in range(count)]


def oracle(model, instance, see, last, aggregated, percent=20):
    tokens = instance.tokens.tolist()
    target = [] if instance.target is None else instance.target.tolist()
    attention, outcomes = run(model, tokens, target)
    count, read = len(tokens), read_place(model, tokens, last)
    heads = [
        [[sum(head[i][j] for head in layer) / len(layer) for j in range(count)] for i in range(count)]
        for layer in attention
    ]
    uniform = []
    for layer in range(len(attention)):
        seen = [[float(see(layer, i, j)) for j in range(count)] for i in range(count)]
        uniform.append([[weight / sum(row) for weight in row] for row in seen])
    row, null = aggregated(heads, read, count), aggregated(uniform, read, count)
    chosen = max(range(len(outcomes)), key=lambda place: outcomes[place])
    ranked = sorted(range(count), key=lambda place: (-row[place], place))
    top = set(ranked[: math.ceil(percent * count / 100)])
    rest = [token for place, token in enumerate(tokens) if place not in top]
    kept = [token for place, token in enumerate(tokens) if place in top]
    return {
        "mass": sum(a * b for a, b in zip(row, instance.relevance.tolist(), strict=True)),
        "null_mass": sum(a * b for a, b in zip(null, instance.relevance.tolist(), strict=True)),
        "entropy": -sum(a * math.log(a) for a in row if a > 0),
        "comprehensiveness": outcomes[chosen] - run(model, rest, target)[1][chosen],
        "sufficiency": outcomes[chosen] - run(model, kept, target)[1][chosen],
    }


def texts(target):
    generator = np.random.default_rng(5)
    instances = []
    for number, length in enumerate((5, 9, 14, 7, 12)):
        tokens = generator.integers(4, 40, length)
        tokens[-1] = 3 if number % 2 else tokens[-1]
        relevance = (generator.random(length) < 0.4) * 1.0
        answer = {"target": np.array([7, 8])} if target else {"label": number % 2}
        instances.append(Instance(tokens, np.ones(length, bool), relevance, id=str(number), **answer))
    return instances


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("aggregation", ["rollout", "mean"])
def test_scores_are_those_of_plain_loops(make_model, name, aggregation):
    head, config, options, see, last = MODELS[name]
    model = make_model(head, config, **options)
    instances = texts(target=head.endswith("CausalLM"))
    measurement = measure(
        model, instances, aggregation=aggregation, removal=Removal(percents=(20,)), nulls=Nulls(draws=0)
    )
    assert measurement.settings["mask"] == "of the model"
    model.set_attn_implementation("eager")
    how = {"rollout": rolled_out, "mean": averaged}[aggregation]
    for number, instance in enumerate(instances):
        expected = oracle(model, instance, see, last, how)
        for column in ("mass", "null_mass", "entropy"):
            assert measurement.columns[column][number] == pytest.approx(expected[column], abs=2e-6), column
        for kind in ("comprehensiveness", "sufficiency"):
            values = getattr(measurement.faithfulness, kind)[number]
            assert values == pytest.approx([expected[kind]], abs=2e-5), kind


class Packed(nn.Module):
    """Attention within parts of a text, which token 1 starts; or to a prefix that ends with the first 1."""

    def __init__(self, prefix):
        super().__init__()
        torch.manual_seed(0)
        self.prefix, self.embedding, self.head = prefix, nn.Embedding(40, 8), nn.Linear(8, 2)
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, tokens, visible):
        states, part = self.embedding(tokens), (tokens == 1).cumsum(1)
        mask = part.unsqueeze(1) == part.unsqueeze(2)
        if self.prefix:
            mask = torch.ones_like(mask).tril() | (part == 0).unsqueeze(1)
        scores = self.q_proj(states) @ self.k_proj(states).transpose(1, 2)
        weights = scores.masked_fill(~(mask & visible.unsqueeze(1)), -1e9).softmax(-1)
        last = visible.sum(1) - 1
        return self.head((weights @ states)[torch.arange(len(tokens)), last])


@pytest.mark.parametrize("prefix", [False, True])
def test_a_mask_that_depends_on_the_text_is_that_of_every_text(prefix):
    instances = []
    for number, text in enumerate(([5, 1, 6, 7], [9, 5, 6, 1, 8, 4, 6], [4, 5, 1, 1, 8], [7, 8, 9, 9, 9, 5])):
        relevance = np.array([0.0, 1.0, *[number % 2] * (len(text) - 2)])
        instances.append(
            Instance(np.array(text), np.ones(len(text), bool), relevance, label=0, id=str(number))
        )
    model = TorchClassifier(Packed(prefix), classes=("no", "yes"), read="last")
    measurement = measure(model, instances, aggregation="last", nulls=Nulls(draws=0))
    assert measurement.settings["mask"] == "of the model"
    for instance, null in zip(instances, measurement.columns["null_mass"], strict=True):
        part = np.cumsum(instance.tokens == 1)
        seen = np.ones(len(part), bool) if prefix else part == part[-1]
        assert null == pytest.approx(instance.relevance[seen].mean(), abs=1e-6)
