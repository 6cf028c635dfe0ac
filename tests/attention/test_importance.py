"""Importances from anywhere: what is built in, functions, mappings and files, aligned and checked."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from fasterqk.attention import (
    HuggingFaceCausal,
    HuggingFaceClassifier,
    Nulls,
    Passes,
    Removal,
    measure,
)
from fasterqk.attention._importance import METHODS, align, kendall_tau
from fasterqk.attention.instances import collate, encode_for_causal, encode_for_classifier, read_example
from fasterqk.errors import InputError

EXAMPLES = [
    {"id": "one", "tokens": ["the", "cats", "sat"], "relevance": [0, 1, 0], "label": 1},
    {"id": "two", "text": "awful film", "spans": [[0, 5]], "label": 0},
]


@pytest.fixture
def instances(word_pieces):
    examples = [read_example(line, f"line {n}", n) for n, line in enumerate(EXAMPLES, 1)]
    return encode_for_classifier(examples, word_pieces, ("no", "yes"), 64)


@pytest.fixture
def classifier(make_model):
    return HuggingFaceClassifier(make_model("BertForSequenceClassification", "BertConfig"))


# --- What is built in ---

NAMES = [
    "mean",
    "max",
    "last",
    "layer:0",
    "layer:1/head:1",
    "gradient",
    "integrated_gradients",
    "leave_one_out",
]


def test_everything_built_in_stands_in_one_table(classifier, instances):
    found = measure(classifier, instances, scores=NAMES, removal=Removal(percents=[20, 50]))
    assert list(found.rankings) == ["rollout", *NAMES]
    table = found.rankings_table()
    assert {(row["score"], row["k"]) for row in table} == {
        *((name, k) for name in ("sufficiency", "comprehensiveness") for k in (20, 50)),
        *(
            (f"{what} {kind}", None)
            for what in ("aopc", "wins")
            for kind in ("sufficiency", "comprehensiveness")
        ),
        *((name, None) for name in ("auprc", "token_f1", "token_iou", "iou_f1", "tau_leave_one_out")),
    }
    assert all(set(row) == {"score", "k", "n", "random", *found.rankings} for row in table)
    rated = sum(x.rationale.any() for x in instances)
    assert [row["n"] for row in table if row["score"] in ("auprc", "iou_f1")] == [rated, rated]
    tau = next(row for row in table if row["score"] == "tau_leave_one_out")
    assert tau["leave_one_out"] is None and -1 <= tau["gradient"] <= 1
    document = found.summary().to_json()
    assert set(document["importance"]) == {"rollout", *NAMES}
    assert document["importance"]["rollout"]["sufficiency"] == document["sufficiency"]


@pytest.mark.parametrize("name", NAMES)
def test_an_importance_beside_another_is_the_same_as_alone(classifier, instances, name):
    beside = measure(
        classifier,
        instances,
        scores=name,
        removal=Removal(percents=[20]),
        nulls=Nulls(draws=0),
        passes=Passes(batch_size=1),
    )
    if name not in METHODS:
        alone = measure(
            classifier, instances, aggregation=name, removal=Removal(percents=[20]), nulls=Nulls(draws=0)
        )
    else:
        alone = measure(
            classifier,
            instances,
            scores={"again": name},
            removal=Removal(percents=[20]),
            nulls=Nulls(draws=0),
        )
        alone = replace(alone, rankings={"again": alone.rankings["again"]})
    for one, other in zip(beside.rankings[name].importance, alone.importance, strict=True):
        assert other == pytest.approx(one, abs=1e-5)
    assert beside.rankings[name].faithfulness.sufficiency == pytest.approx(
        alone.faithfulness.sufficiency, abs=1e-5
    )


def test_heads_are_those_of_the_layer(classifier, instances):
    found = measure(
        classifier,
        instances,
        scores=["layer:1/head:0", "layer:1/head:1", "layer:1"],
        removal=Removal(percents=()),
    )
    first, second, both = (found.rankings[f"layer:1{name}"].importance for name in ("/head:0", "/head:1", ""))
    for one, other, mean in zip(first, second, both, strict=True):
        assert (one + other) / 2 == pytest.approx(mean, abs=1e-6)


def test_integrated_gradients_add_up_to_what_the_input_changes(classifier, instances):
    """Completeness: they sum to log p at the input minus log p at zero embeddings."""
    batch = collate(instances)
    found, gap = classifier.integrated_gradients(batch)
    chosen = classifier.predict(batch).argmax(1)
    rows = np.arange(len(batch))
    whole = np.log(classifier.predict(batch)[rows, chosen])
    weight = classifier.embedding.weight.data.clone()
    classifier.embedding.weight.data.zero_()
    nothing = np.log(classifier.predict(batch)[rows, chosen])
    classifier.embedding.weight.data.copy_(weight)
    assert found.sum(1) == pytest.approx(whole - nothing, abs=1e-3)
    assert gap == pytest.approx(np.abs(found.sum(1) / (whole - nothing) - 1), abs=1e-5)
    measurement = measure(classifier, instances, scores="integrated_gradients", nulls=Nulls(draws=0))
    (note,) = measurement.settings["notes"]
    assert f"by {np.median(gap):.2%} on the median text, by {gap.max():.2%} at most" in note
    assert (found[~batch.real] == 0).all()


def test_integrated_gradients_of_captum(classifier, instances):
    captum = pytest.importorskip("captum.attr")
    import torch

    def log_probability(embedded, mask, chosen):
        logits = classifier.model(inputs_embeds=embedded, attention_mask=mask).logits
        return logits.log_softmax(-1).gather(1, chosen[:, None]).squeeze(1)

    found, _ = classifier.integrated_gradients(collate(instances))
    for row, instance in enumerate(instances):
        tokens = torch.from_numpy(instance.tokens)[None]
        chosen = torch.from_numpy(classifier.predict(collate([instance])).argmax(1))
        inputs = classifier.embedding(tokens).detach()
        theirs = captum.IntegratedGradients(log_probability).attribute(
            inputs, additional_forward_args=(torch.ones_like(tokens), chosen), n_steps=50
        )
        assert found[row, : len(instance.tokens)] == pytest.approx(theirs.sum(-1)[0].numpy(), abs=1e-4)


@pytest.mark.parametrize("removal", [Removal(), Removal("attention"), Removal("mask", 4)])
def test_leaving_one_out_is_asking_again(classifier, instances, removal):
    from fasterqk.attention.faithfulness import remove

    found = measure(classifier, instances, scores="leave_one_out", removal=replace(removal, percents=()))
    for instance, lost in zip(instances, found.rankings["leave_one_out"].importance, strict=True):
        whole = classifier.predict(collate([instance]))[0]
        for place in range(len(instance.tokens)):
            expected = 0.0
            if instance.rankable[place]:
                gone = np.arange(len(instance.tokens))[None] == place
                expected = (
                    whole.max()
                    - classifier.predict(remove(collate([instance]), gone, removal))[0][whole.argmax()]
                )
            assert lost[place] == pytest.approx(expected, abs=1e-6)


def test_causal_models_have_all_of_them(make_model, word_pieces):
    model = HuggingFaceCausal(make_model("GPT2LMHeadModel", "GPT2Config"))
    line = {"tokens": ["the", "cats", "sat"], "relevance": [0, 1, 0], "target": "mat"}
    instances = encode_for_causal([read_example(line, "line 1")], word_pieces, 64)
    found = measure(model, instances, scores=NAMES, removal=Removal(percents=[50]), nulls=Nulls(draws=0))
    assert all(np.isfinite(own.importance[0]).all() for own in found.rankings.values())


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=12))
def test_kendall_tau_is_scipys(pairs):
    one, other = zip(*pairs, strict=True)
    expected = kendalltau(one, other).statistic
    found = kendall_tau(one, other)
    assert (np.nan if found is None else found) == pytest.approx(expected, nan_ok=True)


# --- From anywhere ---


def test_a_function_a_mapping_and_a_file_give_the_same(classifier, instances, tmp_path):
    values = {x.id: np.linspace(-1, 1, len(x.tokens)) * x.rankable for x in instances}

    def mine(instance):
        return values[instance.id]

    path = tmp_path / "other.jsonl"
    path.write_text("\n".join(json.dumps({"id": key, "scores": own.tolist()}) for key, own in values.items()))
    for scores, name in ((mine, "mine"), (values, "scores"), (path, "other"), (str(path), "other")):
        found = measure(
            classifier, instances, scores=scores, removal=Removal(percents=[50]), nulls=Nulls(draws=0)
        )
        assert list(found.rankings) == ["rollout", name]
        for instance, own in zip(instances, found.rankings[name].importance, strict=True):
            assert own == pytest.approx(values[instance.id])
    named = measure(
        classifier,
        instances,
        scores={"a": mine, "b": path, "c": "gradient", "d": values},
        removal=Removal(percents=()),
    )
    assert list(named.rankings) == ["rollout", "a", "b", "c", "d"]


def test_instances_without_ids_keep_their_own_importances(classifier, instances):
    nameless = [replace(x, id="") for x in instances]
    found = measure(
        classifier,
        nameless,
        scores=lambda x: np.arange(len(x.tokens)) * x.rankable,
        removal=Removal(percents=()),
    )
    for instance, own in zip(nameless, found.rankings["scores"].importance, strict=True):
        assert own == pytest.approx(np.arange(len(instance.tokens)) * instance.rankable)
    with pytest.raises(InputError, match="2 instances have 1 ids, so scores cannot be told apart"):
        measure(classifier, nameless, scores={"": [1.0] * len(instances[0].tokens)}, nulls=Nulls(draws=0))


def test_faithfulness_of_given_importances_is_that_of_the_same_ranking(classifier, instances):
    by_gradient = measure(
        classifier, instances, scores="gradient", removal=Removal(percents=[20, 50]), nulls=Nulls(draws=0)
    ).rankings["gradient"]
    given = dict(zip((x.id for x in instances), by_gradient.importance, strict=True))
    found = measure(
        classifier, instances, scores=given, removal=Removal(percents=[20, 50]), nulls=Nulls(draws=0)
    ).rankings["scores"]
    assert found.faithfulness.sufficiency == pytest.approx(by_gradient.faithfulness.sufficiency, abs=1e-6)


def test_words_characters_and_spans_are_carried_over_to_tokens(instances):
    one = instances[0]
    assert one.pieces == ("[CLS]", "the", "cat", "##s", "sat", "[SEP]")
    words = [0, 1.0, 2.0, 2.0, 3.0, 0]
    assert align([1.0, 2.0, 3.0], one, "x").tolist() == words
    assert align({"scores": [1.0, 2.0, 3.0], "tokens": ["The", "cats", "sat"]}, one, "x").tolist() == words
    characters = {"characters": [1, 1, 1, 9, 2, 2, 2, 4, 9, 3, 3, 3], "text": "the cats sat"}
    assert align(characters, one, "x").tolist() == [0, 1, 2, 4, 3, 0]
    assert align({"spans": [[4, 8, 0.5], [4, 5, 0.3]]}, one, "x").round(3).tolist() == [0, 0, 0.6, 0.5, 0, 0]
    ranked = {"scores": [1, 2, 3, 4], "tokens": ["the", "cat", "s", "sat"]}
    assert align(ranked, one, "x").tolist() == [0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1, 2], "2 scores, but the instance has 6 tokens, 4 tokens without special ones, 3 words"),
        ([], "0 scores, but the instance has"),
        ([1, float("nan"), 2], "score 1 is not a finite number"),
        ([[1], [2]], r"scores of shape \(2, 1\); give one number per token"),
        (["a", "b"], r"\['a', 'b'\] are not numbers"),
        (
            {"scores": [1, 2, 3], "tokens": ["the", "dogs", "sat"]},
            "token 1 is 'dogs', but the model reads 'cats'",
        ),
        ({"scores": [1, 2, 3], "tokens": ["the"]}, r"3 scores, but 'tokens' is \['the'\]"),
        ({"characters": [1, 2]}, "2 scores in 'characters', but the text has 12 characters"),
        (
            {"characters": [0] * 12, "text": "the cats sit"},
            "the text is 'the cats sit', but that of the data is",
        ),
        ({"spans": [[0, 20, 1]]}, r"the span \[0, 20, 1\] does not lie in the text of 12 characters"),
        ({"spans": [[0, 2]]}, r"the span \[0, 2\] is not \[start, end, number\]"),
        ({"spans": 5}, "'spans' is 5; give a list of"),
        ({"scores": {"a": 1}}, "are not numbers"),
        ({"scores": [1], "spans": []}, "give one of 'scores', 'characters', 'spans'"),
        ({"text": "the cats sat"}, "give one of"),
    ],
)
def test_what_does_not_fit_is_one_line(instances, given, message):
    with pytest.raises(InputError, match=message) as caught:
        align(given, instances[0], "mine.jsonl: line 1")
    assert str(caught.value).startswith("mine.jsonl: line 1: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"id": "one", "scores": [1, 2, 3]}], "no scores for 1 of 2 instances, such as id 'two'"),
        ([{"id": "three", "scores": [1]}], "the data has no id 'three'; its first is 'one'"),
        ([{"id": "one", "scores": [1]}, {"id": "one", "scores": [1]}], "the id 'one' was used before"),
        ([{"id": "one", "score": [1]}], "unknown field 'score'; a line may have id, name, scores"),
        ([], "is empty"),
    ],
)
def test_files_that_do_not_belong_to_the_data(classifier, instances, tmp_path, lines, message):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(InputError, match=message):
        measure(classifier, instances, scores=path, nulls=Nulls(draws=0))


def test_a_file_may_hold_several(classifier, instances, tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [
        {"id": x.id, "name": name, "scores": [1.0] * len(x.tokens)} for x in instances for name in ("a", "b")
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert list(measure(classifier, instances, scores=path, removal=Removal(percents=())).rankings) == [
        "rollout",
        "a",
        "b",
    ]
    with pytest.raises(InputError, match="holds several importances, so it cannot be called 'mine'"):
        measure(classifier, instances, scores={"mine": path}, nulls=Nulls(draws=0))


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ("lime", "unknown importance 'lime'; choose rollout, mean, .*, or give a JSON lines file"),
        ("layer:x", "unknown importance 'layer:x'"),
        ("mean/head:x", "unknown importance"),
        ("layer:7", "the model has 2 layers of attention; layer 7 was asked for"),
        (["gradient", "gradient"], "two importances are called 'gradient'"),
        ([3], "scores cannot be read from 3"),
        ("nothing.jsonl", "nothing.jsonl"),
    ],
)
def test_unknown_importances_are_one_line(classifier, instances, scores, message):
    with pytest.raises(InputError, match=message):
        measure(classifier, instances, scores=scores, nulls=Nulls(draws=0))


# --- Without rationales ---


def test_a_model_without_a_method_is_one_line(classifier, instances):
    """Also under another name than that of the method."""
    parts = {name: getattr(classifier, name) for name in ("classes", "pattern", "read", "predict")}
    with pytest.raises(
        InputError, match="SimpleNamespace has no method 'integrated_gradients': the same grad"
    ):
        measure(SimpleNamespace(**parts), instances, scores={"mine": "integrated_gradients"})


def test_without_rationales_what_needs_none_is_measured(classifier, word_pieces):
    lines = [
        {key: value for key, value in line.items() if key not in ("relevance", "spans")} for line in EXAMPLES
    ]
    examples = [read_example(line, f"line {n}", n) for n, line in enumerate(lines, 1)]
    assert not any(example.rated for example in examples)
    instances = encode_for_classifier(examples, word_pieces, ("no", "yes"), 64)
    found = measure(classifier, instances, scores="leave_one_out")
    summary = found.summary()
    for name in ("sufficiency_20", "aopc_comprehensiveness", "tau_leave_one_out", "accuracy", "entropy"):
        assert np.isfinite(summary[name])
    for name in ("mrta", "ac", "acmc", "auprc", "token_f1", "token_iou", "iou_f1"):
        assert summary[name] is None
    shown = {row["score"] for row in found.scores_table()}
    assert "aopc comprehensiveness" in shown and not shown & {"mrta", "auprc", "iou_f1"}


def test_scores_of_instances_average_to_the_summary(classifier, instances):
    found = measure(classifier, instances, scores=["leave_one_out"])
    summary, values = found.summary(), found.instance_scores()
    for name, value in summary.scores.items():
        if name != "iou_f1":
            assert np.nanmean(values[name]) == pytest.approx(value, abs=1e-12), name
    precision, recall = (np.nanmean(values[name]) for name in ("span_precision", "span_recall"))
    assert summary["iou_f1"] == pytest.approx(
        2 * precision * recall / max(precision + recall, 1e-9), abs=1e-12
    )


def test_the_table_of_instances_has_predictions_and_importances(classifier, instances):
    rows = measure(
        classifier, instances, scores=["gradient"], removal=Removal(percents=[20]), nulls=Nulls(draws=0)
    ).instances_table()
    assert [row["id"] for row in rows] == ["one", "two"]
    for row, instance in zip(rows, instances, strict=True):
        assert row["label"] == f"LABEL_{instance.label}"
        assert row["predicted"] in ("LABEL_0", "LABEL_1")
        assert row["token_texts"] == list(instance.pieces)
        assert len(row["importance"]) == len(row["gradient importance"]) == len(instance.tokens)
        assert {"auprc", "token_iou", "gradient auprc", "gradient sufficiency_20", "aopc_sufficiency"} <= set(
            row
        )
