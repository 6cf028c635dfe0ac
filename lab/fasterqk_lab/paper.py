"""Claims of the paper and open questions, decided from published results, and one picture of both.

Published are tidy tables in `lab/paper/results` and histories in `lab/paper/cells`. Claims and questions are
data: `claims.toml` and `questions.toml` say what to compare; the rule decides.

An effect is a table: ``experiment`` and ``score`` and, where they differ from the usual, ``arms`` (the first
minus the second; one arm with ``minus``, another of its scores or a number), ``at`` (``level``), ``says``
(``more``, ``less``, ``equal``, ``not less``: the direction of its claim), ``seeds`` (how many were planned),
``margin``, and ``exact`` for a number that is computed, not sampled. ``identity`` names one of
:func:`fasterqk_lab.theory.check_identities`, ``ratio`` asks the closed form. A claim without effects has a
``verdict`` that was read, not computed.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import nan
from pathlib import Path
from typing import Any

from fasterqk.attention.statistics import Interval
from fasterqk.errors import InputError
from fasterqk.files import write_bytes
from fasterqk.theory import Setting, solve
from fasterqk_lab.compare import (
    LEVEL,
    MARGIN,
    NOT_RUN,
    VERDICTS,
    Effect,
    Measured,
    Value,
    above,
    above_random,
    compare,
    correct,
    read_values,
    verdict,
)
from fasterqk_lab.figures import COLORS, INK, STANDS_COLORS, draw_forest, plotting, svg_bytes
from fasterqk_lab.runs import read_cells
from fasterqk_lab.theory import check_identities

ARMS = ("faster_qk", "baseline")
# `lab/paper` of the checkout.
FOLDER = Path(__file__).parents[1] / "paper"


class Published:
    """Everything that is published, comparison by comparison."""

    def __init__(self, folder: Path = FOLDER) -> None:
        if not (folder / "results").is_dir():
            raise InputError(
                f"{str(folder)!r} has no folder 'results'; name the folder lab/paper of a checkout"
            )
        self.folder = folder

    @cached_property
    def _values(self) -> dict[str, list[Value]]:
        values: dict[str, list[Value]] = {}
        for path in sorted((self.folder / "results").glob("*.csv")):
            for value in read_values(path):
                values.setdefault(value.experiment, []).append(value)
        return values

    @cached_property
    def _histories(self) -> dict[str, dict[tuple[str, int], list[Mapping[str, Any]]]]:
        histories: dict[str, dict[tuple[str, int], list[Mapping[str, Any]]]] = {}
        for path in sorted((self.folder / "cells").glob("*.jsonl*")):
            for line in read_cells(path):
                if "result" not in line:
                    continue
                parts = line.get("table") or line["experiment"], line.get("protocol")
                result = line["result"]
                records = [] if result.get("diverged") else result.get("history", [])
                name = "-".join(filter(None, parts))
                histories.setdefault(name, {})[line["arm"], line["seed"]] = list(map(above_random, records))
        return histories

    def has(self, entry: Mapping[str, Any]) -> bool:
        """Whether there are results of the experiment and the arms that an effect is about."""
        arms = {value.arm for value in self._values.get(entry.get("experiment", ""), ())}
        return bool(arms) and arms.issuperset(entry.get("arms", ()))

    def measured(self, name: str) -> Measured:
        """The comparison ``name``: its values, and its histories where its cells are published."""
        if name not in self._values:
            raise InputError(f"no results of {name!r} in {str(self.folder / 'results')!r}")
        return Measured(name, self._values[name], self._histories.get(name, {}))


@dataclass(frozen=True)
class Claim:
    """One claim of the paper with its evidence and its verdict.

    ``before`` is the verdict by the rule that was in force until the date in `claims.toml`.
    """

    text: str
    where: str
    group: str
    verdict: str
    effects: tuple[Effect, ...]
    remark: str = ""
    command: str = ""
    before: str = ""
    computed: bool = True


@dataclass(frozen=True)
class Question:
    """One open question: the effects that decide it, its verdict, and the effects that were explored."""

    title: str
    believed: str
    hypothesis: str
    run: str
    design: str
    decides: str
    registered: str
    verdict: str
    effects: tuple[Effect, ...]
    explored: tuple[Effect, ...]
    becomes: str = ""


@dataclass(frozen=True)
class Line:
    """One line of the picture of everything that was compared."""

    group: str
    effect: Effect
    command: str
    headline: bool = False  # also in the README


def read_claims(published: Published, path: Path = FOLDER / "claims.toml") -> list[Claim]:
    """Every claim, in the order of the file."""
    claims = []
    for entry in read_entries(path, "claim"):
        effects = _effects(published, entry.get("effects", ()), entry.get("says", "more"))
        read = entry.get("verdict")
        if read is not None and read not in VERDICTS:
            raise InputError(f"claim {entry['text']!r:.60}: {read!r} is not one of {', '.join(VERDICTS)}")
        known = ("text", "where", "group", "remark", "command", "before")
        about = {name: entry[name] for name in known if name in entry}
        decided = read or verdict(effects, large=entry.get("large", False))
        claims.append(Claim(**about, verdict=decided, effects=tuple(effects), computed=read is None))
    return claims


def read_questions(published: Published) -> list[Question]:
    """Every question, in the order of the file; one that is registered and not yet run has no effects."""
    questions = []
    for entry in read_entries(FOLDER / "questions.toml", "question"):
        says = entry.get("says", "more")
        run = all(published.has(effect) for effect in entry["effects"])
        entries = (entry["effects"], entry.get("explored", ())) if run else ((), ())
        effects, explored = (_effects(published, its_effects, says) for its_effects in entries)
        decided = verdict(effects, large=False) if run else NOT_RUN
        known = ("title", "believed", "hypothesis", "run", "design", "decides", "registered")
        becomes = entry.get("becomes", {}).get(decided, "")
        about = {name: entry[name] for name in known} | {"verdict": decided, "becomes": becomes}
        questions.append(Question(**about, effects=tuple(effects), explored=tuple(explored)))
    return questions


def read_entries(path: Path, kind: str) -> list[dict[str, Any]]:
    """The tables of one kind (``claim``, ``element``, ``question``, ``line``) of a file."""
    entries: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))[kind]
    return entries


def read_lines(published: Published) -> list[Line]:
    """The lines of the picture, corrected for their number."""
    entries = read_entries(FOLDER / "questions.toml", "line")
    effects = _effects(published, entries, "more")
    return [
        Line(entry["group"], effect, entry["run"], entry.get("headline", False))
        for entry, effect in zip(entries, effects, strict=True)
    ]


def _effects(published: Published, entries: Sequence[Mapping[str, Any]], says: str) -> list[Effect]:
    return correct([_effect(published, {"says": says} | dict(entry)) for entry in entries])


def _effect(published: Published, entry: Mapping[str, Any]) -> Effect:
    if "identity" in entry:
        return _identity(entry["identity"])
    if "ratio" in entry:
        return _theory(entry)
    measured = published.measured(entry["experiment"])
    score, at, label = entry.get("score", "mrta"), entry.get("at", LEVEL), entry.get("label", "")
    options = {"at": at, "label": label, "seeds": entry.get("seeds")}
    arms = tuple(entry.get("arms", ARMS))
    if len(arms) == 1:
        other = entry.get("minus", 0.0)
        other = float(other) if isinstance(other, int | float) else str(other)
        effect = above(measured, arms[0], score, other, entry["says"], **options)
    else:
        effect = compare(
            measured, (arms[0], arms[1]), score, entry["says"], loss=entry.get("loss"), **options
        )
    changes = {name: entry[name] for name in ("margin", "exact") if name in entry}
    return replace(effect, **changes)


@cache
def _identity(name: str) -> Effect:
    """An identity of the theory: both sides, computed independently, agree to its tolerance."""
    [identity] = check_identities(names=[name])
    error = Interval(max(0.0, float(identity.error)), nan, 1)
    return Effect(
        identity.says, name, "equal", error, error, error, "", margin=identity.tolerance, exact=True
    )


def _theory(entry: Mapping[str, Any]) -> Effect:
    """Attention at one ratio and loss by the closed form, minus a number."""
    alpha = float(solve(Setting(**entry["setting"]), entry["ratio"], loss=entry["loss"]).alpha)
    number = float(entry["minus"])
    return Effect(
        entry["label"],
        "attention",
        entry["says"],
        Interval(alpha - number, nan, 1),
        Interval(alpha, nan, 1),
        Interval(number, nan, 1),
        "",
        loss=entry["loss"],
        margin=entry.get("margin", MARGIN),
        exact=True,
    )


# --- The picture ---

TITLE = "Attention on the relevant tokens, both models at the same training loss"
SHUFFLED: dict[str, Any] = {"marker": "|", "color": COLORS[4], "markersize": 14, "markeredgewidth": 2.2}


def save_picture(lines: Sequence[Line], folder: Path) -> Path:
    """Draw one line per comparison, from top to bottom, as ``questions.svg``; returns its path.

    The score of the faster arm with its weights in random order is marked where it differs from the null.
    """
    places: list[float] = []
    headings: dict[str, float] = {}
    for line in lines:
        place = places[-1] + 1 if places else 1.0
        if line.group not in headings:
            place += 1.3 * bool(places)
            headings[line.group] = place - 1
        places.append(place)
    height = 1.4 + 0.27 * places[-1]
    with plotting() as plt:
        figure = plt.figure(figsize=(7.3, height), layout="none")
        axis = figure.add_axes((0.425, 0.3 / height, 0.4, 1 - 1.2 / height))
        draw_forest(axis, [line.effect for line in lines], places)
        left: dict[str, Any] = {"xycoords": ("figure fraction", "data"), "va": "center", "fontsize": 10.5}
        for line, place, text in zip(lines, places, list(axis.texts), strict=True):
            effect, half, color = line.effect, line.effect.value.half_width, STANDS_COLORS[line.effect.stands]
            axis.errorbar(effect.first.mean, place, xerr=half, color=color, capsize=4, zorder=1.9)
            if effect.permuted is not None and abs(effect.permuted - (effect.null or 0.0)) > effect.margin:
                axis.plot(effect.permuted, place, zorder=1.8, **SHUFFLED)
            digits = 3 if half < 0.005 else 2  # two, unless these hide the interval
            difference = f"{effect.value.mean:+z.{digits}f}".replace("-", "\N{MINUS SIGN}")
            text.set(text=f"{difference} ± {half:.{digits}f}" if half > 0 else difference, fontsize=10.5)
            axis.annotate(effect.label, (0.008, place), annotation_clip=False, **left)
        for group, place in headings.items():
            axis.annotate(group, (0.008, place), annotation_clip=False, fontweight="bold", **left)
        axis.set_yticks(places, [])
        axis.grid(axis="y", visible=True)
        axis.spines["left"].set_visible(False)
        axis.set(xlim=(0, 1), ylim=(places[-1] + 0.7, -0.5))
        axis.xaxis.set_major_formatter("{x:g}")
        figure.text(0.008, 1 - 0.1 / height, TITLE, va="top", fontsize=12, fontweight="bold")
        _picture_legend(axis, dict.fromkeys(line.effect.stands for line in lines), 1 - 0.34 / height)
        return write_bytes(folder / "questions.svg", svg_bytes(figure))


def _picture_legend(axis: Any, stands: Iterable[str], top: float) -> None:
    words = {"more": "more attention", "less": "less attention", "open": "open: the seeds do not decide"}
    marks: dict[str, dict[str, Any]] = {
        "equal rates": {"marker": "o", "color": INK, "markerfacecolor": "white", "markersize": 8},
        "uniform attention": {"marker": "$\\vdots$", "color": "#737373", "markersize": 9},
        "faster QK, 95% interval": {"marker": "o", "color": INK, "markersize": 5.5, "linestyle": "-"},
        "its attention, shuffled": SHUFFLED,
    }
    marks |= {words.get(name, name): {"marker": "s", "color": STANDS_COLORS[name]} for name in stands}
    handles = [axis.plot([], [], **{"linestyle": "none"} | mark)[0] for mark in marks.values()]
    space = {"columnspacing": 1.6, "handletextpad": 0.5, "borderpad": 0.2, "handlelength": 1.7}
    axis.figure.legend(handles, list(marks), loc="upper left", bbox_to_anchor=(0, top), ncols=3, **space)
