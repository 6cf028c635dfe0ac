"""The command line of the lab: reproduce the paper, train its models, keep their results."""

from fasterqk import __version__
from fasterqk.cli.common import Program

COMMANDS = {
    "reproduce": "make a figure or table of the paper",
    "train": "train one model on one task, its query-key circuit at a rate of its own",
    "tune": "choose the base rate, then the multiplier of QK, by validation accuracy alone",
    "synthetic": "train one parameterization of the toy language in seconds",
    "data": "which data files are found, what is in them, what is missing",
    "sweep": "run the cells of a spec that are not done yet, over local workers",
    "plan": "what a sweep would still do, and an estimate of its time",
    "runs": "list, show, remove and collect the cells of a store",
    "report": "a results folder as one page to open",
    "bench": "time our code against a plain implementation in one process",
}

# Where the commands are; one with a module of its own name is there too.
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
fasterqk-lab: the paper's figures, tables and claims, made again.

Try first:
  fasterqk-lab reproduce fig4                         a figure of the paper
  fasterqk-lab reproduce all --out out                the paper in a few minutes, ending with a page
  fasterqk-lab train agreement --qk-ratio 30          one training
  fasterqk-lab --help                                 every command"""

PROGRAM = Program(
    name="fasterqk-lab",
    version=__version__,
    description="Reproduce the paper, train its models, and keep their results.",
    package="fasterqk_lab.cli",
    commands=COMMANDS,
    welcome=WELCOME,
    modules=MODULES,
)
main = PROGRAM.main
