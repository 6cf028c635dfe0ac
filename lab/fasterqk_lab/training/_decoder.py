"""A pretrained decoder that is fine-tuned to write the class of a text behind it.

The model reads ``Text: ... Label:`` and answers with the likeliest of the classes, each by the first token
of its name; that is what the loss is computed on. Low-rank adapters (LoRA) of queries, keys, values and
outputs are trained, or all weights. The pretrained ones come from a folder that transformers wrote, or from
an installed package with a GGUF file, and are then dequantised; nothing is downloaded.
"""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fasterqk.attention import Instance, Measurement, Nulls, Passes, Removal, TorchClassifier, measure
from fasterqk.attention.instances import Batch
from fasterqk.errors import InputError, needs_extra
from fasterqk.files import read_json
from fasterqk_lab.tasks import ClassificationTask, LabelledInstance, LabelledInstances, checksum
from fasterqk_lab.training._batches import PaddedInstances, fixed_sample, generator, pad_instances
from fasterqk_lab.training._classification import TABLE_SCORES, FineTuning, scores_json, words_alone
from fasterqk_lab.training._config import TrainConfig

BEFORE, BEHIND = "Text:", "\nLabel:"
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVALUATION_BATCH = 32


def is_decoder(folder: Path) -> bool:
    """Whether the pretrained model in ``folder`` writes text."""
    if any(folder.glob("*.gguf")):
        return True
    config = folder / "config.json"
    names = read_json(config).get("architectures") if config.is_file() else None
    return any(str(name).endswith("ForCausalLM") for name in names or ())


class ClassWriter(nn.Module):
    """A decoder that answers with a class: the logits of ``answers``, one token each, behind a prompt."""

    def __init__(self, decoder: Any, answers: list[int]) -> None:
        super().__init__()
        self.decoder, self.answers = decoder, answers

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.decoder.get_decoder()(input_ids=input_ids, attention_mask=attention_mask)
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = (attention_mask * place).argmax(1)
        read = states.last_hidden_state[torch.arange(len(last), device=last.device), last]
        return read @ self.decoder.get_output_embeddings().weight[self.answers].T

    def _trained(self) -> set[str]:
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """The trained weights alone: those of the pretrained model are in its file."""
        trained = self._trained()
        return {name: w for name, w in super().state_dict(*args, **options).items() if name in trained}

    def load_state_dict(self, weights: Any, strict: bool = True, assign: bool = False) -> Any:
        if strict and set(weights) != self._trained():
            raise InputError("these are not the weights of this decoder's training")
        return super().load_state_dict(weights, strict=False, assign=assign)


class DecoderFineTuning(FineTuning):
    """A pretrained decoder on a task with labels, trained as the paper's classifier is."""

    def __init__(self, config: TrainConfig, task: ClassificationTask, folder: Path) -> None:
        if config.evaluation.readings:
            raise InputError(f"readings {list(config.evaluation.readings)} are for the paper's models only")
        self.config, self.task = config, task
        decoder, tokenizer, file = load_decoder(folder)
        self.files = {**task.files, file.name: checksum(file)}
        train = fixed_sample(task.splits["train"], config.data.train_limit, "limit")
        self.examples = {
            name: as_prompts(split, task.vocabulary, tokenizer, config.model.context)
            for name, split in {**task.splits, "train": train}.items()
        }
        self.splits = {
            name: pad_instances(split, context=config.model.context, read="last", pad=0)
            for name, split in self.examples.items()
        }
        along, at_end = config.evaluation.along_subset, config.evaluation.test_subset
        self.along = {name: fixed_sample(split, along, "along") for name, split in self.splits.items()}
        self.at_end = {name: fixed_sample(split, at_end, "along") for name, split in self.splits.items()}
        self.frame = [len(part) for part in frame(tokenizer)]
        self.model = cast(Any, ClassWriter(adapted(decoder, config), answers_of(task, tokenizer)))

    def loss(self, chosen: Tensor, number: int) -> Tensor:
        self.model.train()
        return cross_entropy(*self._logits(self.splits["train"], chosen))

    def _logits(self, split: PaddedInstances, chosen: Tensor) -> tuple[Tensor, Tensor]:
        tokens, read, labels = split.batch(chosen, next(self.model.parameters()).device)
        mask = (torch.arange(tokens.shape[1], device=tokens.device) <= read[:, None]).long()
        return self.model(tokens, mask), labels

    def _attention(self, split: str, *, quick: bool = False, **options: Any) -> dict[str, Any]:
        """Scores of ``fasterqk measure`` by the mean over layers, and by head, with random rankings."""
        examples, sizes = self.examples[split], self.config.evaluation
        limit = sizes.along_subset if quick else sizes.test_subset
        rated = fixed_sample(np.flatnonzero(examples.rated), limit, "attention")
        measurement = measure(
            TorchClassifier(self.model, classes=self.task.classes, inputs=self._inputs, read="last"),
            [self._instance(examples[int(index)]) for index in rated],
            removal=Removal(percents=sizes.rationale_k),
            nulls=Nulls(seed=self.config.seed),
            passes=Passes(EVALUATION_BATCH, only=TABLE_SCORES if quick else None),
        )
        scores = scores_json(measurement.summary()) | words_alone(measurement)
        scores["first_share"] = float(np.mean([row[0] / row.sum() for row in measurement.importance]))
        return scores if quick else scores | {"heads": head_map(measurement)}

    def _instance(self, example: LabelledInstance) -> Instance:
        """The text is ranked and removed, not what stands before and behind it."""
        before, behind = self.frame
        inside = np.ones(len(example.tokens), dtype=bool)
        inside[:before] = inside[len(inside) - behind :] = False
        assert example.relevance is not None  # only rated ones are measured
        return Instance(example.tokens, inside, example.relevance, label=example.label, id=example.id)

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        device = next(self.model.parameters()).device
        tokens = np.where(batch.real, batch.tokens, 0)
        arrays = {"input_ids": tokens, "attention_mask": batch.visible.astype(np.int64)}
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def head_map(measurement: Measurement) -> list[list[float]]:
    """Attention on relevant tokens by layer and head, mean over the texts."""
    assert measurement.heads is not None  # measured where texts have relevant tokens
    return measurement.heads[measurement.relevant, 0, :, :-1].mean(0).tolist()


