"""Figure 3: the output-value circuit under fixed attention, its loss and the incentive to attend more."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.errors import InputError
from fasterqk.runs import sweep
from fasterqk.synthetic.fixed_attention import FIXED_CIRCUITS, FixedAttentionCell

ALPHAS = (0.2, 0.4, 0.6, 0.8, 1.0)
CIRCUITS = FIXED_CIRCUITS
# The published curves were made with biases, the paper's model has none.
PROTOCOLS = {"released": (True,), "paper": (False,), "both": (True, False)}
# Two cells, one a worker: a factorized curve takes half as long again as a collapsed one.
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
    def peak(self) -> dict[str, Any]:
        """Where the incentive is largest."""
        epoch = int(np.argmax(self.incentive))
        return {"incentive": float(self.incentive[epoch]), "epoch": epoch}

    def summary(self) -> dict[str, Any]:
        """The curve and what is read off it, as plain data."""
        after_peak = self.incentive[self.peak["epoch"] :]
        faded = np.flatnonzero(after_peak < _FADED)
        return {
            "circuit": self.circuit,
            "bias": self.bias,
            "alpha": self.alpha,
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
                yield {
                    "circuit": curve.circuit,
                    "bias": curve.bias,
                    "alpha": curve.alpha,
                    "epoch": epoch,
                    "loss": loss,
                    "incentive": incentive,
                }


def compute(
    protocol: str,
    out: Path,
    *,
    seeds: int = 1,
    epochs: int = 500,
    workers: int = 2,
    force: bool = False,
    progress: Callable[..., None] | None = None,
) -> Fig3:
    """Train what is not stored yet under ``out``."""
    if protocol not in PROTOCOLS:
        raise InputError(f"unknown protocol {protocol!r}; choose from {', '.join(PROTOCOLS)}")
    cells = [
        FixedAttentionCell(curves, bias=bias, seed=seed, epochs=epochs)
        for bias in PROTOCOLS[protocol]
        for seed in range(seeds)
        for curves in _CELLS
    ]
    function = "fasterqk.synthetic.fixed_attention:train_fixed"
    results = sweep(cells, function, out, workers=workers, force=force, progress=progress)
    found = {
        (curve["circuit"], cell.bias, cell.seed, curve["alpha"]): curve
        for cell, result in zip(cells, results, strict=True)
        for curve in result["curves"]
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
