"""Every command line of a program, found by walking its parsers."""

import argparse
from collections.abc import Iterable
from importlib import import_module

from fasterqk.cli.common import Parser


def command_lines(package: str, commands: Iterable[str]) -> list[list[str]]:
    """Every command line of ``commands``, modules of ``package``, that takes ``--help``."""

    def walk(parser: argparse.ArgumentParser, words: list[str]) -> list[list[str]]:
        lines = [words]
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word, child in action.choices.items():
                    lines += walk(child, [*words, word])
        return lines

    lines = []
    for name in commands:
        parser = Parser(prog=name)
        import_module(f"{package}.{name}").configure(parser)
        lines += walk(parser, [name])
    return lines
