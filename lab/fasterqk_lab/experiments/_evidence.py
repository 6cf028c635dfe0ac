"""Evidence for claims: effects read from published results, and the rule that turns them into a verdict."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import floor, isfinite, log10, nan
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from fasterqk.attention import Interval, holm, interval, paired_difference
from fasterqk.errors import InputError
from fasterqk_lab.experiments._arms import BASELINE, FASTER
from fasterqk_lab.experiments._per_seed import END, null_name
from fasterqk_lab.page import Claim

# Arms whose accuracies differ by less than this are comparable: two points.
COMPARABLE = 0.02

RULE = f"""\
An *effect* is the difference that the claim is about: faster QK minus equal rates, paired by seed, at
the lowest training loss that all cells of the comparison reach (unless it says "at the end"). ± is its
95% t-interval over n seeds; where seeds were added after looking, those that were planned count. A *null*
is what uniform attention has, of sufficiency, comprehensiveness and plausibility what a ranking at random
has. Two nulls are those of the faster arm and of the other; *at the end* behind them says that they were
measured only there.

- An effect *supports* a claim if its whole interval lies on the claimed side of zero. For a claim of
  equality the whole interval must lie within ±{COMPARABLE:g} (two points of accuracy, or two hundredths of
  the attention), for one of no loss above -{COMPARABLE:g}.
- It is *against* the claim if its whole interval lies on the other side (beyond that margin), and *open*
  otherwise.
- One seed has no interval: it *points* the claimed way, or is open.

