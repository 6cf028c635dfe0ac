"""The store: a configuration is hashed to a folder that holds it and its result."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.files import SCHEMA_VERSION, config_fields, content_hash, plain, write_text


class Store:
    """Results under ``out/runs/HASH/``, one folder a configuration.

    >>> store = Store("out")                      # doctest: +SKIP
    >>> store.save(config, {"loss": 0.1})         # doctest: +SKIP
    >>> store.result(config)                      # doctest: +SKIP
    {'loss': 0.1}
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.root = Path(out) / "runs"

    def folder(self, config: Any) -> Path:
        """Where the results of ``config`` (a frozen dataclass) live, whether or not they exist."""
        return self.root / content_hash(config)

    def result(self, config: Any) -> dict[str, Any] | None:
        """The stored result of ``config``, or None when it has not been run."""
        path = self.folder(config) / "result.json"
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            result = json.loads(text)
        except ValueError as error:
            raise InputError(
                f"{path} is not JSON ({error}); remove its folder to run the cell again"
            ) from None
        if not isinstance(result, dict):
            raise InputError(f"{path} holds no JSON object; remove its folder to run the cell again")
        return result

    def save(self, config: Any, result: Mapping[str, Any]) -> Path:
        """Write ``config`` and its ``result``; the result comes last, so that it marks a finished cell."""
        folder = self.folder(config)
        document = {
            "kind": type(config).__name__,
            "schema": SCHEMA_VERSION,
            "fields": config_fields(config),
            "all": dataclasses.asdict(config),
        }
        write_text(folder / "config.json", _pretty(document))
        write_text(folder / "result.json", _pretty(result))
        return folder


def _pretty(value: Any) -> str:
    return json.dumps(plain(value), indent=1, sort_keys=True, allow_nan=False) + "\n"
