"""The `measure` command: attention and its faithfulness of a Hugging Face model on your own data."""

import argparse
from pathlib import Path
from typing import Any

from fasterqk.cli.common import Parser, add_json, check_out, examples, list_of, positive_int
from fasterqk.console import print_json, print_table, progress_bar
from fasterqk.errors import InputError

_DATA = """\
data: one JSON object per line, with
  "tokens": ["a", "fine", "film"] and "relevance": [0, 1, 0]       (words; 0/1 or fractions)
  or "text": "a fine film" and "spans": [[2, 6]]                   (characters)
  and "label": 1 or "positive" for a classifier, "target": "some text" for a causal model
  without "relevance" or "spans" everything is measured that needs none

importances of your own (--scores FILE.jsonl): one JSON object per line, with the "id" of the example and
  "scores": [0.1, -0.3, 0.9]                                       (one per token of the model, or per word)
  or "characters": [0, 0, 0.9, ...]                                (one per character of the text)
  or "spans": [[2, 6, 0.9]]                                        (start, end, number)
  and, if you like, "name" (what the table calls it) and "tokens" (texts that are compared with the model's)
"""


def configure(parser: Parser) -> None:
    parser.description = "Measure attention and its faithfulness of a Hugging Face model on your own data."
    parser.epilog = f"{_DATA}\n" + examples(
        "fasterqk measure --model my-classifier --data test.jsonl",
        "fasterqk measure --model my-classifier --data test.jsonl --rationale-k 5,10,20,50 --json",
        "fasterqk measure --model my-classifier --data test.jsonl --scores gradient --scores lime.jsonl",
        "fasterqk measure --model my-gpt --data qa.jsonl --aggregate layer:3 --remove attention",
        "fasterqk measure --model my-classifier --data test.jsonl --eraser-out eraser.jsonl --out out",
    )
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="a saved sequence classifier or causal language model"
    )
    parser.add_argument("--data", required=True, metavar="FILE.jsonl", help="your data, see below")
    parser.add_argument(
        "--rationale-k",
        type=list_of(positive_int),
        metavar="K,...",
        help="percent of tokens kept or removed for faithfulness"
        " (default: 5,10,20,50; with --eraser-out ERASER's 1,5,10,20,50)",
    )
    parser.add_argument(
        "--aggregate",
        default="rollout",
        metavar="HOW",
        help="over layers: rollout, mean, max, last or layer:N from 0 (default: rollout)",
    )
    parser.add_argument(
        "--residual",
        type=float,
        default=0.5,
        metavar="W",
        help="weight of the identity in rollout (default: 0.5)",
    )
    parser.add_argument("--head", type=int, metavar="N", help="one head, from 0, instead of the mean of all")
    parser.add_argument(
        "--discard",
        type=int,
        default=0,
        metavar="PERCENT",
        help="of the lowest weights of each row, before aggregating (default: 0)",
    )
    parser.add_argument(
        "--rank-by",
        choices=("attention", "gradient"),
        default="attention",
        help="what ranks tokens for faithfulness and plausibility: attention or gradient x input",
    )
    parser.add_argument(
        "--scores",
        action="append",
        metavar="NAME|FILE.jsonl",
        help="measure another importance of the tokens beside it (again for more): rollout, mean, max, last,"
        " layer:N, layer:N/head:M, gradient, integrated_gradients, leave_one_out, or a file of your own,"
        " see below",
    )
    parser.add_argument(
        "--absolute", action="store_true", help="rank the importances of your files by size, without signs"
    )
    parser.add_argument(
        "--remove",
        choices=("delete", "mask", "attention"),
        default="delete",
        help="how tokens are removed: deleted, replaced by the mask token, or hidden from attention",
    )
    parser.add_argument(
        "--batch-size", type=positive_int, default=32, metavar="N", help="instances at a time (default: 32)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the random rankings compared with (default: 0)"
    )
    parser.add_argument(
        "--eraser-out", metavar="FILE", help="write predictions in ERASER's format, rationales beside them"
    )
    parser.add_argument("--out", metavar="DIR", help="write the DTAP heat map and tables into this folder")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    import numpy as np

    from fasterqk.attention import Aggregation, Removal, load_model, measure, read_examples

    aggregation = Aggregation.parse(
        arguments.aggregate, residual=arguments.residual, head=arguments.head, discard=arguments.discard
    )
    _check(arguments)
    data = read_examples(arguments.data)

    loaded = load_model(arguments.model)
    mask_token = None
    if arguments.remove == "mask":
        mask_token = loaded.tokenizer.mask_token_id
        if mask_token is None:
            raise InputError(f"--remove mask: the tokenizer of {arguments.model!r} has no mask token")
    with progress_bar("measure") as progress:
        measurement = measure(
            loaded.model,
            loaded.encode(data),
            generator=np.random.default_rng(arguments.seed),
            percents=arguments.rationale_k,
            aggregation=aggregation,
            removal=Removal(arguments.remove, mask_token),
            rank_by=arguments.rank_by,
            scores=arguments.scores,
            absolute=arguments.absolute,
            batch_size=arguments.batch_size,
            progress=progress,
        )
    summary = measurement.summary().to_json()
    summary["measured"] |= {"model": arguments.model, "data": arguments.data, "seed": arguments.seed}
    if arguments.eraser_out:
        summary["measured"]["eraser"] = _write_eraser(measurement, arguments.eraser_out)
    if arguments.out:
        _write(Path(arguments.out), measurement, summary)
    if arguments.json:
        print_json(summary)
    else:
        _print(measurement, summary)
    return 0


