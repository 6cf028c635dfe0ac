"""Figure 3: the output-value circuit under fixed attention, its loss and the incentive to attend more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.console import print_table
from fasterqk.errors import InputError
from fasterqk_lab.compare import END, Value
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
FADED = 0.2
_LABELS = {"loss": "loss (held out)", "incentive": r"incentive $[L(\alpha)-L(\alpha+\delta)]/\delta$"}


@dataclass(frozen=True)
class Curve:
    """One run (or the mean of several seeds); one value at the start and one after each epoch."""

    circuit: str
    bias: bool
    alpha: float
    loss: np.ndarray
    incentive: np.ndarray
    diverged: bool = False

    @property
    def setting(self) -> dict[str, Any]:
        """What tells it from the other curves."""
        return {"circuit": self.circuit, "bias": self.bias, "alpha": self.alpha}

    @property
    def arm(self) -> str:
        """Its name in the table of results."""
        return f"{self.circuit}, {'bias' if self.bias else 'no bias'}, attention {self.alpha:g}"

    def scores(self) -> dict[str, float]:
        """What is read off the curve; ``below_0.2_from`` is missing where the incentive does not fade."""
        peak, lowest = int(np.argmax(self.incentive)), int(np.argmin(self.incentive))
        faded = np.flatnonzero(self.incentive[peak:] < FADED)
        scores = {
            "loss": float(self.loss[-1]),
            "peak_incentive": float(self.incentive[peak]),
            "peak_epoch": peak,
            "lowest_incentive": float(self.incentive[lowest]),
            "lowest_epoch": lowest,
        }
        return scores | ({f"below_{FADED:g}_from": int(peak + faded[0])} if faded.size else {})


def compute(runner: CellRunner, protocol: str, *, seeds: int = 1, epochs: int = 500) -> list[Curve]:
    """Train what is not stored yet; returns the means over seeds, all seeds go to the table of results."""
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
    function, title = "fasterqk_lab.synthetic._fixed:train_fixed", f"fig3, protocol {protocol}"
    results = runner.run(cells, function, title=title, protocol=protocol)
    of_seeds: dict[tuple[bool, str, float], list[Curve]] = {}
    for key, cell in cells.items():
        for curve in results[key]["curves"]:
            own = _curve(cell.bias, curve)
            of_seeds.setdefault((own.bias, own.circuit, own.alpha), []).append(own)
            if not own.diverged:
                runner.add(
                    Value("fig3", own.arm, cell.seed, END, None, *score) for score in own.scores().items()
                )
    return [_mean(of_seeds[key]) for key in product(PROTOCOLS[protocol], CIRCUITS, ALPHAS)]


def _curve(bias: bool, curve: Mapping[str, Any]) -> Curve:
    loss, incentive = (np.array(curve[name], dtype=float) for name in ("loss", "incentive"))
    return Curve(curve["circuit"], bias, curve["alpha"], loss, incentive, curve["diverged"])


def _mean(curves: Sequence[Curve]) -> Curve:
    loss, incentive = (np.mean([getattr(curve, name) for curve in curves], axis=0) for name in _LABELS)
    return Curve(
        **curves[0].setting, loss=loss, incentive=incentive, diverged=any(c.diverged for c in curves)
    )


def save(curves: Sequence[Curve], protocol: str, seeds: int, out: Path) -> dict[str, str]:
    """Draw and save the figure under ``out/figures``; returns the paths by suffix."""
    biases = {True: "with biases, as published", False: "without biases, as in the paper's model"}
    which = " and ".join(biases[bias] for bias in PROTOCOLS[protocol])
    with plotting() as plt:
        return save_figure(
            draw(plt, curves),
            out,
            "fig3" if protocol == "published" else f"fig3-{protocol}",
            title="Figure 3: the output-value circuit under fixed attention",
            caption=f"Attention mass α on the distinct tokens is held fixed; linear layers {which}. Both"
            " losses of an incentive (δ = 0.005) are taken on the same 5,120 held-out sequences; for α = 1"
            f" the shares are continued linearly. {seeds} seed{'s' if seeds > 1 else ''}.",
            rows=[
                curve.setting | {"epoch": epoch, "loss": loss, "incentive": incentive}
                for curve in curves
                for epoch, (loss, incentive) in enumerate(zip(curve.loss, curve.incentive, strict=True))
            ],
            see="Each line holds attention fixed at one share: compare the loss (a, b) with how much a little"
            " more attention would lower it (c, d).",
        )


def draw(plt: Any, curves: Sequence[Curve]) -> Any:
    """Losses and incentives, a row with biases and one without."""
    biases = list(dict.fromkeys(curve.bias for curve in curves))
    size = (11.5, 2.9 * len(biases))
    figure, axes = plt.subplots(len(biases), 4, figsize=size, sharex=True, sharey="col", squeeze=False)
    places = product(biases, _LABELS, CIRCUITS)
    for axis, letter, (bias, value, circuit) in zip(axes.flat, "abcdefgh", places, strict=False):
        own = [curve for curve in curves if (curve.circuit, curve.bias) == (circuit, bias)]
        for curve, color in zip(own, COLORS, strict=False):
            axis.plot(getattr(curve, value), color=color, label=f"{curve.alpha:g}")
        axis.set(title=f"({letter}) {circuit}{'' if bias else ', no biases'}", ylabel=_LABELS[value])
        if value == "incentive":
            axis.axhline(0, color="0.4", linewidth=0.8)
        else:
            axis.set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("epoch")
    axes[0, 0].legend(title=r"attention $\alpha$", loc="upper right")
    return figure


def run(runner: CellRunner, protocol: str, seeds: int, epochs: int) -> dict[str, Any]:
    curves = compute(runner, protocol, seeds=seeds, epochs=epochs)
    return {
        "protocol": protocol,
        "curves": [
            curve.setting
            | {"scores": curve.scores(), "diverged": curve.diverged}
            | {"loss": curve.loss, "incentive": curve.incentive}
            for curve in curves
        ],
        "files": save(curves, protocol, seeds, runner.out),
    }


def show(summary: dict[str, Any]) -> None:
    rows = [
        {key: curve[key] for key in ("circuit", "bias", "alpha")} | curve["scores"]
        for curve in summary["curves"]
    ]
    print_table(rows, title="figure 3, attention held fixed:")
    print(f"\nfigure: {summary['files']['png']}")


EXPERIMENT = Experiment(
    name="fig3",
    chapter="Figure 3",
    options=(
        Option("protocol", str, "which settings", "published", tuple(PROTOCOLS), old_names=OLD_NAMES),
        seeds_option(1),
        Option("epochs", int, "of 250 batches", default=500),
    ),
    run=run,
    show=show,
    examples=("fasterqk-lab reproduce fig3 --out out", "fasterqk-lab reproduce fig3 --protocol both --json"),
    details="Protocol published (default): linear layers with biases, which made the published curves; "
    "no-biases: without, as in the paper's model; both: a row of each.",
)
