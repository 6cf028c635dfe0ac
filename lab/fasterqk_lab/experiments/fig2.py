"""Figure 2: where the four parameterizations attend, with and without faster query-key learning."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.attention import DTAP_EDGES, matched_loss
from fasterqk.console import print_table
from fasterqk_lab.experiments._fig2_dependence import (
    EQUAL,
    FASTER,
    TEXT,
    compute_dependence,
    write_dependence,
)
from fasterqk_lab.experiments._per_seed import levels_for
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments._synthetic import (
    OLD_NAMES,
    PROTOCOL_OPTION,
    Panel,
    panels,
    run_cells,
    summarize_seeds,
)
from fasterqk_lab.figures import (
    PARAMETERIZATION_COLORS,
    draw_dtap,
    dtap_rows,
    plotting,
    save_figure,
    save_table,
)

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


@dataclass(frozen=True)
class Fig2:
    """The figure's data: which panels, every cell's result, and the summaries."""

    protocol: str
    panels: list[Panel]
    results: dict[tuple[str, int], dict[str, Any]]
    summaries: dict[str, dict[str, Any]]
    matched: list[dict[str, Any]]


def compute(runner: CellRunner, protocol: str, *, seeds: int = 5, names: Sequence[str] | None = None) -> Fig2:
    """Train what is not stored yet, and summarise all."""
    protocol = OLD_NAMES.get(protocol, protocol)
    chosen = panels(protocol, list(names) if names else None)
    cells = {
        (panel.name, seed): panel.for_seed(seed)
        for panel in chosen
        for seed in range(max(seeds, panel.least_seeds))
    }
    results = run_cells(cells, runner, title=f"fig2, protocol {protocol}", protocol=protocol)
    histories: dict[Any, Any] = {key: result["history"] for key, result in results.items()}
    return Fig2(
        protocol=protocol,
        panels=chosen,
        results=results,
        summaries={panel.name: _summary(panel, results) for panel in chosen},
        matched=matched_loss(histories, ["mrta"], levels_for(results)),
    )


def differences_from_saved(data: Fig2) -> dict[str, Any]:
    """How far our `published` panels are from what the notebooks saved.

    ``top_row`` is ours minus theirs in percentage points, ours over all seeds; ``losses`` maps an epoch
    to ours and theirs, of torch seed 1234; ``final_losses`` has both for each seed that they print.
    """
    found: dict[str, Any] = {}
    for name, row in RELEASED_TOP_ROWS.items():
        summary = data.summaries.get(name)
        if summary is None or summary["dtap"] is None:
            continue
        windows = [data.results[name, seed]["window_losses"] for seed in summary["seeds"]]
        finals = RELEASED_FINAL_LOSSES.get(name, ())
        found[name] = {
            "top_row": [ours - theirs for ours, theirs in zip(summary["dtap"][-1], row, strict=True)],
            "losses": {
                str(epoch): [windows[0][epoch // 100 - 1], theirs]
                for epoch, theirs in RELEASED_LOSSES[name].items()
                if epoch // 100 <= len(windows[0])
            },
            "final_losses": [[own[-1], theirs] for own, theirs in zip(windows, finals, strict=False)],
        }
    return found


def _summary(panel: Panel, results: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    own = {seed: result for (name, seed), result in results.items() if name == panel.name}
    cell = panel.cell
    return {
        "title": panel.title,
        "parameterization": cell.parameterization,
        "qk_ratio": cell.qk_ratio,
        "ramp_steps": cell.ramp_steps,
        "attend_query": cell.language.attend_query,
        **summarize_seeds(own, cell.stop),
    }


_COLUMNS = 4
_SETTINGS = {
    "published": "the settings of the released notebooks, which differ between panels in start, length, steps"
    " and stop rule; the query is attended, scores are divided by the square root of 50",
    "literal": "the paper's text and equation 1: scores are not scaled, the softmax is over all 50 tokens",
    "scaled-scores": "the paper's text, with scores divided by the square root of 50 as in the notebooks",
    "four-tokens": "the paper's text, with the softmax over the four next tokens only, as in the theory",
}


def write_fig2(data: Fig2, out: Path) -> dict[str, Any]:
    """Write both figures and the table under ``out``; returns the heat maps' paths and the others'."""
    name = "fig2" if data.protocol == "published" else f"fig2-{data.protocol}"
    seeds = max(len(summary["seeds"]) for summary in data.summaries.values())
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
                {"panel": panel.name, "title": panel.title, **row}
                for panel in data.panels
                for row in dtap_rows(_table_of(data, panel.name), DTAP_EDGES)
            ],
            see=_see(data),
        )
        along = save_figure(
            draw_along_training(plt, data),
            out,
            f"{name}-loss",
            title=f"{title}: attention at equal loss",
            caption=f"Attention on held-out sequences against training loss; a line is one cell. {setting}",
            rows=[
                {"panel": panel, "seed": seed, **point}
                for (panel, seed), result in data.results.items()
                for point in result["history"]
            ],
            see="Compare lines at the same loss: above the dotted line is more attention than uniform"
            " attention has.",
        )
    table = save_table(
        out,
        f"fig2-{data.protocol}-panels",
        title=title,
        caption=f"Means over seeds with 95% intervals. {setting}",
        columns=[{"key": key, "label": label} for key, label in _LABELS.items()],
        rows=[_table_row(data, panel.name) for panel in data.panels],
    )
    return {**heat_maps, "along_training": along, "table": table}


def _see(data: Fig2) -> str:
    told = "Further right: more attention on the distinct tokens. Further up: surer of the right token."
    found = {name: one["mrta"] for name, one in data.summaries.items() if one["dtap"] is not None}
    if not found:
        return told
    low, high = (choose(found, key=lambda name: found[name]) for choose in (min, max))
    ends = " to ".join(f"{found[name]:.2f} in ({name})" for name in (low, high))
    null = data.summaries[low]["null"]["mrta"]
    return f"{told} Mean attention goes from {ends}; uniform attention has {null:.2f}."


def draw_heat_maps(plt: Any, data: Fig2) -> Any:
    """One heat map per panel, four in a row."""
    rows = -(-len(data.panels) // _COLUMNS)
    figure, axes = plt.subplots(rows, _COLUMNS, figsize=(11.5, 3.35 * rows), squeeze=False)
    for axis in axes.flat[len(data.panels) :]:
        axis.set_visible(False)
    image = None
    for place, panel in enumerate(data.panels):
        axis = axes.flat[place]
        summary = data.summaries[panel.name]
        # Two lines: one is wider than its panel.
        headline = _headline(summary).replace("), ", ")\n", 1)
        title = f"({panel.name}) {panel.title}\n{headline}"
        if summary["dtap"] is None:
            axis.set_title(title)
            axis.set_axis_off()
            continue
        deviation = summary["dtap_deviation"] if len(summary["seeds"]) > 1 else None
        image = draw_dtap(axis, summary["dtap"], summary["dtap_edges"], title, deviation=deviation)
        axis.title.set_fontsize(9)
        axis.set_xlabel("attention on distinct tokens" if place + _COLUMNS >= len(data.panels) else "")
        axis.set_ylabel("probability of the label" if place % _COLUMNS == 0 else "")
    if image is not None:
        bar = figure.colorbar(
            image, ax=axes.ravel().tolist(), label="% of sequences (square-root scale)", shrink=0.6, aspect=30
        )
        bar.ax.grid(False)
    return figure


def draw_along_training(plt: Any, data: Fig2) -> Any:
    """Attention against training loss, one plot per parameterization."""
    names = list(dict.fromkeys(panel.cell.parameterization for panel in data.panels))
    figure, axes = plt.subplots(
        1, len(names), figsize=(2.9 * max(len(names), 2), 3.1), sharey=True, squeeze=False
    )
    for axis, name in zip(axes[0], names, strict=True):
        _draw_parameterization(axis, data, name)
    axes[0, 0].set_ylabel("attention on distinct tokens")
    return figure


def _draw_parameterization(axis: Any, data: Fig2, name: str) -> None:
    own = [panel for panel in data.panels if panel.cell.parameterization == name]
    styles = dict(zip([panel.name for panel in own], ("-", "--", ":", "-."), strict=False))
    for (panel, seed), result in data.results.items():
        points = [point for point in result["history"] if point["loss"] is not None]
        if panel in styles and points:
            title = next(one.title for one in own if one.name == panel).removeprefix(name).lstrip(", ")
            axis.plot(
                [point["loss"] for point in points],
                [point["mrta"] for point in points],
                styles[panel],
                color=PARAMETERIZATION_COLORS[name],
                alpha=0.8,
                linewidth=1.1,
                label=f"({panel}) {title or 'QK 1x'}" if seed == 0 else None,
            )
    null = data.summaries[own[0].name]["null"]["mrta"]
    if null is not None:
        axis.axhline(null, color="0.5", linewidth=0.8, linestyle=(0, (1, 3)))
    axis.set(xscale="log", xlabel="training loss", title=name, ylim=(-0.02, 1.02))
    axis.invert_xaxis()
    axis.legend(loc="best", handlelength=1.6, fontsize=8.5)


def _headline(summary: dict[str, Any]) -> str:
    if summary["dtap"] is None:
        return "diverged"
    steps = f"{summary['steps'] / 1000:.0f}k steps"
    text = f"MRTA {summary['mrta']:.3f} (uniform {summary['null']['mrta']:.2f}), {steps}"
    marks = []
    if summary["capped"]:
        marks.append(f"{len(summary['capped'])} of {len(summary['seeds'])} hit the cap")
    if summary["diverged_seeds"]:
        marks.append(f"{len(summary['diverged_seeds'])} diverged")
    if summary["attend_query"]:
        marks.append(f"query token {summary['query_mass']:.2f}")
    return text + (f"\n{', '.join(marks)}" if marks else "")


_LABELS = {
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


def _table_row(data: Fig2, name: str) -> dict[str, Any]:
    summary = data.summaries[name]
    intervals = summary.get("intervals") or {}
    row: dict[str, Any] = {"panel": name, "title": summary["title"], "null": summary["null"]["mrta"]}
    row |= {key: intervals.get(key) for key in ("mrta", "ac", "acmc", "accuracy", "loss", "steps")}
    row["query_mass"] = intervals.get("query_mass") if summary["attend_query"] else None
    found = data.matched[0]["arms"].get(name) if data.matched else None
    row["matched"] = found["mrta"] if found else None
    row["top_row"] = " ".join(f"{share:.1f}" for share in _table_of(data, name)[-1])
    row["capped"] = " ".join(map(str, summary["capped"]))
    row["note"] = " ".join(_headline(summary).split("\n")[1:])
    return row


def _table_of(data: Fig2, name: str) -> Any:
    found = data.summaries[name]["dtap"]
    size = len(DTAP_EDGES) - 1
    return np.full((size, size), np.nan) if found is None else found


def run(runner: CellRunner, protocol: str, seeds: int, panels: list[str] | None) -> dict[str, Any]:
    data = compute(runner, protocol, seeds=seeds, names=panels)
    summary: dict[str, Any] = {
        "protocol": data.protocol,
        "panels": data.summaries,
        "matched": data.matched,
        "files": write_fig2(data, runner.out),
    }
    if data.protocol == "published":
        summary["differences_from_saved"] = differences_from_saved(data)
        if not panels:
            pairs = compute_dependence(runner)
            summary["dependence"] = {
                "text": TEXT,
                "pairs": [pair.record() for pair in pairs],
                "files": write_dependence(pairs, runner.out),
            }
    return summary


def show(summary: dict[str, Any]) -> None:
    lowest = summary["matched"][0] if summary["matched"] else {"loss": None, "arms": {}}
    rows = []
    for name, panel in summary["panels"].items():
        matched = lowest["arms"].get(name)
        row = {"panel": name, "": panel["title"]}
        row |= {key: panel[key] for key in ("loss", "accuracy", "steps", "mrta", "ac", "acmc")}
        row["null mrta"] = panel["null"]["mrta"]
        row["mrta at equal loss"] = matched["mrta"]["mean"] if matched else None
        row["note"] = _note(panel)
        rows.append(row)
    print_table(rows, title=f"figure 2, protocol {summary['protocol']} (means over seeds):")
    if lowest["loss"] is not None:
        print(f"\nequal loss: {lowest['loss']:.2g} on training sequences")
    for name, found in summary.get("differences_from_saved", {}).items():
        print(
            f"panel {name}: at most {max(map(abs, found['top_row'])):.1f} points per bin from the heat map "
            "that the notebooks saved"
        )
    print(f"figure: {summary['files']['png']}")
    if "dependence" in summary:
        keys = ("scores", "query", "softmax", "start", "parameterization", "loss", EQUAL, FASTER)
        rows = [{key: pair[key] for key in keys} for pair in summary["dependence"]["pairs"]]
        print_table(rows, title="\nwhat it depends on: attention on class tokens at equal loss:")
        print(f"\n{summary['dependence']['text']}\nfigure: {summary['dependence']['files']['png']}")


def _note(panel: dict[str, Any]) -> str:
    """What a reader must know about a panel's cells."""
    notes = []
    if panel["diverged_seeds"]:
        notes.append(f"diverged: seeds {panel['diverged_seeds']}")
    if panel["capped"]:
        notes.append(f"hit the cap: seeds {panel['capped']}")
    if panel["attend_query"] and panel["query_mass"] is not None:
        notes.append(f"mass on the query token {panel['query_mass']:.2f}")
    return "; ".join(notes)


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
