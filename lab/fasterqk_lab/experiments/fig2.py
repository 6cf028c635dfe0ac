"""Figure 2: where the four parameterizations attend, with and without faster query-key learning.

A second figure shows what the published panels depend on: cells of the protocol ``literal`` with up to three
changes (scores divided by the square root of the width, the query token attended, the softmax over the
four next tokens only, another size of the start), with equal rates and with a faster QK circuit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fasterqk.attention.scores import DTAP_EDGES, dtap_over_seeds
from fasterqk_lab.compare import END, LOSS, Effect, Measured, Value, compare, correct, measured
from fasterqk_lab.experiments._comparison import printed_numbers
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option
from fasterqk_lab.experiments._synthetic import (
    PROTOCOL_OPTION,
    Arm,
    Panel,
    Results,
    group_values,
    panels,
    run_cells,
    run_grid,
    with_scale,
)
from fasterqk_lab.figures import effect_record, save_curve, save_dtaps, save_forest, save_table
from fasterqk_lab.synthetic import PARAMETERIZATIONS

# The panel with equal rates that a panel with a faster query-key circuit is compared with.
BASELINES = {"e": "a", "f": "a", "g": "d", "h": "d", "i": "b", "j": "c"}
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
        mean, deviation = dtap_over_seeds(tables) if tables else (None, None)
        return scores | {
            "panel": name,
            "title": panel.title,
            "query_mass": mass if attended else None,
            "null": self.measured.null(name, "mrta", END, None),
            "matched": self.measured.interval(name, "mrta", LOSS, self.level),
            "dtap": mean,
            "dtap_deviation": deviation,
            "top_row": " ".join(f"{share:.1f}" for share in mean[-1]) if mean is not None else "",
            "seeds": list(seeds),
            "diverged": diverged,
            "capped": " ".join(map(str, capped)),
            "note": ", ".join(notes),
        }


def compute(runner: CellRunner, protocol: str, *, seeds: int = 5, names: Sequence[str] | None = None) -> Fig2:
    """Train what is not stored yet; the values of all cells go to the table of results."""
    chosen = panels(protocol, list(names) if names else None)
    cells = {
        (panel.name, seed): panel.for_seed(seed)
        for panel in chosen
        for seed in range(max(seeds, panel.least_seeds))
    }
    results = run_cells(cells, runner, title=f"fig2, protocol {protocol}", protocol=protocol)
    name, letters = f"fig2-{protocol}", {panel.name for panel in chosen}
    baselines = {faster: equal for faster, equal in BASELINES.items() if {faster, equal} <= letters}
    table = measured(name, results, baselines=baselines, more=_more_values(name, results))
    runner.add(table.values)
    return Fig2(protocol, chosen, results, table)


def _more_values(name: str, results: Results) -> list[Value]:
    """The top row of every heat map, in percent by attention, and whether it met its stop rule (1 or 0)."""
    values = []
    for (panel, seed), result in results.items():
        if not result["diverged"]:
            scores = {f"top_row_{place}": share for place, share in enumerate(result["dtap"][-1], 1)}
            scores["reached"] = float(result["reached"])
            values += [Value(name, panel, seed, END, None, score, value) for score, value in scores.items()]
    return values


def differences_from_saved(data: Fig2) -> list[dict[str, Any]]:
    """How far our `published` panels are from what the notebooks saved, one row per panel.

    ``top_row`` is ours minus theirs in percentage points, ours over all seeds, ``most_points`` the largest
    of it; ``losses`` maps an epoch to ours and theirs, of torch seed 1234; ``final_losses`` has both for each
    seed that they print.
    """
    rows = []
    for name, saved in printed_numbers()["fig2"].items():
        record = data.records.get(name)
        if not record or not record["mrta"]:
            continue
        windows = [data.results[name, seed]["window_losses"] for seed in record["seeds"]]
        points = [a - b for a, b in zip(record["dtap"][-1], saved["top_row"], strict=True)]
        losses = {
            epoch: [windows[0][int(epoch) // 100 - 1], theirs]
            for epoch, theirs in saved["losses"].items()
            if int(epoch) // 100 <= len(windows[0])
        }
        last = zip(windows, saved.get("final_losses", ()), strict=False)
        row = {"panel": name, "most_points": max(map(abs, points)), "top_row": points, "losses": losses}
        rows.append(row | {"final_losses": [[ours[-1], theirs] for ours, theirs in last]})
    return rows


def save(data: Fig2, out: Path) -> dict[str, Any]:
    """Write the heat maps, the table and the differences over all losses; returns their paths."""
    name = "fig2" if data.protocol == "published" else f"fig2-{data.protocol}"
    seeds = max(len(record["seeds"]) for record in data.records.values())
    setting = (
        f"Protocol {data.protocol}: {_SETTINGS[data.protocol]}. {seeds} seed{'s' if seeds > 1 else ''},"
        f" {data.panels[0].cell.evaluated} held-out sequences each."
    )
    title = f"Figure 2: attention and prediction on the toy language, {data.protocol}"
    files: dict[str, Any] = save_dtaps(
        {_heading(record): _dtap(record) for record in data.records.values()},
        out,
        name,
        title=title,
        caption=f"By attention on class tokens and probability of the right token. {setting}",
        see="Further right: more attention on the class tokens. Further up: surer of the right token.",
        highest=100.0,
    )
    files["table"] = save_table(
        out,
        f"fig2-{data.protocol}-panels",
        title=title,
        caption=f"Means over seeds with 95% intervals. {setting}",
        columns=COLUMNS,
        rows=[{key: record[key] for key in COLUMNS} for record in data.records.values()],
    )
    if effects := data.effects:
        titles, names = {"mrta": "attention on class tokens"}, {p.name: p.title for p in data.panels}
        curve = save_curve(effects, titles, out, f"{name}-loss", title=title, caption=setting, names=names)
        files["curve"] = curve
    return files


def _heading(record: dict[str, Any]) -> str:
    """The title of a heat map: its panel, attention beside that of uniform attention, and notes."""
    heading = f"({record['panel']}) {record['title']}"
    if record["mrta"] is None:
        return heading
    scores = f"MRTA {record['mrta'].mean:.3f} (uniform {record['null']:.2f})"
    return f"{heading}\n{scores}\n{record['steps'].mean / 1000:.0f}k steps\n{record['note']}".rstrip()


def _dtap(record: dict[str, Any]) -> dict[str, Any]:
    return {"mean": record["dtap"], "standard_deviation": record["dtap_deviation"], "edges": DTAP_EDGES}


# --- The settings that it depends on ---

EQUAL, FASTER = "equal rates", "QK 10x"
RATIOS = {EQUAL: 1.0, FASTER: 10.0}
# Most pairs reach a loss near .001 within these steps; the others are read at the loss that they reach.
MAX_STEPS = 60_000


class Reading(NamedTuple):
    """One setting: a row of the figure."""

    scaled: bool = False
    query_attended: bool = False
    four_tokens: bool = False
    start: float = 1e-3

    def arm(self, parameterization: str, speed: str) -> Arm:
        """The arm of this setting, at one of `RATIOS`."""
        base = panels("literal", ["a"])[0].cell
        cell = replace(
            base,
            parameterization=parameterization,
            qk_ratio=RATIOS[speed],
            scaled_scores=self.scaled,
            closed=self.four_tokens,
            language=replace(base.language, attend_query=self.query_attended),
            max_steps=MAX_STEPS,
        )
        name = ", ".join([*self.columns.values(), parameterization, speed])
        return Arm(name, with_scale(cell, self.start))

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
    Reading(scaled, *others)
    for scaled in (False, True)
    for others in (
        (False, False, 1e-3),
        (False, True, 1e-3),
        (True, False, 1e-3),
        (True, True, 1e-3),
        (False, False, 1e-6),
        (False, False, 0.1),
    )
)


def compute_dependence(runner: CellRunner) -> tuple[list[Effect], list[dict[str, Any]]]:
    """An effect and a row per setting and parameterization, at the lowest training loss that both arms reach.

    The label of an effect is its setting, the score its parameterization.
    """
    name = "fig2-dependence"
    pairs = {
        (reading, model): {speed: reading.arm(model, speed) for speed in RATIOS}
        for reading, model in product(READINGS, PARAMETERIZATIONS)
    }
    arms = [arm for pair in pairs.values() for arm in pair.values()]
    results = run_grid(arms, runner, seeds=1, title="fig2, what it depends on", protocol="dependence")
    equal_of = {arm.name: pair[EQUAL].name for pair in pairs.values() for arm in pair.values()}
    _, values = group_values(name, results, equal_of, stopped=False)
    table = measured(name, results, baselines=equal_of, more=values)
    runner.add(table.values)
    effects, rows = [], []
    for (reading, model), pair in pairs.items():
        effect = compare(table, (pair[FASTER].name, pair[EQUAL].name), "mrta", at=LOSS)
        effects.append(replace(effect, label=", ".join(reading.columns.values()), score=model))
        masses = {
            f"on the query token, {speed}": fmean(table.of(arm.name, "query_mass", END).values())
            if reading.query_attended
            else 0.0
            for speed, arm in pair.items()
        }
        row: dict[str, Any] = {
            **reading.columns,
            "parameterization": model,
            "loss": effect.loss,
            EQUAL: effect.second,
        }
        rows.append(row | {FASTER: effect.first, "difference": effect.value} | masses)
    return effects, rows


def save_dependence(effects: Sequence[Effect], rows: Sequence[dict[str, Any]], out: Path) -> dict[str, Any]:
    """Write the figure and its table under ``out``; returns the figure's paths and the table's."""
    seeds = max(effect.value.n for effect in effects)
    about: dict[str, Any] = {
        "title": "Figure 2: what the result depends on",
        "caption": "Attention on class tokens, from equal rates (ring) to a query-key circuit that learns ten"
        " times faster (dot), at the lowest training loss that both reach; dotted: uniform attention,"
        f" {seeds} seed{'s' if seeds > 1 else ''}. A row names how scores are scaled, whether the query token"
        " is attended, the softmax, and the size of the start. Where attention falls, the circuit names the"
        " class by the common token or the query that it looks at (docs/covert-channel.md).",
    }
    see = "A dot to the right of its ring: faster query-key learning gave more attention at equal loss."
    titles = {model: model for model in dict.fromkeys(effect.score for effect in effects)}
    name = "fig2-dependence"
    files: dict[str, Any] = save_forest(effects, titles, out, name, see=f"{see} To the left: less.", **about)
    return files | {"table": save_table(out, name, rows=rows, **about)}


def run(
    runner: CellRunner, protocol: str = "published", seeds: int = 5, panels: list[str] | None = None
) -> dict[str, Any]:
    data = compute(runner, protocol, seeds=seeds, names=panels)
    summary: dict[str, Any] = {
        "protocol": data.protocol,
        "loss": data.level,
        "panels": list(data.records.values()),
        "effects": [effect_record(effect) for effect in data.effects],
        "files": save(data, runner.out),
    }
    if data.protocol == "published":
        summary["differences_from_saved"] = differences_from_saved(data)
        if not panels:
            effects, rows = compute_dependence(runner)
            summary["dependence"] = rows
            summary["dependence_files"] = save_dependence(effects, rows, runner.out)
    return summary


EXPERIMENT = Experiment(
    "fig2",
    run,
    (
        PROTOCOL_OPTION,
        Option("seeds", int, "how many (g, h of published: at least five, as in the notebooks)", most=1000),
        Option("panels", str, "only these (default: all)", many=True, metavar="a"),
    ),
    examples=("--protocol literal --seeds 1 # the paper's text, word for word",),
    details="Protocol published (default): the notebooks' settings, as in the published figure, and beside "
    "it what the result depends on; literal: the paper's text word for word; scaled-scores and four-tokens: "
    "the same with one change.",
)
