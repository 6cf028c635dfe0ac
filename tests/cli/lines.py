"""Every command line of a program, found by walking its parsers."""

import argparse

from fasterqk.cli.common import Parser, Program


def parsers(program: Program) -> dict[tuple[str, ...], argparse.ArgumentParser]:
    """The parser of every command line of ``program`` that takes ``--help``, by its words."""

    def walk(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> None:
        known[words] = parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word, child in action.choices.items():
                    walk(child, (*words, word))

    known: dict[tuple[str, ...], argparse.ArgumentParser] = {}
    for name in program.commands:
        parser = Parser(prog=name)
        configure, _ = program.command(name)
        configure(parser)
        walk(parser, (name,))
    return known


def command_lines(program: Program) -> list[list[str]]:
    """Every command line of ``program`` that takes ``--help``."""
    return [list(words) for words in parsers(program)]
