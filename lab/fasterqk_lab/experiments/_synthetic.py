"""Cells of the toy language: the panels of figure 2 under each protocol.

- ``published``: the settings of the released notebooks, which made the published panels.
- ``literal``: as the paper's text and equation 1 say.
- ``scaled-scores``: ``literal``, with scores divided by the square root of the width, as the notebooks do.
- ``four-tokens``: ``literal``, with the softmax over the four next tokens only: the theory's setting.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fasterqk.errors import InputError
from fasterqk.theory import Setting
from fasterqk_lab.compare import LOSS, Value, lowest_levels, values_at
from fasterqk_lab.experiments._registry import CellRunner, Option
from fasterqk_lab.synthetic import Init, Language, SyntheticCell, factorized_output

# The function that computes a cell.
TRAIN_CELL = "fasterqk_lab.synthetic._train:train"
PROTOCOLS = ("published", "literal", "scaled-scores", "four-tokens")
PROTOCOL_OPTION = Option("protocol", str, "which settings", choices=PROTOCOLS)
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
    """The panels of a protocol, or those with these ``names``; an unknown name is an error."""
    if protocol not in _PANELS:
        raise InputError(f"unknown protocol {protocol!r}; choose from {', '.join(PROTOCOLS)}")
    by_name = {panel.name: panel for panel in _PANELS[protocol]()}
    for name in names or []:
        if name not in by_name:
            raise InputError(f"protocol {protocol!r} has no panel {name!r}; choose from {','.join(by_name)}")
    return [by_name[name] for name in dict.fromkeys(names or by_name)]


def _literal(**changes: object) -> list[Panel]:
    def panel(name: str, title: str, parameterization: str, **settings: object) -> Panel:
        return Panel(name, title, SyntheticCell(parameterization, **(changes | settings)))  # type: ignore[arg-type]

    literal = [
        panel("a", "FAFO", "FAFO"),
        panel("b", "FACO", "FACO"),
        panel("c", "CAFO", "CAFO"),
        panel("d", "CACO", "CACO"),
        panel("e", "FAFO, QK 10x", "FAFO", qk_ratio=10.0),
        panel("f", "FAFO, QK 1-20x", "FAFO", qk_ratio=20.0, ramp_steps=RAMP_STEPS),
        panel("g", "CACO, QK 5x", "CACO", qk_ratio=5.0),
        panel("h", "CACO, QK 1-10x", "CACO", qk_ratio=10.0, ramp_steps=RAMP_STEPS),
        # The paper claims these too, and the notebooks do not run them.
        panel("i", "FACO, QK 10x", "FACO", qk_ratio=10.0),
        panel("j", "CAFO, QK 10x", "CAFO", qk_ratio=10.0),
    ]
    if not changes:
        attended = Language(attend_query=True)
        literal.append(panel("k", "CACO, query attended", "CACO", language=attended))
    return literal


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
    first_seed, all_seeds = (1234,), (1234, 1235, 1236, 1237, 1238)
    return [
        Panel("a", "FAFO", replace(base, qk_init=linear), first_seed),
        Panel("b", "FACO", replace(base, parameterization="FACO"), first_seed),
        Panel("c", "CAFO", replace(base, parameterization="CAFO", batches=200, max_steps=5000 * 200)),
        Panel("d", "CACO", replace(caco, batches=200, max_steps=2500 * 200), all_seeds),
        Panel("e", "FAFO, QK 20x", replace(base, qk_ratio=20.0, batches=100, max_steps=1000 * 100)),
        Panel("f", "FAFO, QK 1-40x", replace(base, qk_ratio=40.0, **ramped)),  # type: ignore[arg-type]
        Panel("g", "CACO, QK 5x", replace(faster_caco, qk_ratio=5.0), all_seeds, 5),
        Panel("h", "CACO, QK 1-10x", replace(faster_caco, qk_ratio=10.0, ramp_steps=200_000), all_seeds, 5),
    ]


_PANELS: dict[str, Callable[[], list[Panel]]] = {
    "published": _published,
    "literal": _literal,
    "scaled-scores": lambda: _literal(scaled_scores=True),
    "four-tokens": lambda: _literal(closed=True),
}


Results = Mapping[tuple[str, int], Mapping[str, Any]]


@dataclass(frozen=True)
class Arm:
    """One arm of a grid: its name, its cell (of seed 0), and what the rows of tables say about it."""

    name: str
    cell: SyntheticCell
    about: dict[str, Any] = field(default_factory=dict, hash=False)


def run_grid(
    arms: Sequence[Arm], runner: CellRunner, *, seeds: int, **options: Any
) -> dict[tuple[str, int], dict[str, Any]]:
    """The results of all arms, seed by seed, so that a run that is stopped early has a whole grid."""
    cells = {(arm.name, seed): replace(arm.cell, seed=seed) for seed in range(seeds) for arm in arms}
    return run_cells(cells, runner, **options)


def run_cells(
    cells: Mapping[tuple[str, int], SyntheticCell], runner: CellRunner, **options: Any
) -> dict[tuple[str, int], dict[str, Any]]:
    """The result of every cell; ``options`` are those of :meth:`CellRunner.run`."""
    # A collapsed OV circuit takes ten times as many steps: long cells first, so that none comes last.
    order = sorted(cells, key=lambda key: factorized_output(cells[key].parameterization))
    results = runner.run({key: cells[key] for key in order}, TRAIN_CELL, **options)
    return {key: results[key] for key in cells}


def theory_setting(language: Language) -> Setting:
    """The theory's setting with the numbers of ``language``: its background is one-hot.

    The theory has a fixed number of class tokens, an infinite sample, and outputs for the classes alone.
    """
    distinct = max(1, round(language.gamma * language.context))
    background = max(1, language.context - distinct)
    return Setting(language.classes, language.distinct, distinct, background, "fixed", language.common)


def with_scale(cell: SyntheticCell, scale: float) -> SyntheticCell:
    """``cell`` with both circuits starting at ``scale``."""
    init = Init(cell.ov_init.kind, scale)
    return replace(cell, qk_init=init, ov_init=init)


# --- Arms that are compared within groups, each group at a loss of its own ---


def group_values(
    name: str, results: Results, groups: Mapping[str, str], *, stopped: bool = True
) -> tuple[dict[str, float], list[Value]]:
    """The loss of every group, and the values of its cells there.

    ``groups`` maps an arm to its group. The loss is the lowest that all cells of the group reach; with
    ``stopped`` only those decide that met their stop rule, if any did. A cell that diverged has no value.
    """
    levels: dict[str, float] = {}
    values: list[Value] = []
    for group in dict.fromkeys(groups.values()):
        cells = {cell: result for cell, result in results.items() if groups[cell[0]] == group}
        histories = {cell: result["history"] for cell, result in cells.items() if not result["diverged"]}
        deciding = {cell: history for cell, history in histories.items() if cells[cell]["reached"]}
        for level in lowest_levels((deciding if stopped else {}) or histories, 1):
            levels[group] = level
            values += values_at(name, histories, LOSS, level)
    return levels, values
