"""`fasterqk reproduce table-sva`: subject-verb agreement, whole sentences and prefixes, with controls."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasterqk.cli.output import progress_bar
from fasterqk.cli.parser import Parser, positive_int
from fasterqk.cli.reproduce.arms import add_arm_options, run_experiment, show_arms

if TYPE_CHECKING:
    from fasterqk.experiments.arms import Experiment

SUMMARY = "subject-verb agreement on Linzen's sentences: accuracy, attention and faithfulness of both arms"
EXAMPLES = [
    "fasterqk reproduce table-sva --out out",
    "fasterqk reproduce table-sva --form prefix --seeds 5 --json     # accuracy by number of attractors",
    "fasterqk reproduce table-sva --protocol released",
    "fasterqk reproduce table-sva --form whole --seeds 1 --epochs 2  # a quick look",
]


def configure(parser: Parser) -> None:
    parser.add_argument(
        "--protocol",
        choices=["paper", "released"],
        default="paper",
        help="paper: QK alone learns faster (default); released: what the notebooks do",
    )
    parser.add_argument(
        "--form",
        choices=["whole", "prefix"],
        help="whole sentences, as the paper; prefix: up to the verb (default: all the protocol has)",
    )
    parser.add_argument("--seeds", type=positive_int, default=5, metavar="N", help="how many (default: 5)")
    parser.add_argument("--data-dir", metavar="DIR", help="data folder (default: $FASTERQK_DATA, user cache)")
    add_arm_options(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from fasterqk.experiments.table_sva import FORMS, check_form

    protocol = arguments.protocol
    if arguments.form:
        check_form(protocol, arguments.form)
    forms = [arguments.form] if arguments.form else FORMS[protocol]
    tables = {}
    for form in forms:
        experiment, chosen = build(protocol, form, arguments)
        tables[form] = {**run_experiment(experiment, arguments), "chosen_rate": chosen}
    return {"experiment": "table-sva", "protocol": protocol, "forms": tables}


def build(
    protocol: str, form: str, arguments: argparse.Namespace
) -> tuple["Experiment", dict[str, Any] | None]:
    """The experiment and how its base rate was chosen; trains the candidates that are not done yet."""
    from fasterqk.cli.failures import failures_in_one_line
    from fasterqk.cli.reproduce.arms import use_data_dir
    from fasterqk.experiments.table_sva import choose_rate, released_epochs, table_sva
    from fasterqk.tasks import load_task

    use_data_dir(arguments)
    # Missing or damaged data is told before any worker starts.
    task = load_task("sva", form="released" if protocol == "released" else form)
    epochs = arguments.epochs
    if protocol == "released":
        epochs = epochs or released_epochs(len(task.splits["train"]))
        return table_sva(protocol, form, arguments.seeds, epochs), None
    with progress_bar(f"table-sva-{form}: base rate") as progress, failures_in_one_line():
        chosen = choose_rate(
            form, Path(arguments.out), epochs=epochs, workers=arguments.workers, progress=progress
        )
    return table_sva(protocol, form, arguments.seeds, epochs, chosen["lr"]), chosen


def show(result: dict[str, Any]) -> None:
    for table in result["forms"].values():
        show_arms(table)
        chosen = table["chosen_rate"]
        if chosen:
            tried = ", ".join(
                f"{rate}: {'diverged' if value is None else f'{value:.3f}'}"
                for rate, value in chosen["validation_accuracy"].items()
            )
            print(
                f"base rate {chosen['lr']:g}: the smallest within one standard error of the best "
                f"validation accuracy at equal rates ({tried})\n"
            )
