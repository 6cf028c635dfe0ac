"""How far two trainings of one cell on different processors are apart, beside the published interval.

    fasterqk-lab reproduce table-hatexplain --seeds 1 --out there    # on another processor
    python -m tools.noise there > lab/paper/noise.csv

Compares every cell that both have after training and prints, per comparison and score, the largest difference
over arms and seeds, and half the width of the published interval of the effect. The kernels of a processor
without AVX-512 are had with `ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2`.
"""

import csv
import sys
from pathlib import Path

from fasterqk_lab.compare import END, compare, read_values
from fasterqk_lab.paper import Published

SCORES = ("mrta", "test_accuracy", "aopc_comprehensiveness")


def main() -> None:
    published = Published()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["experiment", "score", "cells", "largest_difference", "interval"])
    again = [value for path in sorted(Path(sys.argv[1]).glob("results/*.csv")) for value in read_values(path)]
    for experiment in dict.fromkeys(value.experiment for value in again):
        measured = published.measured(experiment)
        for score in SCORES:
            pairs = [
                (value.value, measured.of(value.arm, score, END)[value.seed])
                for value in again
                if (value.experiment, value.score, value.at) == (experiment, score, END)
            ]
            largest = max(abs(there - here) for there, here in pairs)
            effect = compare(measured, ("faster_qk", "baseline"), score, at=END)
            writer.writerow(
                [experiment, score, len(pairs), f"{largest:.6f}", f"{effect.value.half_width:.6f}"]
            )


if __name__ == "__main__":
    main()
