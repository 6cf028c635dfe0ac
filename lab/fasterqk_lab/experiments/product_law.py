"""The product law: do the rates of W_Q, W_K, W_V and W_O count only as R = r_Q r_K / (r_V r_O)?

The same R is made in six ways (`SPLITS`), and attention is read at equal loss. Parts:

- ``population``: sign descent and full-batch Adam of the full matrices on an enumerated population, over
  seeds, widths of the factors, scales of the start, and with a background that starts at zero or not;
- ``toy``: the toy language (protocol `four-tokens`), FAFO, Adam;
- ``hatexplain``: one-layer HateXplain with AdamW; arms that slow V and O, and everything that is not QK.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fasterqk.console import Progress
from fasterqk.theory import Setting, product_law, solve
from fasterqk_lab.compare import LOSS, Effect, Value, compare, correct, crossings, value_at
from fasterqk_lab.experiments._comparison import EQUAL, Comparison, Outcome, run_comparison, seeds_from
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option
from fasterqk_lab.experiments._synthetic import Arm, panels, run_grid, theory_setting
from fasterqk_lab.experiments.ablation_hatexplain import EPOCHS, constant_rate
from fasterqk_lab.figures import Line, Panel, effect_record, effect_table, lines_of, save_forest, save_panels
from fasterqk_lab.theory import Population, descend, small_start

PARTS = ("population", "toy", "hatexplain")
# Six ways to make R: the rates of q, k, v and o as powers of R.
SPLITS: dict[str, tuple[float, float, float, float]] = {
    "Q and K": (0.5, 0.5, 0, 0),
    "Q": (1, 0, 0, 0),
    "K": (0, 1, 0, 0),
    "1/V": (0, 0, -1, 0),
    "1/O": (0, 0, 0, -1),
    "1/V and 1/O": (0, 0, -0.5, -0.5),
}
POPULATION_RS = (1 / 9, 1 / 3, 1.0, 3.0)
POPULATION_LEVELS = (0.5, 0.1, 0.01, 0.001)
TOY_RS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
TOY_LEVEL = 0.01
SHOWN = 0.01


class Reading(NamedTuple):
    """Attention of one seed, R and way to make it, at one loss, beside the derived law."""

    part: str
    condition: str
    seed: int
    split: str
    R: float
    loss: float
    attention: float | None
    law: float

    def values(self) -> list[Value]:
        """Its rows of the table of results; none where the loss was not reached."""
        arm = f"{self.condition}, R = {self.R:.3g} by {self.split}"
        place = f"product-law-{self.part}", arm, self.seed, LOSS, self.loss
        reached = self.attention is not None
        return [Value(*place, name, float(getattr(self, name))) for name in ("attention", "law") if reached]


def role_ratios(split: str, R: float) -> tuple[float, float, float, float]:
    """The rates of q, k, v and o that make ``R`` in the way ``split``.

    >>> role_ratios("1/V and 1/O", 9.0)
    (1.0, 1.0, 0.3333333333333333, 0.3333333333333333)
    """
    q, k, v, o = (float(R**power) for power in SPLITS[split])
    return q, k, v, o


# --- An enumerated population ---


@dataclass(frozen=True)
class PopulationCell:
    """All splits and all R from one random start; the step is that of a matrix with rate one."""

    seed: int = 0
    optimizer: str = "sign"
    qk_width: int = 16
    ov_width: int = 16
    scale: float = 5e-3
    background: bool = False
    step: float = 5e-4
    steps: int = 12_000
    products: tuple[float, ...] = POPULATION_RS

    @property
    def setting(self) -> Setting:
        return Setting(M=3, b=2, m=1, n=2, query="fixed")

    @property
    def condition(self) -> str:
        """The settings of the cell, in words."""
        background = "background starts as the rest" if self.background else "background starts at zero"
        widths = f"widths {self.qk_width} and {self.ov_width}"
        return f"{self.optimizer}, {widths}, start {self.scale:g}, {background}"


CONDITIONS = (
    PopulationCell(),
    PopulationCell(qk_width=32, ov_width=8),
    PopulationCell(qk_width=8, ov_width=32),
    PopulationCell(scale=5e-4),
    PopulationCell(scale=5e-2),
    PopulationCell(background=True),
    PopulationCell(optimizer="adam"),
    PopulationCell(optimizer="adam", background=True),
)


def descend_population(
    cell: PopulationCell, *, folder: Path | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Attention at every level, one entry per split and R. Made to be called by a sweep."""
    population = Population.of(cell.setting)
    generator = np.random.default_rng(cell.seed)
    start = small_start(
        population, cell.qk_width, cell.ov_width, cell.scale, generator, background=cell.background
    )
    arms = [(split, R) for R in cell.products for split in SPLITS]
    rates = cell.step * np.array([role_ratios(*arm) for arm in arms])
    histories: list[list[dict[str, float]]] = [[] for _ in arms]
    for record in descend(
        population,
        {name: np.repeat(matrix[None], len(arms), axis=0) for name, matrix in start.items()},
        {name: rates[:, place] for place, name in enumerate("qkvo")},
        optimizer=cell.optimizer,
        until=0.9 * POPULATION_LEVELS[-1],
        steps=cell.steps,
    ):
        for history, loss, alpha in zip(histories, record.loss, record.alpha, strict=True):
            history.append({"loss": loss, "attention": alpha})
        if progress is not None and record.step % 500 == 0:
            progress(record.step, cell.steps)
    levels = np.array(POPULATION_LEVELS)
    return {
        "steps": record.step,
        "arms": [
            {"split": split, "product": R, "attention": crossings(history, "attention", levels).tolist()}
            for (split, R), history in zip(arms, histories, strict=True)
        ],
    }


