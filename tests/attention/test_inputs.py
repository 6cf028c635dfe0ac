"""What may be measured: pairs of texts, several labels and targets, weighted spans, adapters, devices."""

import json

import numpy as np
import pytest
import torch
import transformers
from tokenizers import processors

from fasterqk.attention import (
    HuggingFaceClassifier,
    Nulls,
    Passes,
    Removal,
    load_model,
    measure,
    read_examples,
)
from fasterqk.attention.instances import collate, encode_for_classifier, read_example
from fasterqk.errors import InputError

PAIR = {
    "text": "the cats sat",
    "text_pair": "awful film",
    "spans": [[4, 8]],
    "spans_pair": [[0, 5]],
    "label": 1,
}


@pytest.fixture
def lines(tmp_path):
    def write(*records):
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(map(json.dumps, records)))
        return path

    return write


@pytest.fixture(scope="session")
def pair_pieces(word_pieces):
    """The word pieces with a template for pairs, and token types as BERT's tokenizer gives them."""
    import copy

    tokenizer = copy.deepcopy(word_pieces)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


# --- Pairs ---


def test_both_texts_of_a_pair_have_their_relevance_and_places(pair_pieces):
    (instance,) = encode_for_classifier([read_example(PAIR, "line 1")], pair_pieces, ("no", "yes"), 64)
    text = ("[CLS]", "the", "cat", "##s", "sat", "[SEP]", "aw", "##ful", "film", "[SEP]")
    assert instance.pieces == text
    assert instance.relevance.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert instance.places[:, 0].tolist() == [-1, 0, 0, 0, 0, -1, 1, 1, 1, -1]
    assert instance.types.tolist() == [0] * 6 + [1] * 4
    assert instance.texts == ("the cats sat", "awful film")


def test_a_pair_is_predicted_as_by_transformers_also_when_batched(make_model, pair_pieces):
    model = make_model("BertForSequenceClassification", "BertConfig")
    examples = [read_example(PAIR, "line 1", 1), read_example({"text": "cat", "label": 0}, "line 2", 2)]
    instances = encode_for_classifier(examples, pair_pieces, ("no", "yes"), 64)
    wrapped = HuggingFaceClassifier(model)
    found = wrapped.predict(collate(instances))
    with torch.no_grad():
        inputs = pair_pieces("the cats sat", "awful film", return_tensors="pt")
        expected = model(**inputs).logits.softmax(-1)[0]
        untold = model(inputs["input_ids"], inputs["attention_mask"]).logits.softmax(-1)[0]
    assert found[0] == pytest.approx(expected.numpy(), abs=1e-5)
    assert np.abs(expected.numpy() - untold.numpy()).max() > 1e-3  # the types make a difference
    single = measure(
        wrapped,
        instances,
        scores=["leave_one_out", "gradient"],
        nulls=Nulls(draws=0),
        passes=Passes(batch_size=1),
    )
    batched = measure(
        wrapped,
        instances,
        scores=["leave_one_out", "gradient"],
        nulls=Nulls(draws=0),
        passes=Passes(batch_size=2),
    )
    for name, ranking in single.rankings.items():
        other = batched.rankings[name]
        assert other.faithfulness.sufficiency == pytest.approx(ranking.faithfulness.sufficiency, abs=1e-5)


def test_models_without_types_take_pairs_too(make_model, pair_pieces):
    model = make_model("RobertaForSequenceClassification", "RobertaConfig", type_vocab_size=1, pad_token_id=0)
    instances = encode_for_classifier([read_example(PAIR, "line 1")], pair_pieces, ("no", "yes"), 60)
    assert (
        measure(HuggingFaceClassifier(model), instances, removal=Removal(percents=[20]), nulls=Nulls(draws=0))
        .summary()
        .n
        == 1
    )


def test_importances_of_characters_of_both_texts(pair_pieces):
    from fasterqk.attention._importance import align

    (instance,) = encode_for_classifier([read_example(PAIR, "line 1")], pair_pieces, ("no", "yes"), 64)
    given = {"characters": [0] * 4 + [2] * 4 + [0] * 4, "characters_pair": [3] * 5 + [0] * 5}
    assert align(given, instance, "x").tolist() == [0, 0, 2, 2, 0, 0, 3, 3, 0, 0]


# --- Several labels and targets ---


