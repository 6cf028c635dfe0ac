"""Figure 2: where the four parameterizations attend, with and without faster query-key learning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasterqk.attention import matched_loss
from fasterqk.experiments.synthetic_panels import Panel, panels
from fasterqk.experiments.synthetic_runs import levels_for, run_cells, summarize_seeds

# The top row (probability above .8) of the heat maps that are saved in the released notebooks, in percent.
RELEASED_TOP_ROWS = {
    "a": (0.1, 64.1, 35.7, 0.0, 0.0),
    "b": (0.0, 0.0, 0.0, 5.4, 94.6),
    "g": (0.0, 0.0, 2.3, 76.8, 20.8),
    "h": (0.0, 0.0, 2.6, 86.9, 10.5),
}
# Mean losses of 100 epochs each that those notebooks print for torch seed 1234, by epoch.
RELEASED_LOSSES = {
    "a": {100: 2.901, 200: 1.310, 300: 0.081, 400: 0.009, 500: 0.005, 600: 0.003, 800: 0.002, 1100: 0.001},
    "b": {100: 2.522, 200: 1.030, 300: 0.564, 400: 0.376, 500: 0.280, 600: 0.222, 700: 0.183, 800: 0.156}
    | {900: 0.132, 1000: 0.087, 1100: 0.033, 1200: 0.015, 1300: 0.009, 1900: 0.002, 2500: 0.001},
    "g": {100: 3.284, 200: 2.212, 300: 1.466, 400: 0.928, 500: 0.493, 600: 0.216, 700: 0.101, 800: 0.056}
    | {900: 0.036, 1000: 0.026, 2000: 0.006},
    "h": {100: 3.285, 200: 2.220, 300: 1.500, 400: 1.035, 500: 0.711, 600: 0.468, 700: 0.293, 800: 0.178}
    | {900: 0.110, 1000: 0.071, 2000: 0.007},
}
# The last of them, for each of the five seeds.
RELEASED_FINAL_LOSSES = {
    "g": (0.006, 0.006, 0.006, 0.007, 0.007),
    "h": (0.007, 0.008, 0.007, 0.008, 0.008),
}


@dataclass(frozen=True)
class Fig2:
    """The figure's data: which panels, every cell's result, and the summaries."""

    protocol: str
    panels: list[Panel]
    results: dict[tuple[str, int], dict[str, Any]]
    summaries: dict[str, dict[str, Any]]
    matched: list[dict[str, Any]]


def compute(
    protocol: str,
    out: Path,
    *,
    seeds: int = 5,
    names: Sequence[str] | None = None,
    workers: int = 2,
    force: bool = False,
    progress: Callable[..., None] | None = None,
) -> Fig2:
    """Train what is not stored yet under ``out``, and summarise all."""
    chosen = panels(protocol, list(names) if names else None)
    cells = {(panel.name, seed): panel.for_seed(seed) for panel in chosen for seed in range(seeds)}
    results = run_cells(cells, out, workers=workers, force=force, progress=progress)
    histories: dict[Any, Any] = {key: result["history"] for key, result in results.items()}
    return Fig2(
        protocol=protocol,
        panels=chosen,
        results=results,
        summaries={panel.name: _summary(panel, results) for panel in chosen},
        matched=matched_loss(histories, ["mrta"], levels_for(results)),
    )


def differences_from_released(data: Fig2) -> dict[str, Any]:
    """How far our `released` panels are from what the notebooks saved.

    ``top_row`` is ours minus theirs in percentage points, ours over all seeds; ``losses`` maps an epoch
    to ours and theirs, of torch seed 1234; ``final_losses`` has both for each seed that they print.
    """
    found: dict[str, Any] = {}
    for name, row in RELEASED_TOP_ROWS.items():
        summary = data.summaries.get(name)
        if summary is None or summary["dtap"] is None:
            continue
        windows = [data.results[name, seed]["window_losses"] for seed in summary["seeds"]]
        finals = RELEASED_FINAL_LOSSES.get(name, ())
        found[name] = {
            "top_row": [ours - theirs for ours, theirs in zip(summary["dtap"][-1], row, strict=True)],
            "losses": {
                str(epoch): [windows[0][epoch // 100 - 1], theirs]
                for epoch, theirs in RELEASED_LOSSES[name].items()
                if epoch // 100 <= len(windows[0])
            },
            "final_losses": [[own[-1], theirs] for own, theirs in zip(windows, finals, strict=False)],
        }
    return found


def _summary(panel: Panel, results: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    own = {seed: result for (name, seed), result in results.items() if name == panel.name}
    cell = panel.cell
    return {
        "title": panel.title,
        "parameterization": cell.parameterization,
        "qk_ratio": cell.qk_ratio,
        "ramp_steps": cell.ramp_steps,
        "attend_query": cell.language.attend_query,
        **summarize_seeds(own, cell.stop),
    }
