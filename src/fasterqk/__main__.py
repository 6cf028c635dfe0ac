"""``python -m fasterqk`` and the installed command: the command line, and Ctrl-C while it is imported."""

import sys


def main(module: str = "fasterqk.cli.main") -> int:
    """Run the command line of this process, ``main`` of ``module``; returns the exit code."""
    interrupted = False

    def stop(number: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    try:
        import signal  # here, where Ctrl-C is expected

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, stop)
        from importlib import import_module

        return int(import_module(module).main())
    except KeyboardInterrupt:  # before `run` can say so itself, or while it does
        pass
    except ImportError:
        # An interrupt while an extension (numpy) is imported comes out as this, and blames the installation.
        if not interrupted:
            raise
    print("fasterqk: stopped", file=sys.stderr)
    return 130


if __name__ == "__main__":
    sys.exit(main())
