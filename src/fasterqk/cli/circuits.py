"""The `circuits` command: which parameters of an architecture are query-key and which output-value."""

import argparse
import sys
from typing import Any

from fasterqk.cli.common import Parser, add_json, examples
from fasterqk.console import print_json


def configure(parser: Parser) -> None:
    parser.description = (
        "Label every parameter of a Hugging Face architecture by circuit. MODEL is a directory with a "
        "config.json, else a model type (its default configuration), else a model on the hub. No weights "
        "are loaded; labels are verified on a small copy with random weights."
    )
    parser.epilog = examples(
        "fasterqk circuits gpt2",
        "fasterqk circuits ./my-model --heads",
        "fasterqk circuits --config config.json --json",
        "fasterqk circuits jamba --rule JambaMambaMixer=rest",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="directory, model type or hub name")
    parser.add_argument("--config", metavar="FILE", help="a config.json instead of MODEL")
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATTERN=ROLE",
        help="label what matches: a pattern of parameter names or of module classes, and q, k, v, o, shared "
        "or rest (repeatable)",
    )
    parser.add_argument("--heads", action="store_true", help="cut slices head by head")
    parser.add_argument("--all", action="store_true", help="every layer on its own lines")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from fasterqk.circuits import find_circuits
    from fasterqk.circuits._skeleton import outline
    from fasterqk.errors import InputError

    if arguments.model and arguments.config:
        raise InputError(f"give MODEL or --config, not both: {arguments.model!r} and {arguments.config!r}")
    rules = dict(_rule(given) for given in arguments.rule)
    found = outline(arguments.model, arguments.config)
    name = type(found.model).__name__
    print(f"{name}, {found.source}; no weights", file=sys.stderr)
    circuits = find_circuits(found.model, rules or None, heads=arguments.heads)
    if arguments.json:
        print_json({"model": name, "source": found.source, **circuits.as_dict()})
    else:
        print(circuits if arguments.all else circuits.by_stack())
    return 0


def _rule(given: str) -> tuple[str, Any]:
    from fasterqk.errors import InputError

    pattern, equals, role = given.rpartition("=")
    if not (pattern and equals and role):
        raise InputError(f"--rule {given!r} is not PATTERN=ROLE, as in '*.mamba.*=rest'")
    return pattern, role
