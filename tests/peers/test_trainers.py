"""Recipes for litgpt, torchtitan and axolotl, where they are installed; see docs/trainers.md."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import fasterqk

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENS = torch.arange(12).reshape(2, 6)


@pytest.mark.parametrize("groups", [4, 2], ids=["heads", "grouped queries"])
def test_litgpt_weights_are_split(groups):
    litgpt = pytest.importorskip("litgpt")
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 4, "padded_vocab_size": 20, "block_size": 16}
    model = litgpt.GPT(litgpt.Config(**sizes, n_query_groups=groups))
    optimizer = fasterqk.make_optimizer(model, torch.optim.AdamW, lr=5e-5, qk_ratio=10)
    report = fasterqk.check_circuits(model, optimizer, TOKENS, loss=lambda logits: logits.square().mean())
    assert report.ok
    roles = {part.role for part in fasterqk.find_circuits(model).slices if ".qkv." in part.parameter}
    assert roles == {"q", "k", "v"}


def test_torchtitan_container_resumes_bit_for_bit(monkeypatch):
    pytest.importorskip("torchtitan")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from torchtitan_fasterqk import CircuitOptimizers

    settings = {"optimizer": "AdamW", "lr": 1e-3, "qk_ratio": 3}

    def start():
        torch.manual_seed(0)
        sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 8}
        dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, vocab_size=20, bos_token_id=0, eos_token_id=1))
        return model, CircuitOptimizers.Config(settings=settings).build(model_parts=[model])

    def train(model, optimizers, steps):
        for _ in range(steps):
            model(input_ids=TOKENS, labels=TOKENS).loss.backward()
            optimizers.step()
            optimizers.zero_grad()

    model, optimizers = start()
    train(model, optimizers, 2)
    saved = {
        name: value.clone() if torch.is_tensor(value) else value
        for name, value in optimizers.state_dict().items()
    }
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizers, 2)
    resumed, its_optimizers = start()
    resumed.load_state_dict(weights)
    its_optimizers.load_state_dict(saved)
    train(resumed, its_optimizers, 2)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in resumed.state_dict().items())


CONFIGURATION = """
base_model: ./model
datasets: [{path: ./data.jsonl, type: completion, field: text}]
plugins: [axolotl_fasterqk.FasterQKPlugin]
fasterqk: {qk_ratio: 10}
fasterqk_logits: {every: 1, clip: 100}
sequence_len: 32
micro_batch_size: 2
gradient_accumulation_steps: 1
max_steps: 2
learning_rate: 0.0005
optimizer: adamw_torch
lr_scheduler: constant
val_set_size: 0
output_dir: ./out
bf16: false
logging_steps: 1
save_steps: 2
attn_implementation: sdpa
"""


@pytest.mark.slow
def test_axolotl_trains_with_the_plugin(tmp_path):
    pytest.importorskip("axolotl")
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"word{number}" for number in range(40))]
    spelled = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    spelled.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=spelled, **special).save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=len(words), bos_token_id=1, eos_token_id=2, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    texts = [" ".join(f"word{(7 * row + 3 * place) % 40}" for place in range(20)) for row in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "run.yml").write_text(CONFIGURATION)
    path = f"{EXAMPLES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    offline = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "axolotl.cli.train", "run.yml"],
        cwd=tmp_path,
        env={**os.environ, **offline, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"'logits/max", done.stdout + done.stderr)
    saved = torch.load(tmp_path / "out" / "checkpoint-2" / "optimizer.pt")
    assert {group["lr"] for group in saved["param_groups"]} == {5e-4, 5e-3}
