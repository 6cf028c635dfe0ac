"""Every command line of a program, found by walking its parsers."""

import argparse

from fasterqk.cli.common import Parser, Program


def command_lines(program: Program) -> list[list[str]]:
    """Every command line of ``program`` that takes ``--help``."""

    def walk(parser: argparse.ArgumentParser, words: list[str]) -> list[list[str]]:
        lines = [words]
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word, child in action.choices.items():
                    lines += walk(child, [*words, word])
        return lines

    lines = []
    for name in program.commands:
        parser = Parser(prog=name)
        configure, _ = program.command(name)
        configure(parser)
        lines += walk(parser, [name])
    return lines
