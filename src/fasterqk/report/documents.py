"""The JSON files that experiments leave for the report: one folder a kind, one file a document."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.files import plain, write_text

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_name(name: str) -> str:
    """``name`` again, when it is fit to be a file name everywhere; an error that quotes it otherwise."""
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} cannot name a file; use letters, digits, dots, dashes, underscores")
    return name


def save_document(out: Path, folder: str, document: Mapping[str, Any]) -> Path:
    """Write ``out/FOLDER/NAME.json``, where NAME is the document's own ``name``; returns the path."""
    path = Path(out) / folder / f"{check_name(document['name'])}.json"
    text = json.dumps(plain(document), indent=1, ensure_ascii=False, allow_nan=False)
    return write_text(path, text + "\n")


def load_documents(out: Path, folder: str) -> list[dict[str, Any]]:
    """Every document of ``out/FOLDER``, sorted by file name; an unreadable one is an error that names it."""
    documents = []
    for path in sorted((Path(out) / folder).glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{str(path)!r} is not JSON ({error}); remove it or make it again") from None
        if not isinstance(document, dict):
            raise InputError(f"{str(path)!r} holds no JSON object; remove it or make it again")
        documents.append({**document, "name": path.stem})
    return documents
