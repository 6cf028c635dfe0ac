"""`fasterqk reproduce NAME`: one file an experiment, and `all` that runs the quick ones."""

from fasterqk.cli.reproduce.command import configure, run

__all__ = ["configure", "run"]
