"""The `demo` command: small classifiers and their data, and the command lines to try on them."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from fasterqk.cli.common import Parser, add_json, examples
from fasterqk.console import print_result, print_table, progress_bar


def configure(parser: Parser) -> None:
    parser.description = (
        "Make a folder to try the other commands on: two small Hugging Face classifiers with tokenizers, "
        "one trained at equal rates and one with queries and keys ten times faster, generated data with the "
        "relevant words marked, and a fine-tuning script. It takes some seconds and downloads nothing."
    )
    parser.epilog = examples("fasterqk demo", "fasterqk demo elsewhere --json")
    parser.add_argument(
        "folder", nargs="?", default="demo", metavar="DIR", help="a new folder (default: demo)"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from fasterqk.huggingface import make_demo

    with progress_bar("demo") as progress:
        models = make_demo(arguments.folder, progress=progress)
    result = {"folder": arguments.folder, "models": models, "commands": commands(Path(arguments.folder))}
    return print_result(arguments.json, result, _show)


def commands(folder: Path) -> list[str]:
    """Command lines to try on the folder, in this order; each can be pasted."""
    equal, faster, test = (str(folder / name) for name in ("equal-rates", "faster-qk", "test.jsonl"))
    lines = [
        ["fasterqk", "circuits", faster],
        ["fasterqk", "measure", "--model", equal, "--model", faster, "--data", test],
        ["python", str(folder / "finetune.py"), "10"],
    ]
    return [shlex.join(line) for line in lines]


def _show(result: dict[str, Any]) -> None:
    rows = [
        {
            "model": name,
            "QK rate": f"{model['qk_ratio']:g}x",
            "test accuracy": model["accuracy"],
            "attention on relevant words": model["mrta"],
            "uniform attention": model["null_mrta"],
        }
        for name, model in result["models"].items()
    ]
    print_table(rows, title=f"made {result['folder']}: two classifiers, data and a script")
    print("one seed each: a demonstration, not a result")
    print("\nto try:\n" + "\n".join(f"  {line}" for line in result["commands"]))
