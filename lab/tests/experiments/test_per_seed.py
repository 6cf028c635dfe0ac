"""Per-seed values: what every interval of an experiment can be recomputed from."""

import csv
from pathlib import Path

import pytest
from fasterqk_lab.experiments._per_seed import BEST, END, per_seed_rows

from fasterqk.attention import matched_loss
from fasterqk_lab.experiments._registry import CellRunner, read_cells, settings_of, write_cells
from fasterqk_lab.training import TrainConfig


def result(mrta, diverged=False):
    history = [
        {"step": 0, "loss": 1.0, "mrta": 0.1, "test_accuracy": 0.5},
        {"step": 9, "loss": 0.1, "mrta": mrta, "test_accuracy": 0.9},
    ]
    test = {"loss": 0.2, "accuracy": 0.9, "mrta": mrta, "null": {"mrta": 0.2}, "dtap": [[100.0]]}
    test["groups"] = {"attractors": {"0": {"n": 5, "accuracy": 1.0}, "3": {"n": 2, "accuracy": 0.5}}}
    parts = {"loss": 0.1, "train": {"accuracy": 0.95}, "validation": {"accuracy": 0.8}, "test": test}
    return {**parts, "best": history[1], "history": history, "diverged": diverged}


def test_rows_have_the_values_that_tables_summarise():
    cells = {("a", 0): result(0.3), ("a", 1): result(0.4), ("b", 0): result(0.6), ("b", 1): result(0.0, True)}
    rows = {(row["arm"], row["seed"], row["at"], row["score"]): row["value"] for row in per_seed_rows(cells)}
    assert rows["a", 1, END, "mrta"] == 0.4
    assert rows["a", 1, END, "null_mrta"] == 0.2
    assert rows["a", 0, END, "train_accuracy"] == 0.95
    assert rows["a", 0, END, "accuracy, attractors 3"] == 0.5
    assert rows["b", 0, BEST, "test_accuracy"] == 0.9
    # At equal loss they are those of `matched_loss`.
    histories = {cell: [] if found["diverged"] else found["history"] for cell, found in cells.items()}
    for level in matched_loss(histories, ["mrta"]):
        place = f"training loss {level['loss']:.6g}"
        values = [rows["a", seed, place, "mrta"] for seed in (0, 1)]
        assert sum(values) / 2 == pytest.approx(level["arms"]["a"]["mrta"].mean)
    # A diverged cell has no rows, and decides nothing.
    assert not [key for key in rows if key[:2] == ("b", 1)]


def test_cells_of_the_toy_language_have_rows_too():
    cells = {
        ("FAFO", 0): {"loss": 0.001, "mrta": 0.4, "reached": True, "diverged": False, "null": {"mrta": 0.35}}
    }
    scores = {row["score"]: row["value"] for row in per_seed_rows(cells)}
    assert scores == {"loss": 0.001, "mrta": 0.4, "null_mrta": 0.35}


def test_every_table_of_an_experiment_has_a_file_with_what_was_computed_from_its_cells(
    tmp_path,
):
    """Two depths of one experiment have the same arms: in one file their values could not be told apart."""
    configs = {depth: TrainConfig("hatexplain", layers=depth) for depth in (2, 4)}
    lines = [
        {"arm": "baseline", "seed": 0, "settings": settings_of(config), "result": result(depth / 10)}
        for depth, config in configs.items()
    ]
    file = write_cells(tmp_path / "cells.jsonl", [{"experiment": "table-layers", **line} for line in lines])
    runner = CellRunner(tmp_path, experiment="table-layers", files=[str(file)])
    for depth, config in configs.items():
        cells = {("baseline", 0): config}
        runner.run(cells, "no:function", title="", protocol="paper", table=f"table-layers-{depth}")
    own = {"arm": "baseline", "seed": 0, "at": "equal entropy", "score": "mrta", "value": 0.25}
    runner.add_per_seed([own], protocol="paper", table="table-layers-2")
    texts = [Path(path).read_text() for path in runner.write_per_seed()]
    two, four = (list(csv.DictReader(text.splitlines())) for text in texts)
    assert {row["value"] for row in four if (row["at"], row["score"]) == (END, "mrta")} == {"0.4"}
    assert two[-1] == {name: str(value) for name, value in own.items()}
    exported = read_cells(runner.export(tmp_path / "again.jsonl"))
    assert [line["table"] for line in exported] == ["table-layers-2", "table-layers-4"]
