"""The `bench` command: our code and a plain implementation timed in one process."""

import argparse
from importlib import import_module
from typing import Any

from fasterqk.cli.common import Parser, add_action, add_json, examples
from fasterqk.console import print_result, print_table, progress_bar

# A module of `fasterqk_lab.benchmarks` each, with `run(progress) -> dict` that has at least the keys
# `speedup`, `plain_seconds` and `seconds`.
BENCHMARKS = {
    "circuits": "AdamW by circuit inside fused weights against the plain optimizer, at the size of GPT-2",
    "attention": "attention and faithfulness in batches against one instance at a time",
    "measure": "measure on HateXplain posts against one text at a time, the passes it needs, and ferret",
    "training": "HateXplain training steps against a plain padded full-sequence module",
    "squad": "SQuAD training steps of the paper's answer generator against texts padded to 256 tokens",
    "theory": "closed form against a plain RK4 time-stepping loop",
    "stability": "training steps with qk_clip and LogitMonitor against none, at the size of GPT-2",
    "synthetic": "toy-language training against a plain PyTorch loop, per run and step",
}


def configure(parser: Parser) -> None:
    parser.epilog = examples(*(f"fasterqk-lab bench {name} --json" for name in BENCHMARKS))
    chosen = parser.add_subparsers(dest="benchmark", metavar="NAME", required=True)
    for name, summary in BENCHMARKS.items():
        add_json(add_action(chosen, name, summary, f"fasterqk-lab bench {name} --json"))


def run(arguments: argparse.Namespace) -> int:
    module = import_module(f"fasterqk_lab.benchmarks.{arguments.benchmark}")
    with progress_bar(f"bench {arguments.benchmark}") as progress:
        result = module.run(progress)
    return print_result(arguments.json, result, _show)


def _show(result: dict[str, Any]) -> None:
    print_table([{"measured": key, "value": value} for key, value in result.items()])
