"""The benchmarks of the library, small: what they compare and what they say."""

import json

import pytest
import torch

from fasterqk.optim import make_optimizer
from fasterqk_lab.benchmarks import library
from fasterqk_lab.cli.main import main

SMALL = {"n_layer": 2, "n_embd": 24, "n_head": 3, "vocab_size": 11, "n_positions": 6}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(library, "GPT2", SMALL)
    monkeypatch.setattr(library, "SMALL_LAYERS", SMALL)
    monkeypatch.setattr(library, "ROUNDS", 1)


def test_every_layout_and_kernel_is_reported(small):
    reports = []
    result = library.run_circuits(lambda done, total, note="": reports.append((done, total)))
    assert reports[-1] == (8, 8)
    for name in ("rows", "columns", "interleaved", "rows_fused", "columns_fused", "interleaved_fused"):
        assert result[f"overhead_{name}"] > 0
    for layout in ("rows", "columns"):
        assert result[f"hooks_{layout}"] > 0 and result[f"least_{layout}"] > 0
    assert result["overhead_columns"] == pytest.approx(1 / result["speedup"])  # of one round
    assert result["speedup"] == result["plain_seconds"] / result["seconds"]
    assert result["bytes"] == 28 * sum(parameter.numel() for parameter in library.gpt2().parameters())


@pytest.mark.parametrize("layout", library.LAYOUTS)
def test_the_labels_split_every_fused_weight_in_three_equal_roles(small, layout):
    model, labels = library.laid_out(layout)
    fused = [part for part in labels if ".c_attn." in part.parameter]
    counts = {role: sum(part.numel for part in fused if part.role == role) for role in "qkv"}
    assert set(counts.values()) == {2 * (24 * 24 + 24)}
    assert sum(part.numel for part in labels if part.role == "o") == 2 * (24 * 24 + 24)
    optimizer = make_optimizer(model, torch.optim.AdamW, lr=1e-3, qk_ratio=3, circuits=labels)
    held = sum(leaf.numel() for group in optimizer.param_groups for leaf in group["params"])
    assert held == sum(parameter.numel() for parameter in model.parameters())


def test_every_way_is_reported(small, monkeypatch):
    monkeypatch.setattr(library, "COMPILER", "eager")
    reports = []
    result = library.run_stability(lambda done, total: reports.append((done, total)))
    assert reports[-1] == (3, 3)
    assert result["speedup"] == result["plain_seconds"] / result["seconds"]
    exact = result["overhead_exact"]
    assert abs(result["overhead_monitor"] - (1 + (exact - 1) / 100)) < 1e-12
    assert result["tokens"] == 6
    ways = ("clip", "clip_all", "clip_compiled", "exact", "sampled", "bound", "weights")
    assert all(result[f"overhead_{way}"] > 0 for way in ways)


def test_the_models_share_their_weights(small):
    model = library.gpt2()
    other = library._sharing(model)
    assert other is not model
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    ids = torch.ones(1, 6, dtype=torch.long)
    assert torch.equal(model(ids).logits, other(ids).logits)


def test_all_ways_of_measure_agree(monkeypatch):
    monkeypatch.setattr(library, "POSTS", 6)
    monkeypatch.setattr(library, "POSTS_AT_A_TIME", 4)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    monkeypatch.setattr(library, "SIZE", small)
    reports = []
    result = library.run_measure(lambda done, total: reports.append((done, total)))
    assert reports == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert result["posts"] == 6
    assert result["max_difference"] < 1e-5
    assert result["speedup"] == pytest.approx(result["plain_seconds"] / result["seconds"])
    assert result["over_needed"] == pytest.approx(result["seconds"] / result["needed_seconds"])
    assert "ferret_ratio" in result


def test_bench_theory_measures_both_ways_to_the_same_points(capsys, monkeypatch):
    monkeypatch.setattr(library, "STOP", 0.5)
    monkeypatch.setattr(library, "GRID_RATIOS", 20)
    assert main(["bench", "theory", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    result = json.loads(printed.out)
    assert result["speedup"] == pytest.approx(result["plain_seconds"] / result["seconds"])
    assert result["points"] == library.POINTS
    assert result["largest_relative_difference"] < 1e-9
    assert result["grid_points"] == 20 * library.POINTS
    assert 0 < result["grid_seconds"] < result["grid_seconds_with_times"]
