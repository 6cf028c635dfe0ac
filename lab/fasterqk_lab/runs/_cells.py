"""Files of compact cells: what `--export` writes and `--cells` reads.

A file has one JSON object per line, {experiment, protocol, table, arm, seed, settings, result}. ``settings``
are the fields of the configuration that differ from their defaults; numbers of the ``result`` (scores at the
end and at the best epoch, DTAP, history) keep six significant digits. A line {experiment, fact, value} is a
number that the experiment needs beside its cells, or its options. The suffix of the file says how it is
compressed: .jsonl, .jsonl.gz or .jsonl.xz.
"""

import gzip
import json
import lzma
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.files import plain, read_json_lines, write_bytes

DIGITS = 6

Line = dict[str, Any]


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
