"""The `synthetic` command: train one cell of the toy language."""

import argparse
from typing import Any

from fasterqk.cli.common import Parser, add_json, examples, positive_float, positive_int
from fasterqk.console import print_json, print_table, progress_bar


def configure(parser: Parser) -> None:
    parser.epilog = examples("fasterqk synthetic train --parameterization FAFO --qk-ratio 10 --seed 0 --json")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    train = actions.add_parser(
        "train",
        help="train one parameterization and say where it attends",
        description="Train one parameterization on the toy language until its loss is reached. The"
        " defaults are figure 2's `paper` protocol.",
        epilog=examples(
            "fasterqk synthetic train --parameterization FAFO --qk-ratio 10 --seed 0 --json",
            "fasterqk synthetic train --parameterization CACO --qk-ratio 5 --closed",
            "fasterqk synthetic train --parameterization FAFO --qk-ratio 20 --ramp-steps 10000",
        ),
    )
    train.add_argument("--parameterization", required=True, metavar="NAME", help="FAFO, FACO, CAFO or CACO")
    train.add_argument("--seed", type=int, default=0, help="of the init, the sample and the held-out set")
    train.add_argument("--qk-ratio", type=positive_float, default=1.0, metavar="R", help="QK rate / OV rate")
    train.add_argument(
        "--ramp-steps",
        type=positive_int,
        nargs="?",
        const=200_000,
        default=0,
        metavar="N",
        help="reach the ratio linearly from 1 over so many steps (200000 when no number follows)",
    )
    train.add_argument("--lr", type=positive_float, default=0.2, help="base learning rate (default: 0.2)")
    train.add_argument("--optimizer", default="sgd", metavar="NAME", help="sgd (default) or adam")
    train.add_argument("--init-scale", type=positive_float, default=1e-3, metavar="S", help="default: 0.001")
    train.add_argument("--gamma", type=float, default=0.355, help="share of distinct tokens (default: 0.355)")
    train.add_argument(
        "--context", type=positive_int, default=63, metavar="T", help="tokens before the query"
    )
    train.add_argument(
        "--target-loss", type=positive_float, default=0.001, metavar="L", help="default: 0.001"
    )
    train.add_argument("--max-steps", type=positive_int, default=500_000, metavar="N", help="default: 500000")
    train.add_argument("--scaled", action="store_true", help="divide scores by the square root of 50")
    train.add_argument("--closed", action="store_true", help="softmax over the four next tokens only")
    train.add_argument("--attend-query", action="store_true", help="the query can attend to itself")
    train.add_argument("--fresh", action="store_true", help="new sequences all the time, no fixed sample")
    add_json(train)


def run(arguments: argparse.Namespace) -> int:
    from fasterqk.lab.synthetic import Init, Language, SyntheticCell
    from fasterqk.lab.synthetic._train import train

    init = Init("gaussian", arguments.init_scale)
    cell = SyntheticCell(
        arguments.parameterization,
        seed=arguments.seed,
        qk_ratio=arguments.qk_ratio,
        ramp_steps=arguments.ramp_steps,
        lr=arguments.lr,
        optimizer=arguments.optimizer,
        language=Language(
            context=arguments.context, gamma=arguments.gamma, attend_query=arguments.attend_query
        ),
        qk_init=init,
        ov_init=init,
        scaled_scores=arguments.scaled,
        closed=arguments.closed,
        fresh=arguments.fresh,
        target_loss=arguments.target_loss,
        max_steps=arguments.max_steps,
    )
    with progress_bar(f"{cell.parameterization}, QK {cell.qk_ratio:g}x") as progress:
        result = train(cell, progress=progress)
    if arguments.json:
        print_json({"cell": cell, **result})
    else:
        _show(result)
    return 0


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
