"""Two real processes train what one process trains with the same global batch."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow  # two processes are started

SCRIPT = Path(__file__).with_name("two_processes.py")


@pytest.fixture(scope="module")
def both():
    spec = importlib.util.spec_from_file_location("two_processes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the first of two processes wrote."""
    file = tmp_path_factory.mktemp("processes") / "weights.pt"
    done = subprocess.run(
        [sys.executable, SCRIPT.parents[1] / "processes.py", "2", SCRIPT, file],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("way", "model"),
    [("ddp", "gpt2"), ("ddp, buckets", "gpt2"), ("fsdp2", "llama"), ("fsdp2, fused", "gpt2")],
)
def test_two_processes_equal_one(both, results, way, model):
    assert_equal(results[way], both.weights(both.trained(getattr(both, model)())))


@pytest.mark.parametrize(
    ("way", "model"),
    [
        ("clip, ddp", "gpt2"),
        ("clip, fsdp2", "llama"),
        ("clip, fused, fsdp2", "gpt2"),
        ("clip, own units", "llama"),
    ],
)
def test_a_clip_takes_one_maximum_over_all_processes(both, results, way, model):
    results_of = dict(results[way])
    alone, clip, largest = both.clipped(getattr(both, model)())
    assert results_of.pop("total") == clip.total > 0
    torch.testing.assert_close(results_of.pop("largest"), largest, rtol=1e-5, atol=1e-6)
    assert_equal(results_of, both.weights(alone))


def test_a_clip_is_rehearsed_where_attention_is_a_sharded_unit(results):
    assert "do not follow" in results["clip, normalised"] and "\n" not in results["clip, normalised"]


def test_blocks_are_compared_by_name(results):
    """A healthy stage of a pipeline keeps its weights; a rank may skip a block that another runs."""
    first, second = (rank["pipeline"] for rank in results["ranks"])
    assert (first["changed"], second["changed"]) == ([], ["1"]) and first["total"] == 0 < second["total"]
    assert list(first["monitor"]) == ["0"] and list(second["monitor"]) == ["1"]
    first, second = (rank["same names"] for rank in results["ranks"])
    assert (first["changed"], second["changed"]) == ([], ["0"])
    first, second = (rank["skipping"] for rank in results["ranks"])
    assert first["changed"] == second["changed"] == ["0", "1"] and first["total"] == second["total"]
    assert first["monitor"] == second["monitor"] and list(first["monitor"]) == ["0", "1"]


@pytest.mark.parametrize("way", ["first", "together", "sharded"])
def test_accelerate_equals_one_process(both, results, way):
    """Also where the optimizer was made before Accelerate gave its weights other memory."""
    results_of = dict(results[f"accelerate, {way}"])
    assert results_of.pop("processes") == 2
    assert_equal(results_of, both.weights(both.trained(both.gpt2())))


def assert_equal(results_of, expected):
    assert results_of.keys() == expected.keys()
    for name, value in expected.items():
        keep = torch.ones(len(value), dtype=torch.bool)
        if name.endswith("c_attn.bias"):
            keep[16:32] = False  # of a key bias Adam sees rounding noise alone
        torch.testing.assert_close(results_of[name][keep], value[keep], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("own_unit", [True, False])
def test_the_first_pass_of_a_sharded_model_is_compared_with_the_labels(results, own_unit):
    """The attention itself may be a unit of FSDP2."""
    said = results[f"first pass, {own_unit}"]
    assert said.startswith(
        "True the first training pass contradicts the labels: in *.q_proj.weight rows 0:16 q"
    )
    assert "labels={'*.q_proj.weight': [(0, 0, 16, 'q'), (0, 16, 32, 'o')]" in said and "\n" not in said
