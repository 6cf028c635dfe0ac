"""LoRA adapters with a faster query-key circuit; Accelerate in this process; a loop that scales its loss."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from peft import LoraConfig, get_peft_model
from torch import optim

from fasterqk import find_circuits, make_optimizer
from fasterqk.huggingface import rates

TARGETS = ["query", "key", "value", "attention.output.dense"]


@pytest.fixture
def adapted(bert):
    torch.manual_seed(1)
    return get_peft_model(
        bert(), LoraConfig(target_modules=TARGETS, r=2, lora_dropout=0.0, init_lora_weights="gaussian")
    )


def classified(texts):
    ids = torch.stack([example["input_ids"] for example in texts])
    return ids, ids[:, 0] % 2


def test_adapters_learn_by_circuit_and_merge_to_the_same_function(adapted, texts):
    ids, labels = classified(texts)
    optimizer = make_optimizer(adapted, optim.SGD, lr=0.1, qk_ratio=20)
    circuits = {part.parameter: part.circuit for part in find_circuits(adapted)}
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert {circuits[name] for name in trained if "query" in name or "key" in name} == {"qk"}
    assert {circuits[name] for name in trained if ".value." in name or "output.dense" in name} == {"ov"}
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    adapted(input_ids=ids, labels=labels).loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in trained.items()}
    optimizer.step()
    for name, parameter in trained.items():
        rate = 0.1 * (20 if circuits[name] == "qk" else 1)
        torch.testing.assert_close(parameter.detach(), before[name] - rate * gradients[name], msg=name)
    adapted.eval()
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits
        merged = adapted.merge_and_unload()(input_ids=ids).logits
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-6)


@pytest.fixture
def accelerator():
    """A fresh one: Accelerate shares its state between all that a process makes, those of the Trainer too."""
    _reset_accelerate()
    yield Accelerator(cpu=True, gradient_accumulation_steps=2)
    _reset_accelerate()


def _reset_accelerate():
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_accelerate_equals_a_plain_loop(accelerator, gpt2, texts):
    ids = torch.stack([example["input_ids"] for example in texts])[:32].split(4)
    plain = gpt2()
    optimizer = make_optimizer(plain, optim.AdamW, lr=1e-2, qk_ratio=10)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for left, other in zip(ids[::2], ids[1::2], strict=True):
        for part in (left, other):
            (plain(input_ids=part, labels=part).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    model = accelerator.prepare(gpt2())
    ours = make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=10)
    slower = optim.lr_scheduler.LambdaLR(ours, lambda step: 1 / (1 + step))
    ours, slower = accelerator.prepare(ours, slower)
    for part in ids:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=part, labels=part).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            ours.step()
            slower.step()
            ours.zero_grad()
    assert rates(ours)["lr/qk"] == pytest.approx(10 * 1e-2 / 5)
    for (name, left), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(left, other), name


def test_a_scaled_loss_is_unscaled_before_clipping(gpt2, texts):
    ids = torch.stack([example["input_ids"] for example in texts])[:8]
    models = gpt2(), gpt2()
    optimizers = [make_optimizer(model, optim.AdamW, lr=1e-2, qk_ratio=10) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    for _ in range(5):
        models[0](input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(models[0].parameters(), 0.1)
        optimizers[0].step()
        scaler.scale(models[1](input_ids=ids, labels=ids).loss).backward()
        scaler.unscale_(optimizers[1])
        torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.1)
        scaler.step(optimizers[1])
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    for (name, left), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(left, other, rtol=0, atol=0, msg=name)
