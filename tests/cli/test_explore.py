"""`fasterqk explore`: one file that needs nothing else."""

import json
import webbrowser

from fasterqk.cli.main import main


def test_it_writes_one_self_contained_page(tmp_path, capsys):
    path = tmp_path / "sub" / "explorer.html"
    assert main(["explore", "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"open {path}\n"
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [one.name for one in path.parent.iterdir()] == ["explorer.html"]


def test_the_page_goes_to_the_current_folder_by_default(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["explore", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"explorer": "explorer.html", "bytes": printed["bytes"], "opened": False}
    assert (tmp_path / "explorer.html").stat().st_size == printed["bytes"]


def test_open_shows_the_file_in_the_browser(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(asked.append(address)) or True)
    path = tmp_path / "an explorer.html"
    assert main(["explore", "-o", str(path), "--open"]) == 0
    assert asked == [path.as_uri()]
    assert capsys.readouterr().out == f"opened {path}\n"


def test_without_a_browser_it_says_which_file_to_open(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    path = tmp_path / "explorer.html"
    assert main(["explore", "-o", str(path), "--open"]) == 0
    assert capsys.readouterr().out == f"found no browser; open {path}\n"


def test_a_folder_is_not_a_page(tmp_path, capsys):
    assert main(["explore", "-o", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and repr(str(tmp_path)) in printed.err
