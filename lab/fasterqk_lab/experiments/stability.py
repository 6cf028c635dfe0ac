"""Stability: pretraining with a slower, a bounded and a faster query-key circuit.

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
from pathlib import Path
from typing import Any

from fasterqk.attention.statistics import Interval, interval
from fasterqk_lab.compare import Effect, Measured, Value, compare_arms, correct, measured
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option
from fasterqk_lab.figures import (
    COLORS,
    INK,
    Line,
    Panel,
    effect_record,
    effect_table,
    save_forest,
    save_panels,
    save_table,
)
from fasterqk_lab.training._config import PARTNER_NORM, PLAIN, QK_CLIP, QK_NORM, QK_VO, RATIO, PretrainingCell

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
RATIOS = (0.03, 0.1, 0.3, 3.0, 10.0)
# Queries and keys against values and outputs, everything else held.
QK_VO_RATIOS, QK_VO_RATES = (0.5, 2.0, 4.0), (1e-3, 3e-3)
# Every method with its settings, as ``--methods`` names it.
METHODS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    **{name: {"method": name} for name in (QK_NORM, QK_CLIP, PARTNER_NORM)},
    **{f"{RATIO}={ratio:g}": {"method": RATIO, "qk_ratio": ratio} for ratio in RATIOS},
    **{f"{QK_VO}={ratio:g}": {"method": QK_VO, "qk_ratio": ratio} for ratio in QK_VO_RATIOS},
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
    methods: Sequence[str] = tuple(METHODS), seeds: int = 3, steps: int = STEPS
) -> dict[Key, PretrainingCell]:
    """All cells: first those that decide, then one seed after the other, then the other widths.

    >>> cells = stability_cells()
    >>> len(cells), next(iter(cells))
    (189, ('qk_ratio=0.1', 96, 0.001, 0))
    """
    deciding = [name for name in DECIDING if name in methods]
    against = [name for name in methods if METHODS[name].get("method") == QK_VO]
    others = [name for name in methods if name not in (*DECIDING, *against)]
    groups: list[tuple[list[str], int, tuple[float, ...]]] = [
        (deciding, WIDTH, RATES),
        (others, WIDTH, RATES),
        (against, WIDTH, QK_VO_RATES),
    ]
    groups += [(deciding, width, WIDTH_RATES) for width in WIDTHS]
    return {
        (name, width, rate, seed): PretrainingCell(
            **METHODS[name], lr=rate, width=width, steps=steps, seed=seed
        )
        for names, width, rates in groups
        for seed in range(seeds)
        for name in names
        for rate in rates
    }


# --- Scores and effects ---


def sensitivity(losses: Sequence[float | None], initial: float) -> float:
    """The mean over rates of the loss above the best; a loss counts as ``initial`` at most, and if missing.

    >>> round(sensitivity([2.5, 2.4, 2.6], 5.5), 4), round(sensitivity([2.5, 2.4, None], 5.5), 4)
    (0.1, 1.0667)
    """
    capped = [_capped(loss, initial) for loss in losses]
    return sum(capped) / len(capped) - min(capped)


def _capped(loss: float | None, initial: float) -> float:
    return initial if loss is None else min(loss, initial)


def over_rates(results: Results) -> Measured:
    """Scores over all rates of a method, one per method, width, seed and score; plain is the baseline.

    Widths are compared over the rates that all of them have, so the methods that have several widths also
    have values of these rates alone.
    """
    groups: dict[tuple[str, int, int], dict[float, Mapping[str, Any]]] = {}
    for (name, width, rate, seed), result in results.items():
        groups.setdefault((name, width, seed), {})[rate] = result
    values, plain = [], {}
    for (name, width, seed), by_rate in groups.items():
        plain[arm_name(name, width)] = arm_name(PLAIN, width)
        for at, rates in ((ALL_RATES, RATES), (FEW_RATES, WIDTH_RATES)):
            if all(rate in by_rate for rate in rates) and (at == ALL_RATES or name in DECIDING):
                place = "stability-methods", arm_name(name, width), seed, at, None
                scores = _scores_of([by_rate[rate] for rate in rates])
                values += [Value(*place, score, value) for score, value in scores.items()]
    return Measured("stability-methods", values, baselines=plain)


def _scores_of(cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
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


def method_effects(table: Measured) -> tuple[list[Effect], list[Effect]]:
    """Methods minus plain at the same width and rates: the one that decides, and all others.

    The others, in sensitivity and in mean loss, are corrected for how many they are of their kind (Holm).
    """
    sensitivities, losses = (
        [effect for at in (ALL_RATES, FEW_RATES) for effect in compare_arms(table, {score: at})]
        for score in ("sensitivity", "mean_loss")
    )
    place = SLOWER, ALL_RATES
    deciding = [effect for effect in sensitivities if (effect.label, effect.at) == place]
    others = [effect for effect in sensitivities if (effect.label, effect.at) != place]
    return correct(deciding), [*correct(others), *correct(losses)]


def rate_rows(results: Results) -> list[dict[str, Any]]:
    """One row per method, width and rate: losses and entropy over seeds, and the largest logit of all seeds.

    ``capped`` names the seeds that count as the untrained model: diverged, or no better than it.
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
        capped = " ".join(
            str(seed)
            for seed, cell in by_seed.items()
            if cell["diverged"] or cell["loss"] >= cell["initial_loss"]
        )
        rows.append(row | {"null_entropy": cells[0]["null_entropy"], "capped": capped})
    return rows


