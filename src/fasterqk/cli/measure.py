"""The `measure` command: attention and its faithfulness of a Hugging Face model on your own data."""

import argparse
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fasterqk.cli.common import (
    Parser,
    Whole,
    a_seed,
    add_json,
    check_out,
    examples,
    list_of,
    positive_int,
    prepare_half_precision,
)
from fasterqk.console import print_json, print_table, progress_bar
from fasterqk.errors import InputError

_HALF = ("bfloat16", "float16")
_MOST_DRAWS = 1000  # as in fasterqk.attention.statistics, which imports numpy
_DATA = """\
data: one JSON object per line, with
  "tokens": ["a", "fine", "film"] and "relevance": [0, 1, 0]       (words; 0/1 or fractions)
  or "text": "a fine film" and "spans": [[2, 6]]                   (characters; [2, 6, 0.5] with a weight)
  optionally "text_pair" and "spans_pair", a second text            (classifiers of pairs)
  and "label": 1 or "positive" for a classifier, "target": "some text" for a causal model
  a list of labels (multi-label models) or targets gives one instance for each
  without "relevance" and "spans", scores that need them are left out

importances of your own (--scores FILE.jsonl): one JSON object per line, with the "id" of the example and
  "scores": [0.1, -0.3, 0.9]                                       (one per token of the model, or per word)
  or "characters": [0, 0, 0.9, ...]                                (one per character of the text)
  or "spans": [[2, 6, 0.9]]                                        (start, end, number)
  and optionally "name" (its title in the table) and "tokens" (texts to compare with the model's)
"""


def configure(parser: Parser) -> None:
    parser.description = (
        "Measure where a Hugging Face model attends on your own data, and how faithful that is."
    )
    parser.epilog = f"{_DATA}\n" + examples(
        "fasterqk measure --model my-classifier --data test.jsonl",
        "fasterqk measure --model my-classifier --data test.jsonl --rationale-k 5,10,20,50 --json",
        "fasterqk measure --model my-classifier --data test.jsonl --scores gradient --scores lime.jsonl",
        "fasterqk measure --model baseline --model faster-qk --data test.jsonl          # paired differences",
        "fasterqk measure --model my-classifier --data test.jsonl --k ferret --null 10",
        "fasterqk measure --model my-gpt --data qa.jsonl --aggregate layer:3 --remove attention",
        "fasterqk measure --model my-classifier --data test.jsonl --eraser-out eraser.jsonl --out out",
    )
    parser.add_argument(
        "--model",
        required=True,
        action="append",
        metavar="DIR",
        help="a saved sequence classifier or causal language model; give it twice to compare two models on"
        " the same data",
    )
    parser.add_argument("--data", required=True, metavar="FILE.jsonl", help="your data, see below")
    parser.add_option("--out", str, "DIR", "write a page and its tables into this folder")
    parser.add_argument(
        "--k",
        "--rationale-k",
        dest="rationale_k",
        type=_percentages,
        metavar="K,...",
        help="percent of tokens kept or removed for faithfulness, rounded up, or a convention: eraser"
        " (1,5,10,20,50), ferret (10 to 100 in tens, rounded down)"
        " (default: 5,10,20,50; with --eraser-out ERASER's)",
    )
    parser.add_option(
        "--aggregate",
        str,
        "HOW",
        "over layers: rollout, mean, max, last or layer:N, of one head with /head:M, from 0 (default:"
        " rollout, or mean for a causal model, on whose first token rollout ends)",
    )
    parser.add_argument(
        "--among",
        choices=("all", "words"),
        default="all",
        help="score attention to all tokens (default), or among words alone: without special tokens and, in a"
        " causal model, without the first token, where attention sinks gather",
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
        "--remove",
        type=list_of(str),
        default=["delete"],
        metavar="HOW,...",
        help="how tokens are removed: delete, mask (replaced by the mask token), attention (hidden from it);"
        " of several the first gives the scores, all stand side by side (default: delete)",
    )
    parser.add_argument(
        "--null",
        type=_draws,
        default=1,
        metavar="none|random|N",
        help="how many random rankings per instance faithfulness and plausibility are compared with: none,"
        " one (random), or N, which also gives the standard error of the null (default: random),"
        f" at most {_MOST_DRAWS}",
    )
    intervals = "of the instances, for 95%% bootstrap intervals; 0 for none"
    parser.add_option("--resamples", Whole(100_000, least=0), "N", intervals, default=1000)
    parser.add_option("--residual", float, "W", "weight of the identity in rollout", default=0.5)
    parser.add_option("--seed", a_seed, "N", "of random rankings and resamples", default=0)
    parser.add_option("--eraser-out", str, "FILE", "write predictions and rationales in ERASER's format")
    parser.add_option("--device", str, "NAME", "as torch calls it: cpu, cuda, cuda:1, mps")
    kinds = ("float64", "float32", *_HALF)
    parser.add_argument("--precision", choices=kinds, help="of the weights (default: as saved)")
    parser.add_option("--batch-size", positive_int, "N", "instances at a time", default=32)
    add_json(parser)


