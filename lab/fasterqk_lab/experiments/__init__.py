"""One module per figure or table of the paper, and the registry that lists them."""

from fasterqk_lab.experiments._registry import EXPERIMENTS, Experiment, Option, find_experiment, reproduce

__all__ = ["EXPERIMENTS", "Experiment", "Option", "find_experiment", "reproduce"]
