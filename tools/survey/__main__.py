"""``python -m tools.survey LIBRARY``: label or refuse every model of a library, with a second opinion."""

import sys
from collections.abc import Sequence

from fasterqk.cli.common import Parser, add_json, examples, positive_float
from fasterqk.console import print_result, progress_bar
from fasterqk.errors import InputError
from fasterqk.files import check_output
from tools.survey.page import summary, write_section
from tools.survey.survey import survey


def parser() -> Parser:
    options = Parser(
        prog="python -m tools.survey",
        description="Label or refuse every model of a library, with a second opinion by perturbation.",
        epilog=examples(
            "python -m tools.survey timm --only 'vit_*' --out vit.jsonl",
            "python -m tools.survey transformers --out transformers.jsonl --page docs/survey.md",
        ),
    )
    options.add_argument(
        "library", metavar="LIBRARY", help="transformers, timm, torchvision or diffusers, as installed"
    )
    options.add_argument("--only", metavar="PATTERN", help="only the names that match, as 'vit_*'")
    options.add_argument(
        "--out",
        metavar="FILE",
        help="a JSON line per model, as soon as it is done; names in it are not run again",
    )
    options.add_argument("--page", metavar="FILE", help="write the counts between the marks of this page")
    options.add_option("--seconds", positive_float, "S", "time for each model", default=120.0)
    add_json(options)
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = parser().parse_args(words)
    library, out = arguments.library, arguments.out
    try:
        if out is not None:
            check_output(out)
        with progress_bar(f"survey of {library}") as progress:
            entries = survey(library, arguments.only, out, arguments.seconds, progress=progress)
        if arguments.page is not None:
            write_section(arguments.page, library, entries)
    except InputError as error:
        print(f"tools.survey: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tools.survey: stopped; the same command with --out continues", file=sys.stderr)
        return 130
    return print_result(arguments.json, entries, lambda _: print(summary(library, entries)))


if __name__ == "__main__":
    sys.exit(main())