# --- Drawing ---

# Slower ratios blue, faster ones orange; from the slowest to the fastest, then the other remedies.
_STYLES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{RATIO}=0.03": ("ratio 0.03", {"color": COLORS[0], "marker": "v", "linestyle": ":"}),
    f"{RATIO}=0.1": ("ratio 0.1", {"color": COLORS[0], "marker": "v"}),
    f"{RATIO}=0.3": ("ratio 0.3", {"color": COLORS[5], "marker": "v"}),
    PLAIN: ("plain (ratio 1)", {"color": INK, "marker": "o", "linewidth": 2.2, "zorder": 4}),
    f"{RATIO}=3": ("ratio 3", {"color": COLORS[4], "marker": "^"}),
    f"{RATIO}=10": ("ratio 10", {"color": COLORS[1], "marker": "^"}),
    QK_NORM: ("QK-norm", {"color": COLORS[2], "marker": "s"}),
    QK_CLIP: ("qk_clip", {"color": COLORS[1], "marker": "P"}),
    PARTNER_NORM: ("partner norm", {"color": COLORS[3], "marker": "D"}),
    f"{QK_VO}=0.5": ("QK to VO 0.5", {"color": COLORS[0], "marker": "<"}),
    f"{QK_VO}=2": ("QK to VO 2", {"color": COLORS[4], "marker": ">"}),
    f"{QK_VO}=4": ("QK to VO 4", {"color": COLORS[4], "marker": ">", "linestyle": ":"}),
}


