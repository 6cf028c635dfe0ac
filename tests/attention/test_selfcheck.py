"""What is checked before a model is measured: an error, or a note in the header."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from fasterqk.attention import (
    HuggingFaceClassifier,
    Instance,
    Nulls,
    Passes,
    Removal,
    TorchClassifier,
    measure,
)
from fasterqk.errors import InputError
from fasterqk.trace import capture

KEY_VALUE = {"num_key_value_heads": 2, "num_hidden_layers": 4}
HYBRIDS = {
    "Qwen3Next": KEY_VALUE
    | {"head_dim": 8, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    | {"linear_value_head_dim": 8, "num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]},
    "Jamba": {"num_key_value_heads": 2, "num_hidden_layers": 3, "attn_layer_period": 3, "num_experts": 1}
    | {"attn_layer_offset": 1, "expert_layer_period": 5, "expert_layer_offset": 4, "mamba_d_state": 4}
    | {"mamba_d_conv": 2, "mamba_expand": 2, "mamba_dt_rank": 2, "use_mamba_kernels": False},
    "Lfm2": KEY_VALUE
    | {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_multiple_of": 8},
    "FalconH1": KEY_VALUE
    | {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
    | {"mamba_d_conv": 2, "mamba_expand": 1, "mamba_chunk_size": 4},
}
OUTSIDE = {
    "Qwen3Next": "Qwen3NextDecoderLayer (model.layers.0, model.layers.1, model.layers.2)",
    "Jamba": "JambaMambaDecoderLayer (model.layers.0, model.layers.2)",
    "Lfm2": "Lfm2DecoderLayer (model.layers.0, model.layers.2)",
    "FalconH1": "FalconH1Mixer (model.layers.0.mamba, model.layers.1.mamba, model.layers.2.mamba, ...)",
}


def texts(target=None, lengths=(4, 9, 7)):
    generator = np.random.default_rng(0)
    label = 0 if target is None else None
    return [
        Instance(generator.integers(3, 40, n), np.ones(n, bool), (np.arange(n) == 2) * 1.0, label, target)
        for n in lengths
    ]


def quickly(model, instances, **options):
    return measure(model, instances, removal=Removal(percents=(50,)), nulls=Nulls(draws=0), **options)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_says_where_tokens_mix_without_attention(make_model, name):
    model = make_model(f"{name}ForCausalLM", f"{name}Config", **HYBRIDS[name])
    (note,) = quickly(model, texts(np.array([5, 6]))).settings["notes"]
    assert note.startswith(f"tokens also reach each other without attention, through {OUTSIDE[name]};")


@pytest.mark.parametrize(
    ("head", "config", "more"),
    [
        ("BertForSequenceClassification", "BertConfig", {}),
        ("AlbertForSequenceClassification", "AlbertConfig", {"embedding_size": 8}),
        ("GPT2ForSequenceClassification", "GPT2Config", {}),
        ("MixtralForSequenceClassification", "MixtralConfig", {"num_key_value_heads": 1}),
    ],
)
def test_a_transformer_needs_no_note(make_model, head, config, more):
    assert quickly(make_model(head, config, **more), texts()).settings["notes"] == []


def test_another_kernel_answers_for_attention_alone(make_model):
    """ALiBi of Falcon is scaled in one kernel and not in the other."""
    options = {"alibi": True, "new_decoder_architecture": False, "multi_query": False, "parallel_attn": False}
    own = make_model("FalconForSequenceClassification", "FalconConfig", num_hidden_layers=4, **options)
    measurement = quickly(own, texts())
    with torch.no_grad():
        alone = [own(input_ids=torch.tensor(x.tokens[None])).logits for x in measurement.instances]
    assert measurement.faithfulness.whole == pytest.approx(torch.cat(alone).softmax(-1).numpy(), abs=1e-5)
    (note,) = measurement.settings["notes"]
    assert "the kernel that shows attention changes probabilities by up to" in note


def test_a_model_in_training_is_measured_in_evaluation_mode_and_given_back(make_model):
    own = make_model("BertForSequenceClassification", "BertConfig", hidden_dropout_prob=0.5)
    expected = quickly(own, texts()).summary()
    wrapped = HuggingFaceClassifier(own)
    assert not own.training
    own.train()
    own.bert.encoder.layer[0].eval()  # a part that its owner has frozen
    assert quickly(wrapped, texts()).summary() == expected
    assert own.training and own.dropout.training and not own.bert.encoder.layer[0].training
    HuggingFaceClassifier(own)
    assert own.training


def test_differential_attention_is_seen_once(make_model):
    own = make_model("DiffLlamaForCausalLM", "DiffLlamaConfig", **KEY_VALUE)
    measurement = quickly(own, texts(np.array([5])), aggregation="layer:3")
    assert measurement.settings["notes"] == []
    with pytest.raises(InputError, match="the model has 4 layers of attention; layer 4 was asked for"):
        quickly(own, texts(np.array([5])), aggregation="layer:4")


class Pooling(nn.Module):
    """One layer of attention, then the first token, the last or the mean of all."""

    def __init__(self, reads, batch_first=True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.head, self.reads, self.batch_first = nn.Linear(8, 2), reads, batch_first

    def forward(self, tokens, visible):
        states = self.embedding(tokens)
        states = states if self.batch_first else states.transpose(0, 1)
        states = self.attention(states, states, states, key_padding_mask=~visible)[0]
        states = states if self.batch_first else states.transpose(0, 1)
        last = visible.shape[1] - 1 - visible.flip(1).int().argmax(1)
        rows = {"first": states[:, 0], "last": states[torch.arange(len(states)), last]}
        mean = (states * visible.unsqueeze(2)).sum(1) / visible.sum(1, keepdim=True)
        return self.head(rows.get(self.reads, mean))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("reads", ["first", "last"])
def test_the_read_position_of_any_classifier_is_found_and_checked(reads, batch_first):
    own = Pooling(reads, batch_first)
    found, given = TorchClassifier(own, classes="ab"), TorchClassifier(own, classes="ab", read=reads)
    assert quickly(found, texts()).summary() == quickly(given, texts()).summary()
    assert found.reads == reads
    other = "last" if reads == "first" else "first"
    with pytest.raises(InputError, match=f"Pooling predicts from its {reads} token, not from read='{other}'"):
        quickly(TorchClassifier(own, classes="ab", read=other), texts())


def test_an_unknown_position_is_one_line():
    with pytest.raises(InputError, match="read is 'middle'; choose from first, last, mean"):
        TorchClassifier(Pooling("mean"), classes="ab", read="middle")


def test_a_classifier_that_averages_is_read_at_all_tokens():
    """With one layer and no residual, the row is the plain mean of all rows, and the null is uniform."""
    own = Pooling("mean").double()
    with pytest.raises(InputError, match=r"Pooling predicts from all its tokens; .* read='mean'\)"):
        quickly(TorchClassifier(own, classes="ab"), texts())
    with pytest.raises(InputError, match="if it averages over them, measure TorchClassifier"):
        quickly(TorchClassifier(own, classes="ab", read="first"), texts())
    with pytest.raises(InputError, match="predicts from its first token, not from read='mean'"):
        quickly(TorchClassifier(Pooling("first"), classes="ab", read="mean"), texts())
    options = {"aggregation": "last", "scores": ["leave_one_out", "layer:0/head:1"], "removal": "attention"}
    found = measure(TorchClassifier(own, classes="ab", read="mean"), texts(), **options)
    for number, text in enumerate(texts()):
        tokens = torch.tensor(text.tokens[None])
        (heads,) = capture(own, (tokens, tokens > 0))
        row = heads[0].mean((0, 1)).numpy()
        assert found.importance[number] == pytest.approx(row, abs=1e-6)
        assert found.columns["mass"][number] == pytest.approx(row @ text.relevance, abs=1e-6)
        assert found.columns["null_mass"][number] == pytest.approx(text.relevance.mean(), abs=1e-6)
        assert found.columns["entropy"][number] == pytest.approx(-(row * np.log(row)).sum(), abs=1e-5)
        second = found.rankings["layer:0/head:1"].importance[number]
        assert second == pytest.approx(heads[0, 1].mean(0).numpy(), abs=1e-6)
    alone = measure(
        TorchClassifier(own, classes="ab", read="mean"), texts(), **options, passes=Passes(batch_size=1)
    )
    assert alone.summary().scores == pytest.approx(found.summary().scores, abs=1e-5)
    rollout = quickly(TorchClassifier(own, classes="ab", read="mean"), texts(), passes=Passes(by_layer=True))
    half = [(row + 1 / len(row)) / 2 for row in found.importance]
    for ours, theirs in zip(rollout.importance, half, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    for name in ("mass", "null_mass"):
        assert rollout.layers[0].columns[name] == pytest.approx(found.columns[name])


class Largest(Pooling):
    """The largest of each feature over all tokens but the first."""

    def forward(self, tokens, visible):
        states = self.embedding(tokens)
        states = self.attention(states, states, states, key_padding_mask=~visible)[0]
        return self.head(states[:, 1:].masked_fill(~visible[:, 1:, None], -9).amax(1))


def test_a_classifier_that_pools_otherwise_is_refused():
    with pytest.raises(InputError, match="Largest predicts neither from its first or last token nor from"):
        quickly(TorchClassifier(Largest("mean"), classes="ab", read="mean"), texts())


class Weighted(transformers.BertForSequenceClassification):
    """Reads all tokens, the later ones more."""

    def forward(self, input_ids, **inputs):
        inputs["output_hidden_states"] = True
        outputs = super().forward(input_ids, **inputs)
        weights = torch.linspace(1, 2, input_ids.shape[1])
        outputs.logits = self.classifier((outputs.hidden_states[-1] * weights[:, None]).mean(1))
        return outputs


def test_a_model_of_transformers_that_averages_unevenly_is_refused(make_model):
    own = make_model("BertForSequenceClassification", "BertConfig")
    own.__class__ = Weighted
    with pytest.raises(InputError, match="Weighted predicts neither from its first or last token nor from"):
        HuggingFaceClassifier(own)


class Moving(Pooling):
    """Reads every text from its end, or puts the padding first."""

    def forward(self, tokens, visible):
        length = visible.sum(1, keepdim=True)
        place = torch.arange(tokens.shape[1])
        place = length - 1 - place if self.reads == "first" else place - (len(tokens[0]) - length)
        moved = tokens.gather(1, place % tokens.shape[1])
        return super().forward(moved, visible if self.reads == "first" else visible.flip(1))


@pytest.mark.parametrize("reads", ["first", "mean"])
def test_a_model_that_moves_its_tokens_is_refused(reads):
    given = {"read": "mean"} if reads == "mean" else {}
    with pytest.raises(
        InputError,
        match=r"Moving moves tokens: another token at place \d changes what attention reads at place \d",
    ):
        quickly(TorchClassifier(Moving(reads), classes="ab", **given), texts())


class Restless(Pooling):
    """Dropout that nobody switches off."""

    def forward(self, tokens, visible):
        return nn.functional.dropout(super().forward(tokens, visible), 0.5, training=True)


def test_a_model_that_answers_by_chance_is_refused():
    with pytest.raises(
        InputError, match=r"the same texts predicted twice differ by .* switch off what is random"
    ):
        quickly(TorchClassifier(Restless("first"), classes="ab"), texts())


class Rationed(Pooling):
    """Experts that take half of the tokens of a batch, whichever text they belong to."""

    def forward(self, tokens, visible):
        states = self.embedding(tokens)
        gate = states[..., 0].flatten()
        taken = gate >= gate.topk(max(1, len(gate) // 2)).values[-1]
        states = states * (1 + taken.view_as(tokens).unsqueeze(2))
        return self.head(self.attention(states, states, states, key_padding_mask=~visible)[0][:, 0])


class Recurrent(Pooling):
    """A recurrent layer that runs backwards, and so from the padding into the text."""

    def __init__(self, reads):
        super().__init__(reads)
        self.recurrent = nn.GRU(8, 4, batch_first=True, bidirectional=True)

    def forward(self, tokens, visible):
        states = self.recurrent(self.embedding(tokens))[0]
        return self.head(self.attention(states, states, states, key_padding_mask=~visible)[0][:, 0])


@pytest.mark.parametrize("kind", [Rationed, Recurrent])
def test_any_classifier_whose_texts_change_each_other_runs_text_by_text(kind):
    module, instances = kind("first").double().eval(), texts(lengths=(3, 5, 9, 4, 7, 6, 8, 10))
    measurement = quickly(TorchClassifier(module, classes="ab"), instances)
    assert "every text is run by itself" in measurement.settings["notes"][0]
    for instance, probability in zip(instances, measurement.columns["probability"], strict=True):
        tokens = torch.tensor(instance.tokens[None])
        alone = module(tokens, tokens == tokens).softmax(-1)[0, 0]
        assert probability == pytest.approx(alone.item(), abs=1e-12)


class Reversed(transformers.BertForSequenceClassification):
    """Answers otherwise for a padded batch."""

    def forward(self, input_ids, **inputs):
        outputs = super().forward(input_ids, **inputs)
        outputs.logits = outputs.logits if len(input_ids) == 1 else -outputs.logits
        return outputs


def test_a_model_that_answers_otherwise_in_a_batch_runs_text_by_text(make_model):
    own = make_model("BertForSequenceClassification", "BertConfig")
    expected = quickly(own, texts(), passes=Passes(batch_size=1)).summary()
    own.__class__ = Reversed
    measurement = quickly(HuggingFaceClassifier(own), texts())
    assert "every text is run by itself" in measurement.settings["notes"][0]
    assert measurement.summary().scores == expected.scores


def test_a_window_in_double_precision_survives_padding(make_model):
    """Mistral's softmax is in single precision, where the smallest double is minus infinity."""
    options = {**KEY_VALUE, "sliding_window": 3}
    own = make_model("MistralForSequenceClassification", "MistralConfig", **options)
    single, double = (quickly(model, texts()).summary() for model in (own, own.double()))
    assert double.scores == pytest.approx(single.scores, abs=1e-4)


def test_a_window_that_is_hidden_as_a_whole_keeps_a_token(make_model):
    """What a row that sees nothing answers depends on the kernel."""
    own = make_model("MistralForSequenceClassification", "MistralConfig", **KEY_VALUE, sliding_window=3)
    measured = []
    for kernel in ("eager", "sdpa"):
        own.set_attn_implementation(kernel)
        measured.append(measure(own, texts(), removal="attention", scores="leave_one_out"))
    first, second = measured
    assert first.faithfulness.comprehensiveness == pytest.approx(
        second.faithfulness.comprehensiveness, abs=1e-5
    )
    for one, other in zip(*(x.rankings["leave_one_out"].importance for x in measured), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_regression_heads_are_refused(make_model):
    own = make_model("BertForSequenceClassification", "BertConfig", problem_type="regression")
    with pytest.raises(
        InputError, match=r"2 label\(s\) and problem type 'regression' gives no probabilities"
    ):
        quickly(own, texts())
