"""``python -m fasterqk`` and the installed command: the command line, and Ctrl-C while it is imported."""

import signal
import sys
from typing import Any, NoReturn


def main() -> int:
    """Run the command line of this process; returns the exit code."""
    interrupted = False

    def stop(number: int, frame: Any) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, stop)
        from fasterqk.cli.main import main as run

        return run()
    except BaseException as error:
        # Before `run` can say so itself, or while it does. Where an extension (numpy) is being imported, the
        # interrupt comes out as another error, of a broken installation.
        if not isinstance(error, KeyboardInterrupt) and not (interrupted and isinstance(error, ImportError)):
            raise
        print("fasterqk: stopped", file=sys.stderr)
        return 130
    finally:
        if signal.getsignal(signal.SIGINT) is stop:
            signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())
