"""What ``measure`` takes: folders, models, files, rows, instances, and options as strings."""

import json
import sys

import numpy as np
import pytest

import fasterqk
from fasterqk.attention import (
    Aggregation,
    HuggingFaceClassifier,
    Instance,
    Removal,
    TorchClassifier,
    load_model,
    measure,
    read_examples,
)
from fasterqk.errors import InputError

ROWS = [
    {"text": "the film was very good", "spans": [[13, 22]], "label": 1},
    {"tokens": ["a", "bad", "cat"], "relevance": [0, 1, 0], "label": "LABEL_0"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_model, word_pieces):
    path = tmp_path_factory.mktemp("model")
    make_model("BertForSequenceClassification", "BertConfig").save_pretrained(path)
    word_pieces.save_pretrained(path)
    (path / "data.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return path


def test_every_way_to_give_model_and_data_gives_the_same_numbers(folder, word_pieces):
    loaded = load_model(folder)
    examples = read_examples(folder / "data.jsonl")
    instances = loaded.encode(examples)
    expected = measure(loaded.model, instances).summary().to_json()
    ways = [
        (str(folder), str(folder / "data.jsonl"), None),
        (folder, ROWS, None),
        (loaded, examples, None),
        (loaded.model.model, ROWS, word_pieces),
        (HuggingFaceClassifier(loaded.model.model), examples, word_pieces),
        (loaded.model.model, instances, None),
    ]
    for model, data, tokenizer in ways:
        assert fasterqk.measure(model, data, tokenizer=tokenizer).summary().to_json() == expected


def test_options_as_strings(folder):
    by_name = measure(folder, ROWS, aggregation="layer:1", removal="mask", scores="gradient").summary()
    mask = load_model(folder).tokenizer.mask_token_id
    options = {
        "aggregation": Aggregation("layer", 1),
        "removal": Removal("mask", mask),
        "scores": ["gradient"],
    }
    assert by_name == measure(folder, ROWS, **options).summary()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"aggregation": "average"},
            "unknown aggregation 'average'; choose rollout, mean, max, last or layer:N",
        ),
        ({"removal": "drop"}, "unknown removal 'drop'; choose from delete, mask, attention"),
        ({"scores": "lime"}, "unknown importance 'lime'"),
    ],
)
def test_unknown_names_are_one_line(folder, options, message):
    with pytest.raises(InputError, match=message):
        measure(folder, ROWS, **options)


def test_what_cannot_be_measured_is_one_line(folder, make_model, word_pieces, small_model):
    model = make_model("BertForSequenceClassification", "BertConfig")
    unmarked = [{"text": "a cat", "spans": [], "label": 0}]
    cases = [
        ((folder, []), "no instance was given"),
        ((model, ROWS), "texts need a tokenizer: pass tokenizer=..."),
        ((model, ["the film"], word_pieces), "the examples are of type str; give rows such as"),
        ((model, [{"text": "a cat"}], word_pieces), "row 1: give either 'label'"),
        (
            (model, [{**ROWS[0], "id": 1}, {**ROWS[1], "id": 1}], word_pieces),
            "row 2: the id '1' was used before",
        ),
        ((model, unmarked, word_pieces), "no token is relevant in any of 1 instances"),
        (
            (model.bert, ROWS, word_pieces),
            r"BertModel is not a sequence classifier .*TorchClassifier\(model, ",
        ),
        ((3, ROWS), "int cannot be measured; give a model or the folder of one"),
    ]
    for (first, data, *tokenizer), message in cases:
        with pytest.raises(InputError, match=message):
            measure(first, data, tokenizer=tokenizer[0] if tokenizer else None)


def test_any_classifier_reads_rows_with_a_tokenizer(small_model, word_pieces):
    wrapped = small_model()
    assert isinstance(wrapped, TorchClassifier)
    rows = [{"text": "the cat sat", "spans": [[4, 7]], "label": "b"}]
    assert measure(wrapped, rows, tokenizer=word_pieces).instances[0].pieces == (
        "[CLS]",
        "the",
        "cat",
        "sat",
        "[SEP]",
    )


def test_a_short_repr(small_model, some_instances):
    measurement = measure(small_model(), some_instances())
    text = repr(measurement)
    assert text.startswith("<Measurement of 7 instances: accuracy 0.") and len(text) < 120
    assert f"mrta {measurement.summary()['mrta']:.3f}" in text


def test_a_frame_without_pandas_is_one_line(small_model, some_instances, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="to_frame\\(\\) needs pandas; `pip install pandas` installs it"):
        measure(small_model(), some_instances()).to_frame()


def test_tables_have_lists(small_model):
    pytest.importorskip("pandas")
    instance = Instance(np.array([3, 4]), np.ones(2, dtype=bool), np.array([0.0, 1.0]), label=0)
    measurement = measure(small_model(), [instance])
    (row,) = measurement.instances_table()
    assert measurement.to_frame().iloc[0].to_dict().keys() == row.keys()
    assert measurement.to_frame()["importance"][0] == row["importance"]
    assert row["relevance"] == [0.0, 1.0] and row["token_texts"] == ["3", "4"] and len(row["importance"]) == 2
