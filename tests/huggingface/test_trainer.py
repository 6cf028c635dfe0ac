"""The Hugging Face Trainer, for real: ratios under its schedules, resuming, logging."""

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import HPSearchBackend

from fasterqk import Ramp, make_optimizer
from fasterqk.errors import InputError
from fasterqk.huggingface import Sharpness, SharpnessCallback, trainer_optimizer


def arguments(folder, **changes):
    settings = {
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "weight_decay": 0.1,
        **changes,
    }
    return TrainingArguments(output_dir=str(folder), **settings)


def trained(model, data, args, qk_ratio=10, resume=None, **options):
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data,
        optimizer_cls_and_kwargs=trainer_optimizer(args, qk_ratio),
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_ratio_holds_through_warm_up_and_cosine(tmp_path, gpt2, texts, optim):
    watch = SharpnessCallback(Sharpness({"input_ids": texts[0]["input_ids"][None]}), every=4)
    args = arguments(tmp_path, optim=optim, gradient_accumulation_steps=2, max_grad_norm=0.5)
    trainer = trained(gpt2(), texts, args, callbacks=[watch])
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 8
    for entry in entries:
        assert entry["lr/rest"] == entry["learning_rate"]  # both of the step that was taken
    for entry in entries[:-1]:  # the last rate is zero
        assert entry["lr/qk"] == pytest.approx(10 * entry["lr/ov"])
        assert entry["lr/ov"] == entry["lr/rest"]
    assert len({entry["lr/qk"] for entry in entries}) > 5
    assert [entry["step"] for entry in entries if "attention/entropy" in entry] == [1, 5]


