"""200 steps are 120 steps, a checkpoint, a new process and 80 steps: to the last bit."""

import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fasterqk.optim import Ramp, make_optimizer


def run(net, circuits, kernel, steps, source=None):
    """Train with a ramped ratio and a scheduler, from ``source`` if there is one; returns everything."""
    optimizer = make_optimizer(
        net,
        torch.optim.AdamW,
        lr=3e-3,
        weight_decay=0.1,
        qk_ratio=Ramp(1, 20, 150),
        decay="independent",
        circuits=circuits,
        **{kernel: True},
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200, eta_min=1e-5)
    if source is not None:
        saved = torch.load(source, weights_only=True)
        net.load_state_dict(saved["net"])
        scheduler.load_state_dict(saved["scheduler"])
        optimizer.load_state_dict(saved["optimizer"])
    for _ in range(steps):
        optimizer.zero_grad()
        net.loss().backward()
        optimizer.step()
        scheduler.step()
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


CASES = [("columns", "fused"), ("interleaved", "foreach")]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, net, label):
    """What one new process makes of the checkpoints after 120 steps, by layout."""
    folder = tmp_path_factory.mktemp("resume")
    for layout, kernel in CASES:
        torch.save(run(model := net(layout), label(model), kernel, 120), folder / f"{layout}.pt")
    subprocess.run([sys.executable, __file__, folder], check=True, capture_output=True, text=True)
    return {layout: torch.load(folder / f"{layout}-resumed.pt", weights_only=True) for layout, _ in CASES}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kernel"), CASES)
def test_resume_is_bit_exact(layout, kernel, resumed, net, label):
    whole = run(model := net(layout), label(model), kernel, 200)
    for name, weight in whole["net"].items():
        assert torch.equal(weight, resumed[layout]["net"][name]), name
    ours, theirs = whole["optimizer"], resumed[layout]["optimizer"]
    assert ours["state"].keys() == theirs["state"].keys() and ours["state"]
    for index, state in ours["state"].items():
        for key, value in state.items():
            assert torch.equal(value, theirs["state"][index][key]), (index, key)
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["param_groups"][-1]["ratio_step"] == 200
    assert whole["scheduler"] == resumed[layout]["scheduler"]


@pytest.mark.parametrize("layout", ["rows", "columns", "interleaved"])
def test_distributed_checkpoints(layout, tmp_path, net, label, train):
    """Torch's ``save`` and ``load`` resume bit for bit, and so does ``get_state_dict``."""

    def start():
        model = net(layout)
        options = {"qk_ratio": Ramp(1, 20, 9), "circuits": label(model), "fused": True}
        return model, make_optimizer(model, torch.optim.AdamW, lr=3e-3, **options)

    (whole, whole_optimizer), (first, first_optimizer), (second, second_optimizer) = start(), start(), start()
    third, third_optimizer = start()
    train(whole, whole_optimizer, 5)
    train(first, first_optimizer, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is told that there is one process
        checkpoint.save({"model": first, "optimizer": first_optimizer}, checkpoint_id=tmp_path)
        train(second, second_optimizer, 1)  # so that there are states to load into
        checkpoint.load({"model": second, "optimizer": second_optimizer}, checkpoint_id=tmp_path)
    weights, entries = get_state_dict(first, first_optimizer)
    assert entries["state"]["layers.0.qkv"]["exp_avg"].shape == first.layers[0].qkv.shape
    set_state_dict(third, third_optimizer, model_state_dict=weights, optim_state_dict=entries)
    train(third, third_optimizer, 2)
    assert torch.equal(whole.qkv(), third.qkv())
    train(second, second_optimizer, 2)
    assert torch.equal(whole.qkv(), second.qkv())
    assert whole_optimizer.param_groups[-1]["ratio_step"] == second_optimizer.param_groups[-1]["ratio_step"]


def resume_in_a_new_process():
    folder = Path(sys.argv[1])
    spec = importlib.util.spec_from_file_location("nets", Path(__file__).parents[1] / "conftest.py")
    nets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nets)
    for layout, kernel in CASES:
        model = nets.Net(layout)
        resumed = run(model, nets.labels(model), kernel, 80, folder / f"{layout}.pt")
        torch.save(resumed, folder / f"{layout}-resumed.pt")


if __name__ == "__main__":
    resume_in_a_new_process()
