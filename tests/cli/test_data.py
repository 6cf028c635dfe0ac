import json
import lzma

from fasterqk.cli.main import main
from fasterqk.tasks import TASKS


def test_every_task_is_listed_with_what_is_missing(capsys, tmp_path):
    assert main(["data", "check", "--data-dir", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["data_dir"] == str(tmp_path)
    assert set(document["tasks"]) == set(TASKS)
    assert document["tasks"]["hatexplain"]["status"] == "missing"
    assert "github.com/hate-alert/HateXplain" in document["tasks"]["hatexplain"]["missing"][0]
    assert document["tasks"]["agreement"]["status"] == "ready"
    assert document["tasks"]["agreement"]["counts"]["train"] > 0


def test_a_damaged_file_is_told_and_the_code_is_one(capsys, tmp_path):
    (tmp_path / "hatexplain").mkdir()
    path = tmp_path / "hatexplain" / "hatexplain.jsonl.xz"
    path.write_bytes(lzma.compress(b'{"id": "a"}\n' * 50)[:40])
    assert main(["data", "check", "--data-dir", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "hatexplain: damaged" in out
    assert "hatexplain.jsonl.xz' is truncated" in out


def test_text_names_the_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTERQK_DATA", str(tmp_path))
    assert main(["data", "check"]) == 0
    assert capsys.readouterr().out.startswith(f"data folder {tmp_path}")