The verdict is **holds** if every effect supports the claim; **holds in part** if some do after correction
for the number of effects of that claim (Holm, 5%; those that do not are marked *alone*: they stand so
only if looked at alone), or if one seed points the claimed way and nothing is against it; **does not
hold** if none supports it, which includes claims that the evidence is too weak to show; **not tested** if
there is no measurement, with the reason. Where all effects must support a claim no correction is needed.
An identity of the theory holds if both of its sides, computed independently, agree to the stated
tolerance. Verdicts marked † are not computed: they rest on reading the paper beside its released
notebooks, or a curve. Three claims about curves of Figures 3 and 4 and where attention settles use
thresholds that we chose. Nothing is corrected across claims: single intervals just off zero are weak
evidence."""

Claimed = Literal["more", "less", "equal", "not less"]


@dataclass(frozen=True)
class Effect:
    """One difference, which way the claim says it goes, and what it was measured on."""

    label: str
    value: Interval
    claimed: Claimed
    at: str = ""  # the training loss, or when
    nulls: tuple[float, ...] = ()  # of the first arm and of the second, or one for both
    digits: int = 3
    nulls_at: str = ""  # where the nulls were measured, if elsewhere

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
    def p_value(self) -> float:
        """Of the test that the claim does not hold: below .05 where the effect supports it."""
        mean, half, n = self.value.mean, self.value.half_width, self.value.n
        if self.claimed == "equal":  # both ends of the interval lie within the margin
            ends = [Interval(COMPARABLE - mean, half, n), Interval(COMPARABLE + mean, half, n)]
        else:
            more = COMPARABLE if self.claimed == "not less" else 0.0
            ends = [Interval(more + (-mean if self.claimed == "less" else mean), half, n)]
        return max(1.0 if end.mean <= 0 else end.p_value for end in ends)

    def text(self, alone: bool = False) -> str:
        """The effect as a clause: what, how much, how sure, and how it stands to the claim.

        >>> Effect("steps", Interval(-206.004, 217.6, 10), "less").text()
        'steps -206 ± 218 (n = 10): open'
        >>> Effect("a", Interval(-0.00021, 0.00019, 3), "more").text()
        'a -0.0002 ± 0.0002 (n = 3): against'
        """
        mean = abs(self.value.mean)
        if not isfinite(mean):
            return f"{self.label}: no value{f' ({self.at})' if self.at else ''}: open"
        # What says how sure the mean is (of one seed the mean) is not rounded to nothing.
        unsure = self.value.half_width if self.value.n > 1 else mean
        known = unsure if isfinite(unsure) and unsure else 1.0
        digits = max(self.digits, min(5, -floor(log10(known))))
        digits = 0 if mean >= 100 else digits
        size = f"{self.value.mean:+.{digits}f}"
        if self.value.n > 1:
            size += f" ± {self.value.half_width:.{digits}f}"
        about = [f"n = {self.value.n}"] + ([self.at] if self.at else [])
        nulls = dict.fromkeys(f"{null:.{self.digits}f}" for null in self.nulls)
        about += (
            [f"null{'s' if len(nulls) > 1 else ''} {' and '.join(nulls)}{self.nulls_at}"] if nulls else []
        )
        return f"{self.label} {size} ({', '.join(about)}): {self.standing}{' alone' if alone else ''}"


def stands_alone(effects: Sequence[Effect]) -> list[bool]:
    """Of each effect, whether it supports its claim, or is against it, only uncorrected for their number.

    What is against a claim of equality is against it by a margin, which is not corrected.
    """
    for_it = holm({place: effect.p_value for place, effect in enumerate(effects)})
    against = holm({place: effect.value for place, effect in enumerate(effects)})
    return [
        (effect.standing == "supports" and not for_it[place] < 0.05)
        or (effect.standing == "against" and effect.claimed in ("more", "less") and not against[place] < 0.05)
        for place, effect in enumerate(effects)
    ]


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
    corrected = [s for s, alone in zip(found, stands_alone(effects), strict=True) if not alone]
    if "supports" in corrected or ("points" in found and "against" not in found):
        return "holds in part"
    return "does not hold"


# --- Claims ---

READ = "†"  # marks verdicts that are not computed


def measured(
    claim: str, where: str, effects: Sequence[Effect], experiment: str, link: str, note: str = ""
) -> Claim:
    """A claim decided by effects; the first one stands for it in the table."""
    every = all(effect.standing == "supports" for effect in effects)
    alone = [False] * len(effects) if every else stands_alone(effects)
    texts = [effect.text(mark) for effect, mark in zip(effects, alone, strict=True)]
    evidence = "; ".join(texts) + (f". {note}" if note else ".")
    first = effects[0]
    return Claim(
        claim,
        where,
        verdict(effects),
        evidence,
        effect=first.value if first.value.n > 1 else first.value.mean,
        null=first.nulls[0] if first.nulls and not first.nulls_at else None,
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


def results_folder(given: str | None = None) -> Path | None:
    """The folder of published results: the given one, or `docs/results` of the checkout, if this is one."""
    if given is not None:
        if not Path(given).is_dir():
            raise InputError(f"--results {given!r} is no folder; name docs/results of a checkout")
        return Path(given)
    folder = Path(__file__).parents[3] / "docs" / "results"
    return folder if folder.is_dir() else None


# How many seeds were planned, of tables to which more were added after looking. The first of them decide.
PLANNED = {"tuned-squad-paper": 2, "future-work-hatexplain-sgd-paper": 3}
# Values of single seeds: by moment and score, then arm, then seed.
PerSeed = dict[tuple[str, str], dict[str, dict[str, float]]]


class Results:
    """The tables of a folder such as `docs/results`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, name: str) -> list[dict[str, str]]:
        """The rows of ``NAME.csv``."""
        return _rows(self.folder / f"{name}.csv")

    def per_seed(self, name: str) -> PerSeed:
        """The values of single seeds in ``NAME-per-seed.csv``: by moment and score, then arm, then seed."""
        return _per_seed(self.folder / f"{name}-per-seed.csv")

    def has(self, name: str) -> bool:
        """Whether the values of single seeds of the table ``NAME`` are published."""
        return (self.folder / f"{name}-per-seed.csv").is_file()

    def paired(
        self,
        label: str,
        name: str,
        arms: tuple[str, str] | str,
        claimed: Claimed,
        *,
        score: str = "mrta",
        at: str = "training loss",
        level: int = 0,
        every_seed: bool = False,
        digits: int = 3,
    ) -> Effect:
        """The difference of two arms (first minus second), or the value of one, from ``NAME-per-seed.csv``.

        ``at`` is the moment; ``training loss`` is one of those at which the cells are compared, the lowest
        unless ``level`` says how many to skip. Where seeds were added after looking, those that were planned
        count, unless ``every_seed``.
        """
        seeds = None if every_seed else PLANNED.get(name)
        values = self.per_seed(name)
        moment = _level(values, score, level) if at == "training loss" else at
        of_arm = values[moment, score]
        if isinstance(arms, str):
            found = interval(list(of_arm[arms].values())[:seeds])
        else:
            one, other = (of_arm[arm] for arm in arms)
            both = [seed for seed in one if seed in other][:seeds]
            found = paired_difference([one[seed] for seed in both], [other[seed] for seed in both])
        where = moment if (moment, null_name(score)) in values else END
        nulls = _nulls(values.get((where, null_name(score)), {}), [arms] if isinstance(arms, str) else arms)
        elsewhere = "" if where == moment else " at the end"  # where rankings at random are scored
        return Effect(label, found, claimed, f"at {_short(moment)}", nulls, digits, elsewhere)

    def above_null(
        self, label: str, name: str, arm: str, score: str, null: str, claimed: Claimed, *, digits: int = 3
    ) -> Effect:
        """What ``arm`` scores above a null of the same cells (``sharp``, say), from ``NAME-per-seed.csv``."""
        values = self.per_seed(name)
        moment = _level(values, score)
        own, chance = (values[moment, each][arm] for each in (score, f"{null}_{score}"))
        both = [seed for seed in own if seed in chance][: PLANNED.get(name)]
        found = paired_difference([own[seed] for seed in both], [chance[seed] for seed in both])
        return Effect(label, found, claimed, f"at {_short(moment)}", digits=digits)

    def compared(
        self,
        label: str,
        name: str,
        score: str,
        claimed: Claimed,
        *,
        at_end: bool = False,
        **options: Any,
    ) -> Effect:
        """The faster arm minus the baseline, the two arms of a table of the paper; see :meth:`paired`."""
        at = END if at_end else "training loss"
        return self.paired(label, name, (FASTER, BASELINE), claimed, score=score, at=at, **options)

    def panel(self, protocol: str, name: str) -> tuple[Interval, dict[str, str]]:
        """MRTA of a panel of figure 2 at the end, over seeds, and its row."""
        row = next(row for row in self.rows(f"fig2-{protocol}-panels") if row["panel"] == name)
        return read_interval(row, "mrta"), row

    def panels(self, label: str, protocol: str, name: str, other: str, claimed: Claimed) -> Effect:
        """The difference in MRTA of two panels of figure 2 at the end of training."""
        return self.paired(label, f"fig2-{protocol}", (name, other), claimed, at=END)