def read_population(runner: CellRunner, seeds: int) -> list[Reading]:
    """One reading per condition, seed, R, split and loss."""
    cells = {(cell.condition, seed): replace(cell, seed=seed) for seed in range(seeds) for cell in CONDITIONS}
    function = "fasterqk_lab.experiments.product_law:descend_population"
    results = runner.run(cells, function, title="product-law, population")
    readings = []
    for (condition, seed), cell in cells.items():
        widths = {"qk_width": cell.qk_width, "ov_width": cell.ov_width}
        for arm in results[condition, seed]["arms"]:
            split, R = arm["split"], arm["product"]
            ratio = product_law(R, 1, optimizer="sign", classes=cell.setting.M, **widths)
            law = solve(cell.setting, ratio, loss=POPULATION_LEVELS, optimizer="sign").alpha
            about = "population", condition, seed, split, R
            points = zip(POPULATION_LEVELS, arm["attention"], law, strict=True)
            readings += [
                Reading(*about, level, attention, float(alpha)) for level, attention, alpha in points
            ]
    return readings


# --- The toy language ---


def read_toy(runner: CellRunner, seeds: int) -> list[Reading]:
    """One reading per seed, R and split: FAFO with Adam."""
    base = panels("four-tokens", ["a"])[0].cell
    base = replace(base, optimizer="adam", lr=1e-3, target_loss=0.8 * TOY_LEVEL)
    arms = [
        Arm(
            f"R = {R:g} by {split}",
            replace(base, role_ratios=role_ratios(split, R)),
            {"split": split, "R": R},
        )
        for R in TOY_RS
        for split in SPLITS
    ]
    results = run_grid(arms, runner, seeds=seeds, title="product-law, toy")
    setting = theory_setting(base.language)
    readings = []
    for seed, arm in product(range(seeds), arms):
        split, R = arm.about["split"], arm.about["R"]
        ratio = product_law(R, 1, optimizer="sign", classes=setting.M)
        law = float(solve(setting, ratio, loss=TOY_LEVEL, optimizer="sign").alpha)
        attention = value_at(results[arm.name, seed]["history"], TOY_LEVEL, ["mrta"]).get("mrta")
        readings.append(Reading("toy", "FAFO, Adam", seed, split, R, TOY_LEVEL, attention, law))
    return readings


