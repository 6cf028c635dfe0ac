"""The product law: do the rates of W_Q, W_K, W_V and W_O count only as R = r_Q r_K / (r_V r_O)?

The same R is made in six ways (`SPLITS`), and attention is read at equal loss. Parts:

- ``population``: sign descent and full-batch Adam of the full matrices on an enumerated population, over
  seeds, widths of the factors, scales of the start, and with a background that starts at zero or not;
- ``toy``: the toy language (protocol `four-tokens`), FAFO, Adam;
- ``hatexplain``: one-layer HateXplain with AdamW; arms that slow V and O, and everything that is not QK.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.attention import title_of
from fasterqk.console import Progress, print_table
from fasterqk.errors import InputError
from fasterqk.theory import Population, Setting, descend, product_law, small_start, solve
from fasterqk_lab.compare import compare, correct
from fasterqk_lab.experiments._comparison import Comparison, effect_record, run_arms, show_comparison
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments._synthetic import attention_at, panels, run_cells, theory_setting
from fasterqk_lab.experiments.ablation_hatexplain import EQUAL, SCORES
from fasterqk_lab.experiments.table_hatexplain import FIRST_SEED
from fasterqk_lab.figures import COLORS, plotting, save_figure
from fasterqk_lab.training import TrainConfig

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


def role_ratios(split: str, product: float) -> tuple[float, float, float, float]:
    """The rates of q, k, v and o that make R = ``product`` in the way ``split``.

    >>> role_ratios("1/V and 1/O", 9.0)
    (1.0, 1.0, 0.3333333333333333, 0.3333333333333333)
    """
    q, k, v, o = (float(product**power) for power in SPLITS[split])
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
        """What this cell changes, in words."""
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
    arms = [(split, product) for product in cell.products for split in SPLITS]
    rates = cell.step * np.array([role_ratios(*arm) for arm in arms])
    losses, attention = [], []
    for record in descend(
        population,
        {name: np.repeat(matrix[None], len(arms), axis=0) for name, matrix in start.items()},
        {name: rates[:, place] for place, name in enumerate("qkvo")},
        optimizer=cell.optimizer,
        until=0.9 * POPULATION_LEVELS[-1],
        steps=cell.steps,
    ):
        losses.append(record.loss)
        attention.append(record.alpha)
        if progress is not None and record.step % 500 == 0:
            progress(record.step, cell.steps)
    return {
        "steps": record.step,
        "arms": [
            {"split": split, "product": product}
            | {"attention": _at_levels(np.array(losses)[:, arm], np.array(attention)[:, arm])}
            for arm, (split, product) in enumerate(arms)
        ],
    }


def _at_levels(loss: np.ndarray, attention: np.ndarray) -> list[float | None]:
    """Attention where the loss first falls to each level, in log loss; None where it does not."""
    found: list[float | None] = []
    for level in POPULATION_LEVELS:
        below = np.flatnonzero(loss <= level)
        if not len(below) or below[0] == 0:
            found.append(None)
            continue
        last = below[0]
        share = np.log(loss[last - 1] / level) / np.log(loss[last - 1] / loss[last])
        found.append(float(attention[last - 1] + share * (attention[last] - attention[last - 1])))
    return found


def population_rows(runner: CellRunner, seeds: int) -> list[dict[str, Any]]:
    """One row per condition, seed, R, split and loss, beside the derived law."""
    cells = {(cell, seed): replace(cell, seed=seed) for seed in range(seeds) for cell in CONDITIONS}
    function = "fasterqk_lab.experiments.product_law:descend_population"
    results = runner.run(cells, function, title="product-law, population", arm=lambda key: key[0].condition)
    rows = []
    for (cell, seed), result in results.items():
        for arm in result["arms"]:
            ratio = product_law(
                arm["product"],
                1,
                optimizer="sign",
                classes=cell.setting.M,
                qk_width=cell.qk_width,
                ov_width=cell.ov_width,
            )
            law = solve(cell.setting, ratio, loss=POPULATION_LEVELS, optimizer="sign").alpha
            for place, level in enumerate(POPULATION_LEVELS):
                rows.append(
                    _row("population", cell.condition, seed, arm, level, arm["attention"][place])
                    | {"law": float(law[place])}
                )
    return rows


def _row(
    part: str, condition: str, seed: int, arm: Mapping[str, Any], loss: float, attention: float | None
) -> dict[str, Any]:
    about = {"part": part, "condition": condition, "seed": seed, "split": arm["split"], "R": arm["product"]}
    return about | {"loss": loss, "attention": attention}


# --- The toy language ---


def toy_rows(runner: CellRunner, seeds: int) -> list[dict[str, Any]]:
    """One row per seed, R and split: FAFO with Adam."""
    base = panels("four-tokens", ["a"])[0].cell
    base = replace(base, optimizer="adam", lr=1e-3, target_loss=0.8 * TOY_LEVEL)
    cells = {
        (split, product, seed): replace(base, role_ratios=role_ratios(split, product), seed=seed)
        for seed in range(seeds)
        for product in TOY_RS
        for split in SPLITS
    }
    results = run_cells(
        cells, runner, title="product-law, toy", arm=lambda key: f"R = {key[1]:g} by {key[0]}"
    )
    setting = theory_setting(base.language)
    rows = []
    for (split, product, seed), result in results.items():
        ratio = product_law(product, 1, optimizer="sign", classes=setting.M)
        arm = {"split": split, "product": product}
        attention = attention_at(result["history"], TOY_LEVEL)
        law = float(solve(setting, ratio, loss=TOY_LEVEL, optimizer="sign").alpha)
        rows.append(_row("toy", "FAFO, Adam", seed, arm, TOY_LEVEL, attention) | {"law": law})
    return rows


# --- HateXplain ---

R_HATEXPLAIN = 30.0
REFERENCE = "Q and K"  # the arm beside which the law is asked of the others
# All that is not in the query-key circuit: shell-style patterns of parameter names.
NOT_QUERY_KEY = ("*.W_V", "*.b_V", "*.W_O", "*.b_O", "embedding.*", "positions", "*.mlp.*", "W_U", "b_U")


def hatexplain_arms(seeds: int = 3, epochs: int = 8) -> Comparison:
    """Arms with one R, made by Q, K, V and O; the last with the rest of the model slowed as well.

    Arms that slow the output-value circuit train longer. The last arm has the rates of "Q and K", all of
    them divided by √R: the same ratio on a slower clock.

    >>> list(hatexplain_arms().arms)[:5]
    ['equal rates', 'Q', 'K', 'Q and K', 'Q 10, K 3']
    """
    base = TrainConfig("hatexplain", epochs=epochs, schedule="constant", evaluate_at_fall=0.85)
    root, product = R_HATEXPLAIN**0.5, R_HATEXPLAIN
    slower, longer = base.replace(epochs=2 * epochs), base.replace(epochs=5 * epochs)
    arms = {
        EQUAL: base,
        "Q": base.replace(ratios=f"q={product}"),
        "K": base.replace(ratios=f"k={product}"),
        "Q and K": base.replace(ratios=f"q={root},k={root}"),
        "Q 10, K 3": base.replace(ratios="q=10,k=3"),
        "1/V": slower.replace(ratios=f"v={1 / product}"),
        "1/O": slower.replace(ratios=f"o={1 / product}"),
        "1/V and 1/O": slower.replace(ratios=f"v={1 / root},o={1 / root}"),
        "1/V and 1/O, rest slowed": longer.replace(faster=NOT_QUERY_KEY, qk_ratio=1 / root),
    }
    chosen = tuple(range(FIRST_SEED, FIRST_SEED + seeds))
    title = f"HateXplain, one layer: R = {R_HATEXPLAIN:g} made in several ways"
    return Comparison("product-law-hatexplain", title, "paper", arms, chosen, scores=SCORES)


def run_hatexplain(runner: CellRunner, seeds: int) -> dict[str, Any]:
    """Every arm beside equal rates, and beside `REFERENCE`: where the law holds, these are alike."""
    outcome = run_arms(hatexplain_arms(seeds), runner)
    law = []
    for arm in outcome.comparison.arms:
        if arm not in (EQUAL, REFERENCE):
            with suppress(InputError):  # it diverged
                law.append(compare(outcome.measured, (arm, REFERENCE), "mrta", "equal"))
    files = outcome.save(runner.out)
    return {**outcome.summary(), "law": [effect_record(effect) for effect in correct(law)], "files": files}


# --- What came out ---


def summarize(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per part, condition and loss: how far the splits of one R are apart, and how far R reaches.

    ``spread`` is the standard deviation over splits within one seed and R, averaged (root mean square);
    ``reach`` the same over the means of the values of R. ``explained`` is the share of the variance of
    attention that R alone explains; ``law`` the mean distance from the derived law.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["attention"] is not None:
            groups.setdefault((row["part"], row["condition"], row["loss"]), []).append(row)
    found = []
    for (part, condition, loss), own in groups.items():
        values = np.array([row["attention"] for row in own])
        by_product = np.array([row["R"] for row in own])
        within, between = [], {}
        for product in np.unique(by_product):
            between[product] = float(values[by_product == product].mean())
            for seed in {row["seed"] for row in own}:
                same = [row["attention"] for row in own if (row["R"], row["seed"]) == (product, seed)]
                within.append(np.var(same))
        rest = values - np.array([between[product] for product in by_product])
        apart = [abs(row["attention"] - row["law"]) for row in own if row["law"] is not None]
        found.append(
            {"part": part, "condition": condition, "loss": loss, "values": len(own)}
            | {"spread": float(np.sqrt(np.mean(within))), "reach": float(np.std(list(between.values())))}
            | {"explained": float(1 - np.mean(rest**2) / np.var(values)) if np.var(values) else None}
            | {"law": float(np.mean(apart)) if apart else None}
            | {"seed_spread": _seed_spread(own)}
        )
    return found


def _seed_spread(own: Sequence[Mapping[str, Any]]) -> float | None:
    """Standard deviation over seeds within one split and R (root mean square)."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in own:
        groups.setdefault((row["split"], row["R"]), []).append(row["attention"])
    several = [np.var(values, ddof=1) for values in groups.values() if len(values) > 1]
    return float(np.sqrt(np.mean(several))) if several else None


