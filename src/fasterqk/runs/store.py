"""The store: a configuration is hashed to a folder that holds it and everything about its run."""

import functools
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.files import canonical_json, config_defaults, config_fields, content_hash
from fasterqk.runs.claim import LOCK_NAME, claim, is_claimed
from fasterqk.runs.environment import environment
from fasterqk.runs.sealed import read_sealed, write_sealed

CELL_NAME = re.compile("[0-9a-f]{16}")


class Store:
    """Results under ``out/runs/HASH/``, one folder a configuration.

    >>> store = Store("out")                      # doctest: +SKIP
    >>> store.save(config, {"loss": 0.1})         # doctest: +SKIP
    >>> store.result(config)                      # doctest: +SKIP
    {'loss': 0.1}
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.out = Path(out)
        self.root = self.out / "runs"

    def folder(self, config: Any) -> Path:
        """Where the results of ``config`` (a frozen dataclass) live, whether or not they exist."""
        return self.root / content_hash(config)

    def result(self, config: Any) -> dict[str, Any] | None:
        """The stored result of ``config``, or None when it has not been run."""
        document = read_result(self.folder(config), config)
        return None if document is None else document["result"]

    def begin(self, config: Any) -> Path:
        """Write ``config.json``, so that an unfinished cell can be told from others; returns the folder."""
        folder = self.folder(config)
        if not (folder / "config.json").exists():
            document = {"kind": type(config).__name__, "fields": config_fields(config), "all": config}
            write_sealed(folder / "config.json", document)
        return folder

    def save(
        self,
        config: Any,
        result: Mapping[str, Any],
        *,
        function: str | None = None,
        attempt: int | None = None,
        seconds: float | None = None,
    ) -> Path:
        """Write ``config`` and its ``result``; the result comes last, so that it marks a finished cell.

        How it came about (``function``, which ``attempt``, its ``seconds``, versions, and the checksums
        of the data when the result has them under ``data_checksums``) goes to ``environment.json``.
        """
        folder = self.begin(config)
        about = {
            "function": function,
            "attempt": attempt,
            "seconds": seconds,
            "data_checksums": result.get("data_checksums"),
            **environment(),
        }
        write_sealed(folder / "environment.json", about)
        document = {
            "cell": folder.name,
            "attempt": attempt,
            "defaults": _defaults_signature(config),
            "result": result,
        }
        write_sealed(folder / "result.json", document)
        return folder

    def cells(self) -> Iterator[Path]:
        """The folders of all cells, finished or not, in order of their names."""
        try:
            names = sorted(os.listdir(self.root))
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            if CELL_NAME.fullmatch(name):
                yield self.root / name

    def find(self, prefix: str) -> Path:
        """The folder of the one cell whose name begins with ``prefix``."""
        found = [folder for folder in self.cells() if folder.name.startswith(prefix)] if prefix else []
        if len(found) != 1:
            many = f"{len(found)} cells begin" if found else "no cell begins"
            raise InputError(
                f"{many} with {prefix!r} in {self.root}; `fasterqk runs list --out {self.out}` shows them"
            )
        return found[0]

    def remove(self, folder: Path) -> None:
        """Remove a cell and everything in it, unless a process is working on it."""
        with claim(folder) as claimed:
            if not claimed:
                raise InputError(f"cell {folder.name} is running; stop its sweep before removing it")
            # First what marks the cell as finished: half a removal is then an unfinished cell.
            with suppress(FileNotFoundError):
                os.unlink(folder / "result.json")
            shutil.rmtree(folder)


def read_result(folder: Path, config: Any = None, *, lists: bool = True) -> dict[str, Any] | None:
    """What ``result.json`` of a cell holds (``result`` and what it belongs to), or None.

    Without ``lists`` those of the result, such as its history, come back empty, which is quicker. With
    its ``config``, a result from before a default changed is refused: fields at their defaults are
    not part of a cell's name, so such a result would be taken for one of today.
    """
    return _checked(folder, config, read_sealed(folder / "result.json", lists=lists))


def has_result(folder: Path, config: Any = None) -> bool:
    """Whether :func:`read_result` finds a result, and refuses what it refuses; quicker than reading it."""
    return _checked(folder, config, read_sealed(folder / "result.json", before="result")) is not None


def _checked(folder: Path, config: Any, document: dict[str, Any] | None) -> dict[str, Any] | None:
    if document is None:
        return None
    if document.get("cell") != folder.name:
        raise InputError(
            f"{folder / 'result.json'} belongs to cell {document.get('cell')!r}; remove this folder"
        )
    if config is not None and document.get("defaults") != _defaults_signature(config):
        _refuse_other_defaults(folder, type(config))
    return document


def _defaults_signature(config: Any) -> str:
    """The same as long as no default of its class changes: a quick way to see that nothing did."""
    kind: Any = type(config)
    return _signature_of(kind)


@functools.cache
def _signature_of(kind: Any) -> str:
    return hashlib.sha256(canonical_json(config_defaults(kind)).encode("ascii")).hexdigest()[:16]


def _refuse_other_defaults(folder: Path, kind: Any) -> None:
    saved = read_sealed(folder / "config.json")
    if saved is None:
        return
    for name, value in config_defaults(kind).items():
        then = saved["all"].get(name, value)
        if then != value and name not in saved["fields"]:
            raise InputError(
                f"{folder} was run when the default of {name} was {then!r}; now it is {value!r}: "
                f"give {name} = {then!r} for that cell, or remove it"
            )


def state(folder: Path) -> str:
    """``done``, ``running``, ``failed`` (its traceback is in ``error.json``) or ``stopped``."""
    if (folder / "result.json").exists():
        return "done"
    if is_claimed(folder):
        return "running"
    return "failed" if (folder / "error.json").exists() else "stopped"


def clear(folder: Path) -> None:
    """Empty a cell's folder, its lock excepted; the caller holds the claim."""
    with suppress(FileNotFoundError):
        os.unlink(folder / "result.json")
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != LOCK_NAME:
            entry.unlink()


def clear_temporary(folder: Path) -> None:
    """Remove what a killed process left half-written; the caller holds the claim."""
    for entry in folder.glob(".*.tmp"):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
