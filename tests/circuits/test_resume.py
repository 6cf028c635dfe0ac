"""200 steps are 120 steps, a checkpoint, a new process and 80 steps: to the last bit."""

import subprocess
import sys

import pytest
import torch

SCRIPT = """
import importlib.util, sys, torch
from fasterqk.circuits import Ramp, make_optimizer
conftest, layout, kernel, start, stop, source, target = sys.argv[1:]
spec = importlib.util.spec_from_file_location("nets", conftest)
nets = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nets)
net = nets.Net(layout)
made = make_optimizer(
    net, torch.optim.AdamW, lr=3e-3, weight_decay=0.1, qk_ratio=Ramp(1, 20, 150), decay="independent",
    circuits=nets.labels(net), **{kernel: True},
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, 200, eta_min=1e-5)
if source:
    saved = torch.load(source, weights_only=True)
    net.load_state_dict(saved["net"])
    scheduler.load_state_dict(saved["scheduler"])
    made.load_state_dict(saved["optimizer"])
for _ in range(int(start), int(stop)):
    made.zero_grad()
    net.loss().backward()
    made.step()
    scheduler.step()
everything = {"net": net.state_dict(), "optimizer": made.state_dict(), "scheduler": scheduler.state_dict()}
torch.save(everything, target)
"""


@pytest.mark.parametrize(("layout", "kernel"), [("columns", "fused"), ("interleaved", "foreach")])
def test_resume_is_bit_exact(layout, kernel, tmp_path, request):
    conftest = request.path.parent / "conftest.py"

    def run(start, stop, source, target):
        arguments = [conftest, layout, kernel, start, stop, source and tmp_path / source, tmp_path / target]
        command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return torch.load(tmp_path / target, weights_only=True)

    whole = run(0, 200, "", "whole.pt")
    run(0, 120, "", "half.pt")
    resumed = run(120, 200, "half.pt", "resumed.pt")
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