def load_decoder(folder: Path) -> tuple[Any, Any, Path]:
    """The decoder in ``folder`` in single precision, its tokenizer, and the file of its weights."""
    with needs_extra("hf"):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    packed = sorted(folder.glob("*.gguf"))
    if packed:
        with needs_extra("decoder", ("gguf",), of="fasterqk-lab"):
            import gguf  # noqa: F401 - transformers reads the file with it
    file = packed[0] if packed else folder / "model.safetensors"
    options: dict[str, Any] = {"local_files_only": True} | ({"gguf_file": file.name} if packed else {})
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options), tokenizer, file
    finally:
        if bars:
            logging.enable_progress_bar()


def adapted(decoder: Any, config: TrainConfig) -> Any:
    """The decoder with adapters of the rank that ``config`` gives them; rank 0 trains all its weights."""
    if not config.model.lora:
        return decoder
    with needs_extra("hf"):
        from peft import LoraConfig, inject_adapter_in_model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(config.seed, "weights").initial_seed())
        options = LoraConfig(r=config.model.lora, target_modules=ADAPTED)
        return inject_adapter_in_model(options, decoder)


def answers_of(task: ClassificationTask, tokenizer: Any) -> list[int]:
    """The first token of every class's name."""
    answers = [tokenizer(f" {name}", add_special_tokens=False)["input_ids"][0] for name in task.classes]
    if len(set(answers)) < len(answers):
        raise InputError(f"two of the classes {', '.join(task.classes)} begin with one token of the decoder")
    return answers


def frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens before and behind every text."""
    before, behind = tokenizer([BEFORE, BEHIND], add_special_tokens=False)["input_ids"]
    return before, behind


def words_of(example: LabelledInstance, vocabulary: tuple[str, ...]) -> list[tuple[str, float]]:
    """The words whose pieces an instance has, each with its relevance.

    >>> pieces = LabelledInstance("a", np.array([0, 1, 2]), 0, np.array([0.0, 1.0, 1.0]))
    >>> words_of(pieces, ("a", "rain", "##bow"))
    [('a', 0.0), ('rainbow', 1.0)]
    """
    words: list[tuple[str, float]] = []
    weights = np.zeros(len(example.tokens)) if example.relevance is None else example.relevance
    for token, weight in zip(example.tokens, weights.tolist(), strict=True):
        piece = vocabulary[token]
        if piece.startswith("##") and words:
            start, most = words.pop()
            words.append((start + piece.removeprefix("##"), max(most, weight)))
        else:
            words.append((piece, weight))
    return words


def as_prompts(
    split: LabelledInstances, vocabulary: tuple[str, ...], tokenizer: Any, context: int
) -> LabelledInstances:
    """The texts between what stands before and behind them, in the decoder's tokens.

    Tasks are cut into word pieces; words are put together again, and a token is as relevant as its word.
    """
    before, behind = frame(tokenizer)
    texts = [words_of(example, vocabulary) for example in split]
    distinct = sorted({word for text in texts for word, _ in text})
    coded = tokenizer([f" {word}" for word in distinct], add_special_tokens=False)["input_ids"]
    pieces = dict(zip(distinct, coded, strict=True))
    room = context - len(before) - len(behind)
    if room < 1:
        raise InputError(f"context {context} leaves no room for a text; give more than {context - room}")

    def prompt(example: LabelledInstance, text: list[tuple[str, float]]) -> LabelledInstance:
        tokens = [(token, weight) for word, weight in text for token in pieces[word]][:room]
        ids = [*before, *(token for token, _ in tokens), *behind]
        relevance = np.array([0.0] * len(before) + [weight for _, weight in tokens] + [0.0] * len(behind))
        known = None if example.relevance is None or not relevance.any() else relevance
        return LabelledInstance(example.id, np.array(ids), example.label, known)

    return LabelledInstances.collect(map(prompt, split, texts))
