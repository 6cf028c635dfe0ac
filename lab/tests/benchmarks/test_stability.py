"""The stability benchmark, small: what it compares and what it says."""

import torch

from fasterqk_lab.benchmarks import stability


def test_every_way_is_reported(monkeypatch):
    small = {"LAYERS": 1, "WIDTH": 16, "HEADS": 2, "VOCABULARY": 11, "BATCH": 2, "TOKENS": 6, "ROUNDS": 2}
    for name, value in small.items():
        monkeypatch.setattr(stability, name, value)
    seen = []
    result = stability.run(lambda done, total: seen.append((done, total)))
    assert seen[-1] == (3, 3)
    assert result["speedup"] == result["plain_seconds"] / result["seconds"]
    read = result["overhead_monitor_step"]
    assert abs(result["overhead_monitor"] - (1 + (read - 1) / 100)) < 1e-12
    assert result["batch"] == [2, 6] and result["overhead_clip_all"] > 0


def test_the_models_share_their_weights(monkeypatch):
    monkeypatch.setattr(stability, "LAYERS", 1)
    monkeypatch.setattr(stability, "WIDTH", 24)
    model = stability.Decoder()
    other = stability._sharing(model)
    assert other is not model
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert torch.equal(
        model(torch.ones(1, 256, dtype=torch.long)), other(torch.ones(1, 256, dtype=torch.long))
    )
