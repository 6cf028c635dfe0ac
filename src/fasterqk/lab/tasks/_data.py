"""Where data files are looked for, and what to say when they are not there."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def use_data_folder(folder: str | Path | None) -> Iterator[None]:
    """Make ``folder``, if one is given, the data folder of this process and of the workers it starts."""
    before = os.environ.get(VARIABLE)
    if folder:
        os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        if folder and before is None:
            del os.environ[VARIABLE]
        elif folder and before is not None:
            os.environ[VARIABLE] = before


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
