"""Labelled slices: complete, and printed as table, HTML and JSON."""

import json

import pytest
import torch
from torch import nn

from fasterqk.labels import Circuits, Slice, find_circuits

WIDTH = 8


def test_prints_as_table_html_and_json() -> None:
    circuits = find_circuits(nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16), 2))
    lines = str(circuits).splitlines()
    assert lines[0].split() == ["parameter", "slice", "role", "circuit", "layer", "numel", "decided", "by"]
    assert len(lines) == len(circuits) + 2
    assert lines[-1] == circuits.summary()
    assert circuits.summary().startswith("qk 288 parameters (4 tensors, 4 split) - ov 288 parameters")
    data = json.loads(circuits.to_json())
    total = sum(p.numel() for p in nn.TransformerEncoderLayer(WIDTH, 2, 16).parameters()) * 2
    assert sum(data["parameters"].values()) == total
    assert data["slices"][0]["circuit"] == "qk"
    assert "<td>layers.0.self_attn.in_proj_weight</td>" in circuits._repr_html_()
    assert "layers.*.self_attn.in_proj_weight" in circuits.by_stack()


def test_gaps_and_overlaps_cannot_be_built() -> None:
    first = Slice("w", 0, 0, 4, "q", None, "label", 4)
    for second in (Slice("w", 0, 5, 8, "k", None, "label", 3), Slice("w", 0, 3, 8, "k", None, "label", 5)):
        with pytest.raises(ValueError, match="gap or overlap"):
            Circuits((first, second))


def test_a_slice_is_a_view() -> None:
    weight = torch.arange(6.0).view(2, 3)
    part = Slice("w", 1, 1, 3, "q", None, "label", 4).view(weight)
    assert part.tolist() == [[1, 2], [4, 5]]
    part.zero_()
    assert weight.tolist() == [[0, 0, 0], [3, 0, 0]]
    assert Slice("w", None, None, None, "q", None, "label", 6).view(weight) is weight
