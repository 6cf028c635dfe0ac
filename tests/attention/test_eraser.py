"""The exported files, scored again from nothing but their text, give our numbers."""

import json
import lzma
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fasterqk.attention import Instance, Nulls, Removal, measure
from fasterqk.attention.eraser import eraser_commands, unscorable_class, write_eraser
from fasterqk.attention.faithfulness import CONVENTIONS
from fasterqk.attention.instances import RATIONALE_FROM
from fasterqk.errors import InputError

HATEXPLAIN = Path(__file__).parents[2] / "data" / "hatexplain" / "hatexplain.jsonl.xz"
CLASSES = ("hatespeech", "normal", "offensive")


def read(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def exported(small_model, some_instances, tmp_path):
    instances = some_instances(8)
    instances[0] = replace(instances[0], relevance=0 * instances[0].relevance)
    measurement = measure(small_model(), instances, removal=Removal(percents=[20, 50]))
    paths = write_eraser(measurement, tmp_path / "mine.jsonl")
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
        "mine.jsonl",
        "mine.data/test.jsonl",
        "mine.data/docs.jsonl",
        "mine.rationales.jsonl",
        "mine.data/rationales.jsonl",
    ]
    return measurement.summary().to_json(), *(read(path) for path in paths[:3]), instances


def test_aopc_from_the_file(exported):
    summary, predictions, *_ = exported
    for kind in ("sufficiency", "comprehensiveness"):
        drops = {}
        for line in predictions:
            predicted = line["classification"]
            assert line["classification_scores"][predicted] == max(line["classification_scores"].values())
            for scores in line["thresholded_scores"]:
                drop = (
                    line["classification_scores"][predicted]
                    - scores[f"{kind}_classification_scores"][predicted]
                )
                drops.setdefault(scores["threshold"], []).append(drop)
        assert set(drops) == {0.2, 0.5}
        assert np.mean(drops[0.2]) == pytest.approx(summary[kind]["20"], abs=1e-12)
        assert np.mean(list(drops.values())) == pytest.approx(summary["aopc"][kind], abs=1e-12)


def test_accuracy_from_the_file(exported):
    summary, predictions, annotations, *_ = exported
    truth = {line["annotation_id"]: line["classification"] for line in annotations}
    right = [line["classification"] == truth[line["annotation_id"]] for line in predictions]
    assert np.mean(right) == pytest.approx(summary["accuracy"])


def test_token_f1_from_the_file(exported):
    summary, predictions, annotations, *_ = exported
    gold = {}
    for line in annotations:
        spans = [span for group in line["evidences"] for span in group]
        gold[line["annotation_id"]] = {t for s in spans for t in range(s["start_token"], s["end_token"])}
    scores = []
    for line in predictions:
        for rationale in line["rationales"]:
            hard = rationale["hard_rationale_predictions"]
            chosen = {t for s in hard for t in range(s["start_token"], s["end_token"])}
            true = gold[line["annotation_id"]]
            assert len(chosen) == len(true)
            scores.append(len(chosen & true) / len(true))
    assert np.mean(scores) == pytest.approx(summary["plausibility"]["token_f1"], abs=1e-12)


def test_documents_fit_the_predictions(exported):
    _, predictions, annotations, documents, instances = exported
    lengths = {line["docid"]: len(line["document"].split(" ")) for line in documents}
    # ERASER looks at the first line to see what there is, so the one without a rationale comes last.
    assert predictions[-1]["rationales"] == annotations[-1]["evidences"] == []
    assert predictions[0]["rationales"]
    assert {line["annotation_id"] for line in predictions} == {x.id for x in instances}
    assert lengths["1"] == int(instances[1].rankable.sum())
    marked = sum(
        span["end_token"] - span["start_token"]
        for line in annotations
        for group in line["evidences"]
        for span in group
    )
    assert marked == sum(int((x.relevance >= RATIONALE_FROM).sum()) for x in instances)


# --- What ERASER's metrics.py checks before it scores, written anew from reading it ---


def accepted(folder, name, thresholds=(0.01, 0.05, 0.1, 0.2, 0.5)):
    """Raises as ``metrics.py`` does where it would stop; else which scores it would print."""
    split = "rationales" if name.endswith(".rationales") else "test"
    results = read(folder / f"{name}.jsonl")
    data = folder / f"{name.removesuffix('.rationales')}.data"
    documents = {line["docid"]: line["document"].strip().split(" ") for line in read(data / "docs.jsonl")}
    annotations = read(data / f"{split}.jsonl")
    assert max(Counter(line["annotation_id"] for line in results).values()) == 1
    fields = (
        "classification",
        "sufficiency_classification_scores",
        "comprehensiveness_classification_scores",
    )
    for field in (*fields, "thresholded_scores"):
        assert len({field in line for line in results}) == 1, f"{field} of all or of none"
    soft = [any("soft_rationale_predictions" in own for own in line["rationales"]) for line in results]
    if len(set(soft)) > 1:
        raise ValueError("soft predictions of all or of none")
    for line in results:
        for own in line["rationales"]:
            places = [range(x["start_token"], x["end_token"]) for x in own["hard_rationale_predictions"]]
            flat = [place for span in places for place in span]
            assert len(flat) == len(set(flat)), "overlap"
            assert max(flat) < len(documents[own["docid"]])
            if soft[0]:
                assert len(own["soft_rationale_predictions"]) == len(documents[own["docid"]])
    for line in annotations:
        assert set(line) <= {"annotation_id", "query", "evidences", "classification", "query_type", "docids"}
        for group in line["evidences"]:
            for evidence in group:
                assert set(evidence) <= {"text", "docid", "start_token", "end_token"}
                text = documents[evidence["docid"]][evidence["start_token"] : evidence["end_token"]]
                assert " ".join(text) == evidence["text"]
    printed = {"hard"} if results[0]["rationales"] else set()
    if soft[0]:
        printed |= {"soft"}
    if "classification" in results[0]:
        labels = {line["classification"] for line in annotations}
        by_id = {line["annotation_id"]: line for line in results}
        for line in annotations:
            dict.fromkeys(labels)[by_id[line["annotation_id"]]["classification"]]
        for line in results:
            own = [x["threshold"] for x in line["thresholded_scores"] if x["threshold"] in thresholds]
            assert len(own) == len(thresholds), "a threshold is missing"
        printed |= {"classification"}
    return printed