def test_equal_to_a_plain_loop(tmp_path, gpt2, texts):
    args = arguments(tmp_path, max_steps=6, optim="adamw_torch", lr_scheduler_type="linear", warmup_steps=0)
    batches = []

    def collate(rows):
        batches.append({name: torch.stack([row[name] for row in rows]) for name in rows[0]})
        return batches[-1]

    theirs = trained(gpt2(), texts, args, data_collator=collate)
    model = gpt2().train()
    factory, options = trainer_optimizer(args, 10)
    optimizer = factory()(model, **options)
    for step, batch in enumerate(batches[:6]):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / 6)  # one value for all groups: the ratio is put right
        model(**batch, num_items_in_batch=batch["labels"].numel()).loss.backward()  # as the Trainer
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    for (name, ours), other in zip(model.named_parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("qk_ratio", [10, Ramp(1, 20, steps=6)])
def test_resumed_equals_uninterrupted(tmp_path, gpt2, texts, qk_ratio):
    whole = trained(gpt2(dropout=0.1), texts, arguments(tmp_path / "whole"), qk_ratio)
    saving = arguments(tmp_path / "parts", save_strategy="steps", save_steps=5)
    trained(gpt2(dropout=0.1), texts, saving, qk_ratio)
    resumed = trained(
        gpt2(seed=3, dropout=0.1), texts, saving, qk_ratio, str(tmp_path / "parts/checkpoint-5")
    )
    for (name, left), other in zip(
        whole.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(left, other[1]), name


def test_ratio_one_is_the_stock_trainer(tmp_path, gpt2, texts):
    args = arguments(tmp_path)
    ours = trained(gpt2(), texts, args, qk_ratio=1)
    stock = Trainer(model=gpt2(), args=args, train_dataset=texts)
    stock.train()
    for left, other in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(left, other, rtol=0, atol=0)


def test_a_ramp_is_logged_with_the_step_it_was_used_in(tmp_path, gpt2, texts):
    args = arguments(tmp_path, max_steps=4, lr_scheduler_type="constant", warmup_steps=0)
    watch = SharpnessCallback(Sharpness({"input_ids": texts[0]["input_ids"][None]}), every=100)
    trainer = trained(gpt2(), texts, args, Ramp(1, 5, steps=4), callbacks=[watch])
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["lr/qk"] for entry in entries] == pytest.approx([1e-2, 2e-2, 3e-2, 4e-2])


def test_muon_and_adamw_as_one_resume_bit_for_bit(tmp_path, gpt2, texts):
    def run(folder, model, resume=None, **changes):
        optimizer = make_optimizer(
            model,
            torch.optim.Muon,
            lr=1e-2,
            ratios={"q": 3, "k": 2},
            others=(torch.optim.AdamW, {"lr": 1e-3}),
        )
        args = arguments(tmp_path / folder, **changes)
        watch = SharpnessCallback(Sharpness({"input_ids": texts[0]["input_ids"][None]}), every=100)
        trainer = Trainer(
            model=model, args=args, train_dataset=texts, optimizers=(optimizer, None), callbacks=[watch]
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run("whole", gpt2())
    run("parts", gpt2(), save_strategy="steps", save_steps=5)
    resumed = run("parts", gpt2(seed=3), str(tmp_path / "parts/checkpoint-5"))
    for left, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(left, other)
    entry = next(entry for entry in whole.state.log_history if entry.get("lr/q"))
    assert entry["lr/q"] == pytest.approx(1.5 * entry["lr/k"])


# --- The arguments are read when the optimizer is made ---


def test_arguments_may_change_until_training_starts(tmp_path, gpt2, texts):
    args = arguments(tmp_path, max_steps=1, warmup_steps=0, lr_scheduler_type="constant")
    trainer = Trainer(
        model=gpt2(),
        args=args,
        train_dataset=texts,
        optimizer_cls_and_kwargs=trainer_optimizer(args, 10, betas=(0.5, 0.6)),
    )
    args.learning_rate, args.weight_decay, args.optim = 3e-3, 0.25, "adamw_torch"
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates["base"] == pytest.approx(3e-3) and rates["qk"] == pytest.approx(3e-2)
    decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {"base": 0.25, "base no decay": 0, "qk": 0.25, "qk no decay": 0}
    assert all(group["betas"] == (0.5, 0.6) for group in optimizer.param_groups)  # settings come first
    assert not any(group["fused"] for group in optimizer.param_groups)


def test_a_search_over_hyperparameters(tmp_path, gpt2, texts):
    """What ``Trainer.hyperparameter_search`` does with every trial; no search package is needed for it."""
    args = arguments(tmp_path, max_steps=2, warmup_steps=0, lr_scheduler_type="constant")
    trainer = Trainer(
        model_init=lambda: gpt2(),
        args=args,
        train_dataset=texts,
        optimizer_cls_and_kwargs=trainer_optimizer(args, 10),
    )
    trainer.hp_search_backend, trainer.hp_name = HPSearchBackend.RAY, None
    used = []
    for rate in (1e-2, 1e-3, 5e-3):
        trainer.train(trial={"learning_rate": rate, "weight_decay": 10 * rate})
        groups = {group["name"]: group for group in trainer.optimizer.optimizer.param_groups}
        used.append((groups["base"]["lr"], groups["qk"]["lr"], groups["base"]["weight_decay"]))
    expected = [(rate, 10 * rate, 10 * rate) for rate in (1e-2, 1e-3, 5e-3)]
    assert used == [pytest.approx(row) for row in expected]


def test_what_cannot_be_is_said(tmp_path, monkeypatch):
    look = Sharpness({})
    with pytest.raises(InputError, match="every=0"):
        SharpnessCallback(look, every=0)
    args = arguments(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(InputError, match="optim='adamw_torch"):
        # Those that take a whole model or layers of their own need packages that are not here.
        patch.setattr(Trainer, "get_optimizer_cls_and_kwargs", staticmethod(lambda args: (object, {})))
        trainer_optimizer(args, 10)
    args.deepspeed = {"zero_optimization": {"stage": 2}}
    with pytest.raises(
        InputError, match=r"DeepSpeed builds its optimizer from flattened parameters.*param_groups"
    ):
        trainer_optimizer(args, 10)
    args.deepspeed, args.fsdp = None, True
    with pytest.raises(InputError, match=r"the Trainer shards the model after .*fully_shard\(model\), then"):
        trainer_optimizer(args, 10)
