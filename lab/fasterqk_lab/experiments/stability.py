"""Stability: what a slower or bounded query-key circuit does to pretraining, and a faster one beside it.

A small byte-level decoder on the text of SQuAD's paragraphs, trained from five base rates with every method:
nothing (plain), normalised queries and keys, logits clipped at 100, rates by the partner's norm, and ratios
from .03 to 10. Loss, largest attention logit and entropy of attention are read from the same cells.

Learning-rate sensitivity (Wortsman et al. 2023, "Small-scale proxies for large-scale Transformer training
instabilities") is one number per method and seed:

    sensitivity = mean over rates of ( min(loss(rate), initial) - best ),   best = min over rates of the first

where ``initial`` is the loss of the untrained model. A cell that diverged counts as ``initial``.

The number that decides, named before any run: the sensitivity of ratio .1 minus that of plain, paired by
seed, from the mean training loss of the last tenth of the steps. All others are exploratory; their
differences to plain are corrected for how many they are (Holm).
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from fasterqk.attention import Interval, interval
from fasterqk.console import print_table
from fasterqk.errors import InputError
from fasterqk_lab.compare import Measured, Value, compare, correct, measured
from fasterqk_lab.experiments._comparison import effect_record
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.figures import COLORS, INK, draw_intervals, plotting, save_figure, save_table
from fasterqk_lab.training._pretraining import (
    CLIP_THRESHOLD,
    PARTNER_NORM,
    PLAIN,
    QK_CLIP,
    QK_NORM,
    RATIO,
    PretrainingCell,
)

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
RATIOS = (0.03, 0.1, 0.3, 3.0, 10.0)
# Every method with its settings, as ``--methods`` names it.
METHODS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    QK_NORM: {"method": QK_NORM},
    QK_CLIP: {"method": QK_CLIP},
    PARTNER_NORM: {"method": PARTNER_NORM},
    **{f"{RATIO}={ratio:g}": {"method": RATIO, "qk_ratio": ratio} for ratio in RATIOS},
}
SLOWER = f"{RATIO}=0.1"
DECIDING = (SLOWER, PLAIN)
WIDTH = 96
# Other widths, for the two methods that decide, at fewer rates.
WIDTHS = (64, 128)
WIDTH_RATES = (1e-3, 1e-2, 1e-1)
STEPS = 400
ALL_RATES, FEW_RATES = f"{len(RATES)} rates", f"{len(WIDTH_RATES)} rates"
LOSSES = {"sensitivity": "loss", "validation_sensitivity": "validation_loss"}

# method, width, rate, seed
Key = tuple[str, int, float, int]
Results = Mapping[Key, Mapping[str, Any]]


def stability_cells(
    methods: Sequence[str] = tuple(METHODS),
    widths: Sequence[int] = WIDTHS,
    seeds: int = 3,
    exploratory_seeds: int | None = None,
    steps: int = STEPS,
) -> dict[Key, PretrainingCell]:
    """All cells: first those that decide, then one seed after the other, then the other widths.

    >>> cells = stability_cells()
    >>> len(cells), next(iter(cells))
    (171, ('qk_ratio=0.1', 96, 0.001, 0))
    """
    for name in methods:
        if name not in METHODS:
            raise InputError(f"stability has no method {name!r}; choose from {', '.join(METHODS)}")
    deciding = [name for name in DECIDING if name in methods]
    others = [name for name in methods if name not in DECIDING]
    groups: list[tuple[list[str], int, tuple[float, ...], int]] = [
        (deciding, WIDTH, RATES, seeds),
        (others, WIDTH, RATES, exploratory_seeds or seeds),
    ]
    groups += [(deciding, width, WIDTH_RATES, seeds) for width in widths if width != WIDTH]
    return {
        (name, width, rate, seed): PretrainingCell(
            **METHODS[name], lr=rate, width=width, steps=steps, seed=seed
        )
        for names, width, rates, count in groups
        for seed in range(count)
        for name in names
        for rate in rates
    }


# --- What came out ---


def sensitivity(losses: Sequence[float | None], initial: float) -> float:
    """The mean over rates of the loss above the best; a loss counts as ``initial`` at most, and if missing.

    >>> round(sensitivity([2.5, 2.4, 2.6], 5.5), 4), round(sensitivity([2.5, 2.4, None], 5.5), 4)
    (0.1, 1.0667)
    """
    capped = [_capped(loss, initial) for loss in losses]
    return sum(capped) / len(capped) - min(capped)


def _capped(loss: float | None, initial: float) -> float:
    return initial if loss is None else min(loss, initial)


def method_values(results: Results) -> list[Value]:
    """Numbers over all rates of a method, one per method, width, seed and score.

    Widths are compared over the rates that all of them have, so the methods that have several widths also
    have values of these rates alone.
    """
    groups: dict[tuple[str, int, int], dict[float, Mapping[str, Any]]] = {}
    for (name, width, rate, seed), result in results.items():
        groups.setdefault((name, width, seed), {})[rate] = result
    values = []
    for (name, width, seed), by_rate in groups.items():
        for at, rates in ((ALL_RATES, RATES), (FEW_RATES, WIDTH_RATES)):
            if all(rate in by_rate for rate in rates) and (at == ALL_RATES or name in DECIDING):
                place = "stability-methods", arm_name(name, width), seed, at, None
                scores = _over_rates([by_rate[rate] for rate in rates])
                values += [Value(*place, score, value) for score, value in scores.items()]
    return values


def _over_rates(cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    initial = cells[0]["initial_loss"]
    scores = {name: sensitivity([cell[loss] for cell in cells], initial) for name, loss in LOSSES.items()}
    for loss in LOSSES.values():
        capped = [_capped(cell[loss], initial) for cell in cells]
        scores |= {f"best_{loss}": min(capped), f"mean_{loss}": sum(capped) / len(capped)}
    return scores


def arm_name(method: str, width: int, rate: float | None = None) -> str:
    """The name of an arm.

    >>> arm_name("plain", 96), arm_name("plain", 64, 1e-2)
    ('plain', 'plain, width 64, rate 0.01')
    """
    named = method if width == WIDTH else f"{method}, width {width}"
    return named if rate is None else f"{named}, rate {rate:g}"


def method_rows(table: Measured, families: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """One row per method, width and set of rates: intervals, and differences to plain, paired by seed.

    ``p`` is that of the difference in sensitivity, corrected for how many there are (Holm), but for the one
    that decides, which stands alone; ``mean_loss_p`` that of the mean loss.
    """
    rows, effects = [], {}
    for at, (method, width) in product((ALL_RATES, FEW_RATES), families):
        arm, plain = arm_name(method, width), arm_name(PLAIN, width)
        scores = {score: table.of(arm, score, at) for score in table.scores(at)}
        if not any(scores.values()):
            continue
        row: dict[str, Any] = {"method": arm, "rates": at, "seeds": len(scores["sensitivity"])}
        row |= {score: interval(values.values()) for score, values in scores.items()}
        if method != PLAIN and table.of(plain, "sensitivity", at):
            compared = {score: compare(table, (arm, plain), score, at=at, label=arm) for score in scores}
            row |= {f"{score}_minus_plain": effect.value for score, effect in compared.items()}
            effects[at, arm] = compared
        rows.append(row)
    others = [place for place in effects if place != (ALL_RATES, SLOWER)]
    p_values = dict(zip(others, correct([effects[place]["sensitivity"] for place in others]), strict=True))
    losses = dict(zip(effects, correct([scores["mean_loss"] for scores in effects.values()]), strict=True))
    for row in rows:
        place = row["rates"], row["method"]
        if place in effects:
            deciding = correct([effects[place]["sensitivity"]])[0]
            row |= {"p": p_values.get(place, deciding).p, "mean_loss_p": losses[place].p}
    return rows


def decision(table: Measured) -> dict[str, Any] | None:
    """The difference that decides, with what it shows; None where it was not run."""
    if not (table.of(SLOWER, "sensitivity", ALL_RATES) and table.of(PLAIN, "sensitivity", ALL_RATES)):
        return None
    [effect] = correct([compare(table, (SLOWER, PLAIN), "sensitivity", at=ALL_RATES, label=SLOWER)])
    verdicts = {"supports": "more sensitive", "against": "less sensitive", "small": "too small to matter"}
    return effect_record(effect) | {"verdict": verdicts.get(effect.corrected, "open")}


def rate_rows(results: Results) -> list[dict[str, Any]]:
    """One row per method, width and rate: losses and entropy over seeds, and the largest logit of all seeds.

    ``capped`` lists the seeds that count as the untrained model: diverged, or no better than it.
    """
    groups: dict[tuple[str, int, float], dict[int, Mapping[str, Any]]] = {}
    for (name, width, rate, seed), result in results.items():
        groups.setdefault((name, width, rate), {})[seed] = result
    rows = []
    for (name, width, rate), by_seed in groups.items():
        cells = list(by_seed.values())
        logits = [cell["largest_logit"] for cell in cells]
        row: dict[str, Any] = {"method": name, "width": width, "rate": rate}
        row |= {loss: interval(cell[loss] for cell in cells) for loss in LOSSES.values()}
        row["largest_logit"] = None if None in logits else max(logits)
        for layer in cells[0]["largest_logit_by_layer"]:
            row[f"entropy_{layer}"] = interval((cell["entropy_by_layer"] or {}).get(layer) for cell in cells)
        capped = [
            seed for seed, cell in by_seed.items() if cell["diverged"] or cell["loss"] >= cell["initial_loss"]
        ]
        rows.append(row | {"null_entropy": cells[0]["null_entropy"], "capped": capped})
    return rows


# --- Drawing ---

# Slower ratios blue, faster ones orange; from the slowest to the fastest, then the other remedies.
_STYLES: dict[str, dict[str, Any]] = {
    f"{RATIO}=0.03": {"color": COLORS[0], "marker": "v", "linestyle": ":"},
    f"{RATIO}=0.1": {"color": COLORS[0], "marker": "v"},
    f"{RATIO}=0.3": {"color": COLORS[5], "marker": "v"},
    PLAIN: {"color": INK, "marker": "o", "linewidth": 2.2, "zorder": 4},
    f"{RATIO}=3": {"color": COLORS[4], "marker": "^"},
    f"{RATIO}=10": {"color": COLORS[1], "marker": "^"},
    QK_NORM: {"color": COLORS[2], "marker": "s"},
    QK_CLIP: {"color": COLORS[1], "marker": "P"},
    PARTNER_NORM: {"color": COLORS[3], "marker": "D"},
}
_NAMES = {QK_NORM: "QK-norm", PARTNER_NORM: "partner norm", PLAIN: "plain (ratio 1)"}


def shown_name(method: str) -> str:
    """A method as figures name it.

    >>> shown_name("qk_ratio=0.1"), shown_name("qk_norm")
    ('ratio 0.1', 'QK-norm')
    """
    return _NAMES.get(method, method.replace(f"{RATIO}=", "ratio "))


def draw(plt: Any, rates: Sequence[Mapping[str, Any]], methods: Sequence[Mapping[str, Any]]) -> Any:
    """Loss, largest logit and entropy against the base rate, ratios and remedies apart; sensitivity below."""
    shown = [row for row in rates if row["width"] == WIDTH]
    named = [name for name in _STYLES if any(row["method"] == name for row in shown)]
    layers = [key for key in shown[0] if key.startswith("entropy_")]
    labels = {"loss": "training loss", "largest_logit": "largest logit"}
    labels |= {key: f"entropy, layer {key.removeprefix('entropy_')}\n(uniform: 1)" for key in layers}
    ratios = [name for name in named if name == PLAIN or METHODS[name].get("method") == RATIO]
    columns = {
        "ratio of the query-key rate": ratios,
        "other remedies": [PLAIN, *(name for name in named if name not in ratios)],
    }
    heights = [1.5, *[1] * (len(labels) - 1), 1.7]
    figure, axes = plt.subplots(
        len(heights), 2, figsize=(8.6, 4.2 + 1.7 * len(labels)), height_ratios=heights, sharey="row"
    )
    for line, (key, label) in zip(axes, labels.items(), strict=False):
        for axis, (title, names) in zip(line, columns.items(), strict=True):
            for name in names:
                _draw_line(axis, [row for row in shown if row["method"] == name], key, name)
            axis.set(xscale="log", yscale="log" if key == "largest_logit" else "linear")
            if key == "largest_logit" and QK_CLIP in names:
                axis.axhline(CLIP_THRESHOLD, color=COLORS[1], linewidth=0.8, linestyle=":")
            if key == "loss":
                axis.set_title(title)
                axis.legend(fontsize=9, ncols=2, loc="upper left", handlelength=1.7, columnspacing=1.2)
        line[0].set_ylabel(label)
        if key in layers:
            line[0].set_ylim(0, 1.06)
    for axis in axes[-2]:
        axis.set_xlabel("base rate")
    bars = {"sensitivity": "loss above the best, mean over rates", "mean_loss": "loss, mean over rates"}
    for axis, (score, label) in zip(axes[-1], bars.items(), strict=True):
        _draw_methods(axis, {row["method"]: row[score] for row in methods if row["rates"] == ALL_RATES})
        axis.set(
            xlabel=label, title="sensitivity to the rate" if axis is axes[-1][0] else "and the loss itself"
        )
    return figure


def _draw_line(axis: Any, rows: Sequence[Mapping[str, Any]], key: str, name: str) -> None:
    style = {"markersize": 4.5, "label": shown_name(name), **_STYLES[name]}
    rates, values = [row["rate"] for row in rows], [row[key] for row in rows]
    if key == "largest_logit":
        axis.plot(rates, values, **style)
        return
    if key.startswith("entropy"):
        scales = [1 / row["null_entropy"] for row in rows]
        pairs = zip(values, scales, strict=True)
        values = [Interval(value.mean * scale, value.half_width * scale, value.n) for value, scale in pairs]
    draw_intervals(axis, rates, values, band=True, **style)


def _draw_methods(axis: Any, scores: Mapping[str, Interval]) -> None:
    """One number per method with its interval, plain as a line."""
    names = [name for name in _STYLES if name in scores]
    for place, name in enumerate(names):
        score, style = scores[name], _STYLES[name]
        error = score.half_width if score.n > 1 else None
        axis.errorbar(score.mean, place, xerr=error, fmt=style["marker"], color=style["color"], capsize=3)
    if PLAIN in scores:
        axis.axvline(scores[PLAIN].mean, color=INK, linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(names)), [shown_name(name) for name in names])
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.locator_params(axis="x", nbins=5)
    axis.grid(axis="y", visible=False)


# --- The experiment ---


def describe(summary: Mapping[str, Any]) -> str:
    """What was run, in a few words."""
    return (
        f"stability: {summary['steps']} steps, {summary['cells']} cells, {summary['seeds']} seeds"
        f" ({summary['exploratory_seeds']} of methods that do not decide)"
    )


def save(
    rates: Sequence[Mapping[str, Any]], methods: Sequence[Mapping[str, Any]], out: Path, about: str
) -> dict[str, dict[str, str]]:
    """Write both tables and the figure; returns their paths."""
    title = "Pretraining with a slower, a bounded and a faster query-key circuit"
    listed = [{**row, "capped": " ".join(map(str, row["capped"]))} for row in rates]
    paths = {}
    for name, caption, rows in (
        ("rates", "Mean and 95% interval over seeds; the largest logit is that of all seeds", listed),
        ("methods", "Mean and 95% interval over seeds; differences paired by seed", list(methods)),
    ):
        columns = [
            {"key": key, "label": key.replace("_", " ")}
            for key in dict.fromkeys(k for row in rows for k in row)
        ]
        caption = f"{caption}. {about}."
        paths[name] = save_table(
            out, f"stability-{name}", title=title, caption=caption, columns=columns, rows=rows
        )
    with plotting() as plt:
        paths["figure"] = save_figure(
            draw(plt, rates, methods),
            out,
            "stability",
            title=title,
            caption="Byte-level decoder of width 96 against its base rate; bands and bars are 95% intervals"
            f" over seeds. Entropy is that of attention, divided by that of uniform attention. {about}.",
            rows=[
                {key: value.mean if isinstance(value, Interval) else value for key, value in row.items()}
                for row in listed
                if row["width"] == WIDTH
            ],
        )
    return paths


def run(
    runner: CellRunner,
    seeds: int,
    exploratory_seeds: int | None,
    methods: list[str] | None,
    widths: list[int] | None,
    steps: int,
) -> dict[str, Any]:
    cells = stability_cells(methods or list(METHODS), widths or WIDTHS, seeds, exploratory_seeds, steps)
    function = "fasterqk_lab.training._pretraining:pretrain"
    results = runner.run(cells, function, title="stability", arm=lambda key: arm_name(*key[:3]))
    runner.add(measured("stability", {(arm_name(*key[:3]), key[3]): results[key] for key in cells}).values)
    table = Measured("stability-methods", method_values(results))
    runner.add(table.values)
    rates = rate_rows(results)
    by_method = method_rows(table, list(dict.fromkeys((name, width) for name, width, *_ in cells)))
    about = {"steps": steps, "cells": len(cells), "seeds": seeds}
    about["exploratory_seeds"] = exploratory_seeds or seeds
    files = save(rates, by_method, runner.out, describe(about))
    return about | {"decides": decision(table), "methods": by_method, "rates": rates, "files": files}


def show(summary: dict[str, Any]) -> None:
    print(describe(summary))
    keys = ("method", "width", "rate", "loss", "validation_loss", "largest_logit", "capped")
    entropies = [key for key in summary["rates"][0] if key.startswith("entropy_")]
    rows = [{key: row[key] for key in (*keys, *entropies, "null_entropy")} for row in summary["rates"]]
    print_table([row | {"capped": len(row["capped"]) or None} for row in rows], title="\nby rate")
    over_rates = ["method", "rates", "sensitivity", "sensitivity_minus_plain", "p"]
    over_rates += ["best_loss", "mean_loss", "mean_loss_minus_plain", "mean_loss_p"]
    print_table(
        [{key: row.get(key) for key in over_rates} for row in summary["methods"]],
        title="\nlearning-rate sensitivity (p: Holm, but for the difference that decides)",
    )
    if decides := summary["decides"]:
        print(f"\n{SLOWER} against plain: {decides['verdict']} (p = {decides['p'] or float('nan'):.3g})")
    print(f"\nfigure: {summary['files']['figure']['png']}")


EXPERIMENT = Experiment(
    name="stability",
    chapter="Stability",
    options=(
        seeds_option(3, "of the methods that decide: plain and qk_ratio=0.1"),
        Option("exploratory_seeds", int, "of all other methods (default: as many)"),
        Option("methods", str, "only these, by commas (default: all)", many=True, metavar="NAME"),
        Option("widths", int, "of plain and qk_ratio=0.1, beside 96 (default: 64,128)", many=True),
        Option("steps", int, "of every training", default=STEPS),
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce stability --out out",
        "fasterqk-lab reproduce stability --methods plain,qk_ratio=0.1 --widths 96 --seeds 1 --steps 40",
        "fasterqk-lab reproduce stability --cells lab/paper/cells/stability.jsonl.xz",
    ),
    needs_data=True,
)