def _percentages(text: str) -> tuple[Sequence[int], str]:
    """An argparse type: whole percentages with their rounding, or the name of a convention."""
    from fasterqk.attention.faithfulness import CONVENTIONS

    if text in CONVENTIONS:
        return CONVENTIONS[text]
    if text.strip().isalpha():
        known = ", ".join(CONVENTIONS)
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a convention ({known}) nor a list like 5,10,20,50"
        )
    return list_of(Whole(100))(text), "up"


def _draws(text: str) -> int:
    """An argparse type: ``none``, ``random`` (one draw) or a number of draws."""
    if text in ("none", "random"):
        return int(text == "random")
    return Whole(_MOST_DRAWS)(text)


def run(arguments: argparse.Namespace) -> int:
    if _in_half_precision(arguments):
        prepare_half_precision()
    import numpy as np

    from fasterqk.attention import Aggregation, paired_scores, read_examples, score_intervals
    from fasterqk.attention.aggregation import default_aggregation
    from fasterqk.attention.measurement import nested
    from fasterqk.attention.page import Measured, save_measured

    options = {name: getattr(arguments, name) for name in ("residual", "among")}
    Aggregation(**options)  # raises before anything is read
    aggregation: Any = partial(default_aggregation, **options)
    if arguments.aggregate is not None:
        aggregation = Aggregation.parse(arguments.aggregate, **options)
    _check(arguments)
    data = read_examples(arguments.data)
    names = _names(arguments.model)
    measurements = {
        name: _measure(arguments, model, data, aggregation)
        for name, model in zip(names, arguments.model, strict=True)
    }
    first, last = measurements[names[0]], measurements[names[-1]]
    if set(first.classes) != set(last.classes):
        theirs = " and ".join(", ".join(x.classes) or "none" for x in (first, last))
        last.settings["notes"].append(f"the classes of the two models, compared by number, are {theirs}")
    documents: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    bounds: dict[str, list[Any]] = {}
    for model, (name, measurement) in zip(arguments.model, measurements.items(), strict=True):
        documents[name] = document = measurement.summary().to_json()
        document["measured"] |= {"model": model, "data": arguments.data, "seed": arguments.seed}
        bounds[name] = []
        if arguments.resamples:
            bounds[name] = [
                score_intervals(x, np.random.default_rng(arguments.seed), resamples=arguments.resamples)
                for x in (measurement, *measurement.others)
            ]
            document["interval"] = nested({score: [x.low, x.high] for score, x in bounds[name][0].items()})
        tables[name] = measurement.tables(bounds[name])
        document |= {part: tables[name][part] for part in ("removals", "groups") if part in tables[name]}
        if arguments.eraser_out:
            document["measured"]["eraser"] = _write_eraser(measurement, arguments.eraser_out)
    difference, rows = None, []
    if len(names) == 2:
        generator = np.random.default_rng(arguments.seed)
        difference = paired_scores(first, last, generator, resamples=arguments.resamples)
        rows = _difference_rows(measurements, difference)
    if arguments.out:
        models = zip(arguments.model, measurements.items(), strict=True)
        saved = {name: Measured(x, model, arguments.data, bounds[name]) for model, (name, x) in models}
        page = save_measured(Path(arguments.out), saved, rows)
    if arguments.json:
        differences = {name: vars(bounds) for name, bounds in (difference or {}).items()}
        both = {"models": documents, "difference": nested(differences)}
        print_json(both if difference else documents[names[0]])
        return 0
    for name, measurement in measurements.items():
        _print(measurement, tables[name], f"{name}: " if difference else "")
    if difference:
        title = f"{names[1]} minus {names[0]}, paired by instance, with 95% bootstrap intervals"
        print_table(rows, f"\n{title} (verdict: at 95% for all scores together)")
    if eraser := documents[names[0]]["measured"].get("eraser"):
        commands = "\n".join(f"  {command}" for command in eraser["commands"])
        print(f"\nscored again by ERASER's own code:\n{commands}")
        print(eraser["note"] or "", end="\n" if eraser["note"] else "")
    if arguments.out:
        print(f"\nto look at: {page}")
    return 0


