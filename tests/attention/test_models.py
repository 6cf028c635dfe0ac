"""Models that are measured: any PyTorch classifier, and those of Hugging Face, opened from folders."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from fasterqk.attention import (
    Aggregation,
    HuggingFaceCausal,
    HuggingFaceClassifier,
    Instance,
    Nulls,
    Passes,
    Removal,
    TorchClassifier,
    load_model,
    measure,
)
from fasterqk.attention._loading import longest_input
from fasterqk.attention.instances import Batch, collate, read_example
from fasterqk.errors import InputError
from fasterqk.trace import record
from fasterqk_lab.models import Classifier, ClassifierConfig


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
        measure(model, data, removal=Removal(percents=[20, 50]), passes=Passes(batch_size=size))
        for size in (1, 3)
    )
    for name in ("mass", "null_mass", "probability", "entropy"):
        assert batched.columns[name] == pytest.approx(single.columns[name], abs=1e-6), name
    assert batched.faithfulness.sufficiency == pytest.approx(single.faithfulness.sufficiency, abs=1e-6)


def test_torchs_own_encoder_in_evaluation_mode():
    torch.manual_seed(0)
    model = TorchClassifier(Encoder().train(), classes=("even", "odd"))
    compare(model, instances())
    assert model.model.training


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


@pytest.mark.parametrize(("label", "said"), [(None, "no label"), (2, "the label 2"), (-3, "no label")])
def test_a_label_is_one_of_the_classes(label, said):
    model = TorchClassifier(Encoder(), classes=("even", "odd"))
    one = Instance(np.array([1, 2]), np.ones(2, dtype=bool), np.array([0.0, 1.0]), label=label)
    with pytest.raises(InputError, match=f"an instance has {said}; a classifier of 2 classes needs label=0"):
        measure(model, [one], nulls=Nulls(draws=0))


def test_class_names_differ(make_model):
    with pytest.raises(InputError, match="the class name 'yes' stands for 2 classes"):
        TorchClassifier(Encoder(), classes=("yes", "yes"))
    own = make_model("BertForSequenceClassification", "BertConfig", id2label={0: "a", 1: "a", 2: "b"})
    with pytest.raises(InputError, match="the class name 'a' stands for 2 classes"):
        HuggingFaceClassifier(own)


def test_names_and_numbers_of_classes_agree(make_model):
    own = make_model("BertForSequenceClassification", "BertConfig")
    own.config.id2label, own.config.label2id = {0: "no", 1: "yes"}, {"yes": 0, "no": 1}
    with pytest.raises(InputError, match="calls class 1 'yes' in id2label and class 0 in label2id"):
        HuggingFaceClassifier(own)


def test_max_logit_in_half_precision(make_model):
    data = labelled_instances()
    found = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        own = make_model("BertForSequenceClassification", "BertConfig", initializer_range=0.8).to(dtype)
        measured = measure(HuggingFaceClassifier(own), data, removal=Removal(percents=()))
        found[dtype] = measured.columns["max_logit"]
    assert found[torch.float32].max() > 12
    assert found[torch.float16] == pytest.approx(found[torch.float32], rel=0.02)
    assert found[torch.bfloat16] == pytest.approx(found[torch.float32], rel=0.1)


class SharpFirst(nn.Module):
    """Every row sees everything, and gives all its weight to the first token."""

    def __init__(self, show):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 2)
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.show = show

    def forward(self, tokens, visible):
        stream = self.embedding(tokens)
        scores = 0 * self.q_proj(stream) @ self.k_proj(stream).transpose(1, 2)
        scores = scores + 1000.0 * (torch.arange(tokens.shape[1]) == 0)
        weights = scores.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)
        if not self.show:  # a kernel of one's own, which no trace sees
            weights = torch.from_numpy(weights.detach().numpy().copy())
            record(self, weights.unsqueeze(1))
        return self.head((weights @ stream)[:, 0])


@pytest.mark.parametrize("aggregation", ["mean", "rollout"])
@pytest.mark.parametrize("show", [True, False])
def test_the_null_takes_the_models_mask_where_attention_underflows(aggregation, show):
    torch.manual_seed(0)
    model = TorchClassifier(SharpFirst(show), classes=("even", "odd"))
    measured = measure(model, instances(), aggregation=Aggregation(aggregation), removal=Removal(percents=()))
    # The first row alone would look causal, and the null would be 1 on its only token.
    said = "of the model" if show else "guessed from the weights"
    assert measured.summary().to_json()["measured"]["mask"] == said
    if show and aggregation == "mean":
        assert measured.columns["null_mass"] == pytest.approx([1 / 3, 1 / 7, 1 / 5])


# --- Sequence classifiers: where they read, and that batches change nothing ---

ENCODERS = [
    ("BertForSequenceClassification", "BertConfig"),
    ("RobertaForSequenceClassification", "RobertaConfig"),
]
DECODERS = [
    ("GPT2ForSequenceClassification", "GPT2Config"),
    ("LlamaForSequenceClassification", "LlamaConfig"),
]


def labelled_instances(count=5, seed=0):
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


def test_a_model_that_averages_its_tokens_is_read_at_all_of_them(make_model):
    options = {"classifier_pooling": "mean", "pad_token_id": 0, "num_hidden_layers": 1}
    own = make_model("ModernBertForSequenceClassification", "ModernBertConfig", **options)
    model, data = HuggingFaceClassifier(own), labelled_instances()
    assert model.reads == "mean"
    found = measure(model, data, aggregation="last", removal=Removal(percents=()))
    own.set_attn_implementation("eager")
    for instance, importance in zip(data, found.importance, strict=True):
        tokens = torch.from_numpy(instance.tokens)[None]
        (layer,) = own(tokens, output_attentions=True).attentions
        assert importance == pytest.approx(layer[0].mean((0, 1)).detach().numpy(), abs=1e-6)


@pytest.mark.parametrize(("head", "config"), [ENCODERS[0], *DECODERS])
@pytest.mark.parametrize("removal", [Removal(), Removal("attention")])
def test_batched_equals_single(make_model, head, config, removal):
    # In double precision: rounding in single depends on the kernels that a batch size selects.
    model = HuggingFaceClassifier(make_model(head, config).double())
    data = labelled_instances()
    removal = replace(removal, percents=(10, 50))
    single = measure(model, data, removal=removal, passes=Passes(batch_size=1))
    batched = measure(model, data, removal=removal, passes=Passes(batch_size=5))
    for name in ("mass", "null_mass", "probability", "correct", "entropy", "first_token_share"):
        assert batched.columns[name] == pytest.approx(single.columns[name], abs=1e-12), name
    for scores, others in (
        (single.faithfulness, batched.faithfulness),
        (single.random[0].faithfulness, batched.random[0].faithfulness),
    ):
        assert others.sufficiency == pytest.approx(scores.sufficiency, abs=1e-12)
        assert others.comprehensiveness == pytest.approx(scores.comprehensiveness, abs=1e-12)


@pytest.mark.parametrize(("head", "config"), [ENCODERS[0], *DECODERS])
def test_read_rows_are_those_of_the_whole(make_model, head, config):
    model, batch = HuggingFaceClassifier(make_model(head, config)), collate(labelled_instances())
    whole, rows = model.read(batch), model.read(batch, read_only=True)
    read = whole.read
    assert torch.equal(read, rows.read)
    for layer, row in zip(whole.layers, rows.layers, strict=True):
        torch.testing.assert_close(row, layer[torch.arange(len(read)), :, read].unsqueeze(2), rtol=0, atol=0)


@pytest.mark.parametrize(("head", "config"), [*ENCODERS, *DECODERS])
def test_probabilities_are_the_models_own(make_model, head, config):
    own = make_model(head, config, pad_token_id=1)
    model = HuggingFaceClassifier(own)
    (instance,) = labelled_instances(1)
    with torch.no_grad():
        expected = own(input_ids=torch.tensor([instance.tokens.tolist()])).logits.softmax(-1)
    assert model.predict(collate([instance]))[0] == pytest.approx(expected[0].numpy(), abs=1e-6)
    answer = model.read(collate([instance])).answer
    assert answer.probability[0] == pytest.approx(float(expected[0, instance.label]), abs=1e-6)
    assert answer.correct[0] == (int(expected.argmax()) == instance.label)


@pytest.mark.parametrize(("head", "config"), DECODERS)
def test_a_text_that_ends_in_the_padding_id_is_read_where_transformers_reads_it(make_model, head, config):
    """A tokenizer that pads with the end of text and appends it: the token before it predicts."""
    own = make_model(head, config, pad_token_id=7)
    ended = Instance(np.array([5, 6, 7]), np.ones(3, bool), np.ones(3), label=0)
    longer = Instance(np.array([5, 6, 7, 8, 9, 7]), np.ones(6, bool), np.ones(6), label=0)
    model, batch = HuggingFaceClassifier(own), collate([ended, longer])
    with torch.no_grad():
        plain = [own(input_ids=torch.tensor([x.tokens.tolist()])).logits for x in (ended, longer)]
    expected = torch.cat(plain).softmax(-1).numpy()
    reading = model.read(batch)
    assert model.predict(batch) == pytest.approx(expected, abs=1e-5)
    assert reading.answer.outcomes == pytest.approx(expected, abs=1e-5)
    assert (reading.read.numpy() - batch.first).tolist() == [1, 4]
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
    assert HuggingFaceClassifier(own).predict(collate(labelled_instances())).shape == (5, 2)
    assert own.config.pad_token_id is None


def test_gradient_times_input_is_the_gradient(make_model):
    own = make_model("BertForSequenceClassification", "BertConfig")
    (instance,) = labelled_instances(1)
    tokens = torch.tensor([instance.tokens.tolist()])
    embedded = own.get_input_embeddings()(tokens).detach().requires_grad_()
    own(inputs_embeds=embedded).logits.log_softmax(-1).amax().backward()
    expected = (embedded.grad * embedded).sum(-1)[0].detach().numpy()
    for parameter in own.parameters():
        parameter.requires_grad_(False)
    found = HuggingFaceClassifier(own).gradient_times_input(collate([instance]))
    assert found[0] == pytest.approx(expected, abs=1e-5)


def test_heads_that_cannot_be_measured_are_refused(make_model):
    with pytest.raises(InputError, match="only classifiers"):
        HuggingFaceClassifier(make_model("BertForSequenceClassification", "BertConfig", num_labels=1))
    several = {"problem_type": "regression", "num_labels": 1}
    with pytest.raises(InputError, match="regression"):
        HuggingFaceClassifier(make_model("BertForSequenceClassification", "BertConfig", **several))
    xlnet = transformers.XLNetConfig(vocab_size=40, d_model=16, n_layer=1, n_head=2, d_inner=16)
    with pytest.raises(InputError, match="XLNetForSequenceClassification does not show the hidden states"):
        HuggingFaceClassifier(transformers.XLNetForSequenceClassification(xlnet))


# --- Causal models: probability of the target, greedy match, attention before the target ---

CAUSAL_MODELS = [("GPT2LMHeadModel", "GPT2Config"), ("LlamaForCausalLM", "LlamaConfig")]


def instances_with_targets(count=5, seed=0):
    generator = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = int(generator.integers(2, 10))
        tokens, target = generator.integers(0, 40, length), generator.integers(0, 40, 1 + number % 3)
        relevance = (np.arange(length) == 0) * 1.0
        made.append(Instance(tokens, np.ones(length, bool), relevance, target=target, id=str(number)))
    return made


def one_by_one(own, prompt, target):
    """Probability of each target token and the greedy continuation, one forward pass a token."""
    prompt, probabilities, greedy = list(prompt), [], []
    written = list(prompt)
    for token in target:
        with torch.no_grad():
            after_truth = own(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)
            after_own = own(input_ids=torch.tensor([written])).logits[0, -1]
        probabilities.append(float(after_truth[token]))
        greedy.append(int(after_own.argmax()))
        written.append(greedy[-1])
        prompt.append(int(token))
    return np.mean(probabilities), greedy


@pytest.mark.parametrize(("head", "config"), CAUSAL_MODELS)
def test_probability_of_the_target_tokens(make_model, head, config):
    own = make_model(head, config)
    data = instances_with_targets()
    answer = HuggingFaceCausal(own).read(collate(data)).answer
    for row, instance in enumerate(data):
        probability, _ = one_by_one(own, instance.tokens, instance.target)
        assert answer.probability[row] == pytest.approx(probability, abs=1e-6)


def test_right_is_what_greedy_decoding_writes(make_model):
    own = make_model("GPT2LMHeadModel", "GPT2Config")
    prompt = instances_with_targets(1)[0]
    _, greedy = one_by_one(own, prompt.tokens, [0, 0, 0])
    wrong = [*greedy[:2], (greedy[2] + 1) % 40]
    targets = [greedy, wrong, greedy[:1]]
    data = [
        Instance(prompt.tokens, prompt.rankable, prompt.relevance, target=np.array(target))
        for target in targets
    ]
    assert HuggingFaceCausal(own).read(collate(data)).answer.correct.tolist() == [True, False, True]


@pytest.mark.parametrize(("head", "config"), CAUSAL_MODELS)
@pytest.mark.parametrize("removal", [Removal(), Removal("mask", 3), Removal("attention")])
def test_batched_equals_single_of_causal_models(make_model, head, config, removal):
    model, data = HuggingFaceCausal(make_model(head, config)), instances_with_targets()
    removal = replace(removal, percents=(10, 50))
    single = measure(model, data, removal=removal, passes=Passes(batch_size=1))
    batched = measure(model, data, removal=removal, passes=Passes(batch_size=5))
    for name in ("mass", "null_mass", "probability", "entropy", "correct"):
        assert batched.columns[name] == pytest.approx(single.columns[name], abs=1e-6), name
    for scores, others in (
        (single.faithfulness, batched.faithfulness),
        (single.random[0].faithfulness, batched.random[0].faithfulness),
    ):
        assert others.sufficiency == pytest.approx(scores.sufficiency, abs=1e-6)
        assert others.comprehensiveness == pytest.approx(scores.comprehensiveness, abs=1e-6)


def test_read_rows_are_those_of_the_whole_of_causal_models(make_model):
    model, batch = HuggingFaceCausal(make_model(*CAUSAL_MODELS[0])), collate(instances_with_targets())
    whole, rows = model.read(batch), model.read(batch, read_only=True)
    read = whole.read
    assert torch.equal(read, rows.read)
    for layer, row in zip(whole.layers, rows.layers, strict=True):
        torch.testing.assert_close(row, layer[torch.arange(len(read)), :, read].unsqueeze(2), rtol=0, atol=0)


def test_attention_is_read_before_the_target(make_model):
    own = make_model("GPT2LMHeadModel", "GPT2Config")
    data = instances_with_targets()
    reading = HuggingFaceCausal(own).read(collate(data))
    assert reading.read.tolist() == [len(x.tokens) - 1 for x in data]
    assert reading.layers[0].shape[-1] == max(len(x.tokens) for x in data)


def test_gradient_times_input_is_the_gradient_of_causal_models(make_model):
    own = make_model("LlamaForCausalLM", "LlamaConfig")
    data = instances_with_targets(3)
    found = HuggingFaceCausal(own).gradient_times_input(collate(data))
    for row, instance in enumerate(data):
        both = np.concatenate([instance.tokens, instance.target])
        embedded = own.get_input_embeddings()(torch.from_numpy(both)[None]).detach().requires_grad_()
        logits = own(inputs_embeds=embedded).logits[0].log_softmax(-1)
        start = len(instance.tokens)
        sum(logits[start - 1 + i, token] for i, token in enumerate(instance.target)).backward()
        expected = (embedded.grad * embedded).sum(-1)[0, :start].detach().numpy()
        real = collate(data).real[row]
        assert found[row][real] == pytest.approx(expected, abs=1e-4)
        assert not found[row][~real].any()


def test_a_model_that_looks_ahead_is_refused(make_model):
    own = make_model("BertLMHeadModel", "BertConfig")
    with pytest.raises(InputError, match="not causal"):
        HuggingFaceCausal(own).read(collate(instances_with_targets()))


# --- Model folders: what is opened, and what is refused in one line ---


@pytest.fixture
def saved(tmp_path, make_model, word_pieces):
    def save(head, config, **changes):
        make_model(head, config, **changes).save_pretrained(tmp_path / "model")
        word_pieces.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save


def test_architecture_decides(saved):
    loaded = load_model(saved("BertForSequenceClassification", "BertConfig", id2label={0: "no", 1: "yes"}))
    assert isinstance(loaded.model, HuggingFaceClassifier)
    assert loaded.model.classes == ("no", "yes")
    assert loaded.limit == 64
    loaded = load_model(saved("GPT2LMHeadModel", "GPT2Config", n_positions=32))
    assert isinstance(loaded.model, HuggingFaceCausal)
    assert loaded.model.classes == ()


def test_positions_that_count_from_behind_the_padding_id(make_model, word_pieces):
    model = make_model("RobertaForSequenceClassification", "RobertaConfig")
    assert longest_input(model, word_pieces) == 62


@pytest.mark.parametrize(
    ("head", "config", "changes"),
    [
        ("BertForTokenClassification", "BertConfig", {}),
        ("BertModel", "BertConfig", {}),
        ("BertForMaskedLM", "BertConfig", {}),
    ],
)
def test_other_heads_are_refused(saved, head, config, changes):
    folder = saved(head, config, **changes)
    with pytest.raises(InputError, match=f"holds {head}; only sequence classifiers and causal"):
        load_model(folder)


def test_encoder_decoders_are_refused(tmp_path):
    transformers.BartConfig(architectures=["BartForSequenceClassification"]).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="without an encoder-decoder"):
        load_model(tmp_path)


def test_weights_that_are_missing_are_not_made_up(saved):
    folder = saved("BertModel", "BertConfig")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"lacks 2 weights of BertForSequenceClassification, such as 'class"):
        load_model(folder)


def test_a_tokenizer_of_another_model(saved):
    loaded = load_model(saved("BertForSequenceClassification", "BertConfig", vocab_size=10))
    example = read_example({"tokens": ["not"], "relevance": [1], "label": 0}, "'data.jsonl' line 1")
    with pytest.raises(InputError, match="line 1: the tokenizer gives token 18, but the model knows 10"):
        loaded.encode([example])


def test_a_folder_without_tokenizer_files(saved):
    folder = saved("BertForSequenceClassification", "BertConfig")
    for kept in ({"tokenizer_config.json"}, set()):
        for path in folder.iterdir():
            if "token" in path.name and path.name not in kept:
                path.unlink()
        # transformers would make up a tokenizer of its special tokens alone.
        with pytest.raises(InputError, match=r"has no tokenizer files \(tokenizer\.json, .*save_pretrained"):
            load_model(folder)


def test_a_tokenizer_that_knows_no_word(saved):
    loaded = load_model(saved("BertForSequenceClassification", "BertConfig"))
    unknown, known = (
        read_example({"tokens": [word], "relevance": [1], "label": 0}, "line 1") for word in ("Żółw", "cat")
    )
    with pytest.raises(InputError, match=r"knows no word of the 2 examples: every token is '\[UNK\]'"):
        measure(loaded, [unknown, unknown])
    (note,) = measure(
        loaded, [replace(unknown, id="0"), *[replace(known, id=str(i)) for i in range(1, 8)]]
    ).settings["notes"]
    assert note == "12.5% of the tokens are [UNK], words that the tokenizer does not know, in 1 of 8 texts"


def test_damaged_folders_are_one_line(saved, tmp_path):
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_model(tmp_path / "nothing")
    folder = saved("BertForSequenceClassification", "BertConfig")
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(InputError, match="cannot open AutoModelForSequenceClassification") as raised:
        load_model(folder)
    assert "\n" not in str(raised.value)
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"cannot open AutoConfig from .* is not a valid JSON file"):
        load_model(folder)
    (folder / "config.json").write_text('{"model_type": "bert", "num_hidden_layers": 1000000000}')
    with pytest.raises(InputError, match="has num_hidden_layers 1000000000; at most 2000 can be built"):
        load_model(folder)


# --- Classifiers of many kinds: right, or refused in one line ---

TINY = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"intermediate_size": 24, "max_position_embeddings": 64, "initializer_range": 0.3}
FUNNEL = {"vocab_size": 40, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "block_sizes": [1, 1]}
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
BART |= {"vocab_size": 40, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
XLNET = {"vocab_size": 40, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("Funnel", FUNNEL, "has 3 final states for 6 tokens"),
        ("Bart", BART, "is an encoder-decoder"),
        ("XLNet", XLNET, "does not show the hidden states that it predicts from"),
        ("Longformer", TINY | {"attention_window": 4, "pad_token_id": 0}, "does not show the hidden states"),
        ("Canine", {k: v for k, v in TINY.items() if k != "vocab_size"}, "has no vocabulary of tokens"),
        ("FNet", TINY, "no attention probabilities were formed"),
        ("Yoso", TINY, "form no softmax that can be seen"),
        ("Xmod", TINY, "does not run on token ids and a mask alone: Input language unknown"),
    ],
)
def test_classifiers_that_cannot_be_measured(name, config, message):
    torch.manual_seed(0)
    own = getattr(transformers, f"{name}Config")(**config)
    with pytest.raises(InputError, match=message) as raised:
        measure(
            HuggingFaceClassifier(getattr(transformers, f"{name}ForSequenceClassification")(own)),
            labelled_instances(),
            nulls=Nulls(draws=0),
        )
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ConvBert", TINY | {"embedding_size": 16}),
        ("Nystromformer", TINY),
        ("CTRL", {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "dff": 24, "n_positions": 64}),
        ("IBert", TINY | {"pad_token_id": 0}),
        ("Deberta", TINY | {"pad_token_id": 0}),
    ],
)
def test_batches_change_nothing_whatever_a_model_does_with_padding(name, config):
    torch.manual_seed(0)
    own = getattr(transformers, f"{name}Config")(**config)
    model = HuggingFaceClassifier(getattr(transformers, f"{name}ForSequenceClassification")(own))
    data = labelled_instances()
    for how in (Aggregation(), Aggregation("mean")):
        options = {"removal": Removal(percents=(20,)), "nulls": Nulls(draws=0), "aggregation": how}
        single = measure(model, data, passes=Passes(batch_size=1), **options)
        batched = measure(model, data, passes=Passes(batch_size=5), **options)
        for column, values in single.columns.items():
            assert batched.columns[column] == pytest.approx(values, abs=1e-5), column
        assert batched.faithfulness.sufficiency == pytest.approx(single.faithfulness.sufficiency, abs=1e-6)


def test_a_frozen_model_is_read_where_a_free_one_is(make_model):
    own = make_model("BertForSequenceClassification", "BertConfig").requires_grad_(False)
    assert HuggingFaceClassifier(own).reads == "first"


def test_an_encoder_that_packs_its_texts_without_padding_is_measured():
    """The default of `nn.TransformerEncoder`: in evaluation, texts with a mask become a nested tensor."""
    torch.manual_seed(0)
    packed, plain = Encoder(), Encoder()
    packed.encoder = nn.TransformerEncoder(packed.encoder.layers[0], 2)
    plain.load_state_dict(packed.state_dict())
    scores = [
        measure(TorchClassifier(model, classes=("even", "odd")), instances()).summary()["mrta"]
        for model in (packed, plain)
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)


def test_as_many_names_as_logits():
    with pytest.raises(InputError, match="3 class names for 2 logits"):
        measure(TorchClassifier(Encoder(), classes=("a", "b", "c")), instances())


class InATuple(Encoder):
    def forward(self, *inputs):
        return (super().forward(*inputs)[None],)


def test_where_the_logits_are_has_to_be_said():
    with pytest.raises(InputError, match=r"the model returns a tuple; say where its logits are"):
        measure(TorchClassifier(InATuple(), classes=("a", "b")), instances())
    wrapped = TorchClassifier(InATuple(), classes=("a", "b"), logits=lambda outputs: outputs[0])
    with pytest.raises(InputError, match=r"the logits have shape \(1, .*, 2\); logits=... must give \(batch"):
        measure(wrapped, instances())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: {"passes": Passes(batch_size=0)}, "batch_size is 0; give a whole number from 1 on"),
        (lambda: {"passes": Passes(only=["mrtaa"])}, "no score is called 'mrtaa'"),
        (lambda: {"nulls": 5}, r"nulls is 5; give fasterqk.attention.Nulls\(...\)"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    with pytest.raises(InputError, match=message):
        measure(TorchClassifier(Encoder(), classes=("a", "b")), instances(), **options())


def test_scores_without_mass_have_a_summary():
    wrapped = TorchClassifier(Encoder(), classes=("a", "b"))
    summary = measure(wrapped, instances(), passes=Passes(only=["entropy"])).summary()
    assert summary["mrta"] is None and summary["entropy"] > 0
