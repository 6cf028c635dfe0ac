"""Every interval in the tables and documents is recomputed from per-seed values, where these are published.

A table of `docs/results` belongs to the per-seed file with the longest common beginning of the name. A
section of a document belongs to the experiments whose commands it names. What has no per-seed file is checked
against the tables instead.

What the documents' checks can see: that every interval is one of those experiments', and that the intervals
of a row of a table are of one score, or of one arm, at one moment. They do not read the words beside it.
"""

import csv
import re
from functools import cache
from itertools import combinations
from math import floor, log10
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from fasterqk.attention import Interval, interval, paired_difference
from fasterqk_lab.experiments import EXPERIMENTS, find_experiment
from fasterqk_lab.experiments._evidence import PLANNED
from fasterqk_lab.experiments._per_seed import per_seed_rows
from fasterqk_lab.experiments._registry import read_cells, rounded

DOCS = Path(__file__).parents[3] / "docs"
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
    # Of experiments to which seeds were added, the intervals of those that were planned as well.
    if planned := PLANNED.get(path.name.removesuffix(SUFFIX)):
        values |= {
            (at, f"{score} of planned seeds"): {
                arm: dict(list(seeds.items())[:planned]) for arm, seeds in arms.items()
            }
            for (at, score), arms in list(values.items())
        }
    found = []
    for (at, score), arms in values.items():
        largest = max(abs(value) for seeds in arms.values() for value in seeds.values())
        unit = 10 ** (floor(log10(largest)) - 5) if largest else 0.0
        found += [
            Recomputed(interval(seeds.values()), unit, at, score, (arm,)) for arm, seeds in arms.items()
        ]
        for one, other in combinations(arms, 2):
            shared = [seed for seed in arms[one] if seed in arms[other]]
            if shared:
                pair = ([arms[name][seed] for seed in shared] for name in (other, one))
                found.append(Recomputed(paired_difference(*pair), unit, at, score, (one, other)))
    return found + [each.reversed() for each in found if len(each.arms) == 2 or " above " in each.score]


class Recomputed(NamedTuple):
    """An interval that values of single seeds give: of one arm, or of the difference of two."""

    value: Interval
    unit: float
    at: str
    score: str
    arms: tuple[str, ...]

    def reversed(self):
        """The same difference, the other arm minus the first."""
        value = self.value
        return self._replace(value=Interval(-value.mean, value.half_width, value.n))


@cache
def columns(path):
    """The recomputed intervals of a file: means, half widths, seeds, units, and what each is about."""
    known = recomputed(path)
    numbers = np.array([(e.value.mean, e.value.half_width, e.value.n, e.unit) for e in known]).T
    return *numbers, [{(e.at, "score", e.score), *((e.at, "arm", arm) for arm in e.arms)} for e in known]


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


@pytest.mark.parametrize("path", PER_SEED.values(), ids=PER_SEED)
def test_an_arm_has_one_value_of_a_score_at_a_moment_per_seed(path):
    rows = [tuple(row[key] for key in ("arm", "seed", "at", "score")) for row in read_csv(path)]
    assert len(set(rows)) == len(rows)


TABLES = [path for path in sorted(RESULTS.glob("*.csv")) if not path.name.endswith(SUFFIX) and belongs(path)]


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_every_interval_of_a_table_follows_from_the_values_of_its_seeds(table):
    means, widths, counts, units, _ = columns(PER_SEED[belongs(table)])
    intervals = tabled(table)
    assert intervals
    for where, mean, width, n in intervals:
        same = (counts == n) & (abs(means - mean) <= np.maximum(2e-4 * abs(mean), np.maximum(2e-5, units)))
        if n > 1 and width is not None:
            # What rounding can do to a half width: values off by half a unit, up and down in turn.
            rounding = interval([(-1) ** place / 2 for place in range(n)]).half_width
            same &= abs(widths - width) <= np.maximum(max(2e-3 * abs(width), 1e-4), rounding * units)
        assert same.any(), f"{table.name}, {where}: {mean} ± {width} (n = {n})"


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
            f"fasterqk-lab reproduce {own[0]['experiment']} --cells {file.name} writes {name}{SUFFIX}"
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
    """Means and half widths of experiments: from per-seed values where there are any, else from tables."""
    own = [columns(PER_SEED[key])[:2] for key in PER_SEED if key.startswith(tuple(names))]
    for name in names:
        for path in RESULTS.glob(f"*{name.removeprefix('table-')}*.csv"):
            if not path.name.endswith(SUFFIX) and not belongs(path):
                found = [(mean, width) for _, mean, width, _ in tabled(path) if width is not None]
                own += [np.array([*found, *((-mean, width) for mean, width in found)]).reshape(-1, 2).T]
    return np.concatenate([np.array(each) for each in own], axis=1)


