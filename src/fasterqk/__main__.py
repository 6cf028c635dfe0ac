"""``python -m fasterqk`` and the installed command: the command line, and Ctrl-C while it is imported."""

import sys


def main() -> int:
    """Run the command line of this process; returns the exit code."""
    try:
        from fasterqk.cli.main import main as run

        return run()
    except KeyboardInterrupt:  # before `run` can say so itself, or while it does
        print("fasterqk: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
