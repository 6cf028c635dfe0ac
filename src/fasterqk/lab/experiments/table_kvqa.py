"""Generated key-value questions with and without faster query-key learning; needs no file."""

import argparse
from typing import Any

from fasterqk.cli.common import Parser, positive_int
from fasterqk.lab.experiments._arm_command import add_arm_options, run_deep, show_deep
from fasterqk.lab.experiments._arms import BASELINE, FASTER, Experiment
from fasterqk.lab.training import TrainConfig

# Five times the base rate is 5e-3: at 1e-2 attention hardens before it has found the pairs.
QK_RATIO = 5
EVALUATE_AT_FALL = 0.5


def table_kvqa(seeds: int = 1, epochs: int | None = None) -> Experiment:
    """The experiment; both arms differ in the rate of the query-key circuit and in nothing else."""
    base = TrainConfig("kvqa", evaluate_at_fall=EVALUATE_AT_FALL, along_subset=128)
    if epochs is not None:
        base = base.replace(epochs=epochs)
    return Experiment(
        name="table-kvqa",
        title="Generated key-value questions (accuracy is exact match)",
        protocol="paper",
        arms={BASELINE: base, FASTER: base.replace(qk_ratio=QK_RATIO)},
        seeds=tuple(range(seeds)),
    )


# --- `fasterqk reproduce table-kvqa`: generated key-value questions, no file needed ---

SUMMARY = "generated key-value questions, answered by generating, with and without faster QK"
EXAMPLES = [
    "fasterqk reproduce table-kvqa",
    "fasterqk reproduce table-kvqa --seeds 3 --out out --json",
]


def configure(parser: Parser) -> None:
    parser.add_argument("--seeds", type=positive_int, default=1, metavar="N", help="how many (default: 1)")
    add_arm_options(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:

    return run_deep(table_kvqa(arguments.seeds, arguments.epochs), arguments)


def show(result: dict[str, Any]) -> None:
    show_deep(result)
