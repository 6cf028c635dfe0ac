"""TRL's trainers for real, on a tiny model and tokenizer: the recipes of docs/trainers.md."""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from fasterqk import check_circuits, find_circuits
from fasterqk.huggingface import Sharpness, SharpnessCallback, trainer_optimizer

trl = pytest.importorskip("trl")
WORDS = ["the", "cat", "dog", "sat", "ran", "on", "a", "mat", "road"]
SPECIAL = ["<pad>", "<eos>", "<unk>"]
COMMON = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,  # TRL's default is True
    "disable_tqdm": True,
    "save_strategy": "no",
}


@pytest.fixture
def tokenizer():
    vocabulary = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return made


@pytest.fixture
def fused():
    torch.manual_seed(0)
    size = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=12, pad_token_id=0, **size))


@pytest.fixture
def llama(tmp_path):
    torch.manual_seed(0)
    size = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = LlamaForCausalLM(
        LlamaConfig(vocab_size=12, pad_token_id=0, bos_token_id=1, eos_token_id=1, **size)
    )
    made.save_pretrained(tmp_path / "llama")  # DPO loads its reference model from there
    return LlamaForCausalLM.from_pretrained(tmp_path / "llama")


def rates_in(trainer):
    """lr/qk and the Trainer's own rate of every logged step."""
    return [(e["lr/qk"], e["learning_rate"]) for e in trainer.state.log_history if "lr/qk" in e]


def look():
    return SharpnessCallback(Sharpness({"input_ids": torch.arange(8).view(1, 8)}), every=2)


def checked(trainer, batch):
    """The model that TRL has patched is labelled, verified and checked; nothing stays behind."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    assert all(part.decided_by.endswith("probe") for part in find_circuits(model) if part.circuit == "qk")
    model.zero_grad()
    result = check_circuits(model, trainer.optimizer, batch)
    assert result.ok
    assert all(parameter.grad is None for parameter in model.parameters())
    return {row.circuit: round(row.measured, 2) for row in result.rows}


def constant(config, folder, **options):
    return config(output_dir=str(folder), lr_scheduler_type="constant", **{**COMMON, **options})


@pytest.mark.parametrize("bf16", [False, True])
def test_supervised(tmp_path, fused, tokenizer, bf16):
    args = constant(trl.SFTConfig, tmp_path, bf16=bf16)
    trainer = trl.SFTTrainer(
        model=fused,
        args=args,
        train_dataset=Dataset.from_dict({"text": ["the cat sat on a mat", "the dog ran on a road"] * 8}),
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=trainer_optimizer(args, qk_ratio=10),
        callbacks=[look()],
    )
    before = fused.transformer.h[0].attn.c_attn.weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, fused.transformer.h[0].attn.c_attn.weight)
    assert rates_in(trainer) == [pytest.approx((1e-2, 1e-3))] * 3
    ids = torch.arange(12).view(2, 6)
    assert checked(trainer, {"input_ids": ids, "labels": ids}) == {"qk": 10, "ov": 1, "rest": 1}


def test_preferences(tmp_path, llama, tokenizer):
    args = constant(trl.DPOConfig, tmp_path)
    rows = {
        "prompt": ["the cat", "the dog"],
        "chosen": [" sat", " ran"],
        "rejected": [" ran", " sat"],
    }
    trainer = trl.DPOTrainer(
        model=llama,
        args=args,
        train_dataset=Dataset.from_dict({name: 8 * texts for name, texts in rows.items()}),
        processing_class=tokenizer,
        callbacks=[look()],
    )
    trainer.optimizer_cls_and_kwargs = trainer_optimizer(args, qk_ratio=10)
    trainer.train()
    assert rates_in(trainer) == [pytest.approx((1e-2, 1e-3))] * 3
    ids = torch.arange(12).view(2, 6)
    assert checked(trainer, {"input_ids": ids, "labels": ids})["qk"] == 10


def test_rewards(tmp_path, llama, tokenizer):
    args = constant(trl.GRPOConfig, tmp_path, num_generations=2, max_completion_length=4, max_steps=2)
    trainer = trl.GRPOTrainer(
        model=llama,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["the cat", "the dog"] * 8}),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        callbacks=[look()],
    )
    trainer.optimizer_cls_and_kwargs = trainer_optimizer(args, qk_ratio=10)
    before = llama.model.layers[0].self_attn.q_proj.weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, llama.model.layers[0].self_attn.q_proj.weight)
    assert rates_in(trainer) == [pytest.approx((1e-2, 1e-3))] * 2
    ids = torch.arange(12).view(2, 6)
    assert checked(trainer, {"input_ids": ids, "labels": ids})["qk"] == 10
