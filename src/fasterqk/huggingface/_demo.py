"""A small example to try every command on: two Hugging Face classifiers and their data, made in seconds.

The data are generated reviews. A few telling words decide the label and are marked as relevant. Both
classifiers start from the same weights and see the same batches. One learns at equal rates; in the other,
queries and keys learn ten times faster.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fasterqk.attention import load_model, measure
from fasterqk.attention.instances import Example, read_example
from fasterqk.errors import InputError, needs_extra
from fasterqk.files import write_folder
from fasterqk.optim import make_optimizer

NEGATIVE = "awful boring clumsy dreadful flat hollow lifeless poor tedious weak"
POSITIVE = "brilliant charming clever delightful fresh moving rich superb tender witty"
TELLING = {"negative": NEGATIVE.split(" "), "positive": POSITIVE.split(" ")}
NOTHING = (
    "the a this that film movie story plot scene script camera music score actor actress director cast role "
    "ending beginning hour minute night city house road train and but while then with of in on at from is was"
)
OTHERS = NOTHING.split(" ")
SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
COUNTS = {"train": 1200, "test": 200}
# The ratio of each classifier, by the name of its folder.
RATIOS = {"equal-rates": 1.0, "faster-qk": 10.0}
STEPS, BATCH, RATE = 150, 32, 3e-4

FINETUNE = '''\
"""Fine-tune a classifier of this folder, its query-key circuit RATIO times faster: python finetune.py 10"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import fasterqk
from fasterqk.attention import read_examples

here = Path(__file__).parent
ratio = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
tokenizer = AutoTokenizer.from_pretrained(here / "equal-rates")
model = AutoModelForSequenceClassification.from_pretrained(here / "equal-rates")
examples = read_examples(here / "train.jsonl")

# Only this line differs from ordinary fine-tuning.
optimizer = fasterqk.make_optimizer(model, torch.optim.AdamW, lr=3e-4, qk_ratio=ratio)
for start in range(0, len(examples), 32):
    batch = examples[start : start + 32]
    inputs = tokenizer([example.text for example in batch], padding=True, return_tensors="pt")
    labels = torch.tensor([model.config.label2id[example.label] for example in batch])
    loss = model(**inputs, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

model.save_pretrained(here / "finetuned")
tokenizer.save_pretrained(here / "finetuned")
print(f"loss of the last batch {loss.item():.4f}; saved in {here / 'finetuned'}")
'''


def make_demo(
    folder: str | os.PathLike[str], *, progress: Callable[[float, float], None] = lambda done, total: None
) -> dict[str, Any]:
    """Make the example in ``folder``, which appears when it is complete.

    The example is the same on every call with the same versions of the libraries. Nothing is downloaded.

    Arguments:
        folder: A new folder.
        progress: Called as ``progress(done, total)`` after each training step.

    Returns:
        By the name of each classifier, its ratio, accuracy, attention on telling words and the null.

    Raises:
        InputError: The folder exists already.
    """
    with needs_extra("hf"):
        import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if Path(folder).exists():
        raise InputError(f"{os.fspath(folder)!r} exists already; name a new folder")
    with write_folder(folder) as staging:
        lines = {split: _lines(split) for split in COUNTS}
        for split, records in lines.items():
            text = "".join(json.dumps(record) + "\n" for record in records)
            (staging / f"{split}.jsonl").write_text(text, encoding="utf-8")
        (staging / "finetune.py").write_text(FINETUNE, encoding="utf-8")
        data = {split: [read_example(r, split, n) for n, r in enumerate(lines[split])] for split in lines}
        tokenizer = _tokenizer()
        models = {}
        for number, (name, ratio) in enumerate(RATIOS.items()):
            model = _trained(data["train"], tokenizer, ratio, partial(_report, progress, number * STEPS))
            model.save_pretrained(staging / name)
            tokenizer.save_pretrained(staging / name)
            models[name] = {"qk_ratio": ratio} | _measured(staging / name, data["test"])
    return models


def _report(progress: Callable[[float, float], None], before: int, step: int) -> None:
    progress(before + step, len(RATIOS) * STEPS)


def _lines(split: str) -> list[dict[str, Any]]:
    """Reviews of 8 to 20 words, one to three of them telling."""
    generator = np.random.default_rng(sorted(COUNTS).index(split))
    lines = []
    for number in range(COUNTS[split]):
        label = sorted(TELLING)[number % 2]
        tokens = generator.choice(OTHERS, generator.integers(8, 21)).tolist()
        places = generator.choice(len(tokens), generator.integers(1, 4), replace=False).tolist()
        for place in places:
            tokens[place] = str(generator.choice(TELLING[label]))
        relevance = [int(place in places) for place in range(len(tokens))]
        lines.append({"id": f"{split}-{number}", "tokens": tokens, "relevance": relevance, "label": label})
    return lines


def _tokenizer() -> Any:
    """A tokenizer like BERT's whose vocabulary is the words of the reviews."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL.values(), *sorted({*OTHERS, *TELLING["negative"], *TELLING["positive"]})]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, numbers[name]) for name in ("[CLS]", "[SEP]")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **SPECIAL)


def _trained(examples: list[Example], tokenizer: Any, ratio: float, progress: Callable[[int], None]) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    names = dict(enumerate(sorted(TELLING)))
    size: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = BertConfig(
        **size,
        vocab_size=len(tokenizer),
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        id2label=names,
        label2id={name: number for number, name in names.items()},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertForSequenceClassification(config)
    generator = np.random.default_rng(0)
    optimizer = make_optimizer(model, torch.optim.AdamW, lr=RATE, qk_ratio=ratio)
    for step in range(STEPS):
        batch = [examples[i] for i in generator.choice(len(examples), BATCH, replace=False)]
        inputs = tokenizer([example.text for example in batch], padding=True, return_tensors="pt")
        labels = torch.tensor([sorted(TELLING).index(str(example.label)) for example in batch])
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        progress(step + 1)
    return model.eval()


def _measured(folder: Path, examples: list[Example]) -> dict[str, float]:
    loaded = load_model(folder)
    summary = measure(loaded, examples).summary()
    document = summary.to_json()
    return {"accuracy": document["accuracy"], "mrta": document["mrta"], "null_mrta": document["null"]["mrta"]}
