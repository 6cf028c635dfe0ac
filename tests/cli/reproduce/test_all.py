"""`fasterqk reproduce all`: its parts, and the page they end in."""

import json
from importlib import import_module
from pathlib import Path

from fasterqk.cli.main import main
from fasterqk.lab.experiments import all as everything


def test_its_parts_run_and_end_in_a_page(tmp_path, capsys, monkeypatch):
    small = [
        ["fig2", "--panels", "a", "--seeds", "1", "--workers", "1"],
        ["fig3", "--epochs", "1", "--workers", "1"],
    ]
    monkeypatch.setattr(everything, "PARTS", small)
    assert main(["reproduce", "all", "--out", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [part["experiment"] for part in result["parts"]] == [" ".join(words) for words in small]
    assert all(part["seconds"] > 0 for part in result["parts"])
    page = Path(result["report"]).read_text(encoding="utf-8")
    assert "Figure 2" in page
    assert "Figure 3" in page


def test_every_part_is_called_with_the_results_folder(tmp_path, monkeypatch):
    called = {}
    for words in everything.PARTS:
        module = import_module(f"fasterqk.cli.reproduce.{words[0].replace('-', '_')}")
        monkeypatch.setattr(module, "run", lambda arguments, name=words[0]: called.update({name: arguments}))
    for words in everything.PARTS:
        everything._run_part([*words, "--out", str(tmp_path)])
    assert set(called) == {"fig2", "fig3", "fig4", "table-agreement", "table-kvqa"}
    assert all(arguments.out == str(tmp_path) for arguments in called.values())
    assert called["fig2"].protocol == "paper"
    assert called["fig2"].seeds == 5