def test_every_label_of_a_multi_label_model_is_followed_by_itself(make_model, word_pieces, lines):
    path = lines({"id": "a", "text": "the film was good", "spans": [[13, 17]], "label": ["x", "z"]})
    examples = read_examples(path)
    assert [example.id for example in examples] == ["a:x", "a:z"]
    model = make_model(
        "BertForSequenceClassification",
        "BertConfig",
        num_labels=3,
        problem_type="multi_label_classification",
        id2label={0: "x", 1: "y", 2: "z"},
    )
    wrapped = HuggingFaceClassifier(model)
    instances = encode_for_classifier(examples, word_pieces, wrapped.classes, 64, multi_label=True)
    found = measure(
        wrapped,
        instances,
        scores=["gradient", "integrated_gradients"],
        removal=Removal(percents=[50]),
        nulls=Nulls(draws=0),
    )
    with torch.no_grad():
        inputs = word_pieces("the film was good", return_tensors="pt")
        expected = model(inputs["input_ids"], inputs["attention_mask"]).logits.sigmoid()[0]
    assert found.columns["probability"] == pytest.approx(expected[[0, 2]].numpy(), abs=1e-5)
    assert found.columns["correct"].tolist() == (expected[[0, 2]] >= 0.5).tolist()
    assert found.faithfulness.predicted.tolist() == [0, 2]
    # Importances are those of the label, not of the likeliest class.
    one, other = found.rankings["gradient"].importance
    assert not np.allclose(one, other)
    rows = found.instances_table()
    assert [row["label"] for row in rows] == ["x", "z"]
    assert rows[0]["predicted"] == rows[1]["predicted"] == "xyz"[int(expected.argmax())]


def test_several_labels_need_a_model_that_has_several(word_pieces, lines):
    examples = read_examples(lines({"text": "good", "label": [0, 1]}))
    with pytest.raises(InputError, match="several labels, but a text has one of the model's classes"):
        encode_for_classifier(examples, word_pieces, ("no", "yes"), 64)


def test_several_targets_are_instances_of_their_own(lines):
    examples = read_examples(lines({"text": "the cat sat on the", "target": ["mat", "dog"]}))
    assert [(x.id, x.target) for x in examples] == [("1:mat", "mat"), ("1:dog", "dog")]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a", "label": []}, "'label' is an empty list"),
        ({"text": "a", "label": [1, 1]}, r"'label' names \[1, 1\], one of them twice"),
        ({"text": "a", "target": [""]}, "'target' is ''"),
        ({"text": "a", "label": [None]}, "the label None is neither"),
        ({"tokens": ["a"], "text_pair": "b", "label": 1}, "'text_pair' belongs to 'text'"),
        ({"text": "a", "spans_pair": [], "label": 1}, "'spans_pair' belongs to 'text_pair'"),
        ({"text": "a", "text_pair": " ", "label": 1}, "'text_pair' is ' '; give some text"),
        (PAIR | {"spans_pair": [[0, 11]]}, r"the span \[0, 11\] does not lie in the text of 10"),
        ({"text": "ab", "spans": [[0, 1, 2]], "label": 1}, r"the weight 2 of the span \[0, 1, 2\]"),
        ({"text": "ab", "spans": [[0, 1, True]], "label": 1}, "the weight True"),
    ],
)
def test_bad_lines(lines, record, message):
    with pytest.raises(InputError, match=message):
        read_examples(lines(record))


def test_spans_have_weights_if_they_want(word_pieces):
    line = {"text": "the cats sat", "spans": [[0, 3, 0.25], [4, 8]], "label": 1}
    (instance,) = encode_for_classifier([read_example(line, "line 1")], word_pieces, ("no", "yes"), 64)
    assert instance.relevance.tolist() == [0, 0.25, 1, 1, 0, 0]


# --- Adapters, devices, precisions ---


def test_an_adapter_is_merged_before_it_is_measured(tmp_path, make_model, word_pieces):
    peft = pytest.importorskip("peft")
    make_model("BertForSequenceClassification", "BertConfig").save_pretrained(tmp_path / "base")
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base")
    targets = ["query", "value"]
    settings = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        InputError, match=r"is a PEFT adapter; merge it into its model: peft\.AutoPeftModelFor"
    ):
        load_model(tmp_path / "adapter")
    merged = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter")
    row = {"text": "the cats sat", "label": 1}
    measurement = measure(merged.merge_and_unload(), [row], tokenizer=word_pieces)
    with torch.no_grad():
        expected = adapted(**word_pieces("the cats sat", return_tensors="pt")).logits.softmax(-1)
    assert measurement.faithfulness.whole == pytest.approx(expected.numpy(), abs=1e-5)


def test_devices_and_precisions(tmp_path, make_model, word_pieces):
    make_model("BertForSequenceClassification", "BertConfig").save_pretrained(tmp_path)
    word_pieces.save_pretrained(tmp_path)
    example = read_example({"text": "the cats sat", "spans": [[4, 8]], "label": 1}, "line 1")
    found = {}
    for precision in ("float64", "float32", "bfloat16"):
        loaded = load_model(tmp_path, device="cpu", precision=precision)
        assert next(loaded.model.model.parameters()).dtype == getattr(torch, precision)
        found[precision] = measure(
            loaded.model, loaded.encode([example]), removal=Removal(percents=[50]), nulls=Nulls(draws=0)
        ).summary()["mrta"]
    assert found["float32"] == pytest.approx(found["float64"], abs=1e-5)
    assert found["bfloat16"] == pytest.approx(found["float64"], abs=0.1)
    with pytest.raises(InputError, match="unknown precision 'int8'; choose from float64"):
        load_model(tmp_path, precision="int8")
    with pytest.raises(InputError, match="the device 'tpu9' cannot be used"):
        load_model(tmp_path, device="tpu9")
