"""Made-up cells, from which experiments are rebuilt without training."""

import pytest

from fasterqk_lab.experiments import reproduce
from fasterqk_lab.experiments._registry import settings_of, write_cells
from fasterqk_lab.training import TrainResult


@pytest.fixture
def rebuilt(tmp_path):
    """A function that rebuilds an experiment from cells whose histories it is given.

    ``history(arm, config, seed)`` gives the records of a cell, None if it diverged.
    """

    def rebuild(name, comparisons, history, facts=(), **options):
        lines = [{"experiment": name, "fact": fact, "value": value} for fact, value in dict(facts).items()]
        for comparison in comparisons:
            for (arm, seed), config in comparison.cells().items():
                records = history(arm, config, seed)
                fit = {"loss": 0.1, "accuracy": 0.5}
                result = TrainResult(
                    config.task,
                    seed,
                    1.0,
                    records is None,
                    3,
                    None if records is None else records[-1]["loss"],
                    train=fit,
                    validation=fit,
                    test=fit if records is None else fit | {"mrta": records[-1]["mrta"] + 0.001},
                    history=records or [{"loss": None, "diverged": True}],
                ).to_json()
                about = {"experiment": name, "arm": arm, "seed": seed, "settings": settings_of(config)}
                lines.append(about | {"result": result})
        file = write_cells(tmp_path / "cells.jsonl", lines)
        return reproduce(name, tmp_path / "out", cells=[str(file)], **options)

    return rebuild