SECTIONS = [
    pytest.param(text, id=f"{page.name}-{line}")
    for page in PAGES
    for line, text in sections(page)
    if list(intervals_of(text)) and page.name != "claims.md"
]


@pytest.mark.parametrize("text", SECTIONS)
def test_every_interval_of_a_document_is_in_the_results(text):
    names = experiments_of(text)
    assert names, "a section with intervals names the command that printed them"
    means, widths = candidates(names)
    for printed in intervals_of(text):
        assert prints(printed, means, widths).any(), (
            f"{printed[0][0]} ± {printed[1][0]} is not in the results of {', '.join(sorted(names))}"
        )


def experiments_of(text):
    """The experiments whose commands a text names."""
    return set(re.findall(r"fasterqk-lab reproduce ([a-z0-9-]+)", text)) & set(EXPERIMENTS)


def prints(printed, mean, width):
    """Whether an interval rounds to what is printed; arrays are compared entry by entry."""
    (shown, shown_half), (half, half_half) = printed
    scale = 1 + 1e-6
    return (abs(mean - shown) <= scale * shown_half + 2e-5 * max(1, abs(shown))) & (
        abs(width - half) <= scale * half_half + 1e-4 * max(1, half)
    )


def belong_together(row, names):
    """Whether the cells of a row that are an interval alone are of one score, or one arm, at one moment.

    Of two arms and their difference, the difference is the second minus the first.
    """
    shared, printed_means = None, []
    for cell in row.strip("|").split("|"):
        if not (printed := re.fullmatch(rf"\W*{NUMBER}\s*±\s*{NUMBER}\W*", cell)):
            continue
        [shown] = intervals_of(printed[0])
        places = set()
        for path in (PER_SEED[key] for key in PER_SEED if key.startswith(tuple(names))):
            means, widths, *_, about = columns(path)
            for place in np.flatnonzero(prints(shown, means, widths)):
                places |= about[place]
        shared = places if shared is None else shared & places
        printed_means.append(shown[0])
    if len(printed_means) == 3 and shared and any(kind == "score" for _, kind, _ in shared):
        (one, one_half), (other, other_half), (change, change_half) = printed_means
        if abs(change) > change_half and (other - one) * change < 0:
            return abs(other - one) <= one_half + other_half
    return shared is None or bool(shared)


@pytest.mark.parametrize("text", [section for section in SECTIONS if "\n|" in section.values[0]])
def test_the_intervals_of_a_row_belong_together(text):
    names = experiments_of(text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert [row for row in rows if not belong_together(row, names)] == []


def test_the_check_can_fail():
    whole = "| HateXplain | .402 ± .000 | .666 ± .051 | .264 ± .051 |"
    assert belong_together(whole, {"table-hatexplain"})
    # Of no score; of the end of training, not of equal loss; of the wrong sign.
    for wrong in (".264 ± .052", ".255 ± .057", "-.264 ± .051"):
        assert not belong_together(whole.replace(".264 ± .051", wrong), {"table-hatexplain"})
    [invented] = intervals_of(".123 ± .456")
    assert not prints(invented, *candidates(["table-hatexplain"])).any()
    assert find_experiment("table-hatexplain").trains
    assert list(intervals_of("was .402 ± .000 and −1.5 ± 2e-3")) == [
        ((0.402, 0.0005), (0.0, 0.0005)),
        ((-1.5, 0.05), (0.002, 0.0005)),
    ]
