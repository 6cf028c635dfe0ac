"""The `circuits` command: which parameters of an architecture are query-key and which output-value."""

import argparse
import ast
import re
import shlex
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fasterqk.cli.common import Parser, add_json, examples
from fasterqk.console import print_result
from fasterqk.errors import InputError


def configure(parser: Parser) -> None:
    parser.description = (
        "Label every parameter of a Hugging Face architecture by circuit. MODEL is a directory with a "
        "config.json, else a model type (its default configuration), else a model on the hub. No weights are "
        "loaded; labels are verified on a small copy with random weights."
    )
    parser.epilog = examples(
        "fasterqk circuits gpt2",
        "fasterqk circuits ./my-model --heads",
        "fasterqk circuits --config config.json --json",
        "fasterqk circuits jamba --label JambaMambaMixer=rest",
        "fasterqk circuits ./my-model --optimizer torch.optim.AdamW --lr 1e-3",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="directory, model type or hub name")
    parser.add_argument("--config", metavar="FILE", help="a config.json instead of MODEL")
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="PATTERN=ROLE",
        help="give parameters a role: a pattern of parameter names or of module classes, and q, k, v, o, "
        "shared or rest (repeatable)",
    )
    parser.add_argument("--heads", action="store_true", help="slices per head")
    parser.add_argument("--all", action="store_true", help="a line for every layer")
    parser.add_argument(
        "--optimizer",
        metavar="CLASS",
        help="audit: load the model from its folder, take one step with this class (AdamW, or "
        "package.module.Class) on random tokens, and print what moves at which rate",
    )
    parser.add_argument("--lr", type=float, default=1e-3, help="the rate of --optimizer (default: 1e-3)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.model and arguments.config:
        raise InputError(f"give MODEL or --config, not both: {arguments.model!r} and {arguments.config!r}")
    from fasterqk.labels import find_circuits, model_without_weights

    labels: dict[str, Any] = dict(_label(option) for option in arguments.label)
    if arguments.optimizer:
        return _audit(arguments, labels)
    model, source = model_without_weights(arguments.model, arguments.config)
    name = type(model).__name__
    print(f"{name}, {source}; no weights", file=sys.stderr)
    try:
        circuits = find_circuits(model, labels or None, heads=arguments.heads)
    except InputError as error:
        raise InputError(re.sub(r"labels=({[^}]*})", _as_options, str(error))) from None
    result = {"model": name, "source": source, **circuits.as_dict()}
    return print_result(
        arguments.json, result, lambda _: print(circuits if arguments.all else circuits.by_stack())
    )


def _audit(arguments: argparse.Namespace, labels: dict[str, Any]) -> int:
    """Print ``check_circuits`` of a saved model, with a plain optimizer of all its parameters."""
    import torch

    from fasterqk.labels import model_without_weights
    from fasterqk.optim import check_circuits, optimizer_class

    if arguments.heads or arguments.all:
        raise InputError("--optimizer prints one line per role; leave --heads and --all out")
    if not arguments.model or not Path(arguments.model).is_dir():
        raise InputError(f"--optimizer needs the folder of a saved model, not {arguments.model!r}")
    optimizer_type = optimizer_class(arguments.optimizer)
    model: Any = type(model_without_weights(arguments.model)[0]).from_pretrained(arguments.model)  # type: ignore[attr-defined]
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if vocabulary is None:
        raise InputError(f"{type(model).__name__} reads no tokens; give check_circuits a batch from Python")
    ids = torch.randint(vocabulary, (2, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    try:
        optimizer = optimizer_type(model.parameters(), lr=arguments.lr)
    except (TypeError, ValueError) as error:
        raise InputError(f"--optimizer {arguments.optimizer}: {error}") from None
    with redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        check = check_circuits(
            model, optimizer, batch, lambda outputs: outputs[0].square().mean(), labels or None
        )
    return print_result(arguments.json, asdict(check), lambda _: None)


def _label(option: str) -> tuple[str, str]:
    pattern, equals, role = option.rpartition("=")
    if not (pattern and equals and role):
        raise InputError(f"--label {option!r} is not PATTERN=ROLE, as in '*.mamba.*=rest'")
    return pattern, role


def _as_options(labels: re.Match[str]) -> str:
    """The labels that an error suggests, as options of this command where they are plain roles."""
    roles = ast.literal_eval(labels[1])
    if not all(isinstance(role, str) for role in roles.values()):
        return labels[0]
    return " ".join(f"--label {shlex.quote(f'{pattern}={role}')}" for pattern, role in roles.items())
