"""Fused weights under FSDP2: two and three real processes train what one process trains."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fasterqk import find_circuits, make_optimizer
from fasterqk.optim._fused import steps_by_entry

SCRIPT = Path(__file__).with_name("sharded_processes.py")


@pytest.mark.parametrize(
    ("kind", "by_entry"),
    [
        *((kind, True) for kind in (optim.AdamW, optim.SGD, optim.NAdam, optim.Adagrad, optim.RMSprop)),
        (optim.Adafactor, False),
        (optim.Muon, False),
    ],
)
def test_which_optimizers_step_entry_by_entry(kind, by_entry):
    before = torch.random.get_rng_state()
    assert steps_by_entry(lambda parameters: kind(parameters, lr=0.1)) is by_entry
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_optimizer_that_cannot_be_tried_does_not_step_entry_by_entry():
    class Picky(optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("call train() first")

    assert not steps_by_entry(Picky)


# --- Real processes ---


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("sharded_processes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the first of two, and then the first of three processes found; the three resume what two saved."""
    folder = tmp_path_factory.mktemp("sharded")
    done = subprocess.run(
        [sys.executable, SCRIPT.parents[1] / "processes.py", "3", SCRIPT, folder],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "results.pt", weights_only=True)


@pytest.fixture(scope="module")
def alone(script):
    """The weights of each model after all steps in one process."""
    trained = {}
    for name in script.MODELS:
        model = script.made(name)
        trained[name] = script.train(model, script.optimizer_of(model))
    return trained


def difference(first, second):
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_sharded_fused_weights_equal_one_process(script, results, alone, processes):
    """In float64: columns, rows, interleaved rows, uneven and empty shards."""
    for name in script.MODELS:
        assert difference(results[processes][name], alone[name]) <= 1e-9, name


@pytest.mark.slow
def test_a_checkpoint_resumes_on_another_number_of_processes(script, results, alone):
    for name in script.MODELS:
        assert difference(results[3][f"{name}, resumed"], alone[name]) <= 1e-9, name


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_other_ways_to_shard(script, results, alone, processes):
    """Columns of a weight over processes, tensor parallel, roles, another optimizer's state, bfloat16."""
    result = results[processes]
    if processes == 2:
        for name, trained in result["columns"].items():
            assert difference(trained, alone[name]) <= 1e-9, name
    assert difference(result["parallel"], script.parallel(0, 1, alone=True)) <= 1e-9
    assert difference(result["converted"], alone["gpt2"]) <= 1e-9
    model = script.made("gpt2")
    optimizer = script.optimizer_of(model, optim.NAdam, ratios={"q": 10, "k": 3, "v": 2})
    assert difference(result["roles"], script.train(model, optimizer, 0, 4)) <= 1e-9
    assert sum(result["groups"]) == len(list(model.parameters()))  # each listed once
    assert result["half"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_checks_scales_and_norms_of_sharded_models(script, results, processes):
    result = results[processes]
    assert [(circuit, measured, ok) for circuit, _, measured, ok in result["rows"]] == [
        ("qk", 10.0, True),
        ("ov", 1.0, True),
        ("rest", 1.0, True),
    ]
    assert result["plain"]
    model = script.made("phi3")
    assert sum(count for _, count, _, _ in result["rows"]) == sum(p.numel() for p in model.parameters())
    trained = script.train(model, script.optimizer_of(model, decay="independent"), 0, 6)
    assert difference(result["weights"], trained) <= 1e-9  # the check has changed nothing
    scaled = script.made("phi3")
    script.scale_circuits(scaled, qk=4.0)
    assert difference(result["scaled"], script.weights(scaled)) == 0
    ids = script.batches()[0]
    script.loss_of(ids)(scaled(input_ids=ids)).backward()
    before, after = result["norms"]
    expected = script.normalize_gradients(scaled, {"qk": 1.0, "ov": 1.0})
    assert before == pytest.approx(expected, rel=1e-9) and after == pytest.approx({"qk": 1.0, "ov": 1.0})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hazard", "words"),
    [
        (
            "sharded later",
            "was sharded (by fully_shard, parallelize_module or Accelerate); in a loop of your own",
        ),
        ("unsharded", "is not sharded now (unshard(), or set_reshard_after_backward(False)): call reshard()"),
        ("sharded state", "is sharded and the model is not; save it whole, by get_optimizer_state_dict("),
        ("frozen", "would do nothing"),
        ("Adafactor", "is split and sharded"),
        ("Muon", "Muon steps a matrix other than entry by entry; use AdamW"),
    ],
)
def test_what_cannot_work_ends_in_one_line(results, hazard, words):
    for result in results.values():
        assert words in result[hazard] and "\n" not in result[hazard], result[hazard]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_first_step_that_raises_half_way():
    """Such as out of memory between the steps of two groups: what was stepped stays, as in a stock one."""

    class OutOfMemory(optim.SGD):
        full = False

        def step(self, closure=None):
            for group in self.param_groups:
                if self.full and group["name"] == "qk":
                    raise RuntimeError("out of memory")
                for leaf in group["params"]:
                    self.state[leaf]["sum"] = self.state[leaf].get("sum", 0) + leaf.grad
                    leaf.data.add_(self.state[leaf]["sum"], alpha=-group["lr"])

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.MultiheadAttention(8, 2, batch_first=True)
        roles = [(part.start, part.role) for part in find_circuits(model)]
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        circuits = find_circuits(model)  # of a class that fully_shard has derived
        assert [(part.start, part.role) for part in circuits] == roles
        optimizer = make_optimizer(model, OutOfMemory, lr=1e-3, qk_ratio=10, circuits=circuits)
        model(*[torch.randn(1, 3, 8)] * 3)[0].sum().backward()
        optimizer.full = True
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step()
        optimizer.full = False
        optimizer.step()
        fused = model.in_proj_weight
        assert optimizer.state_dict()["state"]
        expected = fused.grad.full_tensor() * torch.tensor([1] * 16 + [2] * 8)[:, None]
        assert torch.equal(optimizer.state[fused]["sum"].full_tensor(), expected)
        assert set(optimizer.state) == set(model.parameters())
    finally:
        dist.destroy_process_group()
