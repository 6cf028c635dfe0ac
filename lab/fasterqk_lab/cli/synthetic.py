"""The `synthetic` command: train one cell of the toy language."""

import argparse
from typing import Any

from fasterqk.cli.common import Parser, add_action, add_json, examples, positive_float, positive_int
from fasterqk.console import print_result, print_table, progress_bar
from fasterqk.files import config_types


def configure(parser: Parser) -> None:
    parser.epilog = examples(
        "fasterqk-lab synthetic train --parameterization FAFO --qk-ratio 10 --seed 0 --json"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    train = add_action(
        actions,
        "train",
        "train one parameterization until its loss is reached; defaults: figure 2's `paper` protocol",
        "fasterqk-lab synthetic train --parameterization FAFO --qk-ratio 10 --seed 0 --json",
        "fasterqk-lab synthetic train --parameterization CACO --qk-ratio 5 --closed",
        "fasterqk-lab synthetic train --parameterization FAFO --qk-ratio 20 --ramp-steps 10000",
    )
    train.add_argument("--parameterization", required=True, metavar="NAME", help="FAFO, FACO, CAFO or CACO")
    train.add_option("--seed", int, "N", "of the init, the sample and the held-out set", default=0)
    train.add_option("--qk-ratio", positive_float, "R", "QK rate / OV rate", default=1.0)
    train.add_argument(
        "--ramp-steps",
        type=positive_int,
        nargs="?",
        const=200_000,
        default=0,
        metavar="N",
        help="reach the ratio linearly from 1 over so many steps (200000 when no number follows)",
    )
    train.add_option("--lr", positive_float, "RATE", "base learning rate", default=0.2)
    train.add_option("--optimizer", str, "NAME", "sgd or adam", default="sgd")
    train.add_option("--init-scale", positive_float, "S", "of both circuits", default=1e-3)
    train.add_option("--gamma", float, "SHARE", "of distinct tokens", default=0.355)
    train.add_option("--context", positive_int, "T", "tokens before the query", default=63)
    train.add_option("--target-loss", positive_float, "L", "where training ends", default=0.001)
    train.add_option("--max-steps", positive_int, "N", "when it ends otherwise", default=500_000)
    train.add_argument("--scaled", action="store_true", help="divide scores by the square root of 50")
    train.add_argument("--closed", action="store_true", help="softmax over the four next tokens only")
    train.add_argument("--attend-query", action="store_true", help="the query can attend to itself")
    train.add_argument("--fresh", action="store_true", help="new sequences all the time, no fixed sample")
    add_json(train)


def run(arguments: argparse.Namespace) -> int:
    from fasterqk_lab.synthetic import Init, Language, SyntheticCell
    from fasterqk_lab.synthetic._train import train

    init = Init("gaussian", arguments.init_scale)
    cell = SyntheticCell(
        language=Language(**_fields(Language, arguments)),
        qk_init=init,
        ov_init=init,
        scaled_scores=arguments.scaled,
        **_fields(SyntheticCell, arguments),
    )
    with progress_bar(f"{cell.parameterization}, QK {cell.qk_ratio:g}x") as progress:
        result = train(cell, progress=progress)
    return print_result(arguments.json, {"cell": cell, **result}, _show)


def _fields(kind: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that have the name of a field of ``kind``, a dataclass."""
    names = config_types(kind)
    return {name: value for name, value in vars(arguments).items() if name in names}


def _show(result: dict[str, Any]) -> None:
    from fasterqk.attention import dtap_lines

    if result["diverged"]:
        print(f"diverged after {result['steps']} steps; lower --lr or --qk-ratio")
        return
    keys = ("loss", "accuracy", "steps", "reached", "mrta", "ac", "acmc")
    rows = [{"": "this model"} | {key: result[key] for key in keys}]
    print_table([*rows, {"": "uniform attention", **result["null"]}], title="held-out sequences:")
    print()
    print_table(dtap_lines(result["dtap"], result["dtap_edges"]), title="percent of sequences (DTAP):")
