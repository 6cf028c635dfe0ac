"""Crash tests as a command: ``python -m lab.tests.crash --kills 100``, or ``make crash``."""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.tests.crash.faults import FAULTS
from lab.tests.crash.kills import kill_at_random_moments
from lab.tests.crash.sweeps import run_undisturbed, write_spec

from fasterqk.cli.common import Parser, add_json, positive_int
from fasterqk.console import Progress, print_json, progress_bar

CELLS = 8
_VERDICTS = {True: "passed", False: "FAILED", None: "not tried"}


def main(words: Sequence[str] | None = None) -> int:
    """Run the crash tests that ``words`` describe; returns the exit code."""
    arguments = _parser().parse_args(words)
    with progress_bar("crash tests") as progress:
        report = crash(
            arguments.kills, arguments.cell, arguments.seed, spec=arguments.spec, progress=progress
        )
    if arguments.json:
        print_json(report)
    else:
        for trial in report["trials"]:
            print(f"{_VERDICTS[trial['passed']]:<10}{trial['fault']}: {trial['told']}")
            for problem in trial["problems"]:
                print(f"{'':<10}{problem}")
    if not report["passed"]:
        print("crash tests: something was lost; see above", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m lab.tests.crash",
        description="Kills sweeps at random moments, fills their disk, takes their permissions, turns their "
        "clock back, damages their files, runs two at once; and checks that nothing is lost.",
    )
    parser.add_argument(
        "--spec",
        type=Path,
        metavar="FILE.toml",
        help="a sweep of your own to kill; its results must not depend on time",
    )
    parser.add_argument(
        "--kills", type=positive_int, default=100, metavar="N", help="how many (default: 100)"
    )
    parser.add_argument(
        "--cell",
        choices=["learn", "walk"],
        default="learn",
        help="what the killed sweeps do: train a small network, or a chain of hashes (faster)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (default: 0)")
    add_json(parser)
    return parser


def crash(
    kills: int, cell: str = "learn", seed: int = 0, *, spec: Path | None = None, progress: Progress
) -> dict[str, Any]:
    """Kill sweeps ``kills`` times at random moments, then try every other fault; everything is temporary.

    The killed sweeps are those of ``spec``, or of small cells (``"learn"`` or ``"walk"``). The other faults
    use ``"walk"``, which is quick: they are about files, not about what is in them. Returns
    ``{"passed", "seconds", "trials": [{"fault", "passed", "told", "problems"}]}``.
    """
    generator = random.Random(seed)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fasterqk-crash-") as name:
        folders = [Path(name) / "kills", Path(name) / "faults"]
        for folder in folders:
            folder.mkdir()
        killed = run_undisturbed(spec or write_spec(cell, CELLS, folders[0]), folders[0])
        trials = [kill_at_random_moments(killed, kills, generator, progress)]
        quick = run_undisturbed(write_spec("walk", CELLS, folders[1]), folders[1])
        trials += [fault(quick, generator) for fault in FAULTS]
    return {
        "passed": all(trial["passed"] is not False for trial in trials),
        "sweep": str(spec or cell),
        "seed": seed,
        "seconds": round(time.perf_counter() - start, 1),
        "trials": trials,
    }


if __name__ == "__main__":
    sys.exit(main())
