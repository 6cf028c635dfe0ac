"""The generated agreement language with and without faster query-key learning; needs no file."""

import argparse
from typing import Any

from fasterqk.cli.common import Parser, positive_int
from fasterqk.lab.experiments._arm_command import add_arm_options, run_experiment, show_arms
from fasterqk.lab.experiments._arms import BASELINE, FASTER, Experiment
from fasterqk.lab.training import TrainConfig

QK_RATIO = 30
EVALUATE_AT_FALL = 0.6


def table_agreement(seeds: int = 3, epochs: int | None = None) -> Experiment:
    """The experiment; both arms differ in the rate of the query-key circuit and in nothing else."""
    # The loss falls within a fraction of an epoch; comparing at equal loss needs points on the way.
    base = TrainConfig("agreement", evaluate_at_fall=EVALUATE_AT_FALL)
    if epochs is not None:
        base = base.replace(epochs=epochs)
    return Experiment(
        name="table-agreement",
        title="Generated subject-verb agreement, one layer",
        protocol="paper",
        arms={BASELINE: base, FASTER: base.replace(qk_ratio=QK_RATIO)},
        seeds=tuple(range(seeds)),
    )


# --- `fasterqk reproduce table-agreement`: the generated language, no file needed ---

SUMMARY = "generated subject-verb agreement with and without faster query-key learning"
EXAMPLES = [
    "fasterqk reproduce table-agreement",
    "fasterqk reproduce table-agreement --seeds 5 --out out --json",
]


def configure(parser: Parser) -> None:
    parser.add_argument("--seeds", type=positive_int, default=3, metavar="N", help="how many (default: 3)")
    add_arm_options(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:

    return run_experiment(table_agreement(arguments.seeds, arguments.epochs), arguments)


def show(result: dict[str, Any]) -> None:
    show_arms(result)
