"""The published tables are what their cells give, without training."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CELLS = sorted((ROOT / "docs" / "results" / "cells").glob("*.jsonl*"))


@pytest.mark.slow
@pytest.mark.parametrize("file", CELLS, ids=lambda path: path.name)
def test_tables_are_rebuilt_from_cells_as_they_are_published(file, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from rebuild_results import rebuild

    tables = rebuild(file, tmp_path)
    assert tables
    for table in tables:
        published = ROOT / "docs" / "results" / table.name
        assert published.read_bytes() == table.read_bytes(), "run: python tools/rebuild_results.py"
    assert not (tmp_path / "runs").exists()
    sys.modules.pop("rebuild_results", None)