@pytest.fixture(scope="module")
def posts():
    """The first 40 test posts of HateXplain, normal ones (without rationale) among them."""
    found = []
    with lzma.open(HATEXPLAIN, "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            if record["split"] != "test" or record["label"] not in CLASSES:
                continue
            words = record["text"].split()
            rated = [[int(mark) for mark in own] for own in record.get("rationales") or []]
            relevance = np.mean(rated, 0) if rated else np.zeros(len(words))
            tokens = np.array([1 + sum(map(ord, word)) % 28 for word in words])[:30]
            found.append(
                Instance(
                    tokens,
                    np.ones(len(tokens), dtype=bool),
                    relevance[:30],
                    label=CLASSES.index(record["label"]),
                    pieces=tuple(words[:30]),
                    id=record["id"],
                )
            )
            if len(found) == 40:
                return found
    raise AssertionError("too few posts")


def exported_posts(model, posts, folder, percents=CONVENTIONS["eraser"][0]):
    model.classes = CLASSES
    measurement = measure(model, posts, removal=Removal(percents=percents), nulls=Nulls(draws=0))
    write_eraser(measurement, folder / "mine.jsonl")
    return measurement


def test_eraser_accepts_hatexplain_as_it_is(small_model, posts, tmp_path):
    # Posts with and without rationale together, posts with a rationale that are predicted normal.
    rated = [post.rationale.any() for post in posts]
    assert 5 < sum(rated) < len(posts)
    measurement = exported_posts(small_model(), posts, tmp_path)
    predicted = measurement.faithfulness.predicted
    assert any(CLASSES[k] == "normal" for k, own in zip(predicted, rated, strict=True) if own)
    assert accepted(tmp_path, "mine") == {"hard", "classification"}
    assert accepted(tmp_path, "mine.rationales") == {"hard", "soft"}
    alone = read(tmp_path / "mine.rationales.jsonl")
    assert [line["annotation_id"] for line in alone] == [
        post.id for post, own in zip(posts, rated, strict=True) if own
    ]
    commands = eraser_commands(measurement, tmp_path / "mine.jsonl")
    assert len(commands) == 2
    assert commands[0].endswith("--split test --results " + str(tmp_path / "mine.jsonl"))
    assert "aopc" not in commands[0]


def test_one_file_holds_everything_where_all_posts_have_a_rationale(small_model, posts, tmp_path):
    rated = [post for post in posts if post.rationale.any()]
    # One normal post among them, so that every predicted class is somebody's label.
    rated[0] = replace(rated[0], label=CLASSES.index("normal"))
    exported_posts(small_model(), rated, tmp_path)
    assert accepted(tmp_path, "mine") == {"hard", "soft", "classification"}


def test_a_class_that_no_post_has_leaves_the_rationales(small_model, posts, tmp_path):
    rated = [post for post in posts if post.rationale.any()]
    measurement = exported_posts(small_model(), rated, tmp_path)
    assert unscorable_class(measurement) == "normal"
    assert accepted(tmp_path, "mine") == {"hard", "soft"}


def test_other_k_are_named_in_the_command(small_model, posts, tmp_path):
    measurement = exported_posts(small_model(), posts, tmp_path, percents=(5, 50))
    command = eraser_commands(measurement, tmp_path / "mine.jsonl")[0]
    thresholds = [float(text) for text in command.partition("--aopc_thresholds ")[2].split()]
    assert thresholds == [0.05, 0.5]
    assert accepted(tmp_path, "mine", thresholds) == {"hard", "classification"}
    with pytest.raises(AssertionError, match="missing"):
        accepted(tmp_path, "mine")


def test_without_any_rationale_or_any_k(small_model, posts, tmp_path):
    unrated = [post for post in posts if not post.rationale.any()]
    model = small_model()
    model.classes = CLASSES
    measurement = measure(model, unrated, removal=Removal(percents=()))
    paths = write_eraser(measurement, tmp_path / "mine.jsonl")
    assert [path.name for path in paths] == ["mine.jsonl", "test.jsonl", "docs.jsonl"]
    assert len(eraser_commands(measurement, tmp_path / "mine.jsonl")) == 1


def test_ids_must_differ(small_model, posts, tmp_path):
    measurement = measure(
        small_model(),
        [posts[0], replace(posts[1], relevance=posts[1].relevance ** 0, id=posts[0].id)],
        nulls=Nulls(draws=0),
    )
    with pytest.raises(InputError, match="two instances have the id"):
        write_eraser(measurement, tmp_path / "mine.jsonl")
