"""Files: atomic writes, readers with one-line errors, canonical JSON, CSV."""

import codecs
import csv
import dataclasses
import gzip
import io
import json
import lzma
import math
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError

# --- Atomic writes: readers, crashes and full disks never see or leave half a file ---
# Every write goes to a temporary file beside its target, is flushed to disk, and is then renamed over the
# target. The folder is flushed too, so that the rename itself survives a power cut.


def check_output(path: str | os.PathLike[str], *, reads: Iterable[str | os.PathLike[str]] = ()) -> Path:
    """Check that ``path`` may be written, and return it with symbolic links resolved.

    Folders, pipes, devices and read-only files are refused. So are the files in ``reads``, under any name,
    and files inside the folders in ``reads``. Commands call this before they begin, writers before they
    write.

    >>> check_output("mine.jsonl", reads=["mine.jsonl"]).name
    'mine.jsonl'
    >>> write_text("mine.jsonl", "{}").name
    'mine.jsonl'
    >>> check_output("mine.jsonl", reads=["mine.jsonl"])
    Traceback (most recent call last):
    fasterqk.errors.InputError: 'mine.jsonl' is read, so it cannot be written as 'mine.jsonl'; ...
    """
    name = os.fspath(path)
    if not name or "\0" in name:
        raise InputError(f"{name!r} is not a file name")
    target = Path(os.path.realpath(name))
    try:
        status = os.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.basename(name) in ("", ".", ".."):
            raise InputError(f"{name!r} is the name of a folder; name a file") from None
        return target  # writing reports errors of the folder
    except OSError as error:
        raise InputError(f"cannot write {name!r}: {error.strerror}") from None
    if stat.S_ISDIR(status.st_mode):
        raise InputError(f"{name!r} is a folder; name a file")
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{name!r} is a pipe or a device and would be replaced; name a regular file")
    if not status.st_mode & 0o222:
        raise InputError(f"{name!r} is read-only; name another file, or allow it with: chmod u+w")
    for read in reads:
        with suppress(OSError):
            if os.path.samestat(status, os.stat(read)) or Path(os.path.realpath(read)) in target.parents:
                other = "another file" if Path(read).is_file() else "a file outside of it"
                raise InputError(
                    f"{os.fspath(read)!r} is read, so it cannot be written as {name!r}; name {other}"
                )
    return target