def _write_eraser(measurement: Any, path: str) -> dict[str, Any]:
    from fasterqk.attention import eraser_commands, unscorable_class, write_eraser

    write_eraser(measurement, path)
    unscorable = unscorable_class(measurement)
    note = (
        f"ERASER's metrics.py cannot score predictions of {unscorable!r}, as no line of the data has this"
        " label: the files hold rationales alone"
    )
    return {"commands": eraser_commands(measurement, path), "note": None if unscorable is None else note}


def _check(arguments: argparse.Namespace) -> None:
    from fasterqk.attention import eraser_paths
    from fasterqk.files import check_output

    if arguments.rationale_k is None:
        arguments.rationale_k = [5, 10, 20, 50]
        if arguments.eraser_out:
            from fasterqk.attention import ERASER_PERCENTS

            arguments.rationale_k = list(ERASER_PERCENTS)
    percents = arguments.rationale_k
    for percent in percents:
        if percent > 100:
            raise InputError(f"--rationale-k {percent} is above 100 percent")
    if len(set(percents)) < len(percents):
        raise InputError(f"--rationale-k {','.join(map(str, percents))} names a percentage twice")
    if arguments.seed < 0:
        raise InputError(f"--seed {arguments.seed} is negative")
    if arguments.eraser_out is not None:
        for path in eraser_paths(arguments.eraser_out):
            check_output(path, reads=[arguments.data, arguments.model])
    if arguments.out is not None:
        check_out(arguments.out, arguments.data, arguments.model)


def _cut(measured: dict[str, Any]) -> str:
    cut, lost = measured["n_truncated"], measured["n_relevance_cut"]
    if not cut:
        return ""
    return f"; {cut} were cut at the end" + (f", {lost} of them with all that was relevant" if lost else "")


def _print(measurement: Any, summary: dict[str, Any]) -> None:
    from fasterqk.attention import dtap_lines

    print_table(
        measurement.scores_table(),
        f"{summary['n']} instances, {summary['n_without_relevance']} of them without a relevant token"
        f"{_cut(summary['measured'])} (null: uniform attention, or a random ranking; sharp: all attention on"
        " one random token; permuted: the model's own attention in random orders)",
    )
    if len(measurement.rankings) > 1:
        print_table(
            measurement.rankings_table(), "\nevery importance of the tokens (random: a random ranking)"
        )
    if summary["dtap"] is None:
        print(
            "\nThe data does not say which tokens are relevant, so mrta, ac, acmc, dtap and plausibility"
            " (auprc, token_f1, token_iou, iou_f1) are left out."
        )
    else:
        print()
        print_table(
            dtap_lines(summary["dtap"], summary["dtap_edges"]),
            "DTAP, percent of instances: attention on relevant tokens to the right, probability upwards",
        )
    eraser = summary["measured"].get("eraser")
    if eraser:
        print("\nscored again by ERASER's own code:")
        print("\n".join(f"  {command}" for command in eraser["commands"]))
        if eraser["note"]:
            print(eraser["note"])


def _write(out: Path, measurement: Any, summary: dict[str, Any]) -> None:
    from fasterqk.attention import STRONGER_NULLS
    from fasterqk.files import write_csv
    from fasterqk.lab.report import save_dtap, save_table

    columns: list[dict[str, Any]] = [
        {"key": "score", "label": "score"},
        {"key": "k", "label": "k %"},
        {"key": "value", "label": "value", "digits": 3},
        {"key": "null", "label": "uniform or random", "digits": 3, "source": "null"},
    ]
    rows = measurement.scores_table()
    columns += [
        {"key": key, "label": label, "digits": 3, "source": "null"}
        for key, label in {**STRONGER_NULLS, "null error": "standard error of random"}.items()
        if any(key in row for row in rows)
    ]
    save_table(
        out,
        "measure-scores",
        title="Attention and faithfulness",
        caption=f"{summary['n']} instances of {summary['measured']['data']},"
        f" model {summary['measured']['model']}.",
        columns=columns,
        rows=rows,
    )
    if len(measurement.rankings) > 1:
        table = measurement.rankings_table()
        save_table(
            out,
            "measure-importances",
            title="Every importance of the tokens",
            caption="The same instances, with tokens ranked by each importance and by chance.",
            columns=[{"key": key, "label": key, "digits": 3} for key in table[0]],
            rows=table,
        )
    write_csv(out / "tables" / "measure-instances.csv", measurement.instances_table())
    if summary["dtap"] is None:
        return
    save_dtap(
        out,
        "measure-dtap",
        summary["dtap"],
        summary["dtap_edges"],
        title="Attention on relevant tokens and probability of the answer",
        caption=f"Percent of {summary['n'] - summary['n_without_relevance']} instances with relevant tokens."
        f" AC {summary['ac']:.1f} (uniform {summary['null']['ac']:.1f}), ACMC {summary['acmc']:.1f}.",
    )