# --- HateXplain ---

R_HATEXPLAIN = 30.0
REFERENCE = "Q and K"  # the arm to which the others are compared
# Everything except the query-key circuit: shell-style patterns of parameter names.
NOT_QUERY_KEY = ("*.W_V", "*.b_V", "*.W_O", "*.b_O", "embedding.*", "positions", "*.mlp.*", "W_U", "b_U")


def hatexplain_arms(seeds: int = 3) -> Comparison:
    """Arms with one R, made by Q, K, V and O; the last with the rest of the model slowed as well.

    Arms that slow the output-value circuit train longer. The last arm has the rates of "Q and K", all of
    them divided by √R: the same ratio on a slower clock.

    >>> list(hatexplain_arms().arms)[:5]
    ['equal rates', 'Q', 'K', 'Q and K', 'Q 10, K 3']
    """
    base = constant_rate()
    whole, root = R_HATEXPLAIN, R_HATEXPLAIN**0.5
    slower, longer = base.replace(epochs=2 * EPOCHS), base.replace(epochs=5 * EPOCHS)
    arms = {
        EQUAL: base,
        "Q": base.replace(ratios=f"q={whole}"),
        "K": base.replace(ratios=f"k={whole}"),
        "Q and K": base.replace(ratios=f"q={root},k={root}"),
        "Q 10, K 3": base.replace(ratios="q=10,k=3"),
        "1/V": slower.replace(ratios=f"v={1 / whole}"),
        "1/O": slower.replace(ratios=f"o={1 / whole}"),
        "1/V and 1/O": slower.replace(ratios=f"v={1 / root},o={1 / root}"),
        "1/V and 1/O, rest slowed": longer.replace(faster=NOT_QUERY_KEY, qk_ratio=1 / root),
    }
    title = f"HateXplain, one layer: R = {R_HATEXPLAIN:g} made in several ways"
    options: dict[str, Any] = {"answers": answers, "figure": save_reference}
    return Comparison("product-law-hatexplain", title, "paper", arms, seeds_from(seeds), **options)


def reference_effects(outcome: Outcome) -> list[Effect]:
    """All arms minus `REFERENCE`; if the law holds, those with the same R do not differ from it."""
    others = [arm for arm in outcome.comparison.arms if arm != REFERENCE]
    return correct([compare(outcome.measured, (arm, REFERENCE), "mrta", label=arm) for arm in others])


def answers(outcome: Outcome) -> dict[str, Any]:
    return {"minus_reference": list(map(effect_record, reference_effects(outcome)))}


def save_reference(outcome: Outcome, out: Path) -> dict[str, Any]:
    """Draw the differences to `REFERENCE`, and write their table."""
    effects, name = reference_effects(outcome), outcome.comparison.name
    caption = f"Attention on relevant tokens minus that of {REFERENCE} at equal loss, paired by seed."
    about: dict[str, Any] = {"title": outcome.comparison.title, "caption": f"{caption} {outcome.setting()}."}
    figure = save_forest(effects, {"mrta": outcome.scores["mrta"]}, out, name, **about)
    return figure | {"table": effect_table(effects, out, name, **about)}


# --- Summary and figure ---


