"""The cells of an experiment: trained now, read from the store, or read from a file of compact cells.

A file of cells has one JSON object per line, ``{experiment, protocol, arm, seed, settings, result}``:
``settings`` are the fields of the configuration that differ from their defaults, and numbers of the
``result`` (scores at the end and at the best epoch, DTAP, history) keep six significant digits. A line
``{experiment, fact, value}`` is a number that the experiment needs beside its cells. The suffix of the file
says how it is compressed: ``.jsonl``, ``.jsonl.gz`` or ``.jsonl.xz``. Tables and figures can be rebuilt from
such a file without any training.
"""

import gzip
import json
import lzma
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fasterqk.console import progress_bar
from fasterqk.errors import InputError
from fasterqk.files import canonical_json, config_fields, plain, read_json_lines, write_bytes
from fasterqk.lab.runs import SweepError, sweep

DIGITS = 6

Key = TypeVar("Key", bound=Hashable)
Line = dict[str, Any]


class CellRunner:
    """Gives an experiment the results of its cells, and remembers them for :meth:`export`.

    Results come from the store under ``out``, where cells that are missing are trained by ``workers``
    processes (0: this one) and with ``force`` all of them, or from ``files`` of compact cells.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        experiment: str = "",
        workers: int = 2,
        force: bool = False,
        files: Sequence[str] | None = None,
    ) -> None:
        self.out = Path(out)
        self.experiment = experiment
        self.workers = workers
        self.force = force
        self._files = list(files or ())
        self._stored: dict[str, Any] = {}
        self._facts: dict[str, Any] = {}
        self._lines: list[Line] = []
        for line in (line for file in self._files for line in read_cells(file)):
            if "fact" in line:
                self._facts[line["fact"]] = line["value"]
            else:
                self._stored[_identity(line["settings"], line["seed"])] = line["result"]

    @property
    def rebuilds(self) -> bool:
        """Whether results come from files, so that there are no weights and perhaps no data."""
        return bool(self._files)

    def run(
        self,
        cells: Mapping[Key, Any],
        function: str,
        *,
        title: str,
        protocol: str = "",
        arm: Callable[[Any], str] = lambda key: str(key[0]),
        force: bool | None = None,
    ) -> dict[Key, dict[str, Any]]:
        """The result of every cell, under the same keys.

        ``cells`` maps a key, whose last entry is the seed, to a configuration; ``function`` computes one cell
        (see :func:`fasterqk.lab.runs.sweep`); ``title`` stands beside the progress bar; ``arm`` says which
        arm a key belongs to.
        """
        again = self.force if force is None else force
        results = self._find_all(cells, arm) if self.rebuilds else self._sweep(cells, function, title, again)
        for (key, config), result in zip(cells.items(), results, strict=True):
            about: Line = {"experiment": self.experiment} | ({"protocol": protocol} if protocol else {})
            about |= {"arm": arm(key), "seed": config.seed, "settings": settings_of(config)}
            self._lines.append(about | {"result": result})
        return dict(zip(cells, results, strict=True))

    def fact(self, name: str, compute: Callable[[], Any]) -> Any:
        """A value that the experiment needs beside its cells, such as the size of a split."""
        if not self.rebuilds:
            self._facts[name] = plain(compute())
        elif name not in self._facts:
            raise InputError(f"{self._named()} has no fact {name!r}; export its cells again")
        if not any(line.get("fact") == name for line in self._lines):
            self._lines.append({"experiment": self.experiment, "fact": name, "value": self._facts[name]})
        return self._facts[name]

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write every cell that was asked for to ``path``, one line each; returns the path."""
        return write_cells(path, self._lines)

    def _sweep(self, cells: Mapping[Any, Any], function: str, title: str, force: bool) -> list[Any]:
        with progress_bar(title) as progress:
            try:
                return sweep(
                    cells.values(),
                    function,
                    self.out,
                    workers=self.workers,
                    force=force,
                    progress=progress,
                )
            except SweepError as error:
                raise InputError(f"{error} (its traceback is in error.json of that cell)") from None

    def _find_all(self, cells: Mapping[Any, Any], arm: Callable[[Any], str]) -> list[Any]:
        found = []
        for key, config in cells.items():
            result = self._stored.get(_identity(settings_of(config), config.seed))
            if result is None:
                raise InputError(
                    f"{self._named()} has no cell of arm {arm(key)!r} with seed {config.seed} and these "
                    "settings; give the options with which it was exported"
                )
            found.append(result)
        return found

    def _named(self) -> str:
        return ", ".join(repr(file) for file in self._files)


def settings_of(config: Any) -> dict[str, Any]:
    """The fields of a cell's configuration that differ from their defaults, its seed left out."""
    return {name: value for name, value in config_fields(config).items() if name != "seed"}


def write_cells(path: str | os.PathLike[str], lines: Sequence[Line]) -> Path:
    """Write ``lines``, numbers with six significant digits, compressed as the suffix of ``path`` says."""
    text = "".join(
        json.dumps(rounded(plain(line)), separators=(",", ":"), ensure_ascii=False) + "\n" for line in lines
    )
    data = text.encode("utf-8")
    if str(path).endswith(".xz"):
        data = lzma.compress(data, preset=9)
    elif str(path).endswith(".gz"):
        data = gzip.compress(data, mtime=0)
    return write_bytes(path, data)


def read_cells(path: str | os.PathLike[str]) -> list[Line]:
    """The lines of a file that :func:`write_cells` wrote."""
    try:
        lines = list(read_json_lines(path))
    except InputError as error:
        raise InputError(f"{str(path)!r} is no file of cells ({error}); write it with --export") from None
    for _, where, line in lines:
        if not ({"arm", "seed", "settings", "result"} <= line.keys() or {"fact", "value"} <= line.keys()):
            raise InputError(f"{where} is no cell; write the file with --export")
    return [line for _, _, line in lines]


def rounded(value: Any) -> Any:
    """Plain JSON data with every real number at six significant digits.

    >>> rounded({"loss": 0.123456789, "steps": 1234567})
    {'loss': 0.123457, 'steps': 1234567}
    """
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def _identity(settings: Mapping[str, Any], seed: int) -> str:
    return canonical_json([rounded(plain(settings)), seed])
