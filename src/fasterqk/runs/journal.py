"""The journal of a cell: one line for each attempt begun and how it ended.

It proves that a cell was done once: nothing begins after the attempt whose result was saved. Lines are
appended by the process that holds the claim. A line cut short by a crash is not counted.
"""

import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fasterqk.files import plain

JOURNAL_NAME = "journal.jsonl"


def note(folder: Path, event: str, attempt: int, **about: Any) -> None:
    """Append one line to the journal of the cell in ``folder``."""
    line = {
        "event": event,
        "attempt": attempt,
        **about,
        "time": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds"),
        "process": os.getpid(),
        "host": socket.gethostname(),
    }
    path = folder / JOURNAL_NAME
    with path.open("ab") as stream:
        # After a line cut short, begin on a new one.
        start = b"" if _ends_with_newline(path) else b"\n"
        stream.write(start + json.dumps(plain(line)).encode() + b"\n")


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a cell's journal, oldest first."""
    try:
        data = (folder / JOURNAL_NAME).read_bytes()
    except FileNotFoundError:
        return []
    lines = []
    for text in data.split(b"\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and {"event", "attempt"} <= line.keys():
            lines.append(line)
    return lines


def next_attempt(folder: Path) -> int:
    """The number of the next attempt at the cell in ``folder``, counted from 1."""
    return 1 + max((line["attempt"] for line in read_journal(folder)), default=0)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        if size == 0:
            return True
        stream.seek(size - 1)
        return stream.read(1) == b"\n"
