"""Every interval in the tables and documents is recomputed from per-seed values, where these are published.

A table of `docs/results` belongs to the per-seed file with the longest common beginning of the name. A
section of a document belongs to the experiments whose commands it names. What has no per-seed file yet is
checked against the tables instead; once its cells are published it is checked against them, without a change.
"""

import csv
import re
from functools import cache
from itertools import combinations
from math import floor, log10
from pathlib import Path

import pytest

from fasterqk.attention import interval, paired_difference
from fasterqk.lab.experiments import EXPERIMENTS, find_experiment
from fasterqk.lab.experiments._per_seed import per_seed_rows
from fasterqk.lab.experiments._registry import read_cells, rounded

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"
SUFFIX = "-per-seed.csv"
PER_SEED = {path.name.removesuffix(SUFFIX): path for path in sorted(RESULTS.glob(f"*{SUFFIX}"))}
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
NUMBER = r"[-−+]?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?"


def read_csv(path):
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


@cache
def recomputed(path):
    """All intervals that the per-seed values of ``path`` give: of every arm, and of paired differences.

    Values have six digits: ``(interval, unit)``, by what rounding may have moved it, a unit of the last.
    """
    values = {}
    for row in read_csv(path):
        place = row["at"], row["score"]
        values.setdefault(place, {}).setdefault(row["arm"], {})[row["seed"]] = float(row["value"])
    # What a score is above its null, arm by arm.
    for (at, score), arms in list(values.items()):
        for null in ("null", "sharp", "permuted"):
            if nulls := values.get((at, f"{null}_{score}")):
                values[at, f"{score} above {null}"] = {
                    arm: {
                        seed: value - nulls[arm][seed] for seed, value in seeds.items() if seed in nulls[arm]
                    }
                    for arm, seeds in arms.items()
                    if arm in nulls
                }
    found = []
    for arms in values.values():
        largest = max(abs(value) for seeds in arms.values() for value in seeds.values())
        unit = 10 ** (floor(log10(largest)) - 5) if largest else 0.0
        found += [(interval(seeds.values()), unit) for seeds in arms.values()]
        for one, other in combinations(arms, 2):
            shared = [seed for seed in arms[one] if seed in arms[other]]
            if shared:
                pair = ([arms[name][seed] for seed in shared] for name in (other, one))
                found.append((paired_difference(*pair), unit))
    return found + [(type(one)(-one.mean, one.half_width, one.n), unit) for one, unit in found]


@cache
def tabled(path):
    """The intervals ``X, X_half_width, X_n`` of a table, with where they stand."""
    found = []
    for number, row in enumerate(read_csv(path), 2):
        for name in row:
            if f"{name}_half_width" in row and row[name] and row.get(f"{name}_n"):
                half = row[f"{name}_half_width"]
                width = float(half) if half else None
                found.append(
                    (f"line {number}, {name}", float(row[name]), width, int(float(row[f"{name}_n"])))
                )
    return found


@cache
def belongs(table):
    own = [name for name in PER_SEED if table.name.startswith(name) or f"{table.stem}-paper" == name]
    return max(own, key=len, default=None)


def near(value, expected, relative, absolute):
    """As ``pytest.approx``, which is too slow for millions of comparisons."""
    return abs(value - expected) <= max(relative * abs(expected), absolute)


TABLES = [path for path in sorted(RESULTS.glob("*.csv")) if not path.name.endswith(SUFFIX) and belongs(path)]


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_every_interval_of_a_table_follows_from_the_values_of_its_seeds(table):
    known = recomputed(PER_SEED[belongs(table)])
    intervals = tabled(table)
    assert intervals
    for where, mean, width, n in intervals:
        assert any(
            one.n == n
            and near(one.mean, mean, relative=2e-4, absolute=max(2e-5, unit))
            and (n == 1 or width is None or near(one.half_width, width, relative=2e-3, absolute=1e-4))
            for one, unit in known
        ), f"{table.name}, {where}: {mean} ± {width} (n = {n})"


