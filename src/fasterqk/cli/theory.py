"""The `theory` command: the dynamics of Theorem 1 solved exactly."""

import argparse
from typing import Any

from fasterqk.cli.common import Parser, add_action, add_json, examples, list_of, positive_float, positive_int
from fasterqk.console import print_result, print_table

STATE = ("mu_ov", "mu_qk", "alpha", "loss", "time", "effective_ratio")
_PARAMETERIZATION = "FAFO, FACO, CAFO or CACO"


def configure(parser: Parser) -> None:
    parser.epilog = examples(
        "fasterqk theory solve --qk-ratio 10 --loss 1e-4",
        "fasterqk theory ratio --alpha 0.9 --loss 1e-3",
        "fasterqk theory ratio --alpha 0.9 --loss 1e-3 --optimizer sign",
        "fasterqk theory table --qk-ratio 0.1,1,10 --loss 1e-2,1e-4 --csv",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    solve = add_action(
        actions,
        "solve",
        "the state of training at a loss or at a time",
        "fasterqk theory solve --M 5 --b 50 --m 5 --n 50 --qk-ratio 10 --loss 1e-4 --json",
        "fasterqk theory solve --qk-ratio 1 --loss 1e-4 --optimizer sign",
        "fasterqk theory solve --qk-ratio 10 --time 1e6 --parameterization FAFO --mu0 1e-2 --q0 1e-2",
    )
    solve.add_argument("--qk-ratio", type=positive_float, required=True, help="eta_QK / eta_OV")
    where = solve.add_mutually_exclusive_group(required=True)
    where.add_argument("--loss", type=positive_float, help="the state at this loss")
    where.add_argument("--time", type=positive_float, help="the state at this time (eta_OV = 1)")

    ratio = add_action(
        actions,
        "ratio",
        "the ratio that gives a wanted attention at a wanted loss",
        "fasterqk theory ratio --alpha 0.9 --loss 1e-3",
        "fasterqk theory ratio --alpha 0.9 --loss 1e-3 --M 20 --parameterization FAFO --json",
    )
    ratio.add_argument("--alpha", type=positive_float, required=True, help="attention on class positions")
    ratio.add_argument("--loss", type=positive_float, required=True, help="loss at which alpha is wanted")
    for action in (solve, ratio):
        action.add_option("--parameterization", str, "NAME", _PARAMETERIZATION, default="CACO")
        _add_setting(action)

    table = add_action(
        actions,
        "table",
        "the states for lists of ratios, losses and parameterizations",
        "fasterqk theory table --csv > table.csv",
        "fasterqk theory table --qk-ratio 0.1,1,10 --loss 1e-2,1e-4 --parameterization CACO,FAFO",
        "fasterqk theory table --optimizer sign",
    )
    numbers = list_of(positive_float)
    table.add_option("--qk-ratio", numbers, "R,R", "eta_QK / eta_OV", default="0.01,0.1,1,10,100")
    table.add_option("--loss", numbers, "L,L", "at these losses", default="1,0.1,0.01,0.001,0.0001")
    table.add_option("--parameterization", list_of(str), "NAME,NAME", _PARAMETERIZATION, default="CACO")
    table.add_argument("--csv", action="store_true", help="print CSV with all digits")
    _add_setting(table)


def _add_setting(parser: Parser) -> None:
    parser.add_option("--M", positive_int, "M", "classes", default=5)
    parser.add_option("--b", positive_int, "b", "tokens of each class", default=50)
    parser.add_option("--m", positive_int, "m", "class positions", default=5)
    parser.add_option("--n", positive_int, "n", "background positions", default=50)
    parser.add_option(
        "--common", positive_int, "C", "one-hot background tokens (default: zero-mean background)"
    )
    parser.add_option("--query", str, "KIND", "token or fixed", default="token")
    parser.add_option(
        "--optimizer", str, "NAME", "gradient_flow or sign (CACO only)", default="gradient_flow"
    )
    parser.add_option("--mu0", float, "MU0", "start of mu_ov (default: 0, factorized 1e-3)")
    parser.add_option("--q0", float, "Q0", "start of mu_qk (default: 0, factorized 1e-3)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from fasterqk import theory

    setting = theory.Setting(
        arguments.M, arguments.b, arguments.m, arguments.n, arguments.query, arguments.common
    )
    start = {"mu0": arguments.mu0, "q0": arguments.q0, "optimizer": arguments.optimizer}
    if arguments.action == "table":
        return _table(setting, start, arguments)
    start["parameterization"] = arguments.parameterization
    if arguments.action == "ratio":
        ratio = theory.ratio_for(setting, arguments.alpha, arguments.loss, **start)
        return print_result(arguments.json, {"qk_ratio": ratio}, lambda _: print(f"{ratio:.6g}"))
    state = theory.solve(setting, arguments.qk_ratio, loss=arguments.loss, time=arguments.time, **start)
    result = {name: getattr(state, name) for name in STATE}
    return print_result(arguments.json, result, lambda _: print_table([result]))


def _table(setting: Any, start: dict[str, Any], arguments: argparse.Namespace) -> int:
    import numpy as np

    from fasterqk.files import csv_text
    from fasterqk.theory import solve

    ratios, losses = np.array(arguments.qk_ratio), np.array(arguments.loss)
    rows = []
    for name in arguments.parameterization:
        states = solve(setting, ratios[:, None], loss=losses, parameterization=name, **start)
        path = states.path
        about = {"optimizer": path.optimizer, "parameterization": path.parameterization}
        for place in np.ndindex(len(ratios), len(losses)):
            state = {key: float(getattr(states, key)[place]) for key in STATE}
            rows.append({**about, "qk_ratio": float(ratios[place[0]]), **state})
    if arguments.csv and not arguments.json:
        print(csv_text(rows), end="")
        return 0
    return print_result(arguments.json, rows, print_table)
