"""All trials, one after the other, and the verdict."""

import random
import tempfile
import time
from pathlib import Path
from typing import Any

from fasterqk.runs.task import Progress
from fasterqk.runs.torture.faults import FAULTS
from fasterqk.runs.torture.kills import kill_at_random_moments
from fasterqk.runs.torture.subject import prepare_subject

CELLS = 8


def torture(kills: int, cell: str, seed: int, progress: Progress) -> dict[str, Any]:
    """Kill sweeps of ``cell`` (``"learn"`` or ``"walk"``) ``kills`` times, then try every other fault.

    Returns ``{"passed", "seconds", "trials": [{"fault", "passed", "told", "problems"}]}``. Everything
    happens in a temporary folder. The other faults use the quick cells: they are about files, not about
    what is in them.
    """
    generator = random.Random(seed)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fasterqk-torture-") as name:
        folder = Path(name)
        subject = prepare_subject(cell, CELLS, folder)
        trials = [kill_at_random_moments(subject, kills, generator, progress)]
        quick = subject if cell == "walk" else prepare_subject("walk", CELLS, folder)
        trials += [trial(quick, generator) for trial in FAULTS]
    return {
        "passed": all(trial["passed"] is not False for trial in trials),
        "cell": cell,
        "seed": seed,
        "seconds": round(time.perf_counter() - start, 1),
        "trials": trials,
    }
