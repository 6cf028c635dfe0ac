"""What the experiments on the toy language share on the command line."""

from collections.abc import Sequence

from fasterqk.cli.parser import Parser, positive_int


def add_options(parser: Parser, protocols: Sequence[str], default: str, seeds: int) -> None:
    """Add ``--protocol``, ``--seeds``, ``--workers`` and ``--force``."""
    parser.add_argument(
        "--protocol", choices=protocols, default=default, help=f"which settings (default: {default})"
    )
    parser.add_argument(
        "--seeds", type=positive_int, default=seeds, metavar="N", help=f"how many (default: {seeds})"
    )
    parser.add_argument(
        "--workers", type=positive_int, default=2, metavar="N", help="processes that train (default: 2)"
    )
    parser.add_argument("--force", action="store_true", help="train again what is stored already")
