"""Files: atomic writes, canonical JSON, CSV."""

import csv
import dataclasses
import enum
import errno
import gzip
import io
import json
import lzma
import math
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tests.full_disk import file_size_limit
from tokenizers import Tokenizer, models

from fasterqk import files
from fasterqk.errors import InputError
from fasterqk.files import (
    append_line,
    canonical_json,
    check_output,
    csv_text,
    parse_json,
    plain,
    read_json,
    read_json_lines,
    read_lines,
    write_bytes,
    write_csv,
    write_folder,
    write_text,
)


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


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "link to a pipe", "socket"])
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "target"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/null")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    before = path.lstat()
    here = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=f"{str(path)!r} is a .*; name "):
        write_bytes(path, b"new")
    assert os.path.samestat(before, path.lstat()) and before.st_mode == path.lstat().st_mode
    assert sorted(tmp_path.iterdir()) == here


def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    real = tmp_path / "elsewhere" / "real.txt"
    real.parent.mkdir()
    real.write_text("old")
    link = tmp_path / "link"
    link.symlink_to("elsewhere/real.txt")
    second = tmp_path / "second"
    second.symlink_to("link")
    assert write_text(second, "new") == second
    assert link.is_symlink() and second.is_symlink() and real.read_text() == "new"
    assert list(real.parent.iterdir()) == [real]
    # One that points to nothing makes the file it names, as opening it would.
    real.unlink()
    write_text(link, "again")
    assert link.is_symlink() and real.read_text() == "again"


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("link")
    with pytest.raises(InputError, match="links"):
        write_text(link, "new")
    assert link.is_symlink() and list(tmp_path.iterdir()) == [link]


def test_a_write_keeps_the_permissions_of_a_file_and_refuses_a_read_only_one(tmp_path: Path) -> None:
    path = write_text(tmp_path / "private", "old")
    path.chmod(0o600)
    write_text(path, "new")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o444)
    with pytest.raises(InputError, match="is read-only"):
        write_text(path, "newer")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize("given", ["", "a\0b", ".", "..", "a/b/.."])
def test_a_name_that_names_no_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError):
        write_text(given, "new")
    with pytest.raises(InputError):
        check_output(given)


def test_a_file_that_is_read_is_no_output_under_any_name(tmp_path: Path) -> None:
    data = write_text(tmp_path / "data.jsonl", "{}")
    (tmp_path / "link").symlink_to(data)
    os.link(data, tmp_path / "twin")
    (tmp_path / "model").mkdir()
    inside = write_text(tmp_path / "model" / "config.json", "{}")
    for name in ("data.jsonl", "link", "twin", "model/../data.jsonl"):
        with pytest.raises(InputError, match=r"data\.jsonl' is read"):
            check_output(tmp_path / name, reads=[data])
    with pytest.raises(InputError, match="model' is read"):
        check_output(inside, reads=[data, tmp_path / "model"])
    check_output(tmp_path / "model" / "new.json", reads=[data, tmp_path / "model", tmp_path / "missing"])
    check_output(tmp_path / "new.jsonl", reads=[data])


def test_text_that_is_no_unicode_is_written_escaped(tmp_path: Path) -> None:
    assert write_text(tmp_path / "file", "a\ud800é").read_bytes() == "a\\ud800é".encode()


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


def _by_open(path: Path) -> None:
    path.write_text("x" * 1000)


def _by_safetensors(path: Path) -> None:
    save_file({"x": np.zeros(1000)}, path)


def _by_tokenizers(path: Path) -> None:
    Tokenizer(models.WordLevel({str(n): n for n in range(100)}, unk_token="0")).save(str(path))


@pytest.mark.parametrize("write", [_by_open, _by_safetensors, _by_tokenizers])
def test_a_folder_that_does_not_fit_is_named_and_leaves_nothing(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    """Libraries have exceptions of their own for a full disk."""
    target = tmp_path / "folder"
    full, told = file_size_limit(100), pytest.raises(OSError, match="File too large")
    with full, told as caught, write_folder(target) as folder:
        write(folder / "file")
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(target))
    assert not list(tmp_path.iterdir())


