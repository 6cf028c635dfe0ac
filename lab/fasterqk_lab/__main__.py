"""``python -m fasterqk_lab`` and the installed command."""

import sys

from fasterqk.__main__ import main as run


def main() -> int:
    """Run the command line of this process; returns the exit code."""
    return run("fasterqk_lab.cli.main")


if __name__ == "__main__":
    sys.exit(main())
