"""Atomic writes: the old file or the new one, never anything between, never anything beside."""

import errno
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.files import write_bytes, write_folder, write_text


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Writes beyond ``limit`` bytes fail, as they would on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@settings(max_examples=30, deadline=None)
@given(old=st.binary(max_size=200), new=st.binary(max_size=200))
def test_the_last_write_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, old: bytes, new: bytes
) -> None:
    path = tmp_path_factory.mktemp("atomic") / "file"
    assert write_bytes(path, old) == path
    write_bytes(path, new)
    assert path.read_bytes() == new
    assert list(path.parent.iterdir()) == [path]


@settings(max_examples=30, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_is_utf8_and_keeps_its_newlines(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = write_text(tmp_path_factory.mktemp("text") / "file", text)
    assert path.read_bytes().decode("utf-8") == text


def test_parent_folders_are_made(tmp_path: Path) -> None:
    assert write_text(tmp_path / "a" / "b" / "c.txt", "hello").read_text() == "hello"


def test_a_write_that_does_not_fit_keeps_the_old_file_and_names_it(tmp_path: Path) -> None:
    path = write_bytes(tmp_path / "file", b"old")
    with file_size_limit(100), pytest.raises(OSError, match="File too large") as caught:
        write_bytes(path, b"x" * 1000)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_at_any_step_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = write_bytes(tmp_path / "file", b"old")

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(OSError, match="No space left") as caught:
            write_bytes(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_bytes(tmp_path / "file", b"old")

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_a_mixture(tmp_path: Path) -> None:
    path = tmp_path / "file"
    texts = ["a" * 5000, "b" * 5000]
    write_text(path, texts[0])
    seen: list[str] = []
    finished = threading.Event()

    def read() -> None:
        while not finished.is_set():
            seen.append(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for index in range(100):
        write_text(path, texts[index % 2])
    finished.set()
    reader.join()
    assert set(seen) <= set(texts)


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "folder"
    with write_folder(target) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a.txt").write_text("hello")
        assert not target.exists()
    assert (target / "inner" / "a.txt").read_text() == "hello"
    assert list(target.parent.iterdir()) == [target]


def test_a_folder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half-way"), write_folder(tmp_path / "folder") as folder:
        (folder / "a.txt").write_text("hello")
        raise RuntimeError("half-way")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileExistsError, match="folder"), write_folder(tmp_path / "folder"):
        pass
