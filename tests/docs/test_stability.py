"""The page on stability: its blocks run in order."""

import re
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from fasterqk import LogitMonitor

PAGE = (Path(__file__).parents[2] / "docs" / "stability.md").read_text(encoding="utf-8")
SIZE = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 1}


def test_the_blocks_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, ids = GPT2LMHeadModel(GPT2Config(vocab_size=20, **SIZE)).train(), torch.arange(6)
    batches = [{"input_ids": ids.unsqueeze(0), "labels": ids.unsqueeze(0)}] * 11
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=2, logging_steps=1, use_cpu=True)
    rows = [{"input_ids": ids, "labels": ids}] * 4
    trained = GPT2LMHeadModel(GPT2Config(vocab_size=20, **SIZE))
    names = {"model": model, "batches": batches, "trainer": Trainer(trained, args, train_dataset=rows)}
    first, second, third, fourth = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(first, names)
    shown = capsys.readouterr().out
    assert "transformer.h.0.attn" in shown and shown.rstrip().endswith(" 0")
    names["clip"].remove()
    exec(second, names)
    names["trainer"].train()
    assert any("logits/clipped_heads" in entry for entry in names["trainer"].state.log_history)
    exec(third, names)
    assert [logits.way for logits in names["monitor"].history] == ["exact", "bound"]
    assert (tmp_path / "logits.html").stat().st_size > 1000
    exec(fourth, names)
    model.set_attn_implementation("shown")
    monitor = LogitMonitor(model)
    model(**batches[0])
    assert monitor.last.readings["transformer.h.0.attn"].logit.isfinite().all()


def test_the_guide_is_one_page():
    assert len(PAGE.splitlines()) <= 150
