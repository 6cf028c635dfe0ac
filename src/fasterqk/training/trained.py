"""A run that was trained before, its weights read from its checkpoint."""

from pathlib import Path

from fasterqk.errors import InputError
from fasterqk.training import checkpoint
from fasterqk.training.config import TrainConfig
from fasterqk.training.optimizer import build_optimizer
from fasterqk.training.workload import Workload, build_workload


def trained(config: TrainConfig, folder: Path) -> Workload:
    """The workload of ``config`` with the weights that ``folder`` (of the store) holds.

    >>> from fasterqk.runs import Store
    >>> trained(config, Store("out").folder(config)).model      # doctest: +SKIP
    """
    workload = build_workload(config)
    optimizer = build_optimizer(workload.model, config)
    found = checkpoint.load(folder, model=workload.model, optimizer=optimizer, generators={}, config=config)
    if found is None:
        raise InputError(f"no checkpoint in {str(folder)!r}; train this cell first")
    workload.model.eval()
    return workload
