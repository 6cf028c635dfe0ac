"""What the published results say: the paper's claims, the open questions, and the pages of docs/results.

Published are tidy tables in `lab/paper/results` and histories in `lab/paper/cells`. Claims and questions are
data: `claims.toml` and `questions.toml` say what to compare; the rule decides.

An effect is a table: ``experiment`` and ``score`` and, where they differ from the usual, ``arms`` (the first
minus the second; one arm with ``minus``, another score of its own or a number), ``at`` (``level``), ``says``
(``more``, ``less``, ``equal``, ``not less``: the direction of its claim), ``seeds`` (how many were planned),
``margin``, and ``exact`` for a number that is computed, not sampled. ``identity`` names one of
:func:`fasterqk_lab.theory.check_identities`, ``ratio`` asks the closed form. A claim without effects has a
``verdict`` that was read, not computed.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import isfinite, nan
from pathlib import Path
from typing import Any

from fasterqk.attention.statistics import Interval
from fasterqk.console import cell_text
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
from fasterqk_lab.figures import draw_forest, effect_text, plotting, svg_bytes, wide_rows
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
    """One claim of the paper with its evidence and what becomes of it.

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
    """One open question: what decides it, what came out, and what else was looked at."""

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
    for entry in _entries(path, "claim"):
        effects = _effects(published, entry.get("effects", ()), entry.get("says", "more"))
        read = entry.get("verdict")
        if read is not None and read not in VERDICTS:
            raise InputError(f"claim {entry['text']!r:.60}: {read!r} is not one of {', '.join(VERDICTS)}")
        known = ("text", "where", "group", "remark", "command", "before")
        about = {name: entry[name] for name in known if name in entry}
        decided = read or verdict(effects, large=entry.get("large", False))
        claims.append(Claim(**about, verdict=decided, effects=tuple(effects), computed=read is None))
    return claims


def read_questions(published: Published, path: Path = FOLDER / "questions.toml") -> list[Question]:
    """Every question, in the order of the file; one that is registered and not yet run has no effects."""
    questions = []
    for entry in _entries(path, "question"):
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


def _entries(path: Path, kind: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))[kind]
    return entries


def read_lines(published: Published, path: Path = FOLDER / "questions.toml") -> list[Line]:
    """The lines of the picture, corrected for their number."""
    entries = _entries(path, "line")
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


# --- The pages of docs/results, as Markdown: nothing on them is typed that a table knows ---

