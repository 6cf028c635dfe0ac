"""Everything the store knows about one cell."""

from pathlib import Path
from typing import Any

from fasterqk.errors import InputError
from fasterqk.runs.journal import read_journal
from fasterqk.runs.sealed import read_sealed
from fasterqk.runs.store import read_result
from fasterqk.runs.summary import summarize
from fasterqk.runs.table import read_config


def describe(folder: Path) -> dict[str, Any]:
    """Configuration, result, environment, error, journal and files of the cell in ``folder``.

    Parts that are missing or damaged are None; ``damaged`` says in one line each what is wrong.
    """
    damaged: list[str] = []

    def part(read: Any, *arguments: Any) -> Any:
        try:
            return read(*arguments)
        except InputError as error:
            damaged.append(str(error))
            return None

    config = part(read_config, folder)
    result = part(read_result, folder)
    return {
        "cell": folder.name,
        "folder": str(folder),
        "state": "damaged" if damaged else summarize(folder).state,
        "kind": config and config["kind"],
        "config": config and config["all"],
        "result": result and result["result"],
        "environment": part(read_sealed, folder / "environment.json"),
        "error": part(read_sealed, folder / "error.json"),
        "journal": read_journal(folder),
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()},
        "damaged": damaged,
    }
