"""The store: one folder per configuration, named by its hash, that holds everything about its cell.

``out/runs/HASH/`` has ``config.json``, ``environment.json`` (versions and platform), ``result.json`` (which
marks a finished cell) and ``lock``. JSON files are sealed: their first entry is a checksum of the rest. A
process claims a cell by an ``flock`` on ``lock``, which the operating system releases when the process ends,
however it ends: a claim is never stale and needs no clock.
"""

import fcntl
import functools
import gzip
import hashlib
import json
import lzma
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import fasterqk
from fasterqk.errors import InputError
from fasterqk.files import canonical_json, parse_json, plain, read_json_lines, write_bytes
from fasterqk_lab.configs import SCHEMA_VERSION, config_defaults, config_fields, content_hash

# --- Sealed JSON files ---

_PREFIX = b'{\n "sha256": "'
_SUFFIX = b'",\n'
_HEAD = len(_PREFIX) + 64 + len(_SUFFIX)


def write_sealed(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write ``document`` atomically with the schema version and a checksum."""
    body = json.dumps({"schema": SCHEMA_VERSION, **plain(document)}, indent=1, allow_nan=False)
    rest = (body[2:] + "\n").encode("ascii")
    write_bytes(path, _PREFIX + _checksum(rest) + _SUFFIX + rest)


def read_sealed(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The document at ``path`` without its checksum, or None if there is no such file.

    A file that was changed or damaged raises :class:`~fasterqk.errors.InputError`.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    try:
        document: dict[str, Any] = parse_json(data, str(path))
        del document["sha256"]
        version = document["schema"]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise _damaged(path, "it does not hold the JSON that was written") from None
    if data[:_HEAD] != _PREFIX + _checksum(data[_HEAD:]) + _SUFFIX:
        raise _damaged(path, "its checksum is wrong")
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{path} was written by a version of fasterqk whose results this one cannot read; "
            "give another folder"
        )
    return document


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode("ascii")


def _damaged(path: str | os.PathLike[str], reason: str) -> InputError:
    folder = Path(path).parent
    command = f"fasterqk-lab runs rm {folder.name} --out {shlex.quote(str(folder.parent.parent))}"
    return InputError(f"{path} is damaged ({reason}); `{command}` lets the cell run again")


# --- Claims: at most one process works on a cell ---

LOCK_NAME = "lock"


@contextmanager
def claim(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Claim ``folder``, which is created if missing, for the block; yields False if another process has it.

    With ``wait``, block until the other process ends.
    """
    descriptor = _acquire(folder, wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_claimed(folder: Path) -> bool:
    """Whether a process is working on ``folder`` now."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _acquire(folder: Path, wait: bool) -> int | None:
    path = folder / LOCK_NAME
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except (FileNotFoundError, FileExistsError):
            if folder.is_file():
                raise
            continue  # the folder was removed in between
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _is_same_file(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        # The file was removed during the wait: this lock protects nothing, so take the new one.
        os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


# --- The environment of a result ---

PACKAGES = ("torch", "numpy", "scipy", "transformers", "tokenizers", "safetensors")


@functools.cache
def environment() -> dict[str, Any]:
    """Versions of Python, fasterqk and the packages that influence numbers, the platform, and the git commit.

    Nothing is imported. Packages that are not installed are null, and so is ``commit`` unless fasterqk-lab
    runs from a git checkout; ``changed`` says whether files of the lab or the library differ from their
    commit.
    """
    commit, changed = _git_state(Path(__file__).parents[1])
    library_changed = _git_state(Path(fasterqk.__file__).parent)[1]
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "fasterqk": fasterqk.__version__,
        "python": platform.python_version(),
        "packages": versions,
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "device": os.environ.get("FASTERQK_DEVICE") or "cpu",
        "commit": commit,
        "changed": None if commit is None else bool(changed or library_changed),
    }


def _git_state(package: Path) -> tuple[str | None, bool | None]:
    # Only if git tracks this file: a virtual environment may be inside another project's checkout.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    changes = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
    return _git(package, "rev-parse", "HEAD"), changes != ""


def _git(package: Path, *words: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(package), *words], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


# --- Cells ---

CELL_NAME = re.compile("[0-9a-f]{16}")


class Store:
    """Results under ``out/runs/HASH/``, one folder per configuration.

    >>> from dataclasses import make_dataclass
    >>> config = make_dataclass("Config", ["seed"], frozen=True)(seed=0)
    >>> store = Store("out")
    >>> folder = store.save(config, {"loss": 0.1})
    >>> store.result(config)
    {'loss': 0.1}
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.out = Path(out)
        self.root = self.out / "runs"

    def folder(self, config: Any) -> Path:
        """The folder of ``config`` (a frozen dataclass), whether or not it exists."""
        return self.root / content_hash(config)

    def result(self, config: Any) -> dict[str, Any] | None:
        """The stored result of ``config``, or None if it has not been run."""
        document = read_result(self.folder(config), config)
        return None if document is None else document["result"]

    def begin(self, config: Any) -> Path:
        """Write ``config.json``, also for an unfinished cell; returns the folder."""
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
        """Write ``config`` and its ``result``; the result comes last and marks a finished cell.

        ``function``, ``attempt``, ``seconds``, versions, and the checksums of the data (if the result has
        ``data_checksums``) go to ``environment.json``.
        """
        folder = self.begin(config)
        origin = {
            "function": function,
            "attempt": attempt,
            "seconds": seconds,
            "data_checksums": result.get("data_checksums"),
            **environment(),
        }
        write_sealed(folder / "environment.json", origin)
        label = {"cell": folder.name, "attempt": attempt, "defaults": _defaults_signature(config.__class__)}
        write_sealed(folder / "result.json", label | {"result": result})
        return folder

    def cells(self) -> Iterator[Path]:
        """The folders of all cells, finished or not, sorted by name."""
        names = os.listdir(self.root) if self.root.is_dir() else []
        return (self.root / name for name in sorted(names) if CELL_NAME.fullmatch(name))

    def find(self, prefix: str) -> Path:
        """The folder of the one cell whose name begins with ``prefix``."""
        folders = [folder for folder in self.cells() if folder.name.startswith(prefix)] if prefix else []
        if len(folders) != 1:
            many = f"{len(folders)} cells begin" if folders else "no cell begins"
            command = f"fasterqk-lab runs list --out {shlex.quote(str(self.out))}"
            raise InputError(f"{many} with {prefix!r} in {self.root}; `{command}` shows all cells")
        return folders[0]

    def remove(self, folder: Path) -> None:
        """Remove a cell with all its files, unless a process is working on it."""
        with claim(folder) as claimed:
            if not claimed:
                raise InputError(f"cell {folder.name} is running; stop its sweep before removing it")
            clear(folder)
            shutil.rmtree(folder)


def read_result(folder: Path, config: Any = None) -> dict[str, Any] | None:
    """The content of a cell's ``result.json`` (``result``, and the name of its cell), or None.

    If ``config`` is given, a result from before a default changed is refused: fields at their defaults are
    not part of a cell's name, so it would be mistaken for a result with the new default.
    """
    document = read_sealed(folder / "result.json")
    if document is None:
        return None
    if (cell := document.get("cell")) != folder.name:
        raise InputError(f"{folder / 'result.json'} belongs to cell {cell!r}; remove {folder}")
    if config is not None and document.get("defaults") != _defaults_signature(config.__class__):
        _refuse_other_defaults(folder, type(config))
    return document


@functools.cache
def _defaults_signature(kind: Any) -> str:
    """A hash of all defaults of a class, to detect changes quickly."""
    return hashlib.sha256(canonical_json(config_defaults(kind)).encode("ascii")).hexdigest()[:16]


def _refuse_other_defaults(folder: Path, kind: Any) -> None:
    saved = read_sealed(folder / "config.json")
    if saved is None:
        return
    for name, value in config_defaults(kind).items():
        old = saved["all"].get(name, value)
        if old != value and name not in saved["fields"]:
            raise InputError(
                f"{folder} was run when the default of {name} was {old!r}; now it is {value!r}: "
                f"set {name} = {old!r} for that cell, or remove it"
            )


def state(folder: Path) -> str:
    """``done``, ``running``, ``failed`` (its traceback is in ``error.json``) or ``stopped``."""
    if (folder / "result.json").exists():
        return "done"
    if is_claimed(folder):
        return "running"
    return "failed" if (folder / "error.json").exists() else "stopped"


def clear(folder: Path, names: str = "*") -> None:
    """Remove the files that match ``names`` from a cell's folder, except its lock; needs the claim."""
    # The result first, so that an interrupted removal leaves an unfinished cell.
    for entry in sorted(folder.glob(names), key=lambda entry: entry.name != "result.json"):
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != LOCK_NAME:
            entry.unlink()


def clear_temporary(folder: Path) -> None:
    """Remove half-written files of a killed process; needs the claim."""
    clear(folder, ".*.tmp")


# --- Files of compact cells, which `--export` writes and `--cells` reads --- A file has one JSON object per
# line, {experiment, protocol, table, arm, seed, settings, result}. ``settings`` are the fields of the
# configuration that differ from their defaults; numbers of ``result`` (scores at the end and at the best
# epoch, DTAP, history) have six significant digits. A line {experiment, fact, value} is a number that the
# experiment needs besides its cells, or its options. The suffix of the file determines its compression:
# .jsonl, .jsonl.gz or .jsonl.xz.


DIGITS = 6

Line = dict[str, Any]


def write_cells(path: str | os.PathLike[str], lines: Sequence[Line]) -> Path:
    """Write ``lines`` with six significant digits, compressed according to the suffix of ``path``."""
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
        raise InputError(f"{str(path)!r} is not a file of cells ({error}); write it with --export") from None
    for _, where, line in lines:
        if not ({"arm", "seed", "settings", "result"} <= line.keys() or {"fact", "value"} <= line.keys()):
            raise InputError(f"{where} is not a cell; write the file with --export")
    return [line for _, _, line in lines]


def rounded(value: Any) -> Any:
    """Plain JSON data with all real numbers rounded to six significant digits.

    >>> rounded({"loss": 0.123456789, "steps": 1234567})
    {'loss': 0.123457, 'steps': 1234567}
    """
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value
