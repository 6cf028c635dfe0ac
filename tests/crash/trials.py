"""All trials, one after the other, and the verdict."""

import random
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.crash.faults import FAULTS
from tests.crash.kills import kill_at_random_moments
from tests.crash.subject import practice_spec, prepare_subject

from fasterqk.lab.runs._execute import Progress

CELLS = 8


def torture(
    kills: int, cell: str = "learn", seed: int = 0, *, spec: Path | None = None, progress: Progress
) -> dict[str, Any]:
    """Kill sweeps ``kills`` times at random moments, then try every other fault; everything is temporary.

    The killed sweeps are those of ``spec``, or of practice cells (``"learn"`` or ``"walk"``). The other
    faults use the quick practice cells: they are about files, not about what is in them. Returns
    ``{"passed", "seconds", "trials": [{"fault", "passed", "told", "problems"}]}``.
    """
    generator = random.Random(seed)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fasterqk-torture-") as name:
        folders = [Path(name) / "kills", Path(name) / "faults"]
        for folder in folders:
            folder.mkdir()
        killed = prepare_subject(spec or practice_spec(cell, CELLS, folders[0]), folders[0])
        trials = [kill_at_random_moments(killed, kills, generator, progress)]
        quick = prepare_subject(practice_spec("walk", CELLS, folders[1]), folders[1])
        trials += [trial(quick, generator) for trial in FAULTS]
    return {
        "passed": all(trial["passed"] is not False for trial in trials),
        "sweep": str(spec or cell),
        "seed": seed,
        "seconds": round(time.perf_counter() - start, 1),
        "trials": trials,
    }