def panels(rates: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Loss, largest logit and entropy of every layer against the base rate, ratios and remedies apart."""
    shown = [row for row in rates if row["width"] == WIDTH]
    named = [name for name in _STYLES if any(row["method"] == name for row in shown)]
    layers = [key for key in shown[0] if key.startswith("entropy_")]
    labels = {"loss": "training loss", "largest_logit": "largest logit"}
    labels |= {key: f"entropy, layer {key.removeprefix('entropy_')} (uniform: 1)" for key in layers}
    ratios = [name for name in named if name == PLAIN or METHODS[name].get("method") == RATIO]
    columns = {
        "ratio of the query-key rate": ratios,
        "other remedies": [PLAIN, *(name for name in named if name not in ratios)],
    }
    return [
        Panel(
            title if key == "loss" else "",
            ("base rate", label),
            [_line(name, key, [row for row in shown if row["method"] == name]) for name in names],
            log="xy" if key == "largest_logit" else "x",
            limits=(0, 1.06) if key in layers else (None, None),
            null=PretrainingCell.CLIP_THRESHOLD if key == "largest_logit" and QK_CLIP in names else None,
            legend={"ncols": 2, "loc": "upper left"} if key == "loss" else None,
        )
        for key, label in labels.items()
        for title, names in columns.items()
    ]


def _line(name: str, key: str, rows: Sequence[Mapping[str, Any]]) -> Line:
    label, style = _STYLES[name]
    values = [row[key] for row in rows]
    if key.startswith("entropy"):
        scales = [1 / row["null_entropy"] for row in rows]
        pairs = zip(values, scales, strict=True)
        values = [Interval(value.mean * scale, value.half_width * scale, value.n) for value, scale in pairs]
    return Line(label, [row["rate"] for row in rows], values, {"band": True, **style})


def save(
    rates: Sequence[Mapping[str, Any]], effects: Sequence[Effect], out: Path, about: str
) -> dict[str, dict[str, str]]:
    """Write both tables and both figures; returns their paths."""
    title = "Pretraining with a slower, a bounded and a faster query-key circuit"
    shared: dict[str, Any] = {"title": title}
    shared["caption"] = f"Mean and 95% interval over seeds, differences paired by seed. {about}."
    width = [effect for effect in effects if effect.at == ALL_RATES]
    scores = {"sensitivity": "loss above the best, mean over rates", "mean_loss": "loss, mean over rates"}
    names = {name: label for name, (label, _) in _STYLES.items()}
    see = "Ring: plain. Dot: the method, over all base rates."
    paths = {
        "rates": save_table(out, "stability-rates", rows=rates, **shared),
        "methods": effect_table(effects, out, "stability-methods", **shared),
        "sensitivity": save_forest(width, scores, out, "stability-methods", names=names, see=see, **shared),
    }
    paths["figure"] = save_panels(
        panels(rates),
        out,
        "stability",
        title=title,
        caption="Byte-level decoder of width 96 against its base rate; bands are 95% intervals over seeds."
        f" Entropy is that of attention, divided by that of uniform attention. {about}.",
        columns=2,
        size=(4.3, 2.6),
        share=True,
        rows=[row for row in rates if row["width"] == WIDTH],
    )
    return paths


def run(
    runner: CellRunner, seeds: int = 3, methods: Sequence[str] = tuple(METHODS), steps: int = STEPS
) -> dict[str, Any]:
    cells = stability_cells(methods, seeds, steps)
    named = {(arm_name(*key[:3]), key[3]): cell for key, cell in cells.items()}
    done = runner.run(named, "fasterqk_lab.training._pretraining:pretrain", title="stability")
    results = dict(zip(cells, done.values(), strict=True))
    table = over_rates(results)
    runner.add([*measured("stability", done).values, *table.values])
    rates = rate_rows(results)
    deciding, others = method_effects(table)
    about = {"steps": steps, "cells": len(cells), "seeds": seeds}
    setting = ", ".join(f"{count} {what}" for what, count in about.items())
    return about | {
        "by_rate": rates,
        "minus_plain_what_decides": [effect_record(effect) for effect in deciding],
        "minus_plain_exploratory": [effect_record(effect) for effect in others],
        "files": save(rates, [*deciding, *others], runner.out, setting),
    }


EXPERIMENT = Experiment(
    "stability",
    run,
    (
        Option("methods", str, "only these (default: all)", choices=tuple(METHODS), many=True),
        Option("steps", int, "of every training"),
    ),
    examples=(
        "--methods plain,qk_ratio=0.1 --seeds 1 --steps 40",
        "--cells lab/paper/cells/stability.jsonl.xz",
    ),
    needs_data=True,
)