def above(value: Interval, level: float) -> Interval:
    """``value`` minus a fixed number."""
    return Interval(value.mean - level, value.half_width, value.n)


def read_interval(row: dict[str, str], name: str) -> Interval:
    """The interval ``NAME, NAME_half_width, NAME_n`` of a row of a table."""
    half, n = row.get(f"{name}_half_width"), row.get(f"{name}_n")
    return Interval(float(row[name]), float(half) if half else nan, int(float(n)) if n else 1)


def _level(values: Iterable[tuple[str, str]], score: str, level: int = 0) -> str:
    """A training loss among the moments of the per-seed values, counted from the lowest."""
    moments = [at for at, each in values if each == score and at.startswith("training loss")]
    return sorted(moments, key=lambda at: float(at.rpartition(" ")[2]))[level]


def _nulls(values: dict[str, dict[str, float]], arms: Iterable[str]) -> tuple[float, ...]:
    """The null of each arm, its mean over seeds; that of another arm if none of these has one."""
    found = [values[arm] for arm in arms if arm in values] or list(values.values())[:1]
    return tuple(fmean(seeds.values()) for seeds in found)


def _short(moment: str) -> str:
    """A moment of the per-seed values in words, its loss with three digits."""
    if moment == END:
        return "the end"
    words = moment.split()
    return (
        " ".join([*words[:-1], f"{float(words[-1]):.3g}"]) if moment.startswith("training loss") else moment
    )


@cache
def _per_seed(path: Path) -> PerSeed:
    values: PerSeed = {}
    for row in _rows(path):
        place = values.setdefault((row["at"], row["score"]), {})
        place.setdefault(row["arm"], {})[row["seed"]] = float(row["value"])
    return values


@cache
def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise InputError(f"{str(path)!r} is missing; name the folder docs/results of a checkout")
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))
