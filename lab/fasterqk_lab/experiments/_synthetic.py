"""Cells of the toy language: the panels of figure 2 under each protocol, and grids of settings.

- ``published``: the settings of the released notebooks, which made the published panels.
- ``literal``: as the paper's text and equation 1 say.
- ``scaled-scores``: ``literal``, with scores divided by the square root of the width, as the notebooks do.
- ``four-tokens``: ``literal``, with the softmax over the four next tokens only: the theory's setting.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any, TypeVar

from fasterqk.attention import Interval, dtap_over_seeds, interval, matched_loss
from fasterqk.errors import InputError
from fasterqk.theory import Setting
from fasterqk_lab.experiments._per_seed import levels_for, rows_at
from fasterqk_lab.experiments._registry import CellRunner, Option
from fasterqk_lab.synthetic import Init, Language, SyntheticCell, factorized_output

PROTOCOLS = ("published", "literal", "scaled-scores", "four-tokens")
# What they were called in version 0.1.
OLD_NAMES = {
    "released": "published",
    "paper": "literal",
    "scaled": "scaled-scores",
    "closed": "four-tokens",
}
PROTOCOL_OPTION = Option(
    "protocol", str, "which settings", default="published", choices=PROTOCOLS, old_names=OLD_NAMES
)
# The released ramp takes 200,000 steps at a base rate of 0.01; ours covers the same training time.
RAMP_STEPS = round(200_000 * 0.01 / SyntheticCell("FAFO").lr)


@dataclass(frozen=True)
class Panel:
    """One heat map: its letter, a title, and the cell of each seed."""

    name: str
    title: str
    cell: SyntheticCell
    torch_seeds: tuple[int, ...] = ()  # where the init is that of a torch seed: for data seed i, the i-th
    least_seeds: int = 1  # a saved heat map that is a mean over starts is compared with a mean over the same

    def for_seed(self, seed: int) -> SyntheticCell:
        """The cell of one seed."""
        if not self.torch_seeds:
            return replace(self.cell, seed=seed)
        return replace(self.cell, seed=seed, init_seed=self.torch_seeds[seed % len(self.torch_seeds)])


def panels(protocol: str, names: list[str] | None = None) -> list[Panel]:
    """The panels of a protocol, or those that are named; a name that it has not is an error."""
    protocol = OLD_NAMES.get(protocol, protocol)
    if protocol not in _PANELS:
        raise InputError(f"unknown protocol {protocol!r}; choose from {', '.join(PROTOCOLS)}")
    found = {panel.name: panel for panel in _PANELS[protocol]()}
    for name in names or []:
        if name not in found:
            raise InputError(f"protocol {protocol!r} has no panel {name!r}; choose from {','.join(found)}")
    return [found[name] for name in dict.fromkeys(names or found)]


def _literal(**changes: object) -> list[Panel]:
    def panel(name: str, title: str, parameterization: str, **settings: object) -> Panel:
        return Panel(name, title, SyntheticCell(parameterization, **(changes | settings)))  # type: ignore[arg-type]

    found = [
        panel("a", "FAFO", "FAFO"),
        panel("b", "FACO", "FACO"),
        panel("c", "CAFO", "CAFO"),
        panel("d", "CACO", "CACO"),
        panel("e", "FAFO, QK 10x", "FAFO", qk_ratio=10.0),
        panel("f", "FAFO, QK 1-20x", "FAFO", qk_ratio=20.0, ramp_steps=RAMP_STEPS),
        panel("g", "CACO, QK 5x", "CACO", qk_ratio=5.0),
        panel("h", "CACO, QK 1-10x", "CACO", qk_ratio=10.0, ramp_steps=RAMP_STEPS),
        # Claimed for all parameterizations, but run by nobody.
        panel("i", "FACO, QK 10x", "FACO", qk_ratio=10.0),
        panel("j", "CAFO, QK 10x", "CAFO", qk_ratio=10.0),
    ]
    if not changes:
        attended = Language(attend_query=True)
        found.append(panel("k", "CACO, query attended", "CACO", language=attended))
    return found


def _published() -> list[Panel]:
    tiny = Init("identity", 1e-6)
    linear = Init("linear")
    base = SyntheticCell(
        "FAFO",
        lr=0.01,
        language=Language(context=62, gamma=5.5 / 15.5, tilted=True, attend_query=True),
        qk_init=tiny,
        ov_init=tiny,
        scaled_scores=True,
        fresh=True,
        batches=250,
        stop="accumulated",
        max_steps=2500 * 250,
        evaluated=6400,
    )
    longer = replace(base.language, context=126)
    ramped = {"ramp_steps": 200_000, "stop": "never", "batches": 100, "max_steps": 2000 * 100}
    caco = replace(base, parameterization="CACO", qk_init=linear, ov_init=linear)
    faster_caco = replace(caco, language=longer, stop="never", batches=100, max_steps=2000 * 100)
    one, several = (1234,), (1234, 1235, 1236, 1237, 1238)
    return [
        Panel("a", "FAFO", replace(base, qk_init=linear), one),
        Panel("b", "FACO", replace(base, parameterization="FACO"), one),
        Panel("c", "CAFO", replace(base, parameterization="CAFO", batches=200, max_steps=5000 * 200)),
        Panel("d", "CACO", replace(caco, batches=200, max_steps=2500 * 200), several),
        Panel("e", "FAFO, QK 20x", replace(base, qk_ratio=20.0, batches=100, max_steps=1000 * 100)),
        Panel("f", "FAFO, QK 1-40x", replace(base, qk_ratio=40.0, **ramped)),  # type: ignore[arg-type]
        Panel("g", "CACO, QK 5x", replace(faster_caco, qk_ratio=5.0), several, 5),
        Panel(
            "h",
            "CACO, QK 1-10x",
            replace(faster_caco, qk_ratio=10.0, ramp_steps=200_000),
            several,
            len(several),
        ),
    ]


_PANELS: dict[str, Callable[[], list[Panel]]] = {
    "published": _published,
    "literal": _literal,
    "scaled-scores": lambda: _literal(scaled_scores=True),
    "four-tokens": lambda: _literal(closed=True),
}


Key = TypeVar("Key", bound=Hashable)
Result = Mapping[str, Any]
NUMBERS = ("loss", "accuracy", "steps", "mrta", "ac", "acmc", "query_mass", "train_loss")


def run_cells(
    cells: Mapping[Key, SyntheticCell], runner: CellRunner, **options: Any
) -> dict[Key, dict[str, Any]]:
    """The result of every cell; ``options`` are those of :meth:`CellRunner.run`."""
    # A collapsed OV circuit takes ten times as many steps: long cells first, so that none comes last.
    order = sorted(cells, key=lambda key: factorized_output(cells[key].parameterization))
    long_first = {key: cells[key] for key in order}
    found = runner.run(long_first, "fasterqk_lab.synthetic._train:train", **options)
    return {key: found[key] for key in cells}


def summarize_seeds(results: Mapping[int, Result], stop: str = "epoch") -> dict[str, Any]:
    """Means over the seeds that did not diverge, with 95% t-intervals under ``intervals``.

    ``capped`` lists the seeds that hit the cap of steps before the stop rule was met, ``diverged_seeds``
    those without numbers. The standard deviation of a DTAP cell is over seeds (n - 1).
    """
    diverged = [seed for seed, result in results.items() if result["diverged"]]
    finished = [result for result in results.values() if not result["diverged"]]
    summary: dict[str, Any] = dict.fromkeys((*NUMBERS, "dtap", "dtap_deviation", "dtap_edges"))
    summary["null"] = dict.fromkeys(("mrta", "ac", "acmc"))
    if finished:
        intervals = {name: interval(result[name] for result in finished) for name in NUMBERS}
        mean, deviation = dtap_over_seeds([result["dtap"] for result in finished])
        summary |= {name: value.mean for name, value in intervals.items()}
        summary |= {"dtap": mean, "dtap_deviation": deviation, "dtap_edges": finished[0]["dtap_edges"]}
        summary["null"] = {
            name: interval(result["null"][name] for result in finished).mean for name in summary["null"]
        }
        summary["intervals"] = intervals
    capped = [seed for seed, result in results.items() if not result["reached"] and seed not in diverged]
    return summary | {
        "diverged": bool(diverged),
        "diverged_seeds": diverged,
        "capped": [] if stop == "never" else capped,
        "seeds": list(results),
    }


@dataclass(frozen=True)
class Point:
    """One arm of a grid: its cell (of seed 0), and what its seeds came to."""

    protocol: str
    cell: SyntheticCell
    level: float  # the training loss at which attention is read
    alpha: Interval | None  # None when no seed reached the level
    missing: tuple[int, ...]  # seeds that did not reach it
    diverged: tuple[int, ...]
    steps: float

    def record(self) -> dict[str, Any]:
        """The point as flat, plain data."""
        cell = self.cell
        return {
            "protocol": self.protocol,
            "parameterization": cell.parameterization,
            "qk_ratio": cell.qk_ratio,
            "init": cell.qk_init.kind,
            "init_scale": cell.qk_init.scale,
            "gamma": cell.language.gamma,
            "optimizer": cell.optimizer,
            "loss": self.level,
            "alpha": self.alpha.mean if self.alpha else None,
            "half_width": self.alpha.half_width if self.alpha else None,
            "steps": self.steps,
            "missing": list(self.missing),
            "diverged": bool(self.diverged),
        }


def attention_at(history: Sequence[Mapping[str, Any]], level: float) -> float | None:
    """Attention on distinct tokens where the training loss of a cell first falls to ``level``, if it does."""
    found = matched_loss({("cell", 0): history}, ["mrta"], [level])[0]
    return found["arms"]["cell"]["mrta"].mean if not found["missing"] else None


def theory_setting(language: Language) -> Setting:
    """The theory's setting with the numbers of ``language``: its background is one-hot.

    What the theory leaves out: the number of class tokens varies between sequences, samples are finite, and
    outputs are the classes alone.
    """
    distinct = max(1, round(language.gamma * language.context))
    background = max(1, language.context - distinct)
    return Setting(language.classes, language.distinct, distinct, background, "fixed", language.common)


def with_scale(cell: SyntheticCell, scale: float) -> SyntheticCell:
    """``cell`` with both circuits starting at ``scale``."""
    init = Init(cell.ov_init.kind, scale)
    return replace(cell, qk_init=init, ov_init=init)


def measure(
    arms: Mapping[tuple[str, SyntheticCell], str],
    runner: CellRunner,
    *,
    seeds: int,
    title: str,
    protocol: str = "",
) -> list[Point]:
    """One point per arm ``(protocol, cell)``; arms with the same group name are compared at one loss.

    The level of a group is the lowest loss that all its cells reach which met their stop rule.
    """
    cells = {
        (arm, seed): replace(arm[1], seed=seed)
        for seed in range(seeds)  # seed by seed, so that a run stopped early has a whole grid
        for arm in arms
    }
    results = run_cells(cells, runner, title=title, protocol=protocol, arm=lambda key: _arm_name(*key[0]))
    points: dict[tuple[str, SyntheticCell], Point] = {}
    for group in dict.fromkeys(arms.values()):
        own: dict[Any, Any] = {key: result for key, result in results.items() if arms[key[0]] == group}
        levels = levels_for(own, 1)
        histories = {key: [] if result["diverged"] else result["history"] for key, result in own.items()}
        found = matched_loss(histories, ["mrta"], levels)
        for arm in (arm for arm, name in arms.items() if name == group):
            points[arm] = _point(arm, {s: own[arm, s] for s in range(seeds)}, found)
        for level in levels:
            for (arm, seed), history in histories.items():
                runner.add_per_seed(rows_at(level, _arm_name(*arm), seed, history), protocol=protocol)
    return [points[arm] for arm in arms]


def _arm_name(protocol: str, cell: SyntheticCell) -> str:
    """An arm of a grid in words; what tells the arms of one grid apart is in its settings."""
    return (
        f"{protocol}, {cell.parameterization}, {cell.optimizer}, QK x{cell.qk_ratio:g}, "
        f"init {cell.ov_init.scale:g}, gamma {cell.language.gamma:g}"
    )


def _point(
    arm: tuple[str, SyntheticCell], results: Mapping[int, Mapping[str, Any]], found: list[dict[str, Any]]
) -> Point:
    nothing: dict[str, Any] = {"loss": nan, "arms": {}, "missing": [[arm, seed] for seed in results]}
    level = found[0] if found else nothing
    reached = level["arms"].get(arm)
    return Point(
        protocol=arm[0],
        cell=arm[1],
        level=level["loss"],
        alpha=reached["mrta"] if reached else None,
        missing=tuple(seed for name, seed in level["missing"] if name == arm),
        diverged=tuple(seed for seed, result in results.items() if result["diverged"]),
        steps=sum(result["steps"] for result in results.values()) / len(results),
    )
