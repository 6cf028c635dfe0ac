"""Figure 3: the output-value circuit under fixed attention, its loss and the incentive to attend more."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.console import print_table
from fasterqk.errors import InputError
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.figures import COLORS, plotting, save_figure
from fasterqk_lab.synthetic import FIXED_CIRCUITS, FixedAttentionCell

ALPHAS = (0.2, 0.4, 0.6, 0.8, 1.0)
CIRCUITS = FIXED_CIRCUITS
# The published curves were made with biases, the paper's model has none.
PROTOCOLS = {"published": (True,), "no-biases": (False,), "both": (True, False)}
OLD_NAMES = {"released": "published", "paper": "no-biases"}
# Two cells, one per worker: a factorized curve takes half as long again as a collapsed one.
_CELLS = (
    (*product(CIRCUITS[:1], ALPHAS[:3]), *product(CIRCUITS[1:], ALPHAS[3:])),
    (*product(CIRCUITS[:1], ALPHAS[3:]), *product(CIRCUITS[1:], ALPHAS[:3])),
)
_FADED = 0.2


@dataclass(frozen=True)
class Curve:
    """One run (or the mean of several seeds); one value at the start and one after each epoch."""

    circuit: str
    bias: bool
    alpha: float
    loss: np.ndarray
    incentive: np.ndarray
    diverged: bool

    @property
    def setting(self) -> dict[str, Any]:
        """What tells it from the other curves."""
        return {"circuit": self.circuit, "bias": self.bias, "alpha": self.alpha}

    @property
    def peak(self) -> dict[str, Any]:
        """Where the incentive is largest."""
        epoch = int(np.argmax(self.incentive))
        return {"incentive": float(self.incentive[epoch]), "epoch": epoch}

    def summary(self) -> dict[str, Any]:
        """The curve and what is read off it, as plain data."""
        after_peak = self.incentive[self.peak["epoch"] :]
        faded = np.flatnonzero(after_peak < _FADED)
        return {
            **self.setting,
            "final_loss": float(self.loss[-1]),
            "peak": self.peak,
            "lowest": {"incentive": float(self.incentive.min()), "epoch": int(np.argmin(self.incentive))},
            "fades_below_0.2": int(self.peak["epoch"] + faded[0]) if faded.size else None,
            "diverged": self.diverged,
            "loss": self.loss,
            "incentive": self.incentive,
        }


@dataclass(frozen=True)
class Fig3:
    """All curves of the figure."""

    protocol: str
    curves: list[Curve]
    seeds: int

    def rows(self) -> Iterator[dict[str, Any]]:
        """The tidy table behind the figure."""
        for curve in self.curves:
            for epoch, (loss, incentive) in enumerate(zip(curve.loss, curve.incentive, strict=True)):
                yield curve.setting | {"epoch": epoch, "loss": loss, "incentive": incentive}


def compute(runner: CellRunner, protocol: str, *, seeds: int = 1, epochs: int = 500) -> Fig3:
    """Train what is not stored yet."""
    protocol = OLD_NAMES.get(protocol, protocol)
    if protocol not in PROTOCOLS:
        raise InputError(f"unknown protocol {protocol!r}; choose from {', '.join(PROTOCOLS)}")
    cells = {
        (f"{'with' if bias else 'without'} biases, part {part}", seed): FixedAttentionCell(
            curves, bias=bias, seed=seed, epochs=epochs
        )
        for bias in PROTOCOLS[protocol]
        for seed in range(seeds)
        for part, curves in enumerate(_CELLS, 1)
    }
    results = runner.run(
        cells,
        "fasterqk_lab.synthetic._fixed:train_fixed",
        title=f"fig3, protocol {protocol}",
        protocol=protocol,
    )
    found = {
        (curve["circuit"], cell.bias, cell.seed, curve["alpha"]): curve
        for key, cell in cells.items()
        for curve in results[key]["curves"]
    }
    curves = [
        _mean([found[circuit, bias, seed, alpha] for seed in range(seeds)], circuit, bias, alpha)
        for bias in PROTOCOLS[protocol]
        for circuit in CIRCUITS
        for alpha in ALPHAS
    ]
    return Fig3(protocol, curves, seeds)


def _mean(results: list[dict[str, Any]], circuit: str, bias: bool, alpha: float) -> Curve:
    loss = np.mean([np.array(result["loss"], dtype=float) for result in results], axis=0)
    incentive = np.mean([np.array(result["incentive"], dtype=float) for result in results], axis=0)
    return Curve(circuit, bias, alpha, loss, incentive, any(result["diverged"] for result in results))


_VALUES = {"loss": "loss (held out)", "incentive": r"incentive $[L(\alpha)-L(\alpha+\delta)]/\delta$"}


def write_fig3(data: Fig3, out: Path) -> dict[str, str]:
    """Draw and save the figure under ``out/figures``; returns the paths by suffix."""
    biases = {True: "with biases, as published", False: "without biases, as in the paper's model"}
    which = " and ".join(biases[bias] for bias in dict.fromkeys(curve.bias for curve in data.curves))
    with plotting() as plt:
        return save_figure(
            draw_fig3(plt, data),
            out,
            "fig3" if data.protocol == "published" else f"fig3-{data.protocol}",
            title="Figure 3: the output-value circuit under fixed attention",
            caption=f"Attention mass α on the distinct tokens is held fixed; linear layers {which}. Both"
            " losses of an incentive (δ = 0.005) are taken on the same 5,120 held-out sequences; for α = 1"
            f" the shares are continued linearly. {data.seeds} seed{'s' if data.seeds > 1 else ''}.",
            rows=data.rows(),
            see="Each line holds attention fixed at one share: compare the loss (a, b) with how much a little"
            " more attention would lower it (c, d).",
        )


def draw_fig3(plt: Any, data: Fig3) -> Any:
    """Losses and incentives, a row with biases and one without."""
    biases = list(dict.fromkeys(curve.bias for curve in data.curves))
    figure, axes = plt.subplots(
        len(biases), 4, figsize=(11.5, 2.9 * len(biases)), sharex=True, sharey="col", squeeze=False
    )
    letters = iter("abcdefgh")
    for row, bias in zip(axes, biases, strict=True):
        for place, (value, circuit) in enumerate((v, c) for v in _VALUES for c in CIRCUITS):
            axis = row[place]
            for alpha, color in zip(ALPHAS, COLORS, strict=False):
                curve = next(
                    one for one in data.curves if (one.circuit, one.bias, one.alpha) == (circuit, bias, alpha)
                )
                values = getattr(curve, value)
                axis.plot(np.arange(len(values)), values, color=color, label=f"{alpha:g}")
            kind = "" if bias else ", no biases"
            axis.set(title=f"({next(letters)}) {circuit}{kind}", ylabel=_VALUES[value])
            if value == "incentive":
                axis.axhline(0, color="0.4", linewidth=0.8)
    for axis in axes[-1]:
        axis.set_xlabel("epoch")
    axes[0, 0].legend(title=r"attention $\alpha$", loc="upper right")
    for axis in axes[:, :2].flat:
        axis.set_ylim(bottom=0)
    return figure


def run(runner: CellRunner, protocol: str, seeds: int, epochs: int) -> dict[str, Any]:
    data = compute(runner, protocol, seeds=seeds, epochs=epochs)
    return {
        "protocol": data.protocol,
        "curves": [curve.summary() for curve in data.curves],
        "files": write_fig3(data, runner.out),
    }


def show(summary: dict[str, Any]) -> None:
    rows = [
        {key: curve[key] for key in ("circuit", "bias", "alpha", "final_loss")}
        | {"peak incentive": curve["peak"]["incentive"], "at epoch": curve["peak"]["epoch"]}
        | {"lowest": curve["lowest"]["incentive"], "below 0.2 from": curve["fades_below_0.2"]}
        for curve in summary["curves"]
    ]
    print_table(rows, title="figure 3, attention held fixed:")
    print(f"\nfigure: {summary['files']['png']}")


EXPERIMENT = Experiment(
    name="fig3",
    chapter="Figure 3",
    options=(
        Option(
            "protocol",
            str,
            "which settings",
            default="published",
            choices=tuple(PROTOCOLS),
            old_names=OLD_NAMES,
        ),
        seeds_option(1),
        Option("epochs", int, "of 250 batches", default=500),
    ),
    run=run,
    show=show,
    examples=("fasterqk-lab reproduce fig3 --out out", "fasterqk-lab reproduce fig3 --protocol both --json"),
    details="Protocol published (default): linear layers with biases, which made the published curves; "
    "no-biases: without, as in the paper's model; both: a row of each.",
)
