"""JSON files that know when they were damaged: the first entry is a checksum of all the others."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.files import SCHEMA_VERSION, plain, write_bytes

_PREFIX = b'{\n "sha256": "'
_SUFFIX = b'",\n'
_HEAD = len(_PREFIX) + 64 + len(_SUFFIX)


def write_sealed(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write ``document`` atomically with the schema version and a checksum."""
    body = json.dumps({"schema": SCHEMA_VERSION, **plain(document)}, indent=1, allow_nan=False)
    rest = (body[2:] + "\n").encode("ascii")
    write_bytes(path, _PREFIX + _checksum(rest).encode("ascii") + _SUFFIX + rest)


def read_sealed(
    path: str | os.PathLike[str], *, before: str = "", lists: bool = True
) -> dict[str, Any] | None:
    """The document at ``path`` without its checksum, or None when there is no such file.

    Large documents are read more quickly in part: with ``before`` only the entries above that one;
    without ``lists`` those that are entries of its objects (histories) come back empty. A file that is
    not as it was written raises :class:`~fasterqk.errors.InputError`.
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read()
    except FileNotFoundError:
        return None
    try:
        text = _head(data, before) if before else data
        document = json.loads(text if lists else _without_lists(text))
        checksum = document.pop("sha256")
        version = document["schema"]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise _damaged(path, "it is not the JSON that was written") from None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise InputError(
            f"{path} was written by a newer fasterqk (schema {version}, this one reads {SCHEMA_VERSION})"
        )
    if not data.startswith(_PREFIX) or checksum != _checksum(data[_HEAD:]):
        raise _damaged(path, "its checksum is wrong")
    return document


def is_whole(path: str | os.PathLike[str]) -> bool:
    """Whether the file at ``path`` is as it was written, or not there; cheaper than reading it."""
    try:
        with open(path, "rb") as stream:
            data = stream.read()
    except FileNotFoundError:
        return True
    return data[:_HEAD] == _PREFIX + _checksum(data[_HEAD:]).encode("ascii") + _SUFFIX


def _head(data: bytes, before: str) -> bytes:
    # Only entries of the document itself are indented by one blank, and no text holds a line break.
    end = data.find(f'\n "{before}":'.encode())
    return data if end < 0 else data[:end].rstrip(b",") + b"}"


def _without_lists(data: bytes) -> bytes:
    # An entry of an object of the document is indented by two blanks, and so is the end of its list.
    parts, end = [], 0
    while (start := data.find(b'": [\n', end)) >= 0:
        start += len(b'": [')
        line = data.rfind(b"\n", 0, start) + 1
        if data[line : line + 3] == b'  "':
            parts.append(data[end:start])
            end = data.find(b"\n  ]", start) + len(b"\n  ")
        else:
            parts.append(data[end:start])
            end = start
    return b"".join([*parts, data[end:]])


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _damaged(path: str | os.PathLike[str], reason: str) -> InputError:
    folder = Path(path).parent
    command = f"fasterqk runs rm {folder.name} --out {folder.parent.parent}"
    return InputError(f"{path} is damaged ({reason}); `{command}` lets the cell run again")
