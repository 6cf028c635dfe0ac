"""Attention at matched loss over a grid of settings of the toy language."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

from fasterqk.attention import Interval, matched_loss
from fasterqk.experiments.synthetic_runs import levels_for, run_cells
from fasterqk.synthetic import Init, SyntheticCell


@dataclass(frozen=True)
class Point:
    """One arm of a grid: its cell (of seed 0), and what its seeds came to."""

    protocol: str
    cell: SyntheticCell
    level: float  # the training loss at which attention is read
    alpha: Interval | None  # None when no seed reached the level
    missing: tuple[int, ...]  # seeds that did not reach it
    diverged: tuple[int, ...]
    steps: float

    def record(self) -> dict[str, Any]:
        """The point as flat, plain data."""
        cell = self.cell
        return {
            "protocol": self.protocol,
            "parameterization": cell.parameterization,
            "qk_ratio": cell.qk_ratio,
            "init": cell.qk_init.kind,
            "init_scale": cell.qk_init.scale,
            "gamma": cell.language.gamma,
            "optimizer": cell.optimizer,
            "loss": self.level,
            "alpha": self.alpha.mean if self.alpha else None,
            "half_width": self.alpha.half_width if self.alpha else None,
            "steps": self.steps,
            "missing": list(self.missing),
            "diverged": bool(self.diverged),
        }


def with_scale(cell: SyntheticCell, scale: float) -> SyntheticCell:
    """``cell`` with both circuits starting at ``scale``."""
    init = Init(cell.ov_init.kind, scale)
    return replace(cell, qk_init=init, ov_init=init)


def measure(
    arms: Mapping[tuple[str, SyntheticCell], str],
    out: Path,
    *,
    seeds: int,
    workers: int = 2,
    force: bool = False,
    progress: Callable[..., None] | None = None,
) -> list[Point]:
    """One point an arm ``(protocol, cell)``; arms with the same group name are compared at one loss.

    The level of a group is the lowest loss that all its cells reach which met their stop rule.
    """
    cells = {
        (arm, seed): replace(arm[1], seed=seed)
        for seed in range(seeds)  # seed by seed, so that a run stopped early has a whole grid
        for arm in arms
    }
    results = run_cells(cells, out, workers=workers, force=force, progress=progress)
    points: dict[tuple[str, SyntheticCell], Point] = {}
    for group in dict.fromkeys(arms.values()):
        own: dict[Any, Any] = {key: result for key, result in results.items() if arms[key[0]] == group}
        levels = levels_for(own, 1)
        found = matched_loss({key: result["history"] for key, result in own.items()}, ["mrta"], levels)
        for arm in (arm for arm, name in arms.items() if name == group):
            points[arm] = _point(arm, {s: own[arm, s] for s in range(seeds)}, found)
    return [points[arm] for arm in arms]


def _point(
    arm: tuple[str, SyntheticCell], results: Mapping[int, Mapping[str, Any]], found: list[dict[str, Any]]
) -> Point:
    nothing: dict[str, Any] = {"loss": nan, "arms": {}, "missing": [[arm, seed] for seed in results]}
    level = found[0] if found else nothing
    reached = level["arms"].get(arm)
    return Point(
        protocol=arm[0],
        cell=arm[1],
        level=level["loss"],
        alpha=reached["mrta"] if reached else None,
        missing=tuple(seed for name, seed in level["missing"] if name == arm),
        diverged=tuple(seed for seed, result in results.items() if result["diverged"]),
        steps=sum(result["steps"] for result in results.values()) / len(results),
    )
