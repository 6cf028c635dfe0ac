"""The commands on the toy language."""

import json

import pytest

from fasterqk_lab.cli.main import main


def output(capsys, *words):
    assert main(list(words)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_synthetic_train_prints_the_promised_keys(capsys):
    words = ["synthetic", "train", "--parameterization", "FAFO", "--qk-ratio", "10", "--seed", "0"]
    result = json.loads(output(capsys, *words, "--closed", "--json"))
    for key in ("loss", "accuracy", "steps", "mrta", "ac", "acmc", "dtap", "null", "diverged"):
        assert key in result
    assert result["diverged"] is False
    assert result["accuracy"] == 1
    assert result["mrta"] > 0.9
    assert result["cell"]["qk_ratio"] == 10


def test_synthetic_train_for_people(capsys):
    text = output(capsys, "synthetic", "train", "--parameterization", "CAFO", "--max-steps", "100")
    assert "uniform attention" in text
    assert "DTAP" in text


def test_synthetic_train_reports_divergence(capsys):
    words = ["synthetic", "train", "--parameterization", "CAFO", "--lr", "1e4", "--qk-ratio", "100"]
    assert "diverged" in output(capsys, *words)
    result = json.loads(output(capsys, *words, "--json"))
    assert result["diverged"] is True
    assert result["loss"] is None


@pytest.mark.parametrize(
    ("words", "quoted"),
    [
        (["synthetic", "train", "--parameterization", "fofo"], "'fofo'"),
        (["synthetic", "train", "--parameterization", "FAFO", "--gamma", "2"], "2.0"),
        (["synthetic", "train", "--parameterization", "FAFO", "--optimizer", "lion"], "'lion'"),
        (["reproduce", "fig2", "--panels", "a,z"], "'z'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, words, quoted):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert quoted in error
    assert error.count("\n") == 1


def test_reproduce_fig2(capsys, tmp_path):
    words = [
        "reproduce",
        "fig2",
        "--protocol",
        "four-tokens",
        "--panels",
        "a,e",
        "--seeds",
        "1",
        "--out",
        str(tmp_path),
    ]
    result = json.loads(output(capsys, *words, "--json"))
    assert [row["panel"] for row in result["panels"]] == ["a", "e"]
    for key in ("loss", "accuracy", "steps", "mrta", "ac", "acmc", "null", "matched"):
        assert key in result["panels"][0]
    text = output(capsys, *words)  # from the store, as a table
    assert "FAFO, QK 10x" in text
    assert "effects:" in text


@pytest.mark.usefixtures("in_process")
def test_reproduce_fig3(capsys, tmp_path):
    words = ["reproduce", "fig3", "--epochs", "1", "--out", str(tmp_path)]
    text = output(capsys, *words)
    assert "factorized" in text
    result = json.loads(output(capsys, *words, "--json"))
    assert len(result["curves"]) == 10
    assert len(result["curves"][0]["along"]["loss"]) == 2
