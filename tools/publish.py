"""Make what is published from cells, without training: tidy tables, figures and the pages of docs/results.

    python tools/publish.py                        # all files of cells
    python tools/publish.py table-kvqa             # one experiment, then the pages of claims and questions
    python tools/publish.py fig3 --from out        # an experiment without cells, from its results folder

Add cells with ``fasterqk-lab reproduce NAME --export lab/paper/cells/NAME.jsonl.xz``, run this, and look at
``git diff``.
"""

import argparse
import tempfile
from pathlib import Path

from fasterqk_lab.compare import END as AFTER_TRAINING
from fasterqk_lab.compare import read_values, write_values
from fasterqk_lab.experiments import EXPERIMENTS, reproduce
from fasterqk_lab.experiments.covert import arms
from fasterqk_lab.paper import (
    Published,
    claims_page,
    experiment_page,
    index_page,
    questions_page,
    ratio_table,
    read_claims,
    read_lines,
    read_questions,
    save_picture,
    table,
)
from fasterqk_lab.runs import read_cells

ROOT = Path(__file__).parents[1]
PAPER, PAGES = ROOT / "lab" / "paper", ROOT / "docs" / "results"
IMAGES = PAGES / "images"
# The pages written by hand that hold a table of the comparisons, and which of them.
TABLES = {"README.md": "headlines", "docs/ratio.md": "all"}
# The tables of docs/covert-channel.md: the scores of a cell, each with its decimals.
COVERT = {
    "literal": {"mrta": 2, "covert_bits": 2, "covert_common_accuracy": 2},
    "blind": {"mrta": 2, "covert_bits": 4, "accuracy": 2},
}


def experiments_of(file: Path) -> list[str]:
    """The experiments that the cells of ``file`` are from."""
    return list(dict.fromkeys(line["experiment"] for line in read_cells(file)))


def publish(name: str, folders: list[Path]) -> None:
    """Write the table and the page of an experiment from the results folders that have it."""
    tables = [folder / "results" / f"{name}.csv" for folder in folders]
    values = [value for path in tables if path.is_file() for value in read_values(path)]
    if values:
        path = PAPER / "results" / f"{name}.csv"
        rebuilt = {value.experiment for value in values}
        # Comparisons without cells (values of a run elsewhere) stay.
        kept = (
            [value for value in read_values(path) if value.experiment not in rebuilt]
            if path.is_file()
            else []
        )
        write_values(path, [*kept, *values])
    pages = [experiment_page(EXPERIMENTS[name], name, folder, IMAGES) for folder in folders]
    head, *others = pages
    body = "\n".join([head, *("\n".join(page.splitlines()[6:]) for page in others)])
    (PAGES / f"{name}.md").write_text(body, encoding="utf-8")
    print(f"docs/results/{name}.md")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="experiments (default: all that have cells)")
    parser.add_argument(
        "--from", dest="out", type=Path, help="a results folder, for experiments without cells"
    )
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in EXPERIMENTS:
            parser.error(f"unknown experiment {name!r}; choose from {', '.join(EXPERIMENTS)}")
        if arguments.out and not list((arguments.out / "figures").glob(f"{name}*.json")):
            parser.error(f"--from {str(arguments.out)!r} has no figure of {name!r}; reproduce it there first")
    if arguments.out:
        for name in arguments.names:
            publish(name, [arguments.out])
    else:
        files: dict[str, list[Path]] = {}
        for file in sorted((PAPER / "cells").glob("*.jsonl*"), key=lambda path: path.name.split(".")[0]):
            for name in experiments_of(file):
                files.setdefault(name, []).append(file)
        for name in arguments.names or files:
            if name not in files:
                parser.error(f"no cells of {name!r} in lab/paper/cells; name its results folder with --from")
            with tempfile.TemporaryDirectory() as scratch:
                folders = [Path(scratch) / str(place) for place in range(len(files[name]))]
                for file, folder in zip(files[name], folders, strict=True):
                    reproduce(name, folder, cells=[str(file)])  # with the options of the file
                publish(name, folders)
    write_pages()


def write_pages() -> None:
    """Write the pages of claims and questions, the picture, and the tables of other pages."""
    published = Published(PAPER)
    claims, lines = read_claims(published), read_lines(published)
    experiments = {name: text for name, text in EXPERIMENTS.items() if (PAGES / f"{name}.md").is_file()}
    save_picture(lines, IMAGES)
    pages = {
        "index.md": index_page(claims, experiments),
        "claims.md": claims_page(claims),
        "questions.md": questions_page(read_questions(published)),
    }
    for name, text in pages.items():
        (PAGES / name).write_text(text, encoding="utf-8")
    for path, which in TABLES.items():
        chosen = [line for line in lines if line.headline or which == "all"]
        fill(ROOT / path, ratio_table(chosen), "results")
    for part in COVERT:
        fill(ROOT / "docs" / "covert-channel.md", covert_table(published, part), part)
    print("docs/results/index.md, claims.md, questions.md, images/questions.svg", *TABLES, sep=", ")


def fill(page: Path, text: str, name: str) -> None:
    """Put ``text`` between two marks of a page that is written by hand."""
    begin, end = f"<!-- {name}: generated by tools/publish.py -->", f"<!-- end of {name} -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}", encoding="utf-8")


def covert_table(published: Published, part: str) -> str:
    """Scores of the covert channel by ratio, one row per model and share of class tokens."""
    measured = published.measured("covert-channel")
    rows: dict[tuple[str, str], list[str]] = {}
    ratios: dict[str, None] = {}
    for arm in arms([part]):
        means = (measured.interval(arm.name, score, AFTER_TRAINING) for score in COVERT[part])
        decimals = COVERT[part].values()
        texts = [
            "" if mean is None else f"{mean.mean:.{n}f}" for mean, n in zip(means, decimals, strict=True)
        ]
        ratios[f"{arm.about['qk_ratio']:g}"] = None
        row = ", ".join(arm.about["model"]), f"{arm.about['gamma']:g}"
        rows.setdefault(row, []).append(" / ".join(texts))
    return "\n".join(table(["", "γ", *ratios], [[*row, *cells] for row, cells in rows.items()]))


if __name__ == "__main__":
    main()