def write_bytes(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write ``data`` to ``path`` atomically, creating parent folders; returns the path.

    A symbolic link stays, and its target is written. :func:`check_output` may refuse the path. If the write
    fails (disk full, no permission), the old file is untouched, no temporary file stays behind, and the
    ``OSError`` names ``path``.
    """
    target = check_output(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_beside(target)
    with _errors_name(path, temporary):
        try:
            with temporary.open("xb") as stream:
                with suppress(FileNotFoundError):
                    os.fchmod(stream.fileno(), stat.S_IMODE(target.stat().st_mode))
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    _sync(target.parent)
    return Path(path)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write ``text`` as UTF-8 to ``path`` atomically; returns the path.

    Lone surrogates, as in file names that are not valid text, are written escaped.
    """
    return write_bytes(path, text.encode("utf-8", "backslashreplace"))


def user_cache() -> Path:
    """The cache folder of fasterqk, in ``$XDG_CACHE_HOME`` or else in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fasterqk"


@contextmanager
def write_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a folder that appears under its name only when it is complete.

    Yields a temporary folder beside ``path``, which must not exist. On success its files are flushed and it
    is renamed to ``path``. If the block raises, the temporary folder is removed, and an ``OSError`` names
    ``path``.

    >>> with write_folder("results") as folder:
    ...     print((folder / "a.txt").write_text("hello"), Path("results").exists())
    5 False
    >>> Path("results/a.txt").read_text()
    'hello'
    """
    target = Path(path)
    if target.exists():
        raise FileExistsError(f"folder exists already: {str(target)!r}")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_beside(target)
    with _errors_name(path, temporary):
        temporary.mkdir()
        try:
            yield temporary
            for folder, _, names in os.walk(temporary):
                for name in (*names, ""):  # and the folder itself
                    _sync(Path(folder) / name)
            os.rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    _sync(target.parent)


def append_line(path: str | os.PathLike[str], line: str) -> None:
    """Append a line to a text file that others may be reading, and that a crash may have cut short.

    If the last line of the file has no end, the new line still starts on its own. If the write fails, the
    file is as it was, and the ``OSError`` names ``path``.

    >>> append_line("journal.jsonl", '{"step": 1}')
    >>> append_line("journal.jsonl", '{"step": 2}')
    >>> Path("journal.jsonl").read_text().splitlines()
    ['{"step": 1}', '{"step": 2}']
    """
    data = f"{line}\n".encode("utf-8", "backslashreplace")
    with suppress(FileNotFoundError), open(path, "rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - 1))
        if stream.read() not in (b"", b"\n"):
            data = b"\n" + data
    append_bytes(path, data)


def append_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Append ``data`` to a file; if that fails, the file is as it was, and the ``OSError`` names it."""
    with _errors_name(path), open(path, "ab", buffering=0) as stream:
        size = stream.tell()
        try:
            while data:
                data = data[stream.write(data) :]
        except BaseException:
            with suppress(OSError):
                stream.truncate(size)
            raise


# How libraries written in Rust (safetensors, tokenizers) report an error of the operating system.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@contextmanager
def _errors_name(path: str | os.PathLike[str], temporary: Path | None = None) -> Iterator[None]:
    """Turn disk errors into an ``OSError`` that names ``path`` instead of ``temporary`` or nothing."""
    try:
        yield
    except OSError as error:
        ours = temporary is not None and str(error.filename).startswith(str(temporary))
        if ours or not error.filename:
            error.filename, error.filename2 = os.fspath(path), None
        raise
    except Exception as error:
        if (match := _OS_ERROR.search(str(error))) is None:
            raise
        number = int(match[1])
        raise OSError(number, os.strerror(number), os.fspath(path)) from error


def _temporary_beside(target: Path) -> Path:
    # Not tempfile, whose files are private to their owner: a store may be shared by a group.
    # The target's name is cut, so that the temporary name is never too long for the file system.
    return target.with_name(f".{target.name[:40]}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- Readers of text and JSON; a bad file is an InputError ---


def read_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """The lines of a text file, decompressed when its name ends in ``.xz`` or ``.gz``."""
    for line in _lines(path):
        yield _decoded(line, path).rstrip("\r\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """The JSON document in a file, decompressed when its name ends in ``.xz`` or ``.gz``."""
    with _opened(path) as stream:
        data = stream.read(_LARGEST).removeprefix(codecs.BOM_UTF8)
        if stream.read(1):
            raise InputError(f"{str(path)!r} is larger than {_LARGEST // 2**20} MB; is it a JSON document?")
    try:
        return parse_json(_decoded(data, path), repr(str(path)))
    except NotJson as error:
        raise InputError(f"{error}; make or download it again") from None


def read_json_lines(
    path: str | os.PathLike[str], *, skip_bad_lines: bool = False
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The JSON objects of a file, one per line: line number, ``FILE line N`` for messages, and the object.

    The file may be compressed, as for :func:`read_lines`. Empty lines are skipped. With ``skip_bad_lines`` so
    are lines without a JSON object: a file that another process appends to may end in half a line.
    """
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{str(path)!r} line {number}"
        try:
            text = _decoded(line, path)
            record = parse_json(text, where)
            if not isinstance(record, dict):
                raise InputError(f"{where} holds no JSON object but {text.strip()[:40]!r}")
        except InputError:
            if skip_bad_lines:
                continue
            raise
        yield number, where, record


class NotJson(InputError):
    """A text is not JSON, or is JSON that cannot be read or written safely."""


# Deeper than any file that is written on purpose; at Python's own limit the interpreter would crash.
_DEEPEST = 100


def parse_json(text: str | bytes, where: str) -> Any:
    """Parse the JSON document in ``text``; error messages begin with ``where``.

    JSON nested deeper than 100 levels is refused, and so are lone surrogates, which can be neither printed
    nor written.

    >>> parse_json('{"a": [1]}', "this text")
    {'a': [1]}
    """
    try:
        document = json.loads(text)
    except RecursionError:
        raise NotJson(f"{where} is nested deeper than {_DEEPEST} levels") from None
    except ValueError as error:
        raise NotJson(f"{where} is not JSON ({error})") from None
    level: list[Any] = [document] if isinstance(document, dict | list) else []
    for _ in range(_DEEPEST):
        items = (item.values() if type(item) is dict else item for item in level)
        level = [child for children in items for child in children if type(child) in (dict, list)]
        if not level:
            break
    else:
        raise NotJson(f"{where} is nested deeper than {_DEEPEST} levels")
    if re.search(_SURROGATE, text if isinstance(text, bytes) else text.encode("utf-8", "replace")):
        try:
            json.dumps(document, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):x}"
            raise NotJson(f"{where} has half a character, the lone surrogate {half}") from None
    return document


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


# The largest line and JSON document: far beyond what is written on purpose, and read within seconds. Files
# without line ends, and archives that unpack to nothing but zeros, would fill the memory.
_LONGEST, _LARGEST = 16 * 2**20, 64 * 2**20


def _lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The lines of a file, decompressed, without the byte order mark that some editors write first."""
    with _opened(path) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(_LONGEST), b"")):
            if len(line) == _LONGEST:
                size = f"{_LONGEST // 2**20} MB"
                raise InputError(f"{str(path)!r} line {number + 1} is longer than {size}; is it a text file?")
            yield line.removeprefix(codecs.BOM_UTF8) if number == 0 else line


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """A file opened for reading, decompressed; any failure is an ``InputError``."""
    openers: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
    try:
        # A shell's `<(...)` is a pipe under /dev or /proc that somebody writes; any other may wait forever.
        if stat.S_ISFIFO(os.stat(path).st_mode) and not os.fspath(path).startswith(("/dev/", "/proc/")):
            raise InputError(f"{str(path)!r} is a pipe; write it to a file first: cat {path} > FILE")
        with openers.get(Path(path).suffix, open)(path, "rb") as stream:
            yield stream
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        problem = "is truncated" if isinstance(error, EOFError) else f"is damaged ({error})"
        raise InputError(f"the archive {str(path)!r} {problem}; download it again") from None
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except InputError:
        raise
    except ValueError as error:  # a name with a NUL byte in it
        raise InputError(f"cannot read {str(path)!r}: {error}") from None


def _decoded(data: bytes, path: str | os.PathLike[str]) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r} is not UTF-8 text ({error.reason})") from None


# --- Canonical JSON ---


def plain(value: Any) -> Any:
    """``value`` as plain JSON data.

    Arrays become lists, not-a-number and infinity null, dataclasses objects, enumerations their values, paths
    and other keys strings.

    >>> plain({"k": (1, float("nan"))})
    {'k': [1, None]}
    """
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return plain(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(item) for name, item in config_values(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [plain(item) for item in items]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return plain(value.tolist())
    raise TypeError(f"cannot write a {type(value).__name__} as JSON: {value!r}")


def canonical_json(value: Any) -> str:
    """The canonical JSON text of a value: sorted keys, no blanks, ASCII, shortest floats.

    >>> canonical_json({"b": 1.0, "a": [True, None]})
    '{"a":[true,null],"b":1.0}'
    """
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


# --- Fields of dataclasses ---

# Metadata of a field that is a part of a configuration: a dataclass whose fields count as fields of the
# configuration. Code reads them by part (`config.model.layers`), while JSON, hashes and the specs of sweeps
# are flat (`layers`), so field names must be unique over all parts.
PART = {"part": True}


def config_values(config: Any) -> Iterator[tuple[str, Any]]:
    """The name and value of each field of a dataclass; a part is replaced by its fields."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if "part" in field.metadata:
            yield from config_values(value)
        else:
            yield field.name, value


# --- CSV ---


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """``rows`` as CSV text; columns in order of first appearance, missing cells empty.

    Floats keep all digits, so a table read back equals the table that was written.

    >>> print(csv_text([{"r": 1, "alpha": 0.5}, {"r": 10}]), end="")
    r,alpha
    1,0.5
    10,
    """
    collected = list(rows)
    columns = list(dict.fromkeys(name for row in collected for name in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in collected)
    return stream.getvalue()


def write_csv(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write ``rows`` as CSV atomically; returns the path."""
    return write_text(path, csv_text(rows))


def _cell(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return "" if value is None else value
