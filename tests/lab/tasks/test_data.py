import os
from pathlib import Path

from fasterqk.lab.tasks import data_folder, use_data_folder


def test_the_data_folder_is_that_of_before_afterwards(monkeypatch):
    for before in (None, "mine"):
        if before is None:
            monkeypatch.delenv("FASTERQK_DATA", raising=False)
        else:
            monkeypatch.setenv("FASTERQK_DATA", before)
        with use_data_folder("other"):
            assert os.environ["FASTERQK_DATA"] == "other"
        assert os.environ.get("FASTERQK_DATA") == before
        with use_data_folder(None):
            assert os.environ.get("FASTERQK_DATA") == before


def test_data_folder_is_the_argument_then_the_variable_then_the_cache(monkeypatch):
    monkeypatch.setenv("FASTERQK_DATA", "/from/variable")
    assert data_folder("/from/argument") == Path("/from/argument")
    assert data_folder() == Path("/from/variable")
    monkeypatch.delenv("FASTERQK_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/from/cache")
    assert data_folder() == Path("/from/cache/fasterqk/data")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert data_folder() == Path("/home/someone/.cache/fasterqk/data")
