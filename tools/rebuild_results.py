"""Rebuild `docs/results` from its cells, `docs/claims.md` and `docs/questions.md` from it, without training.

    python tools/rebuild_results.py            # all files of cells
    python tools/rebuild_results.py table-kvqa # those of one experiment

For every file, the tables (CSV) of its experiment and the values of every seed are written, and those of its
figures that `docs/images` has. Add a file of cells with `fasterqk-lab reproduce NAME --export
docs/results/cells/NAME.jsonl.xz`, run this, and look at `git diff`.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fasterqk_lab.experiments import claims, find_experiment, reproduce
from fasterqk_lab.experiments._registry import read_cells

DOCS = Path(__file__).parents[1] / "docs"


def parts(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The experiments and options that the cells of ``file`` are from.

    Options are those that the file has, else the seeds and the protocol of its cells.
    """
    every = read_cells(file)
    kept = {line["experiment"]: line["value"] for line in every if line.get("fact") == "options"}
    yield from kept.items()
    lines = [line for line in every if "result" in line]
    for name in dict.fromkeys(line["experiment"] for line in lines if line["experiment"] not in kept):
        known = find_experiment(name).all_options
        own = [line for line in lines if line["experiment"] == name]
        for protocol in dict.fromkeys(line.get("protocol", "") for line in own):
            seeds = {line["seed"] for line in own if line.get("protocol", "") == protocol}
            options: dict[str, Any] = {"seeds": len(seeds)} if "seeds" in known else {}
            if "protocol" in known and protocol:
                options["protocol"] = protocol
            yield name, options


def rebuild(file: Path, out: Path) -> list[Path]:
    """Write the tables of the cells in ``file`` under ``out``; returns the paths of the CSV files."""
    for name, options in parts(file):
        reproduce(name, out, cells=[str(file)], **options)
    return sorted((out / "tables").glob("*.csv"))


def main(names: list[str]) -> None:
    for file in sorted((DOCS / "results" / "cells").glob("*.jsonl*")):
        if names and not any(file.name.startswith(name) for name in names):
            continue
        with tempfile.TemporaryDirectory() as out:
            for table in rebuild(file, Path(out)):
                shutil.copyfile(table, DOCS / "results" / table.name)
                print(f"docs/results/{table.name}")
            for figure in sorted((Path(out) / "figures").glob("*.svg")):
                if (image := DOCS / "images" / figure.name).exists():
                    shutil.copyfile(figure, image)
                    print(f"docs/images/{figure.name}")
    with tempfile.TemporaryDirectory() as out:
        document = claims.document(claims.write_claims(Path(out)) or [])
    (DOCS / "claims.md").write_text(document + "\n", encoding="utf-8")
    with tempfile.TemporaryDirectory() as out:
        found = reproduce("questions", out)
        shutil.copyfile(found["figure"]["svg"], DOCS / "images" / "questions.svg")
    (DOCS / "questions.md").write_text(found["document"] + "\n", encoding="utf-8")
    print("docs/claims.md\ndocs/questions.md\ndocs/images/questions.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
