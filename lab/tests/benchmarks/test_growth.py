"""`bench all`: slopes, limits, the record, and what is told of an earlier one."""

import json

import pytest

from fasterqk.errors import InputError
from fasterqk_lab.benchmarks import growth
from fasterqk_lab.benchmarks.growth import GROWTH, grown, in_a_process, machine, rows, run_all


@pytest.mark.parametrize("name", GROWTH)
def test_everything_runs_at_its_smallest_size(name):
    point = grown(name, GROWTH[name].sizes[0])
    assert point["seconds"] > 0 <= point["megabytes"]
    assert GROWTH[name].sizes[-1] >= 64 * GROWTH[name].sizes[0]


def test_the_error_of_a_size_is_one_line():
    with pytest.raises(InputError, match="theory at -1 ratios ended with"):
        in_a_process("theory", -1)


def test_a_record_is_written_and_compared_with_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(growth, "GROWTH", {"theory": GROWTH["theory"]._replace(sizes=(10, 20, 40))})
    monkeypatch.setattr(growth, "in_a_process", grown)
    assert min(machine().values()) > 0
    monkeypatch.setattr(growth, "limits", lambda speed, names: {"toy": 0.25})

    def bench(speedup):
        return {"toy": lambda progress: {"speedup": speedup, "plain_seconds": 1.0, "seconds": 0.5}}

    assert run_all(lambda *_: None, tmp_path, bench(10.0))["worse"] == []
    record = run_all(lambda *_: None, tmp_path, bench(7.0))
    assert record["worse"] == ["toy: 10.0 times the plain way before, 7.0 now"]
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert saved["benchmarks"]["toy"]["speedup"] == 7.0
    tables = rows(record)
    assert tables["benchmarks"][0]["times the limit"] == 2.0
    assert tables["growth"][0]["to"] == 40
    assert (tmp_path / "figures" / "bench-growth.svg").is_file()
