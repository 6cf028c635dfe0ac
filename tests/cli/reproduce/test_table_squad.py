import json

import pytest

from fasterqk.cli.main import main
from fasterqk.lab.experiments import table_kvqa, table_squad
from fasterqk.lab.experiments import table_kvqa as kvqa_experiment
from fasterqk.lab.experiments import table_squad as experiment
from fasterqk.lab.training import TrainConfig


@pytest.fixture(autouse=True)
def little(monkeypatch):
    """Both tables with models of a second on generated questions."""

    def config(task, **fields):
        sizes = {"width": 8, "heads": 2, "head_width": 4, "mlp_width": 8, "context": 48, "layers": 2}
        few = {"train_limit": 96, "train_subset": 16, "along_subset": 8, "test_subset": 10, "epochs": 1}
        own = {key: fields[key] for key in ("evaluate_at_fall",) if key in fields}
        return TrainConfig("kvqa", batch_size=32, answer_tokens=5, **sizes, **few, **own)

    monkeypatch.setattr(experiment, "TrainConfig", config)
    monkeypatch.setattr(kvqa_experiment, "TrainConfig", config)


def run(capsys, *words):
    code = main(["reproduce", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_arms_run_apart_are_joined_from_the_store(capsys, tmp_path):
    words = ["table-squad", "--size", "tiny", "--workers", "1", "--out", str(tmp_path), "--json"]
    code, out, err = run(capsys, *words, "--arms", "faster_qk")
    alone = json.loads(out)
    assert (code, err) == (0, "")
    assert [cell["arm"] for cell in alone["cells"]] == ["faster_qk"]
    assert alone["protocols"] == {}
    together = json.loads(run(capsys, *words)[1])
    assert [cell["arm"] for cell in together["cells"]] == ["same", "faster_qk"]
    assert together["cells"][1] == alone["cells"][0]
    assert len(list((tmp_path / "runs").iterdir())) == 2
    summary = together["protocols"]["paper"]
    assert {"test_f1", "test_accuracy", "mrta", "ac", "sufficiency", "null"} <= set(
        summary["arms"]["baseline"]
    )
    attentions = {row["attention"] for row in summary["by_layer"]}
    assert attentions == {"rollout", "layer average", "layer 1", "layer 2"}
    table_squad.show(together)
    text = capsys.readouterr().out
    assert "test F1" in text
    assert "attention on relevant tokens by layer" in text
    assert (tmp_path / "figures" / "table-squad-tiny-paper-by-layer.png").exists()


def test_table_kvqa_is_a_table_of_a_deep_model(capsys, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(table_kvqa, "run_deep", lambda experiment, arguments: asked.append(experiment) or {})
    code, out, _ = run(capsys, "table-kvqa", "--seeds", "2", "--out", str(tmp_path), "--json")
    assert (code, json.loads(out)) == (0, {})
    assert asked[0].seeds == (0, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "huge"], "unknown size 'huge'; choose from paper, small, tiny"),
        (["--arms", "slow"], "size 'small' has no arm 'slow'; choose from same, faster_qk"),
        (["--seeds", "0"], "'0' is not at least 1"),
    ],
)
def test_bad_input_is_one_line(capsys, tmp_path, words, message):
    try:
        code = main(["reproduce", "table-squad", *words, "--out", str(tmp_path)])
    except SystemExit as stopped:
        code = stopped.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
