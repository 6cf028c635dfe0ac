"""Sealed files: any change is noticed, and said in one line that names the file."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.errors import InputError
from fasterqk.lab.runs import _store as sealed
from fasterqk.lab.runs._store import is_whole, read_sealed, write_sealed

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
    assert read_sealed(path) == {"schema": 1, **document}
    assert json.loads(path.read_text()).items() >= document.items()
    assert is_whole(path)


def test_the_order_of_keys_is_kept(tmp_path: Path) -> None:
    write_sealed(tmp_path / "file.json", {"b": 1, "a": 2})
    assert list(read_sealed(tmp_path / "file.json") or {}) == ["schema", "b", "a"]


def test_no_file_is_none(tmp_path: Path) -> None:
    assert read_sealed(tmp_path / "file.json") is None
    assert is_whole(tmp_path / "file.json")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("out") / "runs" / "0123456789abcdef" / "result.json"
    write_sealed(path, {"loss": 0.12345, "values": [1, 2, 3]})
    return path


@settings(deadline=None)
@given(place=st.integers(0, 10_000), change=st.integers(1, 255))
def test_any_changed_byte_is_noticed(written: Path, place: int, change: int) -> None:
    whole = written.read_bytes()
    damaged = bytearray(whole)
    damaged[place % len(whole)] ^= change
    written.write_bytes(damaged)
    try:
        with pytest.raises(InputError) as caught:
            read_sealed(written)
        assert not is_whole(written)
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
    with pytest.raises(InputError, match=f"`fasterqk runs rm 0123456789abcdef --out {tmp_path / 'out'}`"):
        read_sealed(path)


def test_a_newer_schema_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    with monkeypatch.context() as patch:
        patch.setattr(sealed, "SCHEMA_VERSION", 9)
        write_sealed(path, {})
    with pytest.raises(InputError, match="newer fasterqk"):
        read_sealed(path)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=9), max_size=4))
def test_the_entries_before_one(tmp_path_factory: pytest.TempPathFactory, result: dict[str, Any]) -> None:
    """Whatever is in the large entry, also something that looks like its own beginning."""
    path = tmp_path_factory.mktemp("sealed") / "result.json"
    result = {**result, '\n "result": ': {"result": 1}}
    write_sealed(path, {"cell": "a", "attempt": 2, "result": result})
    whole = read_sealed(path) or {}
    assert whole.pop("result") == result
    assert read_sealed(path, before="result") == whole
    assert read_sealed(path, before="nothing") == {**whole, "result": result}


def test_damage_after_the_entries_that_are_read_is_seen(tmp_path: Path, flip: Any) -> None:
    path = tmp_path / "result.json"
    write_sealed(path, {"cell": "a", "result": list(range(50))})
    flip(path, path.stat().st_size - 20)
    with pytest.raises(InputError, match="is damaged"):
        read_sealed(path, before="result")


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.text(max_size=4),
        st.recursive(scalars, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(), part)),
        max_size=5,
    )
)
def test_without_the_lists_of_its_objects(
    tmp_path_factory: pytest.TempPathFactory, result: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("sealed") / "result.json"
    write_sealed(path, {"cell": ["kept"], "result": result})
    read = read_sealed(path, lists=False) or {}
    whole = read_sealed(path) or {}
    assert read["cell"] == ["kept"]
    assert read["result"] == {
        name: [] if isinstance(value, list) else value for name, value in whole["result"].items()
    }
