"""Running cells of the toy language, and what one arm came to over its seeds."""

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fasterqk.attention import common_levels, dtap_over_seeds, interval
from fasterqk.runs import sweep
from fasterqk.synthetic import SyntheticCell
from fasterqk.synthetic.parameterization import factorized_output

Key = TypeVar("Key", bound=Hashable)
Result = Mapping[str, Any]
NUMBERS = ("loss", "accuracy", "steps", "mrta", "ac", "acmc", "query_mass", "train_loss")


def run_cells(
    cells: Mapping[Key, SyntheticCell],
    out: Path,
    *,
    workers: int = 2,
    force: bool = False,
    progress: Callable[..., None] | None = None,
) -> dict[Key, dict[str, Any]]:
    """The result of every cell, from the store under ``out`` where it is done already."""
    # A collapsed OV circuit takes ten times as many steps: long cells first, so that none comes last.
    order = sorted(cells, key=lambda key: factorized_output(cells[key].parameterization))
    results = sweep(
        [cells[key] for key in order],
        "fasterqk.synthetic.train:train",
        out,
        workers=workers,
        force=force,
        progress=progress,
    )
    found = dict(zip(order, results, strict=True))
    return {key: found[key] for key in cells}


def summarize_seeds(results: Mapping[int, Result], stop: str = "epoch") -> dict[str, Any]:
    """Means over the seeds that did not diverge, with 95% t-intervals under ``intervals``.

    ``capped`` lists the seeds that hit the cap of steps before the stop rule was met, ``diverged_seeds``
    those without numbers. The standard deviation of a DTAP cell is over seeds (n - 1).
    """
    diverged = [seed for seed, result in results.items() if result["diverged"]]
    finished = [result for result in results.values() if not result["diverged"]]
    summary: dict[str, Any] = dict.fromkeys((*NUMBERS, "dtap", "dtap_deviation", "dtap_edges"))
    summary["null"] = dict.fromkeys(("mrta", "ac", "acmc"))
    if finished:
        intervals = {name: interval(result[name] for result in finished) for name in NUMBERS}
        mean, deviation = dtap_over_seeds([result["dtap"] for result in finished])
        summary |= {name: value.mean for name, value in intervals.items()}
        summary |= {"dtap": mean, "dtap_deviation": deviation, "dtap_edges": finished[0]["dtap_edges"]}
        summary["null"] = {
            name: interval(result["null"][name] for result in finished).mean for name in summary["null"]
        }
        summary["intervals"] = intervals
    capped = [seed for seed, result in results.items() if not result["reached"] and seed not in diverged]
    return summary | {
        "diverged": bool(diverged),
        "diverged_seeds": diverged,
        "capped": [] if stop == "never" else capped,
        "seeds": list(results),
    }


def levels_for(results: Mapping[tuple[str, int], Result], count: int = 3) -> list[float]:
    """Losses at which cells are compared: decided by the cells that met their stop rule, if any did."""
    reached = {key: result for key, result in results.items() if result["reached"]}
    deciding = reached or {key: result for key, result in results.items() if not result["diverged"]}
    return common_levels({key: result["history"] for key, result in deciding.items()}, count)