def summarize(readings: Sequence[Reading]) -> list[dict[str, Any]]:
    """One entry per part, condition and loss: how far apart the splits of one R are, and the values of R.

    ``spread`` is the standard deviation over splits within one seed and R, averaged (root mean square);
    ``seed_spread`` that over seeds within one split and R; ``reach`` the same over the means of the values of
    R. ``explained`` is the share of the variance of attention that R alone explains; ``law`` the mean
    distance from the derived law.
    """
    groups: dict[tuple[str, str, float], list[Reading]] = {}
    for reading in readings:
        if reading.attention is not None:
            groups.setdefault((reading.part, reading.condition, reading.loss), []).append(reading)
    rows = []
    for (part, condition, loss), group in groups.items():
        values = np.array([reading.attention for reading in group])
        products = np.array([reading.R for reading in group])
        means = {R: float(values[products == R].mean()) for R in np.unique(products)}
        rest = values - np.array([means[R] for R in products])
        seeds, splits = ([getattr(reading, key) for reading in group] for key in ("seed", "split"))
        rows.append(
            {"part": part, "condition": condition, "loss": loss, "values": len(group)}
            | {"spread": _spread(values, zip(products, seeds, strict=True), ddof=0)}
            | {"reach": float(np.std(list(means.values())))}
            | {"explained": float(1 - np.mean(rest**2) / np.var(values)) if np.var(values) else None}
            | {"law": float(np.mean(np.abs(values - [reading.law for reading in group])))}
            | {"seed_spread": _spread(values, zip(products, splits, strict=True), ddof=1)}
        )
    return rows


def _spread(values: np.ndarray, keys: Iterable[Any], *, ddof: int) -> float | None:
    """The standard deviation of values with the same key, averaged (root mean square)."""
    groups: dict[Any, list[float]] = {}
    for key, value in zip(keys, values, strict=True):
        groups.setdefault(key, []).append(value)
    variances = [np.var(group, ddof=ddof) for group in groups.values() if len(group) > ddof]
    return float(np.sqrt(np.mean(variances))) if variances else None


def save(readings: Sequence[Reading], out: Path) -> dict[str, str]:
    """Draw one panel per condition of the population and one for the toy language; returns the paths."""

    def by_split(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        return row["split"], {"marker": "o", "markersize": 3, "linestyle": "none", "alpha": 0.7}

    panels: list[Panel] = []
    for part, condition in dict.fromkeys((reading.part, reading.condition) for reading in readings):
        shown = [r._asdict() for r in readings if (r.part, r.condition, r.loss) == (part, condition, SHOWN)]
        for row in shown:  # beside each other
            row["shifted"] = row["R"] * (1 + 0.04 * (list(SPLITS).index(row["split"]) - 2.5))
        lines = lines_of(shown, "shifted", "attention", by_split)
        law = sorted({(row["R"], row["law"]) for row in shown})
        lines.append(Line("derived", [R for R, _ in law], [alpha for _, alpha in law], {"color": "k"}))
        title = (condition if part == "population" else f"{part}: {condition}").replace(", start", "\nstart")
        legend = None if panels else {"fontsize": 6}
        panels.append(Panel(title, ("$R$", r"attention $\alpha$"), lines, legend=legend))
    return save_panels(
        panels,
        out,
        "product-law",
        title="The product law: one R made in several ways",
        caption="Attention at a loss of 0.01 against R = r_Q r_K / (r_V r_O), one point per seed and way"
        " to make R, slightly shifted; where the law holds the points of one R lie on each other. The"
        " line is what is derived for sign descent from small starts.",
        size=(4.0, 3.3),
        rows=[reading._asdict() for reading in readings],
    )


def run(runner: CellRunner, seeds: int = 3, parts: Sequence[str] = PARTS[:2]) -> dict[str, Any]:
    readers = {"population": read_population, "toy": read_toy}
    readings = [reading for part in parts if part in readers for reading in readers[part](runner, seeds)]
    runner.add(value for reading in readings for value in reading.values())
    summary: dict[str, Any] = {}
    if readings:
        summary = {"splits_of_one_R": summarize(readings), "files": save(readings, runner.out)}
    if "hatexplain" in parts:
        summary["hatexplain"] = run_comparison(hatexplain_arms(seeds), runner)
    return summary


EXPERIMENT = Experiment(
    "product-law",
    run,
    (Option("parts", str, "which (default: the first two)", choices=PARTS, many=True),),
    examples=("--parts population --seeds 1 --json", "--parts hatexplain --seeds 3"),
    needs_data=True,
)
