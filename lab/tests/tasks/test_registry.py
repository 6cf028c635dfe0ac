import os
from pathlib import Path

from fasterqk_lab.tasks import _registry, data_folder, data_source, use_data_folder, wrong_checksums


def test_the_data_folder_is_that_of_before_afterwards(monkeypatch, tmp_path):
    for before in (None, "mine"):
        if before is None:
            monkeypatch.delenv("FASTERQK_DATA", raising=False)
        else:
            monkeypatch.setenv("FASTERQK_DATA", before)
        with use_data_folder(tmp_path):
            assert os.environ["FASTERQK_DATA"] == str(tmp_path)
        assert os.environ.get("FASTERQK_DATA") == before
        with use_data_folder(None):
            assert os.environ.get("FASTERQK_DATA") == before


def test_data_folder_is_the_argument_the_variable_the_checkout_or_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FASTERQK_DATA", "/from/variable")
    assert data_folder("/from/argument") == Path("/from/argument")
    assert data_folder() == Path("/from/variable")
    monkeypatch.delenv("FASTERQK_DATA")
    checkout = Path(__file__).parents[3] / "data"
    assert data_source() == (checkout, "the checkout")
    monkeypatch.setattr(_registry, "CHECKOUT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "/from/cache")
    assert data_folder() == Path("/from/cache/fasterqk/data")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert data_folder() == Path("/home/someone/.cache/fasterqk/data")


def test_the_files_of_the_checkout_are_those_of_its_checksums_and_have_their_licence():
    folder = Path(__file__).parents[3] / "data"
    assert wrong_checksums(folder) == []
    named = {line.split()[1].removeprefix("./") for line in (folder / "SHA256SUMS").read_text().splitlines()}
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    papers = {name for name in found if "LICENSE" in name} | {"README.md", "SHA256SUMS"}
    assert found - papers == named - papers
    assert {str(Path(name).parent) for name in papers} - {"."} == {str(Path(name).parent) for name in named}


def test_a_file_that_changed_is_named(tmp_path):
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  ./a.txt\n{'0' * 64}  ./missing.txt\n")
    (tmp_path / "a.txt").write_text("changed")
    assert wrong_checksums(tmp_path) == ["a.txt"]
