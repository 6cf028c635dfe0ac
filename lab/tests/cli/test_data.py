import json
import lzma

from fasterqk_lab.cli.main import main
from fasterqk_lab.tasks import TASKS
from fasterqk_lab.tasks._registry import CHECKOUT


def test_every_task_is_listed_with_what_is_missing(capsys, tmp_path):
    assert main(["data", "check", "--data-dir", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["data_dir"] == str(tmp_path)
    assert set(document["tasks"]) == {*TASKS}
    assert document["tasks"]["hatexplain"]["status"] == "missing"
    assert "github.com/hate-alert/HateXplain" in document["tasks"]["hatexplain"]["missing"][0]
    assert document["tasks"]["agreement"]["status"] == "ready"
    assert document["tasks"]["agreement"]["counts"]["train"] > 0
    assert document["tasks"]["squad"]["status"] == "missing"
    assert "SQuAD-explorer/dataset" in document["tasks"]["squad"]["missing"][0]
    assert document["tasks"]["kvqa"]["status"] == "ready"


def test_a_damaged_file_is_told_and_the_code_is_one(capsys, tmp_path):
    (tmp_path / "hatexplain").mkdir()
    path = tmp_path / "hatexplain" / "hatexplain.jsonl.xz"
    path.write_bytes(lzma.compress(b'{"id": "a"}\n' * 50)[:40])
    (tmp_path / "tokenizers").symlink_to(CHECKOUT / "tokenizers")
    assert main(["data", "check", "--data-dir", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "hatexplain: damaged" in out
    assert "hatexplain.jsonl.xz' is truncated" in out


def test_text_names_the_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTERQK_DATA", str(tmp_path))
    assert main(["data", "check"]) == 0
    assert capsys.readouterr().out.startswith(f"data folder {tmp_path}")


def test_squad_is_counted_and_what_is_left_out_is_said(capsys, tmp_path):
    def article(title, start):
        answer = {"text": "river", "answer_start": start}
        asked = {"id": title, "question": "What?", "answers": [answer]}
        return {"title": title, "paragraphs": [{"context": "the river", "qas": [asked]}]}

    (tmp_path / "squad").mkdir()
    articles = [article("one", 4), article("two", 4), article("three", 5)]
    for part in ("train-v2.0", "dev-v1.1"):
        (tmp_path / "squad" / f"{part}.json").write_text(json.dumps({"data": articles}))
    assert main(["data", "check", "--data-dir", str(tmp_path)]) == 0
    squad = capsys.readouterr().out.split("squad: ")[1].split("\n\n")[0]
    assert squad.startswith("missing\n")
    assert "no tokenizers/gpt2/encoder.json" in squad
    (tmp_path / "tokenizers").symlink_to(CHECKOUT / "tokenizers")
    assert main(["data", "check", "--data-dir", str(tmp_path)]) == 0
    squad = capsys.readouterr().out.split("squad: ")[1].split("\n\n")[0]
    assert squad.startswith("ready\n")
    assert "train 1 questions, validation 1 questions, test 2 questions" in squad
    assert "left out: 2 with an answer that is not in its context" in squad


def test_generated_tasks_say_that_they_need_no_file(capsys, tmp_path):
    assert main(["data", "check", "--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("; generated, no file") == 2


def test_a_folder_that_is_not_there_is_one_line(capsys, tmp_path):
    assert main(["data", "check", "--data-dir", str(tmp_path / "typo")]) == 2
    assert "typo' is not a folder" in capsys.readouterr().err


def test_a_wrong_checksum_is_said_and_the_code_is_one(capsys, tmp_path):
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  ./note.txt\n")
    (tmp_path / "note.txt").write_text("changed")
    assert main(["data", "check", "--data-dir", str(tmp_path)]) == 1
    assert "note.txt does not have the checksum in SHA256SUMS" in capsys.readouterr().out


def test_a_data_folder_that_is_not_there_is_one_line(tmp_path, monkeypatch, capsys):
    typo = str(tmp_path / "dtaa")
    for words in (["--data-dir", typo], ["--data-dir", ""], []):
        monkeypatch.setenv("FASTERQK_DATA", typo)
        assert main(["data", "check", *words]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1 and "is not a folder" in printed.err
