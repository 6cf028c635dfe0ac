"""What figure 2 depends on: attention with equal rates and with a faster QK circuit, one setting per row.

The figure stands beside the published panels. Its cells are those of the protocol ``literal`` with up to
three things changed: scores divided by the square root of the width, the query token attended, the softmax
over the four next tokens only, another size of the start. Both cells of a pair are read at the lowest
training loss that both reach.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from fasterqk_lab.compare import END, LOSS, Effect, compare, measured
from fasterqk_lab.experiments._registry import CellRunner
from fasterqk_lab.experiments._synthetic import group_values, panels, run_cells, with_scale
from fasterqk_lab.figures import COLORS, INK, plotting, save_figure, save_table
from fasterqk_lab.synthetic import PARAMETERIZATIONS, SyntheticCell

EQUAL, FASTER = "equal rates", "QK 10x"
RATIOS = {EQUAL: 1.0, FASTER: 10.0}
# Enough for most pairs to reach a loss near .001; the others are read at the loss that they reach.
MAX_STEPS = 60_000


@dataclass(frozen=True)
class Reading:
    """One setting: a row of the figure."""

    scaled: bool = False
    query_attended: bool = False
    four_tokens: bool = False
    start: float = 1e-3

    def cell(self, parameterization: str, qk_ratio: float) -> SyntheticCell:
        """The cell of this setting (of seed 0)."""
        base = panels("literal", ["a"])[0].cell
        cell = replace(
            base,
            parameterization=parameterization,
            qk_ratio=qk_ratio,
            scaled_scores=self.scaled,
            closed=self.four_tokens,
            language=replace(base.language, attend_query=self.query_attended),
            max_steps=MAX_STEPS,
        )
        return with_scale(cell, self.start)

    @property
    def columns(self) -> dict[str, str]:
        """The setting in words."""
        return {
            "scores": "÷ √d" if self.scaled else "as they are",
            "query": "attended" if self.query_attended else "not",
            "softmax": "4 tokens" if self.four_tokens else "50 tokens",
            "start": f"{self.start:g}",
        }


READINGS = tuple(
    Reading(scaled, query, four, start)
    for scaled in (False, True)
    for query, four, start in (
        (False, False, 1e-3),
        (False, True, 1e-3),
        (True, False, 1e-3),
        (True, True, 1e-3),
        (False, False, 1e-6),
        (False, False, 0.1),
    )
)


@dataclass(frozen=True)
class Pair:
    """Attention on class tokens of one setting and parameterization, at one loss."""

    reading: Reading
    parameterization: str
    effect: Effect
    query_mass: Mapping[str, float]  # at the end, by EQUAL and FASTER

    def record(self) -> dict[str, Any]:
        """The pair as a row of a table."""
        effect = self.effect
        return {
            **self.reading.columns,
            "parameterization": self.parameterization,
            "loss": effect.loss,
            EQUAL: effect.second,
            FASTER: effect.first,
            "difference": effect.value,
            **{f"on the query token, {name}": mass for name, mass in self.query_mass.items()},
        }


def compute_dependence(runner: CellRunner, seeds: int = 1) -> list[Pair]:
    """Train what is not stored yet; one pair per setting and parameterization."""
    name, settings = "fig2-dependence", list(product(READINGS, PARAMETERIZATIONS))
    cells = {
        (_arm_name(reading, parameterization, speed), seed): replace(
            reading.cell(parameterization, ratio), seed=seed
        )
        for seed in range(seeds)
        for reading, parameterization in settings
        for speed, ratio in RATIOS.items()
    }
    results = run_cells(cells, runner, title="fig2, what it depends on", protocol="dependence")
    equal_of = {
        _arm_name(*setting, speed): _arm_name(*setting, EQUAL) for setting in settings for speed in RATIOS
    }
    _, values = group_values(name, results, equal_of, stopped=False)
    table = measured(name, results, baselines=equal_of, more=values)
    runner.add(table.values)
    pairs = []
    for reading, parameterization in settings:
        arms = {speed: _arm_name(reading, parameterization, speed) for speed in RATIOS}
        effect = compare(table, (arms[FASTER], arms[EQUAL]), "mrta", at=LOSS)
        masses = {speed: fmean(table.of(arm, "query_mass", END).values()) for speed, arm in arms.items()}
        attended = masses if reading.query_attended else dict.fromkeys(RATIOS, 0.0)
        pairs.append(Pair(reading, parameterization, effect, attended))
    return pairs


def _arm_name(reading: Reading, parameterization: str, speed: str) -> str:
    return ", ".join([*reading.columns.values(), parameterization, speed])


def save_dependence(pairs: list[Pair], out: Path) -> dict[str, Any]:
    """Write the figure and its table under ``out``; returns the figure's paths and the table's."""
    seeds = max(pair.effect.value.n for pair in pairs)
    name, title = "fig2-dependence", "Figure 2: what the result depends on"
    caption = (
        "Attention on class tokens, from equal rates (ring) to a query-key circuit that learns ten times"
        " faster (dot), at the lowest training loss that both reach; dotted: uniform attention,"
        f" {seeds} seed{'s' if seeds > 1 else ''}. Where attention falls, the circuit names the class by the"
        " common token or the query that it looks at (docs/covert-channel.md)."
    )
    rows = [pair.record() for pair in pairs]
    with plotting() as plt:
        figure = save_figure(
            draw_dependence(plt, pairs),
            out,
            name,
            title=title,
            caption=caption,
            rows=[row | {key: row[key].mean for key in (*RATIOS, "difference")} for row in rows],
            see="A dot to the right of its ring: faster query-key learning gave more attention at equal loss."
            " To the left: less.",
        )
    columns = [{"key": key, "label": key} for key in rows[0]]
    table = save_table(out, name, title=title, caption=caption, columns=columns, rows=rows)
    return {**figure, "table": table}


def draw_dependence(plt: Any, pairs: list[Pair]) -> Any:
    """A row per setting, a plot per parameterization."""
    widths = [1.75, *[1] * len(PARAMETERIZATIONS)]
    figure, axes = plt.subplots(1, len(widths), figsize=(11.5, 4.2), sharey=True, width_ratios=widths)
    names = list(READINGS[0].columns)
    for place, reading in enumerate(READINGS):
        for column, (name, value) in enumerate(reading.columns.items()):
            color = "0.45" if value == READINGS[0].columns[name] else INK
            axes[0].text(column, place, value, ha="center", va="center", color=color, fontsize=8.5)
    axes[0].set(xlim=(-0.55, len(names) - 0.45), ylim=(len(READINGS) - 0.4, -0.6), yticks=[])
    axes[0].set_xticks(range(len(names)), names)
    axes[0].xaxis.tick_top()
    axes[0].tick_params(length=0)
    axes[0].grid(False)
    for spine in axes[0].spines.values():
        spine.set_visible(False)
    for axis, name in zip(axes[1:], PARAMETERIZATIONS, strict=True):
        language = READINGS[0].cell(name, 1.0).language
        axis.axvline(language.gamma, color="0.5", linewidth=0.9, linestyle=":")
        for place, pair in enumerate(pair for pair in pairs if pair.parameterization == name):
            _draw_pair(axis, place, pair)
        axis.set(title=name, xlim=(-0.04, 1.04), xlabel="attention on class tokens")
        axis.grid(visible=False, axis="y")
        axis.axhline(len(READINGS) / 2 - 0.5, color="0.8", linewidth=0.8)
    for color, label in ((COLORS[0], "more attention with faster QK"), (COLORS[1], "less")):
        axes[1].plot([], [], "o-", color=color, label=label)
    axes[1].plot([], [], "o-", color="0.4", label=f"within {pairs[0].effect.margin:g}")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _draw_pair(axis: Any, place: int, pair: Pair) -> None:
    start, end = pair.effect.second.mean, pair.effect.first.mean
    change = end - start
    color = "0.4" if abs(change) < pair.effect.margin else COLORS[0] if change > 0 else COLORS[1]
    axis.plot([start, end], [place, place], color=color, linewidth=1.6)
    axis.plot(start, place, "o", color=color, markersize=6, markerfacecolor="white")
    axis.plot(end, place, "o", color=color, markersize=5)
