from pathlib import Path

import pytest

from fasterqk.errors import InputError
from fasterqk.lab.tasks import TASKS, data_folder, load_task, task_module


def test_every_task_offers_what_the_registry_promises(tmp_path):
    for name in TASKS:
        module = task_module(name)
        assert module.FORMS
        report = module.check(tmp_path)
        assert {"files", "missing"} <= set(report)


def test_a_task_is_read_once():
    assert load_task("agreement") is load_task("agreement", form="prefix")


def test_unknown_task_form_and_file_quote_the_input():
    with pytest.raises(InputError, match="unknown task 'imdb'; choose from hatexplain"):
        load_task("imdb")
    with pytest.raises(InputError, match="no form 'whole'; its forms are 'prefix'"):
        load_task("agreement", form="whole")
    with pytest.raises(InputError, match=r"'mine\.jsonl' belongs to task 'jsonl'"):
        load_task("agreement", file="mine.jsonl")


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
