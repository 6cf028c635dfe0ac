"""Every Python block of the documentation runs as it stands, page by page, in order.

Pages speak of *your* model and data. ``WORLD`` makes small ones under the names that the pages use. A block
that cannot run here has a comment above it that says why: ``<!-- not run: ... -->``.
"""

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"(<!-- not run: .+? -->\n)?```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
# Pages whose blocks print the text below them to the letter; others show what a larger model prints.
EXACT = {"capture.md"}
# Pages with a test of their own, which also runs their commands.
ELSEWHERE = {"measure.md", "measure-python.md", "importances.md", "stability.md"}
PAGES = sorted(path for path in DOCS.glob("*.md") if "```python" in path.read_text(encoding="utf-8"))

WORLD = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fasterqk
from fasterqk import make_optimizer

torch.manual_seed(0)
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=20, num_key_value_heads=1, **sizes))
layers, depth = model.model.layers, 2
ids = torch.arange(12).reshape(2, 6)
batch = {"input_ids": ids, "labels": ids}
batches = [batch] * 2
"""
MORE = {
    "trainers.md": """
from transformers import Trainer, TrainingArguments
from fasterqk.huggingface import SharpnessCallback, Sharpness, trainer_optimizer

train_dataset = [{"input_ids": ids[0], "labels": ids[0]}] * 4
args = TrainingArguments("out", max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
held_batch, held_relevance = {"input_ids": ids}, torch.ones(2, 6)
""",
    "devices.md": """
from torch.utils.data import DataLoader
from accelerate import Accelerator

accelerator, loader = Accelerator(cpu=True), DataLoader([{"input_ids": ids[0], "labels": ids[0]}] * 4)
make_scheduler = lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer)
""",
    **dict.fromkeys(
        ("optimizer.md", "fused.md"),
        """
from transformers import GPT2Config, GPT2LMHeadModel

size = dict(n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=20, **size))
layers = model.transformer.h
torch.save(torch.optim.AdamW(model.parameters()).state_dict(), "plain-adamw.pt")
""",
    ),
}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ELSEWHERE], ids=lambda p: p.stem)
def test_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    exec(WORLD + MORE.get(page.name, ""), names)
    capsys.readouterr()
    for reason, code, printed in BLOCK.findall(page.read_text(encoding="utf-8")):
        if reason:
            continue
        exec(compile(code, f"{page.name}: {code.splitlines()[0]}", "exec"), names)
        shown = capsys.readouterr().out
        assert page.name not in EXACT or shown == printed
