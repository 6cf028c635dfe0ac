import json
import shlex
from pathlib import Path

import pytest

import fasterqk_lab.training
from fasterqk.cli.common import Parser
from fasterqk_lab.cli.main import main
from fasterqk_lab.cli.train import configure_train
from fasterqk_lab.compare import read_values
from fasterqk_lab.experiments import _registry
from fasterqk_lab.runs import sweep


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [
        {"id": str(i), "tokens": ["it", "is", "x" if i % 2 else "y"], "relevance": [0, 0, 1], "label": i % 2}
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def in_this_process(monkeypatch):
    """Runs without worker processes, each two words long."""

    def here(configs, function, out, **options):
        return sweep(configs, function, out, **{**options, "workers": 0})

    def train(config, **options):
        accuracy = 0.6 if config.optimisation.lr > 1e-3 else 0.5
        return {"diverged": False, "best": {"validation_accuracy": accuracy, "epoch": 1.0}}

    monkeypatch.setattr(_registry, "sweep", here)
    monkeypatch.setattr(fasterqk_lab.training, "train", train)


def words(data, out):
    options = ["--rates", "1e-4,5e-3", "--ratios", "5,30", "--seeds", "2", "--out", str(out)]
    return ["tune", "jsonl", "--data", data, *options]


@pytest.mark.usefixtures("in_this_process")
def test_json_is_one_document_with_what_was_chosen(capsys, data, tmp_path):
    assert main([*words(data, tmp_path / "out"), "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert captured.err == ""
    assert (found["lr"], found["qk_ratio"]) == (5e-3, 5)
    assert [row["lr"] for row in found["stages"]["lr"]["tried"]] == [1e-4, 5e-3]
    assert not any("mrta" in key for key in found)
    for folder in ("tables", "results"):
        assert (tmp_path / "out" / folder / "tune-jsonl.csv").exists()
    values = list(read_values(Path(found["files"]["results"]["csv"])))
    assert {value.arm for value in values} > {"base rate 0.0001", "base rate 0.005", "multiplier of QK 30"}
    assert [value[2:] for value in values if value.arm == "base rate 0.005"] == [
        (seed, "best", None, "validation_accuracy", 0.6) for seed in (0, 1)
    ]


@pytest.mark.usefixtures("in_this_process")
def test_people_read_what_was_chosen_and_why(capsys, data, tmp_path):
    assert main(words(data, tmp_path / "out")) == 0
    out = capsys.readouterr().out
    assert "Chosen: base rate 0.005, the highest validation accuracy (0.6000, mean of 2 seeds)." in out
    assert "no attention was measured" in out
    assert "fasterqk-lab train jsonl --lr 0.005 --qk-ratio 5" in out


def printed_command(out):
    (line,) = [line.strip() for line in out.splitlines() if line.startswith("  fasterqk-lab train ")]
    return shlex.split(line)[1:]


def test_the_printed_command_works_when_it_is_pasted(capsys, data, tmp_path, monkeypatch):
    """In the same folder, with all that was given: data, form, depth, batches, decay, optimizer and seed."""
    (tmp_path / "my data.jsonl").write_bytes(Path(data).read_bytes())
    monkeypatch.chdir(tmp_path)
    options = "--layers 2 --batch-size 16 --weight-decay 0.5 --optimizer sgd --seed 3"
    with monkeypatch.context() as patch:
        in_this_process.__wrapped__(patch)
        assert main([*words("my data.jsonl", "out"), *options.split()]) == 0
    command = printed_command(capsys.readouterr().out)
    assert main([*command, "--epochs", "1", "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert (trained["seed"], trained["qk_ratio"]) == (3, 5)
    arguments = configured(command)
    assert (arguments.data, arguments.layers, arguments.batch_size) == ("my data.jsonl", 2, 16)
    assert (arguments.weight_decay, arguments.optimizer) == (0.5, "sgd")


def configured(command):
    parser = Parser(prog="train")
    configure_train(parser)
    return parser.parse_args(command[1:])


@pytest.mark.usefixtures("in_this_process")
def test_the_printed_command_names_form_and_data_folder(capsys, tmp_path):
    data_dir = str(tmp_path)
    given = [
        "tune",
        "agreement",
        "--form",
        "prefix",
        "--data-dir",
        data_dir,
        "--rates",
        "1e-4",
        "--ratios",
        "5",
    ]
    assert main([*given, "--seeds", "1", "--out", str(tmp_path / "out")]) == 0
    arguments = configured(printed_command(capsys.readouterr().out))
    assert (arguments.task, arguments.form, arguments.data_dir) == ("agreement", "prefix", data_dir)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["imdb"], "unknown task 'imdb'; choose from"),
        (["agreement", "--rates", "1e-3,fast"], "'fast' is not a finite number above 0"),
        (["agreement", "--rates", "0.5"], "rate 0.5 lies outside"),
        (["agreement", "--ratios", "5,5"], "each once"),
        (["hatexplain", "--data-dir", "/nonexistent"], "/nonexistent"),
        (["agreement", "--seeds", "0"], "'0' is not a whole number from 1 to"),
    ],
)
def test_bad_input_is_one_line_and_code_two(capsys, tmp_path, options, message):
    try:
        code = main(["tune", *options, "--out", str(tmp_path / "out")])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
