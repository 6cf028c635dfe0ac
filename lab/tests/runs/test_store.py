"""The store: sealed files, claims, the environment of a result, and cells found by their configuration."""

import dataclasses
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fasterqk
from fasterqk.errors import InputError
from fasterqk_lab.cli.main import main
from fasterqk_lab.configs import SCHEMA_VERSION, content_hash
from fasterqk_lab.runs import Store
from fasterqk_lab.runs import _store as store_module
from fasterqk_lab.runs._store import (
    _git_state,
    claim,
    clear_temporary,
    environment,
    is_claimed,
    read_sealed,
    state,
    write_sealed,
)

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
documents = st.dictionaries(
    st.text().filter(lambda name: name not in ("sha256", "schema")),
    scalars | st.lists(scalars, max_size=3),
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(document=documents)
def test_a_document_comes_back(tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("sealed") / "file.json"
    write_sealed(path, document)
    assert read_sealed(path) == {"schema": SCHEMA_VERSION, **document}
    assert json.loads(path.read_text()).items() >= document.items()


def test_the_order_of_keys_is_kept(tmp_path: Path) -> None:
    write_sealed(tmp_path / "file.json", {"b": 1, "a": 2})
    assert list(read_sealed(tmp_path / "file.json") or {}) == ["schema", "b", "a"]


def test_no_file_is_none(tmp_path: Path) -> None:
    assert read_sealed(tmp_path / "file.json") is None


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("out") / "runs" / "0123456789abcdef" / "result.json"
    write_sealed(path, {"loss": 0.12345, "values": [1, 2, 3]})
    return path


@settings(deadline=None)
@given(place=st.integers(0, 10_000), change=st.integers(1, 255))
@example(place=80, change=3)  # the line break after the checksum becomes a tab, which JSON does not mind
def test_any_changed_byte_is_noticed(written: Path, place: int, change: int) -> None:
    whole = written.read_bytes()
    damaged = bytearray(whole)
    damaged[place % len(whole)] ^= change
    written.write_bytes(damaged)
    try:
        with pytest.raises(InputError) as caught:
            read_sealed(written)
    finally:
        written.write_bytes(whole)
    assert str(written) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"schema": 1}', '{"sha256": "0", "schema": 1}', "\xff"]
)
def test_other_files_are_damaged(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out" / "runs" / "0123456789abcdef" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=f"`fasterqk-lab runs rm 0123456789abcdef --out {tmp_path / 'out'}`"):
        read_sealed(path)


def test_another_schema_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "SCHEMA_VERSION", 9)
        write_sealed(path, {})
    with pytest.raises(
        InputError, match="was written by a version of fasterqk whose results this one cannot"
    ):
        read_sealed(path)


HOLD = """
import sys
from pathlib import Path
from fasterqk_lab.runs._store import claim, is_claimed
print("ready", flush=True)
with claim(Path(sys.argv[1]), wait=True) as claimed:
    print(claimed and is_claimed(Path(sys.argv[1])), flush=True)
    sys.stdin.readline()
"""


def other_process(folder: Path) -> "subprocess.Popen[str]":
    """A process that claims ``folder`` when it can, says so, and holds it until told otherwise."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_claim_is_exclusive_and_given_back(tmp_path: Path) -> None:
    folder = tmp_path / "cell"
    assert not is_claimed(folder)
    with claim(folder) as first:
        assert first
        assert is_claimed(folder)
        with claim(folder) as second:
            assert not second
        assert is_claimed(folder)
    assert not is_claimed(folder)
    with claim(folder) as again:
        assert again


def test_the_claim_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with other_process(tmp_path) as other:
        assert [line(other), line(other)] == ["ready", "True"]
        assert is_claimed(tmp_path)
        with claim(tmp_path) as claimed:
            assert not claimed
        other.kill()
        # Waiting on the lock itself, not on the process: the kernel hands it over.
        with claim(tmp_path, wait=True) as claimed:
            assert claimed


def test_a_folder_that_is_removed_can_be_claimed_anew(tmp_path: Path) -> None:
    folder = tmp_path / "cell"
    with claim(folder):
        other = other_process(folder)
        # Most likely it now waits for the lock that is removed here; either way it must end with a
        # claim on the folder that is there then.
        assert line(other) == "ready"
        shutil.rmtree(folder)
    with other:
        assert line(other) == "True"
        with claim(folder) as claimed:
            assert not claimed
        other.communicate("\n")
    assert other.returncode == 0


def test_versions_are_those_that_are_imported() -> None:
    found = environment()
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"].keys() >= {"numpy", "scipy"}


@pytest.mark.parametrize("name", ["fasterqk", "fasterqk_lab"])
def test_changes_of_library_and_lab_count(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(store_module, "_git_state", lambda package: ("0a", package.name == name))
    assert environment.__wrapped__()["changed"] is True


def test_no_commit_outside_a_checkout(tmp_path: Path) -> None:
    assert _git_state(tmp_path) == (None, None)


def test_the_commit_is_that_of_the_package_and_changes_are_told(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
        answer = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True, text=True
        )
        return answer.stdout.strip()

    git("init", "--quiet")
    (tmp_path / "__init__.py").write_text("")
    assert _git_state(tmp_path) == (None, None)  # somebody else's checkout: the file is not tracked
    git("add", "__init__.py")
    git("commit", "--quiet", "--message", "first")
    assert _git_state(tmp_path) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "__init__.py").write_text("changed")
    assert _git_state(tmp_path) == (git("rev-parse", "HEAD"), True)


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
        "schema": SCHEMA_VERSION,
        "kind": "Setting",
        "fields": {"seed": 1},
        "all": {"seed": 1, "lr": 0.1, "task": "agreement"},
    }


def test_a_damaged_result_is_one_line(
    tmp_path: Path, setting: Any, flip: Callable[[Path, int], None]
) -> None:
    store = Store(tmp_path / "my out")
    path = store.save(setting(1), {"loss": 0.1}) / "result.json"
    flip(path, -10)
    with pytest.raises(InputError, match="is damaged") as caught:
        store.result(setting(1))
    assert str(path) in str(caught.value)
    command = shlex.split(str(caught.value).split("`")[1])
    assert main(command[1:]) == 0
    assert not path.exists()


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


def test_a_damaged_cell_does_not_keep_others_from_being_read(tmp_path: Path, setting: Any) -> None:
    folder = Store(tmp_path).save(setting(1), {"loss": 0.5})
    (folder / "config.json").write_text("{")
    assert Store(tmp_path).result(setting(1)) == {"loss": 0.5}
