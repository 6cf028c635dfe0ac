"""The command line of the library: measure, label and predict for your own models."""

from fasterqk import __version__
from fasterqk.cli.common import Program

COMMANDS = {
    "demo": "small classifiers with data, to try the other commands on",
    "circuits": "which parameters of an architecture are query-key, which output-value",
    "measure": "where a Hugging Face model attends on your own data, and whether it matters",
    "theory": "the dynamics solved exactly: attention at a loss, the ratio for a wanted attention",
    "explore": "the theory as an interactive page, computed in the browser",
}

WELCOME = """\
fasterqk: how sharply a transformer attends, set by one learning-rate ratio.

Try first:
  fasterqk demo                                       small models to try every command on
  fasterqk circuits gpt2                              which parameters are queries and keys
  fasterqk theory ratio --alpha 0.9 --loss 1e-3       the ratio for a wanted attention, in theory
  fasterqk --help                                     every command"""

PROGRAM = Program(
    name="fasterqk",
    version=__version__,
    description="Faster query-key learning: apply it, measure it, predict it.",
    package="fasterqk.cli",
    commands=COMMANDS,
    welcome=WELCOME,
)
main = PROGRAM.main
