"""Figure 3: the output-value circuit under fixed attention, its loss and the incentive to attend more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk_lab.compare import END, Value
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option
from fasterqk_lab.figures import Line, Panel, save_panels
from fasterqk_lab.synthetic import FIXED_CIRCUITS, FixedAttentionCell

ALPHAS = (0.2, 0.4, 0.6, 0.8, 1.0)
CIRCUITS = FIXED_CIRCUITS
# The published curves were made with biases, the paper's model has none.
PROTOCOLS = {"published": (True,), "no-biases": (False,), "both": (True, False)}
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
        """The settings that name the curve."""
        return {"circuit": self.circuit, "bias": self.bias, "alpha": self.alpha}

    @property
    def arm(self) -> str:
        """Its name in the table of results."""
        return f"{self.circuit}, {'bias' if self.bias else 'no bias'}, attention {self.alpha:g}"

    def scores(self) -> dict[str, float]:
        """Its scores; ``below_0.2_from`` is missing where the incentive does not fade."""
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
    """Train missing cells; returns means over seeds. The values of all seeds go to the table of results."""
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
            trained = _curve(cell.bias, curve)
            of_seeds.setdefault((trained.bias, trained.circuit, trained.alpha), []).append(trained)
            place = "fig3", trained.arm, cell.seed, END, None
            if not trained.diverged:
                runner.add(Value(*place, *score) for score in trained.scores().items())
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
    panels = []
    places = product(PROTOCOLS[protocol], _LABELS, CIRCUITS)
    for letter, (bias, value, circuit) in zip("abcdefgh", places, strict=False):
        lines = [
            Line(f"{curve.alpha:g}", range(len(curve.loss)), getattr(curve, value))
            for curve in curves
            if (curve.circuit, curve.bias) == (circuit, bias)
        ]
        panels.append(
            Panel(
                f"({letter}) {circuit}{'' if bias else ', no biases'}",
                ("epoch", _LABELS[value]),
                lines,
                log="",
                limits=(0 if value == "loss" else None, None),
                null=0.0 if value == "incentive" else None,
                legend={"title": r"attention $\alpha$", "loc": "upper right"} if letter == "a" else None,
            )
        )
    return save_panels(
        panels,
        out,
        "fig3" if protocol == "published" else f"fig3-{protocol}",
        title="Figure 3: the output-value circuit under fixed attention",
        caption=f"Attention mass α on the class tokens is held fixed; linear layers {which}. Both"
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


def run(runner: CellRunner, protocol: str = "published", seeds: int = 1, epochs: int = 500) -> dict[str, Any]:
    curves = compute(runner, protocol, seeds=seeds, epochs=epochs)
    rows = [
        curve.setting
        | curve.scores()
        | {"diverged": curve.diverged, "along": {"loss": curve.loss, "incentive": curve.incentive}}
        for curve in curves
    ]
    return {"protocol": protocol, "curves": rows, "files": save(curves, protocol, seeds, runner.out)}


EXPERIMENT = Experiment(
    "fig3",
    run,
    (
        Option("protocol", str, "which settings", choices=tuple(PROTOCOLS)),
        Option("epochs", int, "of 250 batches"),
    ),
    examples=("--protocol both --json",),
    details="Protocol published (default): linear layers with biases, which made the published curves; "
    "no-biases: without, as in the paper's model; both: a row of each.",
)