def _in_half_precision(arguments: argparse.Namespace) -> bool:
    """Whether the CPU will compute in half precision, by the options and the model folders."""
    if arguments.device is not None and not arguments.device.startswith("cpu"):
        return False
    if arguments.precision is not None:
        return arguments.precision in _HALF
    for config in (Path(model, "config.json") for model in arguments.model):
        # Loading reports a bad file later.
        with suppress(OSError, ValueError, RecursionError, AttributeError):
            document = json.loads(config.read_bytes() if config.is_file() else "")
            if str(document.get("dtype") or document.get("torch_dtype")) in _HALF:
                return True
    return False


def _names(models: list[str]) -> list[str]:
    """The names of the models: their folder names, or their paths if two folders have the same name."""
    if len(models) > 2:
        raise InputError(f"--model was given {len(models)} times; give one model, or two to compare")
    if len(set(models)) < len(models):
        raise InputError(f"--model {models[0]!r} was given twice; give two different models to compare")
    names = [Path(model).resolve().name for model in models]
    return names if len(set(names)) == len(names) else models


def _measure(arguments: argparse.Namespace, model: str, data: list[Any], aggregation: Any) -> Any:
    from fasterqk.attention import Nulls, Passes, load_model, measure

    loaded = load_model(model, device=arguments.device, precision=arguments.precision)
    mask_token = loaded.tokenizer.mask_token_id
    if "mask" in arguments.remove and mask_token is None:
        raise InputError(f"--remove mask: the tokenizer of {model!r} has no mask token")
    with progress_bar("measure") as progress:
        return measure(
            loaded,
            data,
            aggregation=aggregation,
            scores=arguments.scores,
            removal=_removals(arguments, mask_token),
            nulls=Nulls(arguments.null, arguments.seed),
            passes=Passes(arguments.batch_size, progress=progress),
        )


def _removals(arguments: argparse.Namespace, mask_token: int | None) -> list[Any]:
    from fasterqk.attention import Removal

    percents: Any = arguments.rationale_k or _percentages("eraser" if arguments.eraser_out else "5,10,20,50")
    return [Removal(how, mask_token if how == "mask" else None, *percents) for how in arguments.remove]


def _difference_rows(measurements: dict[str, Any], difference: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per score: both models, and the second minus the first."""
    from fasterqk.attention.scores import ScoreName

    first = next(iter(measurements.values()))
    counts = {(row["score"], row["k"]): row["n"] for row in first.scores_table()}
    rows = []
    for flat_name, bounds in difference.items():
        name = ScoreName.parse(flat_name)
        if name.score.tables:
            row = {**name.row, "n": counts[name.row["score"], name.k]}
            row |= {model: x.at_defaults[flat_name] for model, x in measurements.items()}
            row |= {"difference": bounds.value, "low": bounds.low, "high": bounds.high}
            good = bounds.value > 0 if name.score.better == "higher" else bounds.value < 0
            known = ("better" if good else "worse") if name.score.better else "differs"
            rows.append(row | {"verdict": known if bounds.apart else ""})
    return rows


def _write_eraser(measurement: Any, path: str) -> dict[str, Any]:
    from fasterqk.attention.eraser import eraser_commands, unscorable_class, write_eraser

    write_eraser(measurement, path)
    unscorable = unscorable_class(measurement)
    note = (
        f"ERASER's metrics.py cannot score predictions of {unscorable!r}, as no line of the data has this"
        " label: the files hold rationales alone"
    )
    return {"commands": eraser_commands(measurement, path), "note": None if unscorable is None else note}


def _check(arguments: argparse.Namespace) -> None:
    from fasterqk.attention.eraser import eraser_paths
    from fasterqk.files import check_output

    _removals(arguments, mask_token=0)  # raises before anything is read
    if len(arguments.model) > 1 and not arguments.resamples:
        raise InputError("--resamples 0: two models are compared by resampling; give at least 1")
    if len(arguments.model) > 1 and arguments.eraser_out:
        raise InputError("--eraser-out takes the predictions of one model; give --model once")
    if arguments.eraser_out is not None:
        for path in eraser_paths(arguments.eraser_out):
            check_output(path, reads=[arguments.data, *arguments.model, *(arguments.scores or ())])
    if arguments.out is not None:
        check_out(arguments.out, arguments.data, *arguments.model, *(arguments.scores or ()))


def _print(measurement: Any, tables: dict[str, Any], of: str) -> None:
    note = (
        "low, high: 95% bootstrap interval of each score alone, not corrected for their number; null: uniform"
        " attention, or a random ranking"
    )
    if any("sharp" in row for row in tables["scores"]):
        note += "; sharp: all attention on one random token; permuted: the model's own in random orders"
    print_table(tables.pop("scores"), f"{of}{measurement.counts}\n({note})")
    print(*(f"\nnote: {text}" for text in measurement.notes), sep="")
    for name, rows in tables.items():
        print_table(rows, f"\n{measurement.titles[name]}")
