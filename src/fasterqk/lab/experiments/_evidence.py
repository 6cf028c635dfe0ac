"""Evidence for claims: effects read from published results, and the rule that turns them into a verdict."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite, nan
from pathlib import Path
from typing import Literal

from fasterqk.attention import Interval, title_of
from fasterqk.errors import InputError
from fasterqk.lab.report import Claim

# Arms whose accuracies differ by less than this are comparable: two points.
COMPARABLE = 0.02

RULE = f"""\
An *effect* is the difference that the claim is about: faster QK minus equal rates, paired by seed, at
the lowest training loss that all cells of the comparison reach (unless it says "at the end"). ± is its
95% t-interval over n seeds. Where only the intervals of two arms are published, ± is the sum of their
half widths, which is wider.

- An effect *supports* a claim if its whole interval lies on the claimed side of zero. For a claim of
  equal performance the whole interval must lie within ±{COMPARABLE:g} (two points of accuracy), for one of
  no loss above -{COMPARABLE:g}.
- It is *against* the claim if its whole interval lies on the other side (beyond that margin), and *open*
  otherwise.
- One seed has no interval: it *points* the claimed way, or is open.

The verdict is **holds** if every effect supports the claim; **holds in part** if some do, or if one
seed points the claimed way and nothing is against it; **does not hold** if none supports it, which
includes claims that the evidence is too weak to show; **not tested** if there is no measurement, with
the reason. An identity of the theory holds if both of its sides, computed independently, agree to the
stated tolerance. Verdicts marked † are not computed: they rest on reading the paper beside its released
notebooks, or a curve. Three claims about curves of Figures 3 and 4 and where attention settles use
thresholds that we chose. Many effects are compared and none is corrected for that: single intervals
just off zero are weak evidence."""

Claimed = Literal["more", "less", "equal", "not less"]


@dataclass(frozen=True)
class Effect:
    """One difference, which way the claim says it goes, and what it was measured on."""

    label: str
    value: Interval
    claimed: Claimed
    at: str = ""  # the training loss, or when
    null: float | None = None
    digits: int = 3

    @property
    def standing(self) -> str:
        """``supports``, ``against``, ``open`` or, of one seed, ``points``."""
        mean, half = self.value.mean, self.value.half_width
        if not isfinite(mean):
            return "open"
        if self.claimed == "equal":
            if self.value.n < 2:
                return "points" if abs(mean) <= COMPARABLE else "open"
            if abs(mean) + half <= COMPARABLE:
                return "supports"
            return "against" if abs(mean) - half > COMPARABLE else "open"
        signed = -mean if self.claimed == "less" else mean
        if self.claimed == "not less":  # than nothing, by more than the margin
            signed += COMPARABLE
        if self.value.n < 2:
            return "points" if signed > 0 else "open"
        return "supports" if signed - half > 0 else "against" if signed + half < 0 else "open"

    @property
    def text(self) -> str:
        """The effect as a clause: what, how much, how sure, and how it stands to the claim."""
        size = f"{self.value.mean:+.{self.digits}f}"
        if self.value.n > 1:
            size += f" ± {self.value.half_width:.{self.digits}f}"
        about = [f"n = {self.value.n}"] + ([self.at] if self.at else [])
        about += [] if self.null is None else [f"null {self.null:.{self.digits}f}"]
        return f"{self.label} {size} ({', '.join(about)}): {self.standing}"


def verdict(effects: Sequence[Effect]) -> str:
    """The verdict on a claim by the rule above.

    >>> one, many = Interval(0.3, nan, 1), Interval(0.3, 0.1, 5)
    >>> verdict([Effect("a", many, "more")]), verdict([Effect("a", many, "more"), Effect("b", many, "less")])
    ('holds', 'holds in part')
    >>> verdict([Effect("a", one, "more")]), verdict([Effect("a", many, "equal")]), verdict([])
    ('holds in part', 'does not hold', 'not tested')
    """
    found = [effect.standing for effect in effects]
    if not found:
        return "not tested"
    if all(standing == "supports" for standing in found):
        return "holds"
    if "supports" in found or ("points" in found and "against" not in found):
        return "holds in part"
    return "does not hold"


# --- Claims ---

READ = "†"  # marks verdicts that are not computed


def measured(
    claim: str, where: str, effects: Sequence[Effect], experiment: str, link: str, note: str = ""
) -> Claim:
    """A claim decided by effects; the first one stands for it in the table."""
    evidence = "; ".join(effect.text for effect in effects) + (f". {note}" if note else ".")
    first = effects[0]
    return Claim(
        claim,
        where,
        verdict(effects),
        evidence,
        effect=first.value if first.value.n > 1 else first.value.mean,
        null=first.null,
        seeds=first.value.n,
        experiment=experiment,
        link=link,
    )


def read(claim: str, where: str, decided: str, evidence: str, experiment: str = "", link: str = "") -> Claim:
    """A claim decided by reading."""
    return Claim(claim, where, decided, f"{READ} {evidence}", experiment=experiment, link=link)


def untested(claim: str, where: str, why: str, experiment: str = "", link: str = "") -> Claim:
    return Claim(claim, where, "not tested", why, experiment=experiment, link=link)


# --- Reading the tables of docs/results ---


class Results:
    """The tables of a folder such as `docs/results`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, name: str) -> list[dict[str, str]]:
        """The rows of ``NAME.csv``."""
        return _rows(self.folder / f"{name}.csv")

    def compared(
        self,
        label: str,
        name: str,
        score: str,
        claimed: Claimed,
        *,
        at_end: bool = False,
        level: int = 0,
        digits: int = 3,
    ) -> Effect:
        """The difference of two arms in ``score``, of the table ``NAME-matched`` or ``NAME-end``.

        ``level`` counts the training losses at which they are compared, from the lowest.
        """
        own = [row for row in self.rows(f"{name}-end") if row["metric"] == title_of(score)]
        null = float(own[0]["null, baseline"]) if own and own[0].get("null, baseline") else None
        if at_end:
            return Effect(label, _interval(own[0], "difference"), claimed, "at the end", null, digits)
        rows = [row for row in self.rows(f"{name}-matched") if row["metric"] == title_of(score)]
        row = sorted(rows, key=lambda row: float(row["at loss"]))[level]
        at = f"at training loss {float(row['at loss']):.3g}"
        return Effect(label, _interval(row, "difference"), claimed, at, null, digits)

    def by_layer(self, label: str, name: str, attention: str, claimed: Claimed) -> Effect:
        """The difference in MRTA of one layer, or of their average, of the table ``NAME-by-layer``."""
        row = next(
            row
            for row in self.rows(f"{name}-by-layer")
            if (row["attention"], row["metric"], row["at"]) == (attention, "MRTA", "equal loss")
        )
        at = f"at training loss {float(row['loss']):.3g}"
        return Effect(label, _interval(row, "difference"), claimed, at, float(row["null"]))

    def arms(
        self, label: str, arm: str, other: str, claimed: Claimed, *, name: str = "ablation-hatexplain"
    ) -> Effect:
        """The difference in MRTA of two arms of a table that has one row per arm."""
        rows = [row for row in self.rows(name) if row["at"] == "equal loss"]
        lowest = min(float(row["loss"]) for row in rows)
        found = {row["arm"]: row for row in rows if float(row["loss"]) == lowest}
        value = apart(_interval(found[arm], "mrta"), _interval(found[other], "mrta"))
        return Effect(label, value, claimed, f"at training loss {lowest:.3g}")

    def panel(self, protocol: str, name: str) -> tuple[Interval, dict[str, str]]:
        """MRTA of a panel of figure 2 at the end, over seeds, and its row."""
        row = next(
            row for row in self.rows("synthetic-fig2") if (row["protocol"], row["panel"]) == (protocol, name)
        )
        return Interval(float(row["mrta"]), float(row["mrta_half_width"]), int(row["seeds"])), row

    def panels(self, label: str, protocol: str, name: str, other: str, claimed: Claimed) -> Effect:
        """The difference in MRTA of two panels of figure 2 at the end of training."""
        (value, row), (against, _) = self.panel(protocol, name), self.panel(protocol, other)
        return Effect(label, apart(value, against), claimed, "at the end", float(row["uniform_mrta"]))


def above(value: Interval, level: float) -> Interval:
    """``value`` minus a fixed number."""
    return Interval(value.mean - level, value.half_width, value.n)


def apart(one: Interval, other: Interval) -> Interval:
    """``one`` minus ``other`` where their seeds are not paired: the half widths add up."""
    n = min(one.n, other.n)
    half = one.half_width + other.half_width if n > 1 else nan
    return Interval(one.mean - other.mean, half, n)


def _interval(row: dict[str, str], name: str) -> Interval:
    half, n = row.get(f"{name}_half_width"), row.get(f"{name}_n")
    return Interval(float(row[name]), float(half) if half else nan, int(float(n)) if n else 1)


@cache
def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise InputError(f"{str(path)!r} is missing; name the folder docs/results of a checkout")
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))
