"""The command line of the lab: reproduce the paper, train its models, store their results."""

from fasterqk import __version__
from fasterqk.cli.common import Program

COMMANDS = {
    "reproduce": "make a figure or table of the paper",
    "train": "train one model on one task, with its own learning rate for the query-key circuit",
    "tune": "choose the base rate, then the multiplier of QK, by validation accuracy alone",
    "synthetic": "train one parameterization of the toy language in seconds",
    "data": "check the data files: found, counts, missing",
    "sweep": "run the cells of a spec that are not done yet",
    "plan": "show which cells of a sweep are left, and estimate their time",
    "runs": "list, show, remove and collect the cells of a store",
    "report": "turn a results folder into one HTML page",
    "bench": "time our code against a plain implementation in one process",
}

# The module of each command.
MODULES = {
    name: module
    for module, names in {
        "reproduce": ("reproduce", "report", "bench"),
        "train": ("train", "tune", "synthetic", "data"),
        "sweep": ("sweep", "plan", "runs"),
    }.items()
    for name in names
}

WELCOME = """\
fasterqk-lab: the paper's figures, tables and claims, reproduced.

Try first:
  fasterqk-lab reproduce fig4                         a figure of the paper
  fasterqk-lab reproduce all --out out                the paper in a few minutes, ending with a page
  fasterqk-lab train agreement --qk-ratio 30          one training
  fasterqk-lab --help                                 every command"""

PROGRAM = Program(
    name="fasterqk-lab",
    version=__version__,
    description="Reproduce the paper, train its models, and store their results.",
    package="fasterqk_lab.cli",
    commands=COMMANDS,
    welcome=WELCOME,
    modules=MODULES,
)
main = PROGRAM.main
