"""Fine-tune a Hugging Face classifier with a faster query-key circuit, and print its attention.

It runs in seconds on a tiny model with generated data. For your own model replace `make_model` by
`AutoModelForSequenceClassification.from_pretrained(...)` and `make_batch` by your data loader.

    python examples/finetune.py --qk-ratio 10
"""

import argparse

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, get_cosine_schedule_with_warmup

import fasterqk
from fasterqk.trace import capture

VOCABULARY, LENGTH, STEPS = 60, 24, 400


def make_model() -> torch.nn.Module:
    config = AutoConfig.for_model(
        "bert",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=2,
    )
    return AutoModelForSequenceClassification.from_config(config)


def make_batch(size: int, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Texts with four telling tokens each (10..19 or 20..29, by label); the first token is 1.

    Returns the batch and a mask of the telling tokens, both ``(size, LENGTH)``.
    """
    tokens = torch.randint(30, VOCABULARY, (size, LENGTH), generator=generator)
    labels = torch.randint(2, (size,), generator=generator)
    places = torch.rand(size, LENGTH - 1, generator=generator).argsort(-1)[:, :4] + 1
    telling = 10 + 10 * labels[:, None] + torch.randint(10, (size, 4), generator=generator)
    tokens.scatter_(1, places, telling)
    tokens[:, 0] = 1
    relevance = torch.zeros(size, LENGTH).scatter_(1, places, 1.0)
    return {"input_ids": tokens, "labels": labels}, relevance


def main() -> None:
    parser = argparse.ArgumentParser(
        description="fine-tune a tiny classifier with a faster query-key circuit"
    )
    parser.add_argument("--qk-ratio", type=float, default=10.0)
    ratio = parser.parse_args().qk_ratio
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = make_model()

    # Only this line changes. The rest is an ordinary training loop.
    optimizer = fasterqk.make_optimizer(
        model, torch.optim.AdamW, lr=5e-4, qk_ratio=ratio, decay="independent"
    )
    print(fasterqk.describe(optimizer))
    schedule = get_cosine_schedule_with_warmup(optimizer, STEPS // 10, STEPS)

    for step in range(STEPS):
        batch, _ = make_batch(64, generator)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    model.eval()
    batch, relevance = make_batch(512, generator)
    captured = capture(model, batch)
    right = (captured.outputs.logits.argmax(-1) == batch["labels"]).float().mean().item()
    print(f"accuracy {right:.3f}; uniform attention would put {4 / LENGTH:.3f} on the telling tokens")
    for layer, attention in enumerate(captured):
        row = attention.mean(1)[:, 0]  # mean over heads; the classifier reads the first token
        print(f"layer {layer}: {(row * relevance).sum(-1).mean():.3f} of the attention on the telling tokens")


if __name__ == "__main__":
    main()
