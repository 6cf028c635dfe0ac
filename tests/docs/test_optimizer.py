"""The code of docs/optimizer.md runs on a small GPT-2."""

import re
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fasterqk

PAGE = (Path(__file__).parents[2] / "docs" / "optimizer.md").read_text(encoding="utf-8")
# Those that need processes or a file have tests of their own (tests/optim/test_sharded.py, test_convert.py).
BLOCKS = [
    block
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    if "fully_shard" not in block and "torch.load" not in block
]


@pytest.mark.filterwarnings("ignore")
def test_every_block_runs():
    torch.manual_seed(0)
    size = {"n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 1}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=10, **size))
    ids = torch.arange(6)[None]
    names = {"torch": torch, "model": model, "batch": {"input_ids": ids, "labels": ids}}
    names |= {name: getattr(fasterqk, name) for name in ("make_optimizer", "find_circuits")}
    names |= {"layers": model.transformer.h, "depth": 2}
    assert len(BLOCKS) >= 8
    for block in BLOCKS:
        exec(block, names)
