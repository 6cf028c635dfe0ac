"""Figure 4: Theorem 1's dynamics for five ratios, in closed form.

The paper integrates numerically; here every number is computed in closed form, with DOP853 runs beside it.
With ``optimizer="sign"`` the same figure shows sign descent, which is solved for CACO.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.console import progress_bar
from fasterqk.errors import InputError
from fasterqk.theory import (
    OPTIMIZERS,
    PARAMETERIZATIONS,
    Integrated,
    Setting,
    Solution,
    integrate,
    ratio_for,
    solve,
)
from fasterqk_lab.compare import LOSS, Value
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option
from fasterqk_lab.figures import PARAMETERIZATION_COLORS, Line, Panel, save_panels
from fasterqk_lab.theory import check_identities

RATIOS = np.array([0.01, 0.1, 1.0, 10.0, 100.0])
STOP = 1e-4
SIGN = "CACO, sign descent"
_STATE = ("mu_ov", "mu_qk", "alpha", "loss", "time")
_POINTS = 200
_EVERY = 20  # one ratio in so many of panel (e) is also integrated
WANTED = (0.3, 0.5, 0.7, 0.9, 0.99)  # attention in panel (f), where it is above uniform attention


@dataclass(frozen=True)
class Fig4:
    """The data of the figure. Solutions of ``curves`` and ``matched`` have one row per ratio.

    ``sweeps`` has a parameterization's gradient flow under its name and sign descent under ``SIGN``;
    ``integrated`` is empty for sign descent, which has nothing to integrate.
    """

    setting: Setting
    optimizer: str
    curves: Solution
    matched: Solution
    final: Solution
    sweeps: dict[str, Solution]
    integrated: dict[str, list[tuple[float, Integrated]]]
    map_alpha: NDArray[np.float64]
    map_loss: NDArray[np.float64]
    map_ratio: NDArray[np.float64]

    @property
    def name(self) -> str:
        """The name of its values and files: ``fig4``, ``fig4-sign``, ``fig4-M20``."""
        sign = "-sign" if self.optimizer == "sign" else ""
        return f"fig4{sign}" + (f"-M{self.setting.M}" if self.setting.M != 5 else "")

    @property
    def integration_error(self) -> float | None:
        """The largest relative difference between integrated and exact attention in the figure, if any."""
        errors = [
            abs(state.alpha[0] / exact - 1)
            for name, points in self.integrated.items()
            for exact, (_, state) in zip(self.sweeps[name].alpha[::_EVERY], points, strict=True)
        ]
        return float(max(errors)) if errors else None

    def rows(self) -> Iterator[dict[str, Any]]:
        """The tidy table behind the figure, panel by panel."""
        panels = [("loss over time", self.curves), ("matched loss", self.matched)]
        panels += [("attention by ratio", states) for states in self.sweeps.values()]
        for panel, states in panels:
            for record in _records(states):
                yield _about(panel, states) | record
        for name, points in self.integrated.items():
            for ratio, state in points:
                about = _about("attention by ratio, integrated", self.sweeps[name])
                yield about | {"qk_ratio": ratio} | {key: getattr(state, key)[0] for key in _STATE}
        about = _about("ratio needed", self.curves)
        for (i, j), ratio in np.ndenumerate(self.map_ratio):
            yield about | {"qk_ratio": ratio, "alpha": self.map_alpha[j], "loss": self.map_loss[i]}

    def values(self) -> Iterator[Value]:
        """Scales, attention and time at one loss, for the table of results: ratios that are powers of ten."""
        for name, states in self.sweeps.items():
            for record in list(_records(states))[::_EVERY]:
                arm = f"{name}, r = {record['qk_ratio']:g}"
                scores = {key: record[key] for key in _STATE if key != "loss"}
                scores["null_alpha"] = self.setting.uniform_attention
                for score, value in scores.items():
                    yield Value(self.name, arm, 0, LOSS, STOP, score, value)
        if self.integration_error is not None:
            error = self.integration_error
            yield Value(self.name, "integrated", 0, LOSS, STOP, "integration_error", error)


def compute(M: int = 5, optimizer: str = "gradient_flow") -> Fig4:
    """The data of the figure for ``M`` classes (5 in the paper's caption, 20 in the released notebook)."""
    setting = Setting(M=M, b=50, m=5, n=50)
    highest = min(1.0, 0.99 * float(np.log(M)))
    sign = optimizer == "sign"
    final = solve(setting, RATIOS, loss=STOP, optimizer=optimizer)
    times = np.geomspace(1e-2 if sign else 1.0, final.time, _POINTS, axis=-1)
    sweep = np.geomspace(1e-3, 1e4, 141)
    alpha = np.linspace(setting.uniform_attention, 1.0, 122)[1:-1]
    losses = np.geomspace(highest, 1e-8, 100)
    flows = {
        name: solve(setting, sweep, loss=STOP, parameterization=name)
        for name in (("CACO",) if sign else PARAMETERIZATIONS)
    }
    matched = np.geomspace(highest, STOP, 50)
    return Fig4(
        setting=setting,
        optimizer=optimizer,
        curves=solve(setting, RATIOS[:, None], time=times, optimizer=optimizer),
        matched=solve(setting, RATIOS[:, None], loss=matched, optimizer=optimizer),
        final=final,
        sweeps=flows | {SIGN: solve(setting, sweep, loss=STOP, optimizer="sign")},
        integrated={
            name: [
                (float(ratio), integrate(setting, float(ratio), losses=STOP, parameterization=name))
                for ratio in sweep[::_EVERY]
            ]
            for name in (() if sign else PARAMETERIZATIONS)
        },
        map_alpha=alpha,
        map_loss=losses,
        map_ratio=ratio_for(setting, alpha, losses[:, None], optimizer=optimizer),
    )


def normalised_time(states: Solution) -> Any:
    """The paper's time axis, t * min(eta_ov, eta_qk): it makes slow query-key learning look fast."""
    return states.time * np.minimum(1.0, states.qk_ratio)


def _about(panel: str, states: Solution) -> dict[str, str]:
    path = states.path
    return {"panel": panel, "optimizer": path.optimizer, "parameterization": path.parameterization}


def _records(states: Solution) -> Iterator[dict[str, float]]:
    columns = {name: getattr(states, name) for name in ("qk_ratio", *_STATE)}
    columns["normalised_time"] = normalised_time(states)
    for place in np.ndindex(np.shape(states.mu_ov)):
        yield {name: float(values[place]) for name, values in columns.items()}


def save(data: Fig4, out: Path) -> dict[str, str]:
    """Draw and save the figure under ``out/figures``; returns the paths by suffix."""
    setting, sign = data.setting, data.optimizer == "sign"
    points = (
        "both CACO"
        if sign
        else "lines are the closed form from 0.001, points DOP853 runs (largest difference"
        f" {data.integration_error:.0e}), dashed sign descent"
    )
    ends = zip(RATIOS, data.final.alpha, strict=True)
    attention = ", ".join(f"{float(alpha):.2f} at r = {ratio:g}" for ratio, alpha in ends)
    return save_panels(
        _panels(data),
        out,
        data.name,
        title=f"Figure 4: how the ratio sets attention (M={setting.M}{', sign descent' if sign else ''})",
        caption=f"{'Sign descent' if sign else 'Theorem 1'} with M={setting.M}, b={setting.b},"
        f" m={setting.m}, n={setting.n} from zero, solved in closed form for five ratios r. (a) Loss over"
        " the paper's normalised time t min(1, r) and over time itself; (b, c, d) OV scale, QK scale and"
        f" attention on class tokens at matched loss; (e) attention at loss {STOP:g}: {points}; (f) the"
        " ratio that gives a wanted attention at a wanted loss (CACO).",
        rows=list(data.rows()),
        see=f"(d): where training stops at the same loss ({STOP:g}), attention on class tokens is"
        f" {attention}; uniform attention has {setting.uniform_attention:.2f}.",
    )


def _panels(data: Fig4) -> list[Panel]:
    """The seven plots of the figure."""
    curves, matched, uniform = data.curves, data.matched, data.setting.uniform_attention

    def by_ratio(title: str, axes: tuple[str, str], x: Any, y: Any, **more: Any) -> Panel:
        lines = [Line(f"r = {ratio:g}", x[place], y[place]) for place, ratio in enumerate(RATIOS)]
        return Panel(title, axes, lines, **{"limits": (0, None), **more})

    sweeps = []
    for name, states in data.sweeps.items():
        style: dict[str, Any] = {"color": PARAMETERIZATION_COLORS[states.path.parameterization]}
        dashes = {"linestyle": "--"} if name == SIGN else {}
        sweeps.append(Line(name.removeprefix("CACO, "), states.qk_ratio, states.alpha, style | dashes))
        if name in data.integrated:
            ratios, points = zip(*data.integrated[name], strict=True)
            style |= {"marker": "o", "linestyle": "none", "markersize": 4, "markerfacecolor": "white"}
            sweeps.append(Line("", ratios, [float(state.alpha[0]) for state in points], style))
    places = [int(np.abs(data.map_alpha - wanted).argmin()) for wanted in WANTED]
    needed = [Line(f"α = {data.map_alpha[j]:.2f}", data.map_loss, data.map_ratio[:, j]) for j in places]
    alpha, stop = r"attention $\alpha$", "loss at which training stops"
    began = {"xlim": (1 if data.optimizer == "gradient_flow" else 1e-2, None)}
    normalised = r"normalised time $t\,\min(1, r)$", "loss"
    ratio, limits = r"ratio $r=\eta_{QK}/\eta_{OV}$", (0, 1.02)
    return [
        by_ratio("(a) loss", normalised, normalised_time(curves), curves.loss, more=began, legend={}),
        by_ratio("(a) loss, true time", (r"time $t$", "loss"), curves.time, curves.loss, more=began),
        by_ratio("(b) OV scale", (stop, r"$\mu_{OV}$"), matched.loss, matched.mu_ov, falls=True),
        by_ratio("(c) QK scale", (stop, r"$\mu_{QK}$"), matched.loss, matched.mu_qk, falls=True),
        by_ratio(
            "(d) attention",
            (stop, alpha),
            matched.loss,
            matched.alpha,
            falls=True,
            limits=limits,
            null=uniform,
        ),
        Panel(
            f"(e) attention at loss {STOP:g}",
            (ratio, alpha),
            sweeps,
            limits=limits,
            null=uniform,
            legend={"loc": "lower right", "fontsize": 7, "handlelength": 1.2, "frameon": True},
        ),
        Panel("(f) ratio needed", ("wanted loss", ratio), needed, log="xy", falls=True, legend={}),
    ]


def run(runner: CellRunner, M: int = 5, optimizer: str = "gradient_flow") -> dict[str, Any]:
    data = compute(M, optimizer)
    runner.add(data.values())
    return {
        "setting": data.setting,
        "optimizer": data.optimizer,
        "final": list(_records(data.final)),
        "integration_error": data.integration_error,
        "files": save(data, runner.out),
    }


EXPERIMENT = Experiment(
    "fig4",
    run,
    (
        Option("M", int, "classes: 5 as in the paper's caption (default), 20 as in the notebook"),
        Option("optimizer", str, "whose dynamics", choices=OPTIMIZERS),
    ),
    examples=("--M 20 --json", "--optimizer sign"),
    trains=False,
)

# --- The identities behind the figure ---


def run_identities(runner: CellRunner) -> dict[str, Any]:
    with progress_bar("identities") as progress:
        identities = check_identities(progress)
    if wrong := [f"{x.name} (error {x.error:g}, tolerance {x.tolerance:g})" for x in identities if not x.ok]:
        raise InputError(f"not every identity holds: {', '.join(wrong)}")
    rows = [asdict(identity) for identity in identities]
    return {"identities": rows, "verdict": "every identity holds"}


IDENTITIES = Experiment("identities", run_identities, examples=("--json",), trains=False)