def draw(plt: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    """One panel per condition of the population, one for the toy language."""
    panels_of = list(dict.fromkeys((row["part"], row["condition"]) for row in rows))
    columns = min(4, len(panels_of))
    lines = -(-len(panels_of) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4 * columns, 3.3 * lines), squeeze=False)
    for axis, (part, condition) in zip(axes.ravel(), panels_of, strict=False):
        own = [row for row in rows if (row["part"], row["condition"]) == (part, condition)]
        level = SHOWN if part == "population" else own[0]["loss"]
        own = [row for row in own if row["loss"] == level]
        for place, split in enumerate(dict.fromkeys(row["split"] for row in own)):
            points = [(row["R"], row["attention"]) for row in own if row["split"] == split]
            shift = 1 + 0.04 * (place - 2.5)
            axis.plot(
                [product * shift for product, value in points if value is not None],
                [value for _, value in points if value is not None],
                "o",
                markersize=3,
                color=COLORS[place % len(COLORS)],
                alpha=0.7,
                label=split,
            )
        law = sorted({(row["R"], row["law"]) for row in own if row["law"] is not None})
        if law:
            axis.plot(*np.transpose(law), "k-", linewidth=0.9, label="derived")
        title = condition if part == "population" else f"{part}: {condition}"
        axis.set(xscale="log", xlabel="$R$", ylabel=r"attention $\alpha$")
        axis.set_title(title.replace(", background", "\nbackground"), fontsize=8)
    axes[0, 0].legend(fontsize=6)
    for axis in axes.ravel()[len(panels_of) :]:
        axis.set_visible(False)
    return figure


