"""Beyond the paper: attention at matched loss over the learning-rate ratio and the init, and under Adam."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fasterqk.errors import InputError
from fasterqk.experiments.synthetic_grid import Point, measure, with_scale
from fasterqk.experiments.synthetic_panels import panels
from fasterqk.synthetic import PARAMETERIZATIONS, SyntheticCell

RATIOS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
SCALES = (1e-4, 1e-3, 1e-2, 1e-1)
GAMMAS = (0.1, 0.2, 0.355, 0.5)
OVER = ("scale", "gamma")
PROTOCOLS = {"both": ("paper", "closed"), "paper": ("paper",), "scaled": ("scaled",), "closed": ("closed",)}
ADAM_RATIOS = (1.0, 10.0)
ADAM_LR = 1e-3


@dataclass(frozen=True)
class Phase:
    """The grid (SGD), the Adam arm, and what the theory says of CACO at the same ratios."""

    over: str
    grid: list[Point]
    adam: list[Point]
    theory: list[dict[str, Any]]


def compute(
    protocol: str,
    out: Path,
    *,
    over: str = "scale",
    seeds: int = 1,
    ratios: tuple[float, ...] = RATIOS,
    values: tuple[float, ...] | None = None,
    workers: int = 2,
    force: bool = False,
    progress: Callable[..., None] | None = None,
) -> Phase:
    """Train what is not stored yet; all arms of one protocol are compared at one loss.

    ``over`` is what varies beside the ratio: the ``scale`` of the init, or the share ``gamma`` of
    distinct tokens.
    """
    if over not in OVER:
        raise InputError(f"cannot vary {over!r}; choose from {', '.join(OVER)}")
    if protocol not in PROTOCOLS:
        raise InputError(f"unknown protocol {protocol!r}; choose from {', '.join(PROTOCOLS)}")
    values = values or (SCALES if over == "scale" else GAMMAS)
    grid, adam = {}, {}
    for name in PROTOCOLS[protocol]:
        base = panels(name, ["a"])[0].cell
        for parameterization in PARAMETERIZATIONS:
            cell = replace(base, parameterization=parameterization)
            for ratio in ratios:
                for value in values:
                    grid[name, _varied(replace(cell, qk_ratio=ratio), over, value)] = name
            for ratio in ADAM_RATIOS:
                adam[name, replace(cell, qk_ratio=ratio, optimizer="adam", lr=ADAM_LR)] = name
    points = measure(grid | adam, out, seeds=seeds, workers=workers, force=force, progress=progress)
    return Phase(over, points[: len(grid)], points[len(grid) :], theory_points(points, ratios))


def theory_points(points: list[Point], ratios: tuple[float, ...]) -> list[dict[str, Any]]:
    """Theorem 1 for a fixed query with the language's numbers, at the losses of the grid.

    Indicative only: the theory has zero-mean background where the language has one-hot common tokens,
    and predicts among the classes alone.
    """
    from fasterqk.theory import Setting, solve

    language = points[0].cell.language
    dense = np.geomspace(min(ratios), max(ratios), 60)
    found: list[dict[str, Any]] = []
    for protocol, level in dict.fromkeys((point.protocol, point.level) for point in points):
        for gamma in dict.fromkeys(point.cell.language.gamma for point in points):
            distinct = round(gamma * language.context)
            setting = Setting(
                M=language.classes,
                b=language.distinct,
                m=distinct,
                n=language.context - distinct,
                query="fixed",
            )
            alphas = solve(setting, dense, loss=level).alpha
            found += [
                {"protocol": protocol, "gamma": gamma, "loss": level, "qk_ratio": float(r), "alpha": float(a)}
                for r, a in zip(dense, alphas, strict=True)
            ]
    return found


def _varied(cell: SyntheticCell, over: str, value: Any) -> SyntheticCell:
    if over == "scale":
        return with_scale(cell, value)
    return replace(cell, language=replace(cell.language, gamma=value))
