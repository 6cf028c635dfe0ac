"""What figure 2 owes to its initialisation: attention at matched loss against the scale of the init."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fasterqk.experiments.synthetic_grid import Point, measure, with_scale
from fasterqk.experiments.synthetic_panels import panels
from fasterqk.synthetic import PARAMETERIZATIONS

SCALES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
RATIOS = (1.0, 10.0)


@dataclass(frozen=True)
class Fig2Init:
    """One point a parameterization, ratio and scale."""

    protocol: str
    points: list[Point]
    null: float


def compute(
    protocol: str,
    out: Path,
    *,
    seeds: int = 3,
    scales: tuple[float, ...] = SCALES,
    workers: int = 2,
    force: bool = False,
    progress: Callable[..., None] | None = None,
) -> Fig2Init:
    """Train what is not stored yet; each parameterization is compared at one loss.

    `released` starts from the notebooks' scaled identities, with the settings of their panel (e).
    """
    base = panels(protocol, ["e"])[0].cell
    arms = {
        (protocol, with_scale(replace(base, parameterization=name, qk_ratio=ratio), scale)): name
        for name in PARAMETERIZATIONS
        for ratio in RATIOS
        for scale in scales
    }
    points = measure(arms, out, seeds=seeds, workers=workers, force=force, progress=progress)
    language = base.language
    null = language.gamma * language.context / language.positions
    return Fig2Init(protocol, points, null)
