"""Where data files are looked for, and what to say when they are not there."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fasterqk.errors import InputError
from fasterqk.files import read_lines

VARIABLE = "FASTERQK_DATA"


# The folder `data` of a checkout; an installed package has none.
CHECKOUT = Path(__file__).parents[4] / "data"
CHECKSUMS = "SHA256SUMS"


def data_folder(data_dir: str | Path | None = None) -> Path:
    """``data_dir`` if given, else ``$FASTERQK_DATA``, else ``data`` of the checkout, else the user cache."""
    return data_source(data_dir)[0]


def data_source(data_dir: str | Path | None = None) -> tuple[Path, str]:
    """The data folder, and what named it."""
    if data_dir:
        return Path(data_dir), "--data-dir"
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]), f"${VARIABLE}"
    if (CHECKOUT / CHECKSUMS).is_file():
        return CHECKOUT, "the checkout"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fasterqk" / "data", "the user cache"


def wrong_checksums(folder: Path) -> list[str]:
    """The files of ``folder`` that are there but are not what its ``SHA256SUMS`` says."""
    listing = folder / CHECKSUMS
    if not listing.is_file():
        return []
    pairs = [line.split(maxsplit=1) for line in read_lines(listing) if line.strip()]
    names = {name.removeprefix("*").removeprefix("./"): digest for digest, name in pairs}
    return [n for n, digest in names.items() if (folder / n).is_file() and checksum(folder / n) != digest]


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
