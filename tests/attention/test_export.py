"""The exported files, scored again from nothing but their text, give our numbers."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fasterqk.attention import measure, write_eraser
from fasterqk.attention._instances import RATIONALE_FROM


def read(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def exported(small_model, some_instances, tmp_path):
    instances = some_instances(8)
    instances[0] = replace(instances[0], relevance=0 * instances[0].relevance)
    measurement = measure(small_model(), instances, generator=np.random.default_rng(0), percents=[20, 50])
    paths = write_eraser(measurement, tmp_path / "mine.jsonl")
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
        "mine.jsonl",
        "mine.data/test.jsonl",
        "mine.data/docs.jsonl",
    ]
    return measurement.summary().to_json(), *(read(path) for path in paths), instances


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
    for line in predictions:
        for rationale in line["rationales"]:
            assert len(rationale["soft_rationale_predictions"]) == lengths[rationale["docid"]]
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
