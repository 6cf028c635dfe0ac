import json

import pytest

from fasterqk.attention.scores import title_of
from fasterqk_lab.cli.main import main
from fasterqk_lab.tasks import _registry, kvqa


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "mine.jsonl"
    lines = [
        {
            "id": str(i),
            "tokens": ["a", "good" if i % 2 else "bad", "day", "it", "was"][: 2 + i % 4],
            "relevance": [0, 1, 0, 0, 0][: 2 + i % 4],
            "label": "yes" if i % 2 else "no",
        }
        for i in range(80)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def run(capsys, *words):
    code = main(["train", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_is_one_document_with_the_measurements(capsys, data):
    code, out, err = run(capsys, "jsonl", "--data", data, "--epochs", "2", "--qk-ratio", "10", "--json")
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert result["qk_ratio"] == 10
    assert result["diverged"] is False
    assert {"accuracy", "mrta", "ac", "acmc", "dtap", "null", "sufficiency"} <= set(result["test"])
    assert len(result["history"]) == 3
    assert result["seconds"] > 0


@pytest.fixture
def few_questions(monkeypatch):
    monkeypatch.setattr(kvqa, "COUNTS", {"train": 256, "validation": 16, "test": 32})
    _registry._load.cache_clear()
    yield
    _registry._load.cache_clear()


def test_ratios_by_role_train_and_are_kept(capsys, data, tmp_path):
    words = ("jsonl", "--data", data, "--epochs", "1", "--json", "--out", str(tmp_path / "out"))
    equal = json.loads(run(capsys, *words, "--qk-ratio", "5")[1])
    by_role = json.loads(run(capsys, *words, "--ratios", "q=5,k=5")[1])
    other = json.loads(run(capsys, *words, "--ratios", "q=5,k=1")[1])
    assert by_role["loss"] == equal["loss"] != other["loss"]
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 3


def test_a_task_of_answers_is_trained_by_the_same_command(capsys, few_questions, tmp_path):
    words = ("kvqa", "--epochs", "2", "--qk-ratio", "5", "--out", str(tmp_path), "--json")
    code, out, err = run(capsys, *words)
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert len(result["history"]) == 3
    assert result["history"][-1]["loss"] < result["history"][0]["loss"]
    assert {"f1", "accuracy", "mrta", "average", "layer", "sufficiency"} <= set(result["test"])
    code, out, _ = run(capsys, *words[:-1])
    assert code == 0
    assert "test F1" in out


def test_table_for_people(capsys, data):
    code, out, _ = run(capsys, "jsonl", "--data", data, "--epochs", "1")
    assert code == 0
    assert "test accuracy" in out
    for name in ("mrta", "acmc", "entropy", "sufficiency_5", "comprehensiveness_50", "auprc"):
        assert title_of(name) in out


def test_out_keeps_the_run_and_does_not_train_again(capsys, data, tmp_path):
    words = ("jsonl", "--data", data, "--epochs", "1", "--seed", "7", "--out", str(tmp_path), "--json")
    first = json.loads(run(capsys, *words)[1])
    (cell,) = (tmp_path / "runs").iterdir()
    assert (cell / "result.json").exists()
    written = (cell / "result.json").stat().st_mtime_ns
    second = json.loads(run(capsys, *words)[1])
    assert (cell / "result.json").stat().st_mtime_ns == written
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    run(capsys, *words, "--force")
    assert (cell / "result.json").stat().st_mtime_ns > written


def test_a_diverged_run_says_so(capsys, data):
    words = ("jsonl", "--data", data, "--epochs", "4", "--lr", "1e5", "--optimizer", "sgd")
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert out.startswith("diverged after")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["imdb"], "unknown task 'imdb'; choose from"),
        (["jsonl"], "--data FILE.jsonl"),
        (["jsonl", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["agreement", "--form", "whole"], "no form 'whole'"),
        (["agreement", "--weight-decay", "-1"], "weight_decay -1"),
        (
            ["agreement", "--ratios", "x=3"],
            "ratios 'x=3': 'x=3' is not a role and a number above 0; write q=10",
        ),
        (["agreement", "--ratios", "q=3", "--qk-ratio", "2"], "qk_ratio 2.0 and ratios 'q=3' both set rates"),
        (["hatexplain", "--data-dir", "/nonexistent"], "/nonexistent"),
        (["squad", "--data-dir", "/nonexistent"], "/nonexistent"),
        (["kvqa", "--form", "whole"], "no form 'whole'"),
    ],
)
def test_bad_input_is_one_line_and_code_two(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_missing_data_is_told_before_anything_is_written(capsys, tmp_path):
    words = ("hatexplain", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out"))
    code, _, err = run(capsys, *words)
    assert code == 2
    assert "dataset.json" in err
    assert not (tmp_path / "out").exists()
