"""No command writes over what it reads, nor over what is no regular file."""

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from lab.tests.crash.cells import Empty
from tokenizers import Tokenizer, models, pre_tokenizers

from fasterqk.cli.main import COMMANDS
from fasterqk.cli.main import main as library
from fasterqk_lab.cli.main import main as lab
from fasterqk_lab.configs import content_hash
from fasterqk_lab.figures import save_table
from fasterqk_lab.runs import sweep


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a classifier, data, a spec, and a results folder with a table and a cell."""
    root = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    size = {"vocab_size": 5, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**size, intermediate_size=8, max_position_embeddings=16)
    transformers.BertForSequenceClassification(config).save_pretrained(root / "model")
    words = Tokenizer(
        models.WordLevel({"[UNK]": 0, "[PAD]": 1, "it": 2, "is": 3, "so": 4}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", cls_token="it")
    saved.save_pretrained(root / "model")
    lines = [{"tokens": ["it", "is", "so"], "relevance": [0, 0, 1], "label": i % 2} for i in range(8)]
    for folder in (root, root / "mine.data", root / "out" / "tables"):
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_table(
        root / "out", "t", title="T", caption="C", columns=[{"key": "a", "label": "a"}], rows=[{"a": 1}]
    )
    sweep([Empty(0)], "lab.tests.crash.cells:empty", root / "out", workers=0)
    for name in ("mine.rationales.jsonl", "mine.data/rationales.jsonl"):
        (root / name).write_text((root / "test.jsonl").read_text())
    (root / "cells.jsonl").write_text('{"fact": "x", "value": 1}\n')
    (root / "link").symlink_to("test.jsonl")
    os.link(root / "test.jsonl", root / "twin")
    os.mkfifo(root / "pipe")
    return root


def main(words: list[str]) -> int:
    """Run a command line of whichever program has the command."""
    return library(words) if words[0] in COMMANDS else lab(words)


CELL = f"out/runs/{content_hash(Empty(0))}/result.json"


@pytest.mark.parametrize(
    "line",
    [
        "measure --model model --data test.jsonl --eraser-out test.jsonl",
        "measure --model model --data test.jsonl --eraser-out ./model/../test.jsonl",
        "measure --model model --data test.jsonl --eraser-out link",
        "measure --model model --data test.jsonl --eraser-out twin",
        "measure --model model --data link --eraser-out test.jsonl",
        "measure --model model --data mine.data/test.jsonl --eraser-out mine.jsonl",
        "measure --model model --data mine.data/rationales.jsonl --eraser-out mine.jsonl",
        "measure --model model --data mine.rationales.jsonl --eraser-out mine.jsonl",
        "measure --model model --data test.jsonl --eraser-out model/config.json",
        "measure --model model --data test.jsonl --eraser-out model/model.safetensors",
        "measure --model model --data test.jsonl --eraser-out .",
        "measure --model model --data test.jsonl --eraser-out ..",
        "measure --model model --data test.jsonl --eraser-out model",
        "measure --model model --data test.jsonl --eraser-out mine.data",
        "measure --model model --data test.jsonl --eraser-out new.data",
        "measure --model model --data test.jsonl --eraser-out pipe",
        "measure --model model --data test.jsonl --eraser-out /dev/null",
        "measure --model model --data out/tables/test.jsonl --out out",
        "measure --model model --data test.jsonl --out test.jsonl",
        "measure --model model --data test.jsonl --out ''",
        "measure --model model --data test.jsonl --eraser-out ''",
        "train jsonl --data out/tables/test.jsonl --out out",
        "train jsonl --data test.jsonl --out test.jsonl",
        "tune jsonl --data out/tables/test.jsonl --out out",
        "tune jsonl --data test.jsonl --out test.jsonl",
        "report out -o out/tables/t.json",
        "report out -o out/tables/t.csv",
        f"report out -o {CELL}",
        "report out -o pipe",
        "report out -o /dev/null",
        "report out -o ''",
        "explore -o pipe",
        "explore -o /dev/full",
        "explore -o model",
        "explore -o ''",
        "explore -o nothing/..",
        "reproduce fig2 --cells cells.jsonl --export cells.jsonl",
        f"reproduce fig2 --export {CELL}",
        "reproduce fig2 --export pipe",
        "reproduce fig2 --export ''",
        "reproduce fig4 --out cells.jsonl",
        "sweep out/tables/spec.toml --out out",
        "sweep spec.toml --out test.jsonl",
        "plan spec.toml --out test.jsonl",
    ],
)
def test_it_is_refused_in_one_line_and_every_file_stays(
    made: Path, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made)
    before = _state(made)
    devices = {name: os.lstat(name).st_rdev for name in ("/dev/null", "/dev/full")}
    assert main([word.strip("'") for word in line.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert _state(made) == before
    assert {name: os.lstat(name).st_rdev for name in devices} == devices


def test_a_page_is_written_through_a_link(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.html").symlink_to("real.html")
    for _ in range(2):
        assert main(["explore", "-o", "link.html"]) == 0
        assert (tmp_path / "link.html").is_symlink() and (tmp_path / "real.html").stat().st_size > 1000
    assert main(["report", str(made / "out"), "-o", "link.html"]) == 0
    assert (tmp_path / "link.html").is_symlink() and "<h3>T</h3>" in (tmp_path / "real.html").read_text()


def _state(folder: Path) -> dict[str, object]:
    """Every file of a folder: what it is, and what is in it."""
    found: dict[str, object] = {}
    for place, folders, names in os.walk(folder):
        for path in (Path(place) / name for name in (*folders, *names)):
            regular = path.is_file() and not path.is_symlink()
            found[str(path)] = path.lstat().st_mode, path.read_bytes() if regular else None
    return found