def test_an_error_about_another_file_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, write_folder(tmp_path / "folder"):
        (tmp_path / "data").read_text()
    assert caught.value.filename == str(tmp_path / "data")


def test_a_line_that_does_not_fit_is_not_appended(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, "one")
    with file_size_limit(50), pytest.raises(OSError, match="File too large") as caught:
        append_line(path, "x" * 100)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"one\n"
    path.write_bytes(b"one\ntw")
    append_line(path, "three")
    assert path.read_bytes() == b"one\ntw\nthree\n"


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileExistsError, match="folder"), write_folder(tmp_path / "folder"):
        pass


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@dataclasses.dataclass(frozen=True)
class Inner:
    width: int = 64
    names: tuple[str, ...] = ()


@given(values)
def test_plain_data_survives_the_text(value: Any) -> None:
    assert json.loads(canonical_json(value)) == value


@given(values)
def test_the_text_is_canonical(value: Any) -> None:
    text = canonical_json(value)
    assert text.isascii()
    assert canonical_json(json.loads(text)) == text


@given(st.dictionaries(st.text(), scalars, max_size=6), st.randoms())
def test_the_order_of_keys_does_not_matter(value: dict[str, Any], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert canonical_json(dict(items)) == canonical_json(value)


def test_plain_takes_what_configurations_and_results_hold() -> None:
    class Colour(enum.Enum):
        RED = "red"

    assert plain({1: (np.float64(0.5), np.arange(2), Colour.RED, Path("a/b"), {2, 1}, math.inf)}) == {
        "1": [0.5, [0, 1], "red", "a/b", [1, 2], None]
    }
    assert plain(Inner()) == {"width": 64, "names": []}
    with pytest.raises(TypeError, match="object"):
        plain(object())


names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6)
numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.dictionaries(names, numbers, min_size=1, max_size=4), min_size=1, max_size=5))
def test_floats_come_back_exactly(rows: list[dict[str, float]]) -> None:
    back = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert [{name: float(value) for name, value in row.items() if value} for row in back] == rows


@given(st.lists(st.dictionaries(names, names, min_size=1, max_size=4), min_size=1, max_size=5))
def test_columns_are_in_order_of_first_appearance(rows: list[dict[str, str]]) -> None:
    header = next(csv.reader(io.StringIO(csv_text(rows))))
    assert header == list(dict.fromkeys(name for row in rows for name in row))


def test_missing_and_numpy_values(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"a": None, "b": np.float64(0.1)}, {"b": np.int64(3)}]
    path = write_csv(tmp_path / "table.csv", rows)
    assert path.read_text() == "a,b\n,0.1\n,3\n"
    assert csv_text([]) == "\n"


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz"])
def test_json_lines_come_back_with_their_places(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"lines.jsonl{suffix}"
    opened: Any = {"": open, ".xz": lzma.open, ".gz": gzip.open}[suffix]
    with opened(path, "wt", encoding="utf-8") as stream:
        stream.write('{"a": "é"}\n\n{"b": [1]}')
    assert list(read_json_lines(path)) == [
        (1, f"{str(path)!r} line 1", {"a": "é"}),
        (3, f"{str(path)!r} line 3", {"b": [1]}),
    ]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'{"a": 1}\n{"b', "line 2 is not JSON"),
        (b'{"a": 1}\n[2]\n', r"line 2 holds no JSON object but '\[2\]'"),
        (b'{"a": 1}\n\xff\n', "is not UTF-8 text"),
    ],
)
def test_a_bad_line_is_named_or_skipped(tmp_path: Path, data: bytes, told: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(data)
    with pytest.raises(InputError, match=told):
        list(read_json_lines(path))
    assert [record for _, _, record in read_json_lines(path, skip_bad_lines=True)] == [{"a": 1}]


@pytest.mark.parametrize("suffix", [".xz", ".gz"])
def test_a_damaged_archive_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"words.txt{suffix}"
    whole = {".xz": lzma.compress, ".gz": gzip.compress}[suffix](b"some words\n" * 100)
    path.write_bytes(whole[:-9])
    with pytest.raises(InputError, match=f"the archive '.*{suffix}' is truncated"):
        list(read_lines(path))
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match=f"the archive '.*{suffix}' is damaged"):
        list(read_lines(path))


