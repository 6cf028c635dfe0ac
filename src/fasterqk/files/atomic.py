"""Atomic writes: a reader, a crash or a full disk never sees half a file.

Every write goes to a temporary file beside its target, is flushed to the disk, and is then renamed
over the target; the folder is flushed too, so that the rename itself survives a power cut.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_bytes(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write ``data`` to ``path`` atomically, making parent folders; returns the path.

    When the write fails (disk full, no permission) the old file is untouched, no temporary file stays
    behind, and the ``OSError`` names ``path``.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_beside(target)
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(target), None
        raise
    _sync_folder(target.parent)
    return target


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write ``text`` as UTF-8 to ``path`` atomically; returns the path."""
    return write_bytes(path, text.encode("utf-8"))


@contextmanager
def write_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Fill a folder that appears under its name only when it is complete.

    Yields a temporary folder beside ``path``. On success its files are flushed and it is renamed to
    ``path``; when the block raises it is removed. ``path`` must not exist.

    >>> with write_folder("results") as folder:   # doctest: +SKIP
    ...     _ = (folder / "a.txt").write_text("hello")
    """
    target = Path(path)
    if target.exists():
        raise FileExistsError(f"folder exists already: {str(target)!r}")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_beside(target)
    temporary.mkdir()
    try:
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                _sync_file(Path(folder) / name)
            _sync_folder(Path(folder))
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(target.parent)


def _temporary_beside(target: Path) -> Path:
    # Not tempfile: its files are private to their owner, and a store may be shared by a group.
    return target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _sync_file(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
