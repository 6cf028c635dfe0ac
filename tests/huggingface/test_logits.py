"""LogitCallback: attention logits in the Trainer's log and in its trackers, and a clip after its steps."""

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from fasterqk import qk_clip
from fasterqk.huggingface import LogitCallback, trainer_optimizer


class Tracker(TrainerCallback):
    """What TensorBoard's callback would be given."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **others):
        self.seen.append(dict(logs))


def trainer(folder, model, texts, tracker=None, **changes):
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=5e-2,
        optim="sgd",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        **changes,
    )
    return Trainer(
        model=model,
        args=args,
        train_dataset=texts,
        optimizer_cls_and_kwargs=trainer_optimizer(args, qk_ratio=3),
        callbacks=[] if tracker is None else [tracker],
    )


def large(model):
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight *= 25
    return model


def test_logits_reach_the_log_and_the_trackers(tmp_path, gpt2, texts):
    tracker, callback = Tracker(), LogitCallback(every=2, limit=1e6)
    made = trainer(tmp_path, large(gpt2()), texts, tracker)
    callback.add_to(made)
    made.train()
    for entries in (tracker.seen, made.state.log_history):
        read = [number for number, entry in enumerate(entries) if "logits/max" in entry]
        assert read == [0, 2]
        assert entries[0]["logits/max"] > 1 and entries[0]["logits/entropy"] > 0
    assert not any(module._forward_hooks for module in made.model.modules())


def test_a_clip_under_the_trainer_is_the_same_as_in_a_loop(tmp_path, gpt2, texts):
    callback = LogitCallback(clip=1.0, alpha=0.3, limit=1e6)
    made = trainer(tmp_path, large(gpt2()), texts)
    batches = []

    def collate(rows):
        batches.append({name: torch.stack([row[name] for row in rows]) for name in rows[0]})
        return batches[-1]

    made.data_collator = collate
    callback.add_to(made)
    made.train()
    model = large(gpt2()).train()
    factory, options = trainer_optimizer(made.args, 3)
    optimizer = factory()(model, **options)
    clip = qk_clip(model, optimizer, 1.0, alpha=0.3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)
    for step in range(4):
        for batch in batches[2 * step : 2 * step + 2]:
            (model(**batch).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert callback.clip.total == clip.total > 0
    entries = [entry for entry in made.state.log_history if "loss" in entry]
    assert sum(entry["logits/clipped_heads"] for entry in entries) == clip.total
    for left, other in zip(made.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(left, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("threshold", [1.0, 1e6])
def test_a_clip_of_a_compiled_model(threshold, tmp_path, gpt2, texts):
    """The Trainer compiles a model that it does not show to its callbacks."""
    counts = []
    for compile in (False, True):
        torch.manual_seed(0)
        options = {"torch_compile": True, "torch_compile_backend": "eager"} if compile else {}
        made = trainer(tmp_path, large(gpt2()), texts, **options)
        callback = LogitCallback(clip=threshold, limit=1e6)
        callback.add_to(made)
        made.train()
        entries = [entry for entry in made.state.log_history if "loss" in entry]
        counts.append([entry["logits/clipped_heads"] for entry in entries])
    assert counts[0] == counts[1] and (sum(counts[0]) > 0) == (threshold == 1.0)
    assert callback.clip.exact_steps == (4 if threshold == 1.0 else 1)


def test_the_threshold_is_checked_when_training_begins(tmp_path, gpt2, texts):
    made = trainer(tmp_path, gpt2(), texts)
    LogitCallback(clip=-1).add_to(made)
    with pytest.raises(ValueError, match="threshold"):
        made.train()