@pytest.mark.parametrize("depth", [101, 900, 100_000])
@pytest.mark.parametrize("begin", ["[", '{"a":', '[1, {"b": '])
def test_json_nested_too_deeply_is_one_line(tmp_path: Path, depth: int, begin: str) -> None:
    end = {"[": "]", '{"a":': "}"}.get(begin, "}]")
    text = '{"x": ' + begin * depth + "0" + end * depth + "}"
    path = write_text(tmp_path / "deep.json", text)
    with pytest.raises(InputError, match="deeper than 100"):
        read_json(path)
    with pytest.raises(InputError, match=r"line 1 .*deeper than 100"):
        list(read_json_lines(path))
    assert list(read_json_lines(path, skip_bad_lines=True)) == []


def test_json_of_usual_depth_is_read() -> None:
    assert parse_json("[" * 100 + "]" * 100, "it")


@pytest.mark.parametrize(
    "text", [r'{"a": "\ud800"}', r'{"\uDFFF": 1}', r'{"a": ["x", {"b": "\udc00\ud800"}]}']
)
def test_half_a_character_in_json_is_refused(tmp_path: Path, text: str) -> None:
    path = write_text(tmp_path / "half.json", text)
    for read in (read_json, lambda path: list(read_json_lines(path))):
        with pytest.raises(InputError, match="surrogate"):
            read(path)
    assert parse_json(r'"\ud83d\ude00 \\ud800"', "it") == "😀 \\ud800"


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "marked.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xef\xbb\xbf"}\n{"b": 1}')
    assert [record for _, _, record in read_json_lines(path)] == [{"a": "\ufeff"}, {"b": 1}]
    assert next(iter(read_lines(path))).startswith("{")
    path.write_bytes(b"\xef\xbb\xbf[1]")
    assert read_json(path) == [1]
    packed = tmp_path / "marked.json.gz"
    packed.write_bytes(gzip.compress(b"\xef\xbb\xbf[1]"))
    assert read_json(packed) == [1]


@pytest.mark.parametrize("what", ["folder", "missing", "nul", "not UTF-8", "UTF-16", "digits", "empty"])
def test_what_cannot_be_read_is_one_line(tmp_path: Path, what: str) -> None:
    path = tmp_path / "file"
    contents = {
        "not UTF-8": b"\xff\xfe\x00",
        "UTF-16": "[1]".encode("utf-16"),
        "digits": b"9" * 5000,
        "empty": b"",
    }
    if what in contents:
        path.write_bytes(contents[what])
    elif what == "folder":
        path.mkdir()
    elif what == "nul":
        path = Path("a\0b")
    with pytest.raises(InputError) as caught:
        read_json(path)
    assert "\n" not in str(caught.value)


def test_a_pipe_that_nobody_writes_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"is a pipe; write it to a file first: cat .*pipe > FILE$"):
        list(files.read_lines(tmp_path / "pipe"))


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LONGEST", 1000)
    (tmp_path / "zeros").write_bytes(bytes(5000))
    with pytest.raises(InputError, match="line 1 is longer than"):
        list(files.read_lines(tmp_path / "zeros"))
    (tmp_path / "lines").write_bytes(b"a" * 900 + b"\nb")
    assert [len(line) for line in files.read_lines(tmp_path / "lines")] == [900, 1]
    monkeypatch.setattr(files, "_LARGEST", 1000)
    with pytest.raises(InputError, match="is it a JSON document"):
        files.read_json(tmp_path / "zeros")
