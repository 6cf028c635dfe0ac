"""The benchmarks of the optimizer and of stability, small: what it compares and what it says."""

import pytest
import torch

from fasterqk.optim import make_optimizer
from fasterqk_lab.benchmarks import circuits


@pytest.fixture
def small(monkeypatch):
    for name, value in {
        "LAYERS": 2,
        "WIDTH": 24,
        "HEADS": 3,
        "VOCABULARY": 11,
        "POSITIONS": 5,
        "ROUNDS": {"loop": 1, "fused": 1},
    }.items():
        monkeypatch.setattr(circuits, name, value)


def test_every_layout_and_kernel_is_reported(small):
    seen = []
    result = circuits.run_circuits(lambda done, total, note="": seen.append((done, total)))
    assert seen[-1] == (6, 6)
    for name in ("rows", "columns", "interleaved", "rows_fused", "columns_fused", "interleaved_fused"):
        assert result[f"overhead_{name}"] == pytest.approx(
            result[f"seconds_{name}"] / result[f"plain_seconds_{name}"]
        )
    assert result["speedup"] == result["plain_seconds"] / result["seconds"]


@pytest.mark.parametrize("layout", circuits.LAYOUTS)
def test_the_labels_split_every_fused_weight_in_three_equal_roles(small, layout):
    model = circuits._model(layout)
    labels = circuits._labels(model, layout)
    fused = [part for part in labels if ".qkv." in part.parameter]
    counts = {role: sum(part.numel for part in fused if part.role == role) for role in "qkv"}
    assert set(counts.values()) == {2 * (24 * 24 + 24)}
    made = make_optimizer(model, torch.optim.AdamW, lr=1e-3, qk_ratio=3, circuits=labels)
    held = sum(leaf.numel() for group in made.param_groups for leaf in group["params"])
    assert held == sum(parameter.numel() for parameter in model.parameters())


def test_every_way_is_reported(monkeypatch):
    small = {
        "LAYERS": 1,
        "WIDTH": 16,
        "HEADS": 2,
        "VOCABULARY": 11,
        "BATCH": 2,
        "TOKENS": 6,
        "STABILITY_ROUNDS": 2,
    }
    for name, value in small.items():
        monkeypatch.setattr(circuits, name, value)
    seen = []
    result = circuits.run_stability(lambda done, total: seen.append((done, total)))
    assert seen[-1] == (3, 3)
    assert result["speedup"] == result["plain_seconds"] / result["seconds"]
    read = result["overhead_monitor_step"]
    assert abs(result["overhead_monitor"] - (1 + (read - 1) / 100)) < 1e-12
    assert result["batch"] == [2, 6] and result["overhead_clip_all"] > 0


def test_the_models_share_their_weights(monkeypatch):
    monkeypatch.setattr(circuits, "LAYERS", 1)
    monkeypatch.setattr(circuits, "WIDTH", 24)
    model = circuits.Decoder()
    other = circuits._sharing(model)
    assert other is not model
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert torch.equal(
        model(torch.ones(1, 256, dtype=torch.long)), other(torch.ones(1, 256, dtype=torch.long))
    )
