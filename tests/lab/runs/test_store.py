"""The store: what was saved is found again by its configuration, and by nothing else."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fasterqk
from fasterqk.errors import InputError
from fasterqk.files import content_hash
from fasterqk.lab.runs import Store
from fasterqk.lab.runs._store import claim, clear_temporary, has_result, read_sealed, state


def test_a_result_is_found_by_its_configuration(tmp_path: Path, setting: Any) -> None:
    store = Store(tmp_path)
    assert store.result(setting(1)) is None
    folder = store.save(setting(1), {"loss": 0.1, "rows": [[1, 2]], "none": float("nan")})
    assert folder == store.folder(setting(1)) == tmp_path / "runs" / content_hash(setting(1))
    assert store.result(setting(seed=1)) == {"loss": 0.1, "rows": [[1, 2]], "none": None}
    assert store.result(setting(2)) is None


def test_what_stands_beside_the_result(tmp_path: Path, setting: Any) -> None:
    result = {"data_checksums": {"posts.json": "ab12"}}
    folder = Store(tmp_path).save(setting(1), result, function="a:b", attempt=2, seconds=1.5)
    about = read_sealed(folder / "environment.json") or {}
    assert (about["function"], about["attempt"], about["seconds"]) == ("a:b", 2, 1.5)
    assert about["data_checksums"] == {"posts.json": "ab12"}
    assert about["fasterqk"] == fasterqk.__version__
    config = read_sealed(folder / "config.json") or {}
    assert config == {
        "schema": 1,
        "kind": "Setting",
        "fields": {"seed": 1},
        "all": {"seed": 1, "lr": 0.1, "task": "agreement"},
    }


def test_a_damaged_result_is_one_line(
    tmp_path: Path, setting: Any, flip: Callable[[Path, int], None]
) -> None:
    store = Store(tmp_path)
    path = store.save(setting(1), {"loss": 0.1}) / "result.json"
    flip(path, -10)
    with pytest.raises(InputError, match="is damaged") as caught:
        store.result(setting(1))
    assert str(path) in str(caught.value)


def test_a_result_of_another_cell_is_refused(tmp_path: Path, setting: Any) -> None:
    store = Store(tmp_path)
    first = store.save(setting(1), {"loss": 0.1})
    second = store.save(setting(2), {"loss": 0.2})
    (second / "result.json").write_bytes((first / "result.json").read_bytes())
    with pytest.raises(InputError, match=f"belongs to cell '{first.name}'"):
        store.result(setting(2))


def test_a_result_from_before_a_default_changed_is_refused(tmp_path: Path) -> None:
    def kind(**defaults: float) -> Any:
        return dataclasses.make_dataclass("Kind", [(n, float, v) for n, v in defaults.items()], frozen=True)

    store = Store(tmp_path)
    store.save(kind(lr=0.1, decay=0.5)(), {"loss": 1.0})
    store.save(kind(lr=0.1, decay=0.5)(lr=0.3), {"loss": 2.0})
    newer = kind(lr=0.2, decay=0.5, clip=1.0)
    with pytest.raises(InputError, match=r"the default of lr was 0\.1; now it is 0\.2"):
        store.result(newer())
    assert store.result(newer(lr=0.3)) == {"loss": 2.0}  # given, not a default: nothing has changed
    assert store.result(kind(lr=0.1, decay=0.5, clip=1.0)()) == {"loss": 1.0}  # a new field changes nothing


def test_states(tmp_path: Path, setting: Any) -> None:
    store = Store(tmp_path)
    folder = store.begin(setting(1))
    assert state(folder) == "stopped"
    with claim(folder):
        assert state(folder) == "running"
    (folder / "error.json").write_text("{}")
    assert state(folder) == "failed"
    store.save(setting(1), {})
    assert state(folder) == "done"


def test_cells_are_found_by_a_prefix(tmp_path: Path, setting: Any) -> None:
    store = Store(tmp_path)
    assert list(store.cells()) == []
    folders = sorted(store.save(setting(seed), {}) for seed in range(3))
    (tmp_path / "runs" / "notes").mkdir()
    assert list(store.cells()) == folders
    assert store.find(folders[0].name[:8]) == folders[0]
    with pytest.raises(InputError, match="no cell begins with 'xyz'"):
        store.find("xyz")
    with pytest.raises(InputError, match="no cell begins with ''"):
        store.find("")


def test_an_ambiguous_prefix(tmp_path: Path) -> None:
    for name in ("00" * 8, "01" * 8):
        (tmp_path / "runs" / name).mkdir(parents=True)
    with pytest.raises(InputError, match="2 cells begin with '0'"):
        Store(tmp_path).find("0")


def test_a_running_cell_is_not_removed(tmp_path: Path, setting: Any) -> None:
    store = Store(tmp_path)
    folder = store.save(setting(1), {})
    with claim(folder), pytest.raises(InputError, match="is running"):
        store.remove(folder)
    assert store.result(setting(1)) == {}
    store.remove(folder)
    assert not folder.exists()


def test_half_written_files_are_cleared_and_others_kept(tmp_path: Path) -> None:
    (tmp_path / ".result.json.12-ab.tmp").write_text("{")
    (tmp_path / ".folder.12-ab.tmp").mkdir()
    (tmp_path / "history.jsonl").write_text("")
    clear_temporary(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["history.jsonl"]


def test_whether_there_is_a_result_is_known_without_reading_it(tmp_path: Path, setting: Any) -> None:
    store = Store(tmp_path)
    assert not has_result(store.folder(setting()), setting())
    folder = store.save(setting(), {"losses": [0.5] * 100})
    assert has_result(folder, setting())
    other = store.folder(setting(1))
    folder.rename(other)
    with pytest.raises(InputError, match="belongs to cell"):
        has_result(other)
