"""The ten lines of the page on stability run as they stand."""

import re
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

PAGE = Path(__file__).parents[3] / "docs" / "stability.md"


def test_the_first_code_of_the_page(capsys):
    size = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 1}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, **size)).train()
    ids = torch.arange(6).unsqueeze(0)
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(code[1], {"model": model, "batches": [{"input_ids": ids, "labels": ids}] * 2})
    shown = capsys.readouterr().out
    assert "transformer.h.0.attn" in shown and shown.rstrip().endswith(" 0")