@pytest.mark.parametrize("file", sorted((RESULTS / "cells").glob("*.jsonl*")), ids=lambda path: path.name)
def test_the_cells_of_an_experiment_are_published_seed_by_seed(file):
    """The file of per-seed values exists, and its values at the end are those of the cells."""
    tables = {}
    for line in read_cells(file):
        if "result" in line:
            parts = line.get("table", line["experiment"]), line.get("protocol", "")
            tables.setdefault("-".join(part for part in parts if part), []).append(line)
    for name, own in tables.items():
        assert name in PER_SEED, (
            f"fasterqk reproduce {own[0]['experiment']} --cells {file.name} writes {name}{SUFFIX}"
        )
        published = {
            (row["arm"], row["seed"], row["score"]): float(row["value"])
            for row in read_csv(PER_SEED[name])
            if row["at"] == "end"
        }
        for line in own:
            ends = [
                row
                for row in per_seed_rows({(line["arm"], line["seed"]): line["result"]})
                if row["at"] == "end"
            ]
            for row in rounded(ends):
                assert published[row["arm"], str(row["seed"]), row["score"]] == row["value"]


# --- The documents ---


def sections(page):
    """Sections of a page, each with the line it starts at."""
    found, start, lines = [], 1, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("#") and lines:
            found.append((start, "\n".join(lines)))
            start, lines = number, []
        lines.append(line)
    return [*found, (start, "\n".join(lines))]


def intervals_of(text):
    """``(mean, half width)`` as printed, with the size of half a unit of their last digits."""
    for mean, half in re.findall(rf"({NUMBER})\s*±\s*({NUMBER})", text):
        yield as_printed(mean), as_printed(half)


def as_printed(text):
    digits = text.replace("−", "-").lstrip("+")
    decimals = len(digits.partition(".")[2].partition("e")[0])
    exponent = int(digits.partition("e")[2] or 0)
    return float(digits), 0.5 * 10.0 ** (exponent - decimals)


def candidates(names):
    """Intervals of the experiments: from per-seed values where there are any, else from their tables."""
    found = []
    for name in names:
        own = [key for key in PER_SEED if key.startswith(name)]
        found += [(one.mean, one.half_width) for key in own for one, _ in recomputed(PER_SEED[key])]
        for path in RESULTS.glob(f"*{name.removeprefix('table-')}*.csv"):
            if not path.name.endswith(SUFFIX) and not belongs(path):
                found += [(mean, width) for _, mean, width, _ in tabled(path) if width is not None]
                found += [(-mean, width) for _, mean, width, _ in tabled(path) if width is not None]
    return found


SECTIONS = [
    pytest.param(text, id=f"{page.name}-{line}")
    for page in PAGES
    for line, text in sections(page)
    if list(intervals_of(text)) and page.name != "claims.md"
]


@pytest.mark.parametrize("text", SECTIONS)
def test_every_interval_of_a_document_is_in_the_results(text):
    names = set(re.findall(r"fasterqk reproduce ([a-z0-9-]+)", text)) & set(EXPERIMENTS)
    assert names, "a section with intervals names the command that printed them"
    known = candidates(names)
    for (mean, mean_half), (width, width_half) in intervals_of(text):
        scale = 1 + 1e-6
        assert any(
            abs(one - mean) <= scale * mean_half + 2e-5 * max(1, abs(mean))
            and abs(half - width) <= scale * width_half + 1e-4 * max(1, width)
            for one, half in known
        ), f"{mean} ± {width} is not in the results of {', '.join(sorted(names))}"


def test_the_check_can_fail():
    assert not any(
        abs(one - 0.123) < 0.0005 and abs(half - 0.456) < 0.0005
        for one, half in candidates(["table-hatexplain"])
    )
    assert find_experiment("table-hatexplain").trains
    assert list(intervals_of("was .402 ± .000 and −1.5 ± 2e-3")) == [
        ((0.402, 0.0005), (0.0, 0.0005)),
        ((-1.5, 0.05), (0.002, 0.0005)),
    ]
