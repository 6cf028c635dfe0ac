"""200 steps are 120 steps, a checkpoint, a new process and 80 steps: to the last bit."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fasterqk.circuits import Ramp, make_optimizer


def run(net, circuits, kernel, steps, source=None):
    """Train with a ramped ratio and a scheduler, from ``source`` if there is one; returns everything."""
    made = make_optimizer(
        net,
        torch.optim.AdamW,
        lr=3e-3,
        weight_decay=0.1,
        qk_ratio=Ramp(1, 20, 150),
        decay="independent",
        circuits=circuits,
        **{kernel: True},
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, 200, eta_min=1e-5)
    if source is not None:
        saved = torch.load(source, weights_only=True)
        net.load_state_dict(saved["net"])
        scheduler.load_state_dict(saved["scheduler"])
        made.load_state_dict(saved["optimizer"])
    for _ in range(steps):
        made.zero_grad()
        net.loss().backward()
        made.step()
        scheduler.step()
    return {"net": net.state_dict(), "optimizer": made.state_dict(), "scheduler": scheduler.state_dict()}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kernel"), [("columns", "fused"), ("interleaved", "foreach")])
def test_resume_is_bit_exact(layout, kernel, tmp_path, net, label):
    whole = run(model := net(layout), label(model), kernel, 200)
    torch.save(run(model := net(layout), label(model), kernel, 120), tmp_path / "half.pt")
    command = [sys.executable, __file__, layout, kernel, tmp_path / "half.pt", tmp_path / "resumed.pt"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    resumed = torch.load(tmp_path / "resumed.pt", weights_only=True)
    for name, weight in whole["net"].items():
        assert torch.equal(weight, resumed["net"][name]), name
    ours, theirs = whole["optimizer"], resumed["optimizer"]
    assert ours["state"].keys() == theirs["state"].keys() and ours["state"]
    for index, state in ours["state"].items():
        for key, value in state.items():
            assert torch.equal(value, theirs["state"][index][key]), (index, key)
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["param_groups"][-1]["ratio_step"] == 200
    assert whole["scheduler"] == resumed["scheduler"]


def resume_in_a_new_process():
    layout, kernel, source, target = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("nets", Path(__file__).with_name("conftest.py"))
    nets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nets)
    model = nets.Net(layout)
    torch.save(run(model, nets.labels(model), kernel, 80, source), target)


if __name__ == "__main__":
    resume_in_a_new_process()
