"""Figure 2: where the four parameterizations attend, with and without faster query-key learning."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.attention.scores import DTAP_EDGES, dtap_over_seeds
from fasterqk.console import print_table
from fasterqk_lab.compare import END, LOSS, Effect, Measured, Value, compare, correct, measured
from fasterqk_lab.experiments._comparison import effect_record
from fasterqk_lab.experiments._fig2_dependence import EQUAL, FASTER, compute_dependence, save_dependence
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments._synthetic import (
    OLD_NAMES,
    PROTOCOL_OPTION,
    Panel,
    Results,
    panels,
    run_cells,
)
from fasterqk_lab.figures import draw_dtap, dtap_rows, plotting, save_curve, save_figure, save_table

# The panel with equal rates that a panel with a faster query-key circuit is compared with.
BASELINES = {"e": "a", "f": "a", "g": "d", "h": "d", "i": "b", "j": "c"}
# The top row (probability above .8) of the heat maps that are saved in the released notebooks, in percent.
RELEASED_TOP_ROWS = {
    "a": (0.1, 64.1, 35.7, 0.0, 0.0),
    "b": (0.0, 0.0, 0.0, 5.4, 94.6),
    "g": (0.0, 0.0, 2.3, 76.8, 20.8),
    "h": (0.0, 0.0, 2.6, 86.9, 10.5),
}
# Mean losses of 100 epochs each that those notebooks print for torch seed 1234, by epoch.
RELEASED_LOSSES = {
    "a": {100: 2.901, 200: 1.310, 300: 0.081, 400: 0.009, 500: 0.005, 600: 0.003, 800: 0.002, 1100: 0.001},
    "b": {100: 2.522, 200: 1.030, 300: 0.564, 400: 0.376, 500: 0.280, 600: 0.222, 700: 0.183, 800: 0.156}
    | {900: 0.132, 1000: 0.087, 1100: 0.033, 1200: 0.015, 1300: 0.009, 1900: 0.002, 2500: 0.001},
    "g": {100: 3.284, 200: 2.212, 300: 1.466, 400: 0.928, 500: 0.493, 600: 0.216, 700: 0.101, 800: 0.056}
    | {900: 0.036, 1000: 0.026, 2000: 0.006},
    "h": {100: 3.285, 200: 2.220, 300: 1.500, 400: 1.035, 500: 0.711, 600: 0.468, 700: 0.293, 800: 0.178}
    | {900: 0.110, 1000: 0.071, 2000: 0.007},
}
# The last of them, for each of the five seeds.
RELEASED_FINAL_LOSSES = {
    "g": (0.006, 0.006, 0.006, 0.007, 0.007),
    "h": (0.007, 0.008, 0.007, 0.008, 0.008),
}


COLUMNS = {
    "panel": "panel",
    "title": "model",
    "mrta": "MRTA",
    "null": "uniform",
    "matched": "MRTA at equal loss",
    "ac": "AC",
    "acmc": "ACMC",
    "accuracy": "accuracy",
    "loss": "loss",
    "steps": "steps",
    "query_mass": "mass on the query token",
    "top_row": "% of sequences with a probability above .8, by attention 0-.2 to .8-1",
    "capped": "seeds that hit the cap of steps",
    "note": "",
}
SCORES = ("mrta", "ac", "acmc", "accuracy", "loss", "steps", "query_mass", "train_loss")
_SETTINGS = {
    "published": "the settings of the released notebooks, which differ between panels in start, length, steps"
    " and stop rule; the query is attended, scores are divided by the square root of 50",
    "literal": "the paper's text and equation 1: scores are not scaled, the softmax is over all 50 tokens",
    "scaled-scores": "the paper's text, with scores divided by the square root of 50 as in the notebooks",
    "four-tokens": "the paper's text, with the softmax over the four next tokens only, as in the theory",
}


@dataclass(frozen=True, eq=False)
class Fig2:
    """The figure's data: which panels, and every cell's result with its values."""

    protocol: str
    panels: list[Panel]
    results: Results
    measured: Measured

    @property
    def level(self) -> float | None:
        """The lowest loss at which panels are compared."""
        losses = [value.loss for value in self.measured.values if value.at == LOSS and value.loss]
        return min(losses, default=None)

    @cached_property
    def effects(self) -> list[Effect]:
        """Every panel with a faster circuit minus its baseline, corrected for their number."""
        names = {panel.name for panel in self.panels}
        pairs = [(name, base) for name, base in BASELINES.items() if {name, base} <= names]
        finished = [pair for pair in pairs if all(self.records[name]["matched"] for name in pair)]
        return correct([compare(self.measured, pair, "mrta", label=pair[0]) for pair in finished])

    @cached_property
    def records(self) -> dict[str, dict[str, Any]]:
        """Every panel over its seeds, by its letter; scores are None where all of them diverged."""
        return {panel.name: self._record(panel) for panel in self.panels}

    def _record(self, panel: Panel) -> dict[str, Any]:
        name, attended = panel.name, panel.cell.language.attend_query
        seeds = {seed: result for (letter, seed), result in self.results.items() if letter == name}
        tables = [result["dtap"] for result in seeds.values() if not result["diverged"]]
        diverged = [seed for seed, result in seeds.items() if result["diverged"]]
        late = [seed for seed, result in seeds.items() if not result["reached"] and seed not in diverged]
        capped = [] if panel.cell.stop == "never" else late
        scores = {score: self.measured.interval(name, score, END) for score in SCORES}
        mass = scores["query_mass"]
        notes = [f"{len(capped)} of {len(seeds)} hit the cap"] if capped else []
        notes += [f"{len(diverged)} diverged"] if diverged else []
        notes += [f"query token {mass.mean:.2f}"] if attended and mass else []
        empty = np.full([len(DTAP_EDGES) - 1] * 2, np.nan).tolist()
        mean, deviation = dtap_over_seeds(tables) if tables else (empty, empty)
        return scores | {
            "panel": name,
            "title": panel.title,
            "query_mass": mass if attended else None,
            "null": self.measured.null(name, "mrta", END, None),
            "matched": self.measured.interval(name, "mrta", LOSS, self.level),
            "dtap": mean,
            "dtap_deviation": deviation,
            "top_row": " ".join(f"{share:.1f}" for share in mean[-1]),
            "seeds": list(seeds),
            "diverged": diverged,
            "capped": " ".join(map(str, capped)),
            "note": ", ".join(notes),
        }


def compute(runner: CellRunner, protocol: str, *, seeds: int = 5, names: Sequence[str] | None = None) -> Fig2:
    """Train what is not stored yet; the values of all cells go to the table of results."""
    protocol = OLD_NAMES.get(protocol, protocol)
    chosen = panels(protocol, list(names) if names else None)
    cells = {
        (panel.name, seed): panel.for_seed(seed)
        for panel in chosen
        for seed in range(max(seeds, panel.least_seeds))
    }
    results = run_cells(cells, runner, title=f"fig2, protocol {protocol}", protocol=protocol)
    letters = [panel.name for panel in chosen]
    baselines = {name: base for name, base in BASELINES.items() if {name, base} <= set(letters)}
    name = f"fig2-{protocol}"
    table = measured(name, results, baselines=baselines, more=_more_values(name, results))
    runner.add(table.values)
    return Fig2(protocol, chosen, results, table)


def _more_values(name: str, results: Results) -> list[Value]:
    """The top row of every heat map, in percent by attention, and whether the stop rule was met (1 or 0)."""
    values = []
    for (panel, seed), result in results.items():
        if not result["diverged"]:
            scores = {f"top_row_{place}": share for place, share in enumerate(result["dtap"][-1], 1)}
            scores["reached"] = float(result["reached"])
            values += [Value(name, panel, seed, END, None, score, value) for score, value in scores.items()]
    return values


def differences_from_saved(data: Fig2) -> dict[str, Any]:
    """How far our `published` panels are from what the notebooks saved.

    ``top_row`` is ours minus theirs in percentage points, ours over all seeds; ``losses`` maps an epoch
    to ours and theirs, of torch seed 1234; ``final_losses`` has both for each seed that they print.
    """
    differences: dict[str, Any] = {}
    for name, row in RELEASED_TOP_ROWS.items():
        if name not in data.records or not data.records[name]["mrta"]:
            continue
        windows = [data.results[name, seed]["window_losses"] for seed in data.records[name]["seeds"]]
        finals = RELEASED_FINAL_LOSSES.get(name, ())
        differences[name] = {
            "top_row": [
                ours - theirs for ours, theirs in zip(data.records[name]["dtap"][-1], row, strict=True)
            ],
            "losses": {
                str(epoch): [windows[0][epoch // 100 - 1], theirs]
                for epoch, theirs in RELEASED_LOSSES[name].items()
                if epoch // 100 <= len(windows[0])
            },
            "final_losses": [[ours[-1], theirs] for ours, theirs in zip(windows, finals, strict=False)],
        }
    return differences


def save(data: Fig2, out: Path) -> dict[str, Any]:
    """Write the heat maps, the table and the differences over all losses; returns their paths."""
    name = "fig2" if data.protocol == "published" else f"fig2-{data.protocol}"
    seeds = max(len(record["seeds"]) for record in data.records.values())
    setting = (
        f"Protocol {data.protocol}: {_SETTINGS[data.protocol]}. {seeds} seed{'s' if seeds > 1 else ''},"
        f" {data.panels[0].cell.evaluated} held-out sequences each."
    )
    title = f"Figure 2: attention and prediction on the toy language, {data.protocol}"
    with plotting() as plt:
        heat_maps = save_figure(
            draw_heat_maps(plt, data),
            out,
            name,
            title=title,
            caption="Percent of held-out sequences by attention on distinct tokens and probability of the"
            f" right token, mean ± standard deviation over seeds. {setting}",
            rows=[
                {"panel": letter, "title": record["title"], **row}
                for letter, record in data.records.items()
                for row in dtap_rows(record["dtap"], DTAP_EDGES)
            ],
            see="Further right: more attention on the distinct tokens. Further up: surer of the right token.",
        )
    table = save_table(
        out,
        f"fig2-{data.protocol}-panels",
        title=title,
        caption=f"Means over seeds with 95% intervals. {setting}",
        columns=COLUMNS,
        rows=[{key: record[key] for key in COLUMNS} for record in data.records.values()],
    )
    files = {**heat_maps, "table": table}
    if effects := data.effects:
        titles, names = {"mrta": "attention on distinct tokens"}, {p.name: p.title for p in data.panels}
        curve = save_curve(effects, titles, out, f"{name}-loss", title=title, caption=setting, names=names)
        files["curve"] = curve
    return files


def draw_heat_maps(plt: Any, data: Fig2, columns: int = 4) -> Any:
    """One heat map per panel, four in a row."""
    rows = -(-len(data.panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(11.5, 3.35 * rows), squeeze=False)
    image = None
    for axis in axes.flat[len(data.panels) :]:
        axis.set_visible(False)
    for place, (axis, record) in enumerate(zip(axes.flat, data.records.values(), strict=False)):
        title = f"({record['panel']}) {record['title']}"
        if record["mrta"] is None:
            axis.set_title(f"{title}\ndiverged")
            axis.set_axis_off()
            continue
        steps = f"{record['steps'].mean / 1000:.0f}k steps"
        title += f"\nMRTA {record['mrta'].mean:.3f} (uniform {record['null']:.2f})\n{steps}\n{record['note']}"
        image = draw_dtap(
            axis, record["dtap"], DTAP_EDGES, title.rstrip(), deviation=record["dtap_deviation"]
        )
        axis.title.set_fontsize(9)
        axis.set_xlabel("attention on distinct tokens" if place + columns >= len(data.panels) else "")
        axis.set_ylabel("probability of the label" if place % columns == 0 else "")
    if image is not None:
        label = "% of sequences (square-root scale)"
        figure.colorbar(image, ax=axes.ravel().tolist(), label=label, shrink=0.6, aspect=30).ax.grid(False)
    return figure


def run(runner: CellRunner, protocol: str, seeds: int, panels: list[str] | None) -> dict[str, Any]:
    data = compute(runner, protocol, seeds=seeds, names=panels)
    summary: dict[str, Any] = {
        "protocol": data.protocol,
        "loss": data.level,
        "panels": data.records,
        "effects": [effect_record(effect) for effect in data.effects],
        "files": save(data, runner.out),
    }
    if data.protocol == "published":
        summary["differences_from_saved"] = differences_from_saved(data)
        if not panels:
            dependence = compute_dependence(runner)
            files = save_dependence(dependence, runner.out)
            summary["dependence"] = {"pairs": [pair.record() for pair in dependence], "files": files}
    return summary


def show(summary: dict[str, Any]) -> None:
    keys = [key for key in COLUMNS if key not in ("top_row", "capped")]
    rows = [{key: panel[key] for key in keys} for panel in summary["panels"].values()]
    print_table(rows, title=f"figure 2, protocol {summary['protocol']} (mean and interval over seeds):")
    if summary["loss"] is not None:
        print(f"\nmatched: at equal loss, {summary['loss']:.2g} on training sequences")
    for name, differences in summary.get("differences_from_saved", {}).items():
        most = max(map(abs, differences["top_row"]))
        print(f"panel {name}: at most {most:.1f} points per bin from the heat map that the notebooks saved")
    print(f"figure: {summary['files']['png']}")
    if "dependence" in summary:
        keys = ["scores", "query", "softmax", "start", "parameterization", "loss", EQUAL, FASTER]
        rows = [{key: pair[key] for key in keys} for pair in summary["dependence"]["pairs"]]
        print_table(rows, title="\nwhat it depends on: attention on class tokens at equal loss:")
        print(f"\nfigure: {summary['dependence']['files']['png']}")


EXPERIMENT = Experiment(
    name="fig2",
    chapter="Figure 2",
    options=(
        PROTOCOL_OPTION,
        seeds_option(5, "how many (g and h of published: at least the five that the notebooks averaged)"),
        Option("panels", str, "only these (default: all)", many=True, metavar="a"),
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce fig2 --out out",
        "fasterqk-lab reproduce fig2 --panels a,b,g,h --json          # those that the notebooks saved",
        "fasterqk-lab reproduce fig2 --protocol literal --seeds 1     # the paper's text, word for word",
    ),
    details="Protocol published (default): the notebooks' settings, as in the published figure, and beside "
    "it what the result depends on; literal: the paper's text word for word; scaled-scores and four-tokens: "
    "the same with one change.",
)
