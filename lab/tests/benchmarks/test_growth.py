"""`bench all`: slopes, limits, the record, and what is told of an earlier one."""

import json
from pathlib import Path

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk_lab.benchmarks import growth
from fasterqk_lab.benchmarks.growth import GROWTH, grown, in_a_process, limit, machine, rows, run_all
from tools.performance import page


@pytest.mark.parametrize("name", GROWTH)
def test_everything_runs_at_its_smallest_size(name):
    sizes = GROWTH[name].sizes
    [point] = grown(name, sizes[:1])
    assert point["seconds"] > 0 <= point["megabytes"]
    assert sizes[-1] >= 64 * sizes[0]


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux")
def test_memory_is_that_of_a_process_and_not_of_its_parent():
    held = np.ones(2**26)  # 512 MB, all of it written
    small, large = in_a_process("theory", (100, 3000))
    del held
    assert small["megabytes"] < large["megabytes"] < 400


def test_the_error_of_a_size_is_one_line():
    with pytest.raises(InputError, match=r"theory with ratios \(-1,\) ended with"):
        in_a_process("theory", (-1,))


def test_limits_are_in_operations_bytes_or_what_cannot_be_left_out():
    assert min(machine().values()) > 0
    speed = {"gigaflops": 100.0, "gigabytes": 10.0}
    assert limit("training", {"operations": 2e9}, speed) == {"seconds": 0.02, "what": "2 GFLOP"}
    assert limit("circuits", {"bytes": 5e9}, speed) == {"seconds": 0.5, "what": "5 GB"}
    assert limit("measure", {"needed_seconds": 3.0}, speed) == {"seconds": 3.0, "what": "its forward passes"}
    assert limit("stability", {"plain_seconds": 2.0}, speed) == {"seconds": 2.0, "what": "the plain step"}
    assert limit("theory", {}, speed) is None


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(growth, "GROWTH", {"theory": GROWTH["theory"]._replace(sizes=(10, 20, 40))})
    monkeypatch.setattr(growth, "in_a_process", grown)
    monkeypatch.setattr(growth, "machine", lambda: {"gigaflops": 1.0, "gigabytes": 1.0})


def bench(speedup):
    result = {"speedup": speedup, "plain_seconds": 1.0, "seconds": 0.5, "operations": 2.5e8}
    return {"toy": lambda progress: result}


def test_a_record_is_written_and_compared_with_the_one_before(tmp_path, small, capsys):
    assert run_all(lambda *_: None, tmp_path, bench(10.0))["worse"] == []
    record = run_all(lambda *_: None, tmp_path, bench(7.0))
    assert record["worse"] == ["toy: 10.0 times the plain way before, 7.0 now"]
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert saved["benchmarks"]["toy"]["speedup"] == 7.0
    tables = rows(record)
    assert tables["benchmarks"][0]["times the limit"] == 2.0
    assert tables["growth"][0]["to"] == 40
    assert (tmp_path / "figures" / "bench-growth.svg").is_file()
    lines = capsys.readouterr().err.splitlines()
    parts = ["benchmarks: toy", "growth: theory"] * 2
    assert [line.rpartition(":")[0] for line in lines] == [f"bench all: {part}" for part in parts]


def test_a_run_that_was_stopped_goes_on_and_is_compared_with_the_whole_one_before_it(tmp_path, small):
    run_all(lambda *_: None, tmp_path, bench(10.0))

    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(lambda *_: None, tmp_path, bench(7.0) | {"other": stop})
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert (saved["done"], list(saved["benchmarks"]), saved["growth"]) == (False, ["toy"], {})
    record = run_all(lambda *_: None, tmp_path, {"toy": stop, "other": bench(3.0)["toy"]})
    assert {name: result["speedup"] for name, result in record["benchmarks"].items()} == {
        "toy": 7.0,
        "other": 3.0,
    }
    assert record["worse"] == ["toy: 10.0 times the plain way before, 7.0 now"]
    assert list(record["growth"]) == ["theory"]


def test_the_page_is_made_from_the_record(tmp_path, small):
    record = run_all(lambda *_: None, tmp_path, bench(10.0))
    text = page(record)
    assert "| toy | 10 | 0.5 | 0.25 | 0.25 GFLOP | 2 |" in text
    assert "| theory | ratios | 10 | 40 |" in text
    assert len(text.splitlines()) <= 150
    with pytest.raises(InputError, match="stopped"):
        page(record | {"done": False})