CHANGED = "2026-11-18"
NOTE = "<!-- Generated by `python tools/publish.py`; do not edit. -->"
RULE = f"""\
**How it is decided.** Two arms differ in their learning rates and in nothing else. Both are read where the
training loss first falls to the *level*: the mean training loss at which the baseline, the arm with equal
rates, has its best validation loss. A person would stop there, and the baseline alone fixes it. If a cell
never reaches the level, the lowest loss that all cells reach decides instead (marked ↓). An *effect* is the
difference of the two arms, paired by seed; ± is its 95% t-interval over n seeds. *Levels* is the share of
25 training losses over the common range at which that interval excludes zero on the same side. *Null* is
what uniform attention scores, or a random ranking of the words.

An effect **supports** a claim of more or less if its interval lies on the claimed side of zero and its mean
is beyond the smallest difference that matters (0.02 for attention, accuracy and faithfulness, 2 points for
AC and ACMC, 0.01 for a loss, 5% of the steps). It is **against** it in the mirror image, **small** if the
interval lies within that margin, and **open** otherwise. A claim of equality is supported by an interval
within the margin. P-values are corrected for the number of effects of a claim (Holm); an effect that does
not pass is open. One seed leaves everything open.

A claim is **confirmed** if all its effects support it, at half of the levels or more; **contradicted** if
all are against it; **inconclusive** if none supports it and some are open; otherwise it **depends on the
setting**. **Text differs from code** and **not run** were read, not computed. This rule replaced another
one on {CHANGED}, after the data had been seen; the earlier verdict stands beside the new one where they
differ."""
# Earlier verdicts, by what they are called now.
_EARLIER = {
    "holds": "confirmed",
    "holds in part": "depends on the setting",
    "does not hold": "contradicted",
    "not tested": "not run",
}
# Rows of a table beyond these are left to its file.
_ROWS = 40


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(_text(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]


def _text(text: str) -> str:
    """``text`` of a results folder without markup of HTML, which Markdown would pass on."""
    return text.replace("<", "&lt;")


# --- Effects ---


def effect_table(effects: Sequence[Effect]) -> list[str]:
    """One row per effect: both values, the null, the difference, where it was read, and how it stands."""
    if all(effect.exact for effect in effects):
        rows = [
            [effect.label, f"{effect.value.mean:.2g}", f"{effect.margin:g}", effect.corrected]
            for effect in effects
        ]
        return table(["", "difference", "within", ""], rows)
    columns = ["", "baseline", "arm", "null", "difference", "read at", "training, base / arm", "levels", ""]
    return table(columns, map(_effect_row, effects))


def _effect_row(effect: Effect) -> list[str]:
    digits = 1 if effect.margin >= 1 else 3
    null = "" if effect.null is None else f"{effect.null:.{digits}f}"
    progress = "" if effect.progress is None else f"{effect.progress[1]:.0%} / {effect.progress[0]:.0%}"
    levels = "" if effect.agreement is None else f"{effect.agreement:.0%}"
    values = [f"{value.mean:.{digits}f}" for value in (effect.second, effect.first)]
    return [
        *(effect.label, *values, null, effect_text(effect), _where(effect)),
        *(progress, levels, effect.corrected),
    ]


def _where(effect: Effect) -> str:
    if effect.loss is None:
        return {"end": "the end", "best": "best validation"}.get(effect.at, effect.at)
    return f"loss {effect.loss:.3g}{' ↓' if effect.lowest else ''}"


# --- Claims ---


def index_page(claims: Sequence[Claim], experiments: Mapping[str, str]) -> str:
    """``index.md``: the picture, every element of the paper, every claim, every experiment."""
    elements = tomllib.loads((FOLDER / "claims.toml").read_text(encoding="utf-8"))["element"]
    counts = ", ".join(f"{sum(c.verdict == v for c in claims)} {v}" for v in VERDICTS)
    groups = list(dict.fromkeys(claim.group for claim in claims))
    parts = ["# Results", "", NOTE, "", f"{len(claims)} claims of the paper: {counts}.", ""]
    parts += ["![attention with equal rates and with a faster query-key circuit](images/questions.svg)", ""]
    see = "Ring: equal rates. Dot: queries and keys learn faster. Dotted mark: uniform attention."
    parts += [see, "", RULE, "", "## The paper, element by element", ""]
    rows = []
    for element in elements:
        command = element["command"]
        links = [_page(command, experiments), _command(command)]
        rows.append([element["name"], element["what"], _verdicts(claims, command), *links])
    parts += table(["", "what it shows", "its claims", "page", "command"], rows)
    for group in groups:
        parts += ["", f"## {group.capitalize()}", ""]
        parts += table(
            ["", "claim", "verdict", "effect", "remark"],
            [_claim_row(n, c) for n, c in enumerate(claims, 1) if c.group == group],
        )
    parts += ["", "## Every experiment", ""]
    parts += table(["", "command"], ([_page(name, experiments), _command(name)] for name in experiments))
    beyond = "Beyond the paper: [open questions](questions.md). Values of single seeds, one tidy table"
    parts += ["", beyond, "per experiment: [lab/paper/results](../../lab/paper/results)."]
    return "\n".join(parts) + "\n"


def _verdicts(claims: Sequence[Claim], command: str) -> str:
    counts = {v: sum(c.verdict == v and c.command == command for c in claims) for v in VERDICTS}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def _page(name: str, experiments: Mapping[str, str]) -> str:
    return f"[{experiments[name]}]({name}.md)" if name in experiments else ""


def _command(name: str) -> str:
    return f"`fasterqk-lab reproduce {name}`" if name else ""


def _claim_row(number: int, claim: Claim) -> list[str]:
    verdict = f"**{claim.verdict}**"
    if claim.before and _EARLIER[claim.before] != claim.verdict:
        verdict += f" (before: {claim.before})"
    first = claim.effects[0] if claim.effects else None
    effect = "" if first is None or first.exact else f"{effect_text(first)} ({first.label})"
    more = f"[evidence](claims.md#claim-{number})" if claim.effects else ""
    remark = " ".join(filter(None, (claim.remark, more)))
    return [str(number), f"{claim.text} ({claim.where})", verdict, effect, remark]


def claims_page(claims: Sequence[Claim]) -> str:
    """``claims.md``: every effect of every claim."""
    parts = ["# Every claim of the paper, with its evidence", "", NOTE, ""]
    parts += ["[The verdicts and the rule](index.md)."]
    for number, claim in enumerate(claims, 1):
        if not claim.effects:
            continue
        parts += ["", f"## Claim {number}", "", f"{claim.text}: **{claim.verdict}**. {claim.where}.", ""]
        parts += effect_table(claim.effects)
        if claim.command:
            parts += ["", _command(claim.command)]
    return "\n".join(parts) + "\n"


def questions_page(questions: Sequence[Question]) -> str:
    """``questions.md``: what was believed, run and found."""
    parts = ["# Open questions", "", NOTE, ""]
    named = "Scores that decide were named before the run; others are exploratory."
    parts += [f"What the paper does not ask. {named}", "[How it is decided](index.md)."]
    for number, question in enumerate(questions, 1):
        parts += ["", f"## {number}. {question.title}", "", f"**Believed.** {question.believed}", ""]
        parts += [f"**Run.** {_command(question.run)}. {question.design}", ""]
        decides = f"{question.decides[0].upper()}{question.decides[1:]}. {question.registered}"
        parts += [f"**Decides.** {decides}", ""]
        parts += [f"**Hypothesis**: {question.hypothesis}: **{question.verdict}**. {question.becomes}", ""]
        parts += effect_table(question.effects) if question.effects else []
        if question.explored:
            parts += ["", "Exploratory:", "", *effect_table(question.explored)]
    return "\n".join(parts) + "\n"


def ratio_table(lines: Sequence[Line]) -> str:
    """The lines of the picture as a table: all in docs/ratio.md, the headlines in the README."""
    rows = []
    for line in lines:
        effect = line.effect
        values = [f"{value.mean:.3f}" for value in (effect.second, effect.first)]
        null = "" if effect.null is None else f"{effect.null:.3f}"
        command = f"`fasterqk-lab reproduce {line.command}`"
        rows.append([effect.label, *values, null, effect_text(effect), effect.stands, command])
    return "\n".join(table(["", "equal rates", "faster QK", "null", "difference", "", "command"], rows))


def save_picture(lines: Sequence[Line], folder: Path) -> Path:
    """Draw one line per comparison, from top to bottom, as ``questions.svg``; returns its path."""
    places: list[int] = []
    headings: dict[str, int] = {}
    for line in lines:
        place = places[-1] + 1 if places else 1
        if line.group not in headings:
            place += bool(places)
            headings[line.group] = place - 1
        places.append(place)
    with plotting() as plt:
        figure, axis = plt.subplots(figsize=(8.6, 1.0 + 0.29 * (max(places) + 1)))
        draw_forest(axis, [line.effect for line in lines], places)
        for group, place in headings.items():
            axis.annotate(
                group,
                (0, place),
                xytext=(-8, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=10,
                fontweight="bold",
            )
        axis.set_yticks(places, [line.effect.label for line in lines])
        axis.set_ylim(max(places) + 0.7, -0.6)
        axis.set_xlim(0, 1)
        axis.set_xlabel("attention on the relevant tokens, at equal training loss")
        return write_bytes(folder / "questions.svg", svg_bytes(figure))


# --- Experiments ---


def experiment_page(title: str, command: str, out: Path, images: Path) -> str:
    """The figures and tables that an experiment wrote under ``out``; pictures are copied to ``images``."""
    parts = [f"# {title[0].upper()}{title[1:]}", "", NOTE, "", f"`fasterqk-lab reproduce {command}`"]
    for path in sorted((out / "figures").glob("*.json")):
        document = json.loads(_text(path.read_text(encoding="utf-8")))
        picture = path.with_suffix(".svg")
        images.mkdir(parents=True, exist_ok=True)
        (images / picture.name).write_bytes(picture.read_bytes())
        parts += ["", f"## {document['title']}", ""]
        parts += [f"![{document.get('alt') or document['title']}](images/{picture.name})", ""]
        parts += [" ".join(filter(None, (document.get("see"), document["caption"])))]
    for path in sorted((out / "tables").glob("*.json")):
        parts += _table_parts(json.loads(_text(path.read_text(encoding="utf-8"))))
    name = command.split()[0]
    parts += ["", f"Values of single seeds: [{name}.csv](../../lab/paper/results/{name}.csv)."]
    return "\n".join(parts) + "\n"


def _table_parts(document: Mapping[str, Any]) -> list[str]:
    rows = [
        row
        for row in document["rows"]
        if row.get("kind") != "exploratory" or row.get("at") in ("equal loss", "lowest common loss")
    ]
    columns = {column["key"]: column["label"] for column in document["columns"]}
    if {"score", "arm", "value", "difference"} <= set(columns) and len({row["arm"] for row in rows}) == 2:
        rows, columns = wide_rows(rows, columns)
    columns = {key: label for key, label in columns.items() if any(row.get(key) is not None for row in rows)}
    shown = [[_cell(row.get(key)) for key in columns] for row in rows[:_ROWS]]
    parts = ["", f"## {document['title']}: table", "", document["caption"], ""]
    parts += table(list(columns.values()), shown)
    if len(document["rows"]) > len(rows[:_ROWS]):
        parts += ["", "The command writes all scores, at all moments."]
    return parts


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and not isfinite(value)):
        return ""
    return cell_text(value)
