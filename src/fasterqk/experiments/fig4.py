"""Figure 4: Theorem 1's dynamics for five ratios, and what the closed form adds to it.

The paper integrates; here every number is the closed form's, and DOP853 runs stand beside it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fasterqk.theory import PARAMETERIZATIONS, Integrated, Setting, Solution, integrate, ratio_for, solve
from fasterqk.theory.setting import Floats

RATIOS = np.array([0.01, 0.1, 1.0, 10.0, 100.0])
STOP = 1e-4
_POINTS = 200
_EVERY = 20  # one ratio in so many of panel (e) is also integrated


@dataclass(frozen=True)
class Fig4:
    """All that the figure shows. Solutions of ``curves`` and ``matched`` have one row a ratio."""

    setting: Setting
    curves: Solution
    matched: Solution
    final: Solution
    sweeps: dict[str, Solution]
    integrated: dict[str, list[tuple[float, Integrated]]]
    map_alpha: Floats
    map_loss: Floats
    map_ratio: Floats

    @property
    def integration_error(self) -> float:
        """The largest relative difference between integrated and exact attention in the figure."""
        exact = [self.sweeps[name].alpha[::_EVERY] for name in self.integrated]
        found = [[state.alpha[0] for _, state in points] for points in self.integrated.values()]
        return float(np.abs(np.array(found) / np.array(exact) - 1).max())

    def final_values(self) -> list[dict[str, float]]:
        """One entry a ratio: the state at which its run stops."""
        return list(_records(self.final))

    def rows(self) -> Iterator[dict[str, Any]]:
        """The tidy table behind the figure, panel by panel."""
        for panel, states in (("loss over time", self.curves), ("matched loss", self.matched)):
            for record in _records(states):
                yield {"panel": panel, "parameterization": "CACO"} | record
        for name, states in self.sweeps.items():
            for record in _records(states):
                yield {"panel": "attention by ratio", "parameterization": name} | record
        for name, points in self.integrated.items():
            for ratio, state in points:
                yield {
                    "panel": "attention by ratio, integrated",
                    "parameterization": name,
                    "qk_ratio": ratio,
                    "mu_ov": state.mu_ov[0],
                    "mu_qk": state.mu_qk[0],
                    "alpha": state.alpha[0],
                    "loss": state.loss[0],
                    "time": state.time[0],
                }
        for i, loss in enumerate(self.map_loss):
            for j, alpha in enumerate(self.map_alpha):
                ratio = self.map_ratio[i, j]
                yield {
                    "panel": "ratio needed",
                    "parameterization": "CACO",
                    "qk_ratio": ratio,
                    "alpha": alpha,
                    "loss": loss,
                }


def compute(M: int = 5) -> Fig4:
    """The data of the figure for ``M`` classes (5 in the paper's caption, 20 in the released notebook)."""
    setting = Setting(M=M, b=50, m=5, n=50)
    highest = min(1.0, 0.99 * float(np.log(M)))
    final = solve(setting, RATIOS, loss=STOP)
    times = np.geomspace(1.0, final.time, _POINTS, axis=-1)
    sweep = np.geomspace(1e-3, 1e4, 141)
    alpha = np.linspace(setting.uniform_attention, 1.0, 122)[1:-1]
    losses = np.geomspace(highest, 1e-8, 100)
    return Fig4(
        setting=setting,
        curves=solve(setting, RATIOS[:, None], time=times),
        matched=solve(setting, RATIOS[:, None], loss=np.geomspace(highest, STOP, 50)),
        final=final,
        sweeps={name: solve(setting, sweep, loss=STOP, parameterization=name) for name in PARAMETERIZATIONS},
        integrated={
            name: [
                (float(ratio), integrate(setting, float(ratio), losses=STOP, parameterization=name))
                for ratio in sweep[::_EVERY]
            ]
            for name in PARAMETERIZATIONS
        },
        map_alpha=alpha,
        map_loss=losses,
        map_ratio=ratio_for(setting, alpha, losses[:, None]),
    )


def normalised_time(states: Solution) -> Any:
    """The paper's time axis, t * min(eta_ov, eta_qk): it makes slow query-key learning look fast."""
    return states.time * np.minimum(1.0, states.qk_ratio)


def _records(states: Solution) -> Iterator[dict[str, float]]:
    columns = {
        name: getattr(states, name) for name in ("qk_ratio", "mu_ov", "mu_qk", "alpha", "loss", "time")
    }
    columns["normalised_time"] = normalised_time(states)
    for place in np.ndindex(np.shape(states.mu_ov)):
        yield {name: float(values[place]) for name, values in columns.items()}
