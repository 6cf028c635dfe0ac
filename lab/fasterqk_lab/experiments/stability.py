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
from typing import Any

from fasterqk.attention import Interval, holm, interval, paired_difference
from fasterqk.console import print_table
from fasterqk.errors import InputError
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.figures import COLORS, INK, plotting, save_figure, save_table
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


def method_values(results: Results) -> list[dict[str, Any]]:
    """Numbers over all rates of a method, one row per method, width, seed and score, as per-seed files have.

    Widths are compared over the rates that all of them have, so the methods that have several widths also
    have rows of these rates alone.
    """
    groups: dict[tuple[str, int, int], dict[float, Mapping[str, Any]]] = {}
    for (name, width, rate, seed), result in results.items():
        groups.setdefault((name, width, seed), {})[rate] = result
    rows = []
    for (name, width, seed), by_rate in groups.items():
        for rates in (RATES, WIDTH_RATES) if name in DECIDING else (RATES,):
            if all(rate in by_rate for rate in rates):
                own = [by_rate[rate] for rate in rates]
                about = {"arm": arm_name(name, width), "seed": seed, "at": f"{len(rates)} rates"}
                rows += [about | {"score": score, "value": value} for score, value in _over_rates(own)]
    return rows


def _over_rates(own: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    initial = own[0]["initial_loss"]
    found = [(name, sensitivity([one[loss] for one in own], initial)) for name, loss in LOSSES.items()]
    for loss in LOSSES.values():
        capped = [_capped(one[loss], initial) for one in own]
        found += [(f"best_{loss}", min(capped)), (f"mean_{loss}", sum(capped) / len(capped))]
    return found


def arm_name(method: str, width: int, rate: float | None = None) -> str:
    """The name of an arm.

    >>> arm_name("plain", 96), arm_name("plain", 64, 1e-2)
    ('plain', 'plain, width 64, rate 0.01')
    """
    named = method if width == WIDTH else f"{method}, width {width}"
    return named if rate is None else f"{named}, rate {rate:g}"


def summarize_methods(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per method and set of rates: intervals, paired differences to plain, and their p-values.

    ``p`` is corrected by Holm over all rows that are compared with plain, but for the difference that
    decides, whose p-value is its own; ``mean_loss_p`` is that of the mean loss, over all of them.
    """
    values: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for row in rows:
        values.setdefault((row["at"], row["arm"]), {}).setdefault(row["score"], {})[row["seed"]] = row[
            "value"
        ]
    found, differences, of_losses = [], {}, {}
    for (at, arm), scores in values.items():
        method, _, width = arm.partition(",")
        row = {"method": arm, "rates": at, "seeds": len(scores["sensitivity"])}
        row |= {score: interval(seeds.values()) for score, seeds in scores.items()}
        base = values.get((at, f"{PLAIN},{width}" if width else PLAIN))
        if base is not None and method != PLAIN:
            for score in scores:
                shared = [seed for seed in scores[score] if seed in base[score]]
                row[f"{score}_minus_plain"] = paired_difference(
                    [scores[score][seed] for seed in shared], [base[score][seed] for seed in shared]
                )
            differences[at, arm] = row["sensitivity_minus_plain"]
            of_losses[at, arm] = row["mean_loss_minus_plain"]
        found.append(row)
    decides = (f"{len(RATES)} rates", SLOWER)
    corrected = holm({name: one for name, one in differences.items() if name != decides})
    if decides in differences:
        corrected[decides] = differences[decides].p_value
    losses = holm(of_losses)
    for row in found:
        name = row["rates"], row["method"]
        row |= {"p": corrected.get(name), "mean_loss_p": losses.get(name)}
    return found


def summarize_rates(results: Results) -> list[dict[str, Any]]:
    """One row per method, width and rate: losses and entropy over seeds, and the largest logit of all seeds.

    ``capped`` lists the seeds that count as the untrained model: diverged, or no better than it.
    """
    groups: dict[tuple[str, int, float], dict[int, Mapping[str, Any]]] = {}
    for (name, width, rate, seed), result in results.items():
        groups.setdefault((name, width, rate), {})[seed] = result
    rows = []
    for (name, width, rate), seeds in groups.items():
        own = list(seeds.values())
        logits = [one["largest_logit"] for one in own]
        row: dict[str, Any] = {"method": name, "width": width, "rate": rate}
        row |= {loss: interval(one[loss] for one in own) for loss in LOSSES.values()}
        row["largest_logit"] = None if None in logits else max(logits)
        for layer in own[0]["largest_logit_by_layer"]:
            row[f"entropy_{layer}"] = interval((one["entropy_by_layer"] or {}).get(layer) for one in own)
        row |= {"null_entropy": own[0]["null_entropy"], "capped": [s for s in seeds if _is_capped(seeds[s])]}
        rows.append(row)
    return rows


def _is_capped(result: Mapping[str, Any]) -> bool:
    return bool(result["diverged"]) or result["loss"] >= result["initial_loss"]


def decision(methods: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The difference that decides, with its verdict; None where it was not run."""
    for row in methods:
        if (row["method"], row["rates"]) == (SLOWER, f"{len(RATES)} rates"):
            difference: Interval | None = row.get("sensitivity_minus_plain")
            if difference is None:
                return None
            if not difference.half_width < abs(difference.mean):  # nan for one seed
                verdict = "not settled: the interval has zero in it"
            else:
                verdict = "less sensitive" if difference.mean < 0 else "more sensitive"
            return {"difference": difference, "p": difference.p_value, "verdict": verdict}
    return None


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
    own = [row for row in rates if row["width"] == WIDTH]
    layers = [key for key in own[0] if key.startswith("entropy_")]
    quantities = [("loss", "training loss"), ("largest_logit", "largest logit")]
    quantities += [(key, f"entropy, layer {key.removeprefix('entropy_')}\n(uniform: 1)") for key in layers]
    figure = plt.figure(figsize=(8.6, 4.2 + 1.7 * len(quantities)))
    grid = figure.add_gridspec(1 + len(quantities), 2, height_ratios=[1.5, *[1] * (len(quantities) - 1), 1.7])
    named = {row["method"] for row in own}
    columns = {
        "ratio of the query-key rate": [name for name in _STYLES if name in named and _is_ratio(name)],
        "other remedies": [name for name in _STYLES if name in named and not _is_ratio(name)],
    }
    for line, (key, label) in enumerate(quantities):
        left = None
        for column, (title, chosen) in enumerate(columns.items()):
            axis = figure.add_subplot(grid[line, column], sharey=left)
            last = line == len(quantities) - 1
            axis.tick_params(labelbottom=last, labelleft=left is None)
            axis.set(xscale="log", ylabel="" if left else label, xlabel="base rate" if last else "")
            if key == "largest_logit":
                axis.set_yscale("log")
            for name in chosen if PLAIN in chosen else (PLAIN, *chosen):
                _draw_line(axis, [row for row in own if row["method"] == name], key, name)
            if line == 0:
                axis.set_title(title)
                if axis.lines:
                    axis.legend(fontsize=9, ncols=2, loc="upper left", handlelength=1.7, columnspacing=1.2)
            if key in layers:
                axis.set_ylim(0, 1.06)
            if key == "largest_logit" and QK_CLIP in chosen:
                axis.axhline(CLIP_THRESHOLD, color=COLORS[1], linewidth=0.8, linestyle=":")
            left = axis
    left = None
    for column, (key, label) in enumerate(
        {"sensitivity": "loss above the best, mean over rates", "mean_loss": "loss, mean over rates"}.items()
    ):
        axis = figure.add_subplot(grid[-1, column], sharey=left)
        _draw_methods(axis, methods, key)
        axis.set(xlabel=label, title="sensitivity to the rate" if column == 0 else "and the loss itself")
        axis.tick_params(labelleft=left is None)
        left = axis
    return figure


def _is_ratio(name: str) -> bool:
    return name == PLAIN or name.startswith(RATIO)


def _draw_line(axis: Any, rows: Sequence[Mapping[str, Any]], key: str, name: str) -> None:
    if not rows:
        return
    scale = 1 / rows[0]["null_entropy"] if key.startswith("entropy") else 1.0
    values = [row[key] for row in rows]
    middle = [_mean(value) for value in values]
    across = [row["rate"] for row in rows]
    style = {"markersize": 4.5, "label": shown_name(name), **_STYLES[name]}
    axis.plot(across, [None if value is None else scale * value for value in middle], **style)
    if all(isinstance(value, Interval) and value.n > 1 for value in values):
        low, high = ([scale * getattr(value, end) for value in values] for end in ("low", "high"))
        axis.fill_between(across, low, high, color=style["color"], alpha=0.13, linewidth=0)


def _mean(value: Any) -> float | None:
    return value.mean if isinstance(value, Interval) else value


def _draw_methods(axis: Any, methods: Sequence[Mapping[str, Any]], key: str) -> None:
    """One number per method with its interval, plain as a line."""
    own = {row["method"]: row[key] for row in methods if row["rates"] == f"{len(RATES)} rates"}
    names = [name for name in _STYLES if name in own]
    for place, name in enumerate(names):
        found, style = own[name], _STYLES[name]
        error = found.half_width if found.n > 1 else None
        axis.errorbar(found.mean, place, xerr=error, fmt=style["marker"], color=style["color"], capsize=3)
    if PLAIN in own:
        axis.axvline(own[PLAIN].mean, color=INK, linewidth=0.8, linestyle=":")
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
    rates: Sequence[Mapping[str, Any]], methods: Sequence[Mapping[str, Any]], runner: CellRunner, about: str
) -> dict[str, dict[str, str]]:
    """Write both tables and the figure; returns their paths."""
    title = "Pretraining with a slower, a bounded and a faster query-key circuit"
    shown = [{**row, "capped": " ".join(map(str, row["capped"]))} for row in rates]
    tables: dict[str, list[Mapping[str, Any]]] = {"rates": list(shown), "methods": list(methods)}
    captions = {
        "rates": "Mean and 95% interval over seeds; the largest logit is that of all seeds",
        "methods": "Learning-rate sensitivity, mean and 95% interval over seeds; differences paired by seed",
    }
    paths = {
        name: save_table(
            runner.out,
            f"stability-{name}",
            title=title,
            caption=f"{captions[name]}. {about}.",
            columns=[{"key": key, "label": key.replace("_", " ")} for key in _columns(own)],
            rows=own,
        )
        for name, own in tables.items()
    }
    points = [
        {key: _mean(value) for key, value in row.items() if key != "capped"}
        for row in rates
        if row["width"] == WIDTH
    ]
    with plotting() as plt:
        paths["figure"] = save_figure(
            draw(plt, rates, methods),
            runner.out,
            "stability",
            title=title,
            caption="Byte-level decoder of width 96 against its base rate; bands and bars are 95% intervals"
            f" over seeds. Entropy is that of attention, divided by that of uniform attention. {about}.",
            rows=points,
        )
    return paths


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def run(
    runner: CellRunner,
    seeds: int,
    exploratory_seeds: int | None,
    methods: list[str] | None,
    widths: list[int] | None,
    steps: int,
) -> dict[str, Any]:
    chosen = methods or list(METHODS)
    cells = stability_cells(chosen, widths or WIDTHS, seeds, exploratory_seeds, steps)
    results = runner.run(
        cells,
        "fasterqk_lab.training._pretraining:pretrain",
        title="stability",
        arm=lambda key: arm_name(*key[:3]),
    )
    per_seed = method_values(results)
    rates, by_method = summarize_rates(results), summarize_methods(per_seed)
    about = {
        "steps": steps,
        "cells": len(cells),
        "seeds": seeds,
        "exploratory_seeds": exploratory_seeds or seeds,
    }
    files = save(rates, by_method, runner, describe(about))
    runner.add_per_seed(per_seed, table="stability-methods")
    found = {"decides": decision(by_method), "methods": by_method, "rates": rates, "files": files}
    return about | found


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
    found = summary["decides"]
    if found:
        print(f"\n{SLOWER} against plain: {found['verdict']} (p = {found['p'] or float('nan'):.3g})")
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
