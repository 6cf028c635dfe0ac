"""Where data files are looked for, and what to say when they are not there or cannot be read."""

import hashlib
import json
import lzma
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError

VARIABLE = "FASTERQK_DATA"


def data_folder(data_dir: str | Path | None = None) -> Path:
    """``data_dir`` when given, else ``$FASTERQK_DATA``, else ``fasterqk/data`` in the user's cache."""
    if data_dir:
        return Path(data_dir)
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fasterqk" / "data"


def find_files(folder: Path, alternatives: Sequence[Sequence[str]]) -> list[Path] | None:
    """The first of several sets of files that is complete in ``folder``, or None."""
    for names in alternatives:
        paths = [folder / name for name in names]
        if all(path.is_file() for path in paths):
            return paths
    return None


def require_files(folder: Path, alternatives: Sequence[Sequence[str]], download: str) -> list[Path]:
    """As :func:`find_files`, but missing files are an error that says where it looked and what to get."""
    found = find_files(folder, alternatives)
    if found is None:
        raise InputError(missing_files(folder, alternatives, download))
    return found


def missing_files(folder: Path, alternatives: Sequence[Sequence[str]], download: str) -> str:
    """One line: which files were looked for, where, and how to get them."""
    wanted = " or ".join(" + ".join(names) for names in alternatives)
    how = f"--data-dir or ${VARIABLE} names another folder"
    return f"no {wanted} in the data folder {str(folder)!r} ({how}); {download}"


def checksum(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from None


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, decompressed when its name ends in ``.xz``."""
    opened: Any = lzma.open if path.suffix == ".xz" else open
    try:
        with opened(path, "rb") as stream:
            for line in stream:
                yield line.decode("utf-8").rstrip("\r\n")
    except (lzma.LZMAError, EOFError) as error:
        what = "is truncated" if isinstance(error, EOFError) else f"is damaged ({error})"
        raise InputError(f"the archive {str(path)!r} {what}; download it again") from None
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r} is not UTF-8 text ({error.reason})") from None


def read_json(path: Path) -> Any:
    """The JSON document in a file (decompressed when its name ends in ``.xz``)."""
    try:
        return json.loads("\n".join(read_lines(path)))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(path)!r} is not JSON ({error}); download it again") from None


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """For every line its place (``FILE line N``) and its JSON object; empty lines are passed over."""
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{str(path)!r} line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(f"{where} is not JSON ({error})") from None
        if not isinstance(record, dict):
            raise InputError(f"{where} holds no JSON object but {line[:40]!r}")
        yield where, record
