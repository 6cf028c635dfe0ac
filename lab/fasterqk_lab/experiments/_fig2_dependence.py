"""What figure 2 depends on: attention with equal rates and with a faster QK circuit, one setting per row.

The figure stands beside the published panels. Its cells are those of the protocol ``literal`` with up to
three things changed: scores divided by the square root of the width, the query token attended, the softmax
over the four next tokens only, another size of the start. Both cells of a pair are read at the lowest
training loss that both reach.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fasterqk.attention import Interval, common_levels, matched_loss
from fasterqk_lab.experiments._per_seed import rows_at
from fasterqk_lab.experiments._registry import CellRunner
from fasterqk_lab.experiments._synthetic import panels, run_cells, with_scale
from fasterqk_lab.figures import COLORS, INK, plotting, save_figure, save_table
from fasterqk_lab.synthetic import PARAMETERIZATIONS, SyntheticCell

EQUAL, FASTER = "equal rates", "QK 10x"
RATIOS = {EQUAL: 1.0, FASTER: 10.0}
# Enough for most pairs to reach a loss near .001; the others are read at the loss that they reach.
MAX_STEPS = 60_000
# Differences smaller than this are drawn as neither.
NOTICEABLE = 0.02
TEXT = (
    "What holds: with the softmax over the four next tokens and a query that is not attended, a faster "
    "query-key circuit attends more to the class tokens in all four parameterizations, or attends to "
    "nothing else already. With scores divided by √d, as in the notebooks, it does so for both factorized"
    " output-value circuits (FAFO, CAFO) in every row. Where it turns around: without that division and "
    "with all 50 tokens in the softmax, attention on class tokens falls to zero, or is there already; "
    "with it, an attended query takes the attention of FACO and CACO, a large start (0.1) costs both "
    "theirs, and CACO falls a little even without these (at the paper's five times it rises). Why: the "
    "query names the class. A query-key circuit that is fast enough can state the class by which common "
    "token it looks at, or by looking at the query itself, and the output-value circuit reads it off "
    "there: a covert channel that lowers the loss without the class tokens."
)


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
    loss: float
    attention: Mapping[str, Interval]  # by EQUAL and FASTER
    difference: Interval
    query_mass: Mapping[str, float]  # at the end

    def record(self) -> dict[str, Any]:
        """The pair as a row of a table."""
        return {
            **self.reading.columns,
            "parameterization": self.parameterization,
            "loss": self.loss,
            **self.attention,
            "difference": self.difference,
            **{f"on the query token, {name}": mass for name, mass in self.query_mass.items()},
        }


def compute_dependence(runner: CellRunner, seeds: int = 1) -> list[Pair]:
    """Train what is not stored yet; one pair per setting and parameterization."""
    cells = {
        (reading, name, arm, seed): replace(reading.cell(name, ratio), seed=seed)
        for seed in range(seeds)
        for reading in READINGS
        for name in PARAMETERIZATIONS
        for arm, ratio in RATIOS.items()
    }
    results = run_cells(cells, runner, title="fig2, what it depends on", protocol="dependence", arm=_arm_name)
    pairs = [
        _pair(
            reading, name, {key[2:]: result for key, result in results.items() if key[:2] == (reading, name)}
        )
        for reading in READINGS
        for name in PARAMETERIZATIONS
    ]
    losses = {(pair.reading, pair.parameterization): pair.loss for pair in pairs}
    for key, result in results.items():
        if result["diverged"]:
            continue
        rows = rows_at(losses[key[:2]], _arm_name(key), key[3], result["history"])
        runner.add_per_seed(rows, protocol="dependence")
    return pairs


def _arm_name(key: tuple[Reading, str, str, int]) -> str:
    reading, parameterization, arm, _ = key
    return ", ".join([*reading.columns.values(), parameterization, arm])


def _pair(reading: Reading, name: str, results: Mapping[Any, Mapping[str, Any]]) -> Pair:
    histories = {cell: [] if found["diverged"] else found["history"] for cell, found in results.items()}
    at = matched_loss(histories, ["mrta"], common_levels(histories, 1))[0]
    mass = {
        arm: sum(found["query_mass"] for (own, _), found in results.items() if own == arm)
        / sum(own == arm for own, _ in results)
        for arm in RATIOS
    }
    return Pair(
        reading,
        name,
        at["loss"],
        {arm: at["arms"][arm]["mrta"] for arm in RATIOS},
        at["difference"][FASTER]["mrta"],
        mass if reading.query_attended else dict.fromkeys(RATIOS, 0.0),
    )


def write_dependence(pairs: list[Pair], out: Path) -> dict[str, Any]:
    """Write the figure and its table under ``out``; returns the figure's paths and the table's."""
    seeds = max(pair.difference.n for pair in pairs)
    title = "Figure 2: what the result depends on"
    rows = [pair.record() for pair in pairs]
    with plotting() as plt:
        figure = save_figure(
            draw_dependence(plt, pairs),
            out,
            "fig2-dependence",
            title=title,
            caption=f"{TEXT} Each line goes from equal rates (ring) to a query-key circuit that learns "
            "ten times faster (dot), both at the lowest training loss that both reach; the dotted line is "
            f"uniform attention. {seeds} seed{'s' if seeds > 1 else ''}.",
            rows=[row | {key: row[key].mean for key in (*RATIOS, "difference")} for row in rows],
            see="A dot to the right of its ring: faster query-key learning gave more attention at equal loss."
            " To the left: less.",
        )
    table = save_table(
        out,
        "fig2-dependence",
        title=title,
        caption="Attention on class tokens at the lowest training loss that both cells of a pair reach.",
        columns=[{"key": key, "label": key} for key in rows[0]],
        rows=rows,
    )
    return {**figure, "table": table}


def draw_dependence(plt: Any, pairs: list[Pair]) -> Any:
    """A row per setting, a plot per parameterization."""
    widths = [1.75, *[1] * len(PARAMETERIZATIONS)]
    figure, axes = plt.subplots(1, len(widths), figsize=(11.5, 4.2), sharey=True, width_ratios=widths)
    names = list(READINGS[0].columns)
    for place, reading in enumerate(READINGS):
        for column, (name, value) in enumerate(reading.columns.items()):
            usual = value == READINGS[0].columns[name]
            axes[0].text(
                column,
                place,
                value,
                ha="center",
                va="center",
                color="0.45" if usual else INK,
                fontsize=8.5,
            )
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
    axes[1].plot([], [], "o-", color="0.4", label=f"within {NOTICEABLE}")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _draw_pair(axis: Any, place: int, pair: Pair) -> None:
    start, end = (pair.attention[arm].mean for arm in RATIOS)
    change = end - start
    color = "0.4" if abs(change) < NOTICEABLE else COLORS[0] if change > 0 else COLORS[1]
    axis.plot([start, end], [place, place], color=color, linewidth=1.6)
    axis.plot(start, place, "o", color=color, markersize=6, markerfacecolor="white")
    axis.plot(end, place, "o", color=color, markersize=5)
