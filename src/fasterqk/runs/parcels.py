"""A cell's folder on its way between machines: what changed in it, and putting that down elsewhere.

A folder is read at one moment: nothing in it changed between the first look and the last. What arrives
is therefore what a crash at that moment would have left, and every cell can go on from that.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from fasterqk.files import write_bytes
from fasterqk.runs.claim import LOCK_NAME
from fasterqk.runs.journal import JOURNAL_NAME
from fasterqk.runs.worker import OUTPUT_NAME

# Contents by the name of the file, in the order in which they were written; None for one that is gone.
Parcel = Mapping[str, bytes | None]
# What tells that a file was written again.
_Stamp = tuple[int, int, int]

# So often a folder is read again when it changed meanwhile; then it is left for the next time.
_TRIES = 5


def pack(folder: Path) -> dict[str, bytes | None]:
    """Every file of a cell's ``folder`` that nobody is writing to now, its lock excepted."""
    return {name: (folder / name).read_bytes() for name in _stamps(folder)}


def unpack(folder: Path, parcel: Parcel) -> None:
    """Put the files of ``parcel`` down in ``folder``, each at once and in the order they were written."""
    for name, content in parcel.items():
        if content is not None:
            write_bytes(folder / name, content)
        else:
            with suppress(FileNotFoundError):
                os.unlink(folder / name)


class Watch:
    """Looks at a cell's ``folder`` and tells what changed since the last look.

    The journal is not looked at: it belongs to whoever owns the store.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = self._look()

    def changes(self, *, anyway: bool = False) -> dict[str, bytes | None]:
        """What was written or removed since the last call; nothing when the folder does not hold still.

        With ``anyway`` it is told as it is: a finished cell may have left something that goes on writing.
        """
        for _ in range(_TRIES):
            seen = self._look()
            try:
                found: dict[str, bytes | None] = {
                    name: (self._folder / name).read_bytes()
                    for name, stamp in seen.items()
                    if self._known.get(name) != stamp
                }
            except FileNotFoundError:
                continue
            if anyway or _but_output(self._look()) == _but_output(seen):
                found |= dict.fromkeys(self._known.keys() - seen.keys())
                self._known = seen
                return found
        return {}

    def _look(self) -> dict[str, _Stamp]:
        return {name: stamp for name, stamp in _stamps(self._folder).items() if name != JOURNAL_NAME}


def _stamps(folder: Path) -> dict[str, _Stamp]:
    """Inode, size and time of every file in ``folder``, in the order in which they were written."""
    found = {}
    for path in _files(folder):
        with suppress(FileNotFoundError):
            status = path.stat()
            found[str(path.relative_to(folder))] = status.st_ino, status.st_size, status.st_mtime_ns
    return dict(sorted(found.items(), key=_order))


def _order(item: tuple[str, _Stamp]) -> tuple[bool, int, bool]:
    # The result marks a finished cell. Clocks of files tick slowly: within a tick the checkpoint comes last.
    name, (_, _, time) = item
    return name == "result.json", time, name.startswith("checkpoint")


def _files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        for name in names:
            if name != LOCK_NAME and not (name.startswith(".") and name.endswith(".tmp")):
                yield Path(place) / name


def _but_output(stamps: Mapping[str, _Stamp]) -> dict[str, _Stamp]:
    # A cell may print all the time; no later attempt depends on what it printed.
    return {name: stamp for name, stamp in stamps.items() if name != OUTPUT_NAME}