def save(rows: Sequence[Mapping[str, Any]], out: Path) -> dict[str, str]:
    """Draw and save the figure under ``out/figures``; returns the paths by suffix."""
    with plotting() as plt:
        return save_figure(
            draw(plt, rows),
            out,
            "product-law",
            title="The product law: one R made in several ways",
            caption="Attention at equal loss (population and toy language 0.01) against R = r_Q r_K / (r_V"
            " r_O), one point per seed and way to make R, slightly shifted. Where the law holds the points of"
            " one R lie on each other. The line is what is derived for sign descent from small starts.",
            rows=rows,
        )


def run(runner: CellRunner, seeds: int, parts: list[str] | None) -> dict[str, Any]:
    chosen = parts or ["population", "toy"]
    for part in chosen:
        if part not in PARTS:
            raise InputError(f"product-law has no part {part!r}; choose from {', '.join(PARTS)}")
    makers = {"population": population_rows, "toy": toy_rows}
    rows = [row for part in chosen if part in makers for row in makers[part](runner, seeds)]
    runner.add_per_seed(
        [
            {"arm": f"{row['condition']}, R = {row['R']:.3g} by {row['split']}", "seed": row["seed"]}
            | {"at": f"loss {row['loss']:.6g}", "score": "attention", "value": row["attention"]}
            for row in rows
            if row["attention"] is not None
        ]
    )
    files = {"product-law": save(rows, runner.out)} if rows else {}
    hatexplain = run_hatexplain(runner, seeds) if "hatexplain" in chosen else None
    return {"summary": summarize(rows), "hatexplain": hatexplain, "cells": rows, "files": files}


def show(summary: dict[str, Any]) -> None:
    if summary["summary"]:
        print_table(summary["summary"], title="how far the splits of one R are apart:")
    if summary["hatexplain"]:
        show_comparison(summary["hatexplain"], [title_of(name) for name in ("mrta", "test_accuracy")])
        keys = ("arm", "difference", "p", "stands")
        law = [{key: effect[key] for key in keys} for effect in summary["hatexplain"]["law"]]
        print_table(law, title="\nHateXplain: ways to make one R beside each other")
    for name, paths in summary["files"].items():
        print(f"{name}: {paths['png']}")


EXPERIMENT = Experiment(
    name="product-law",
    chapter="Product",
    options=(
        seeds_option(3),
        Option("parts", str, "population, toy, hatexplain (default: the first two)", many=True),
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce product-law --out out",
        "fasterqk-lab reproduce product-law --parts population --seeds 1 --json",
        "fasterqk-lab reproduce product-law --parts hatexplain --seeds 3",
    ),
    needs_data=True,
)
