"""What one training run is: a frozen dataclass of plain values, hashed by the store to name its folder."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from fasterqk.errors import InputError
from fasterqk.files import USUALLY

OPTIMIZERS = ("adamw", "sgd")
DECAYS = ("coupled", "independent")
SCHEDULES = ("cosine", "half-cosine", "constant")
READ_POSITIONS = ("after", "last")
POSITION_STARTS = ("random", "waves")

# The value of a field that was not given and that depends on the task.
OF_TASK: Any = None
# The paper's one-layer HateXplain model, and what other tasks do otherwise.
PAPER_SETTINGS = {
    "lr": 5e-5,
    "epochs": 30,
    "batch_size": 32,
    "weight_decay": 1e-4,
    "mlp_width": 256,
    "context": 256,
    "residual": True,
    "read": "after",
}
TASK_SETTINGS: dict[str, dict[str, Any]] = {
    "sva": {
        "lr": 1e-3,
        "epochs": 6,
        "batch_size": 256,
        "mlp_width": 0,
        "residual": False,
        "read": "last",
    },
    "agreement": {"lr": 1e-4, "epochs": 8, "context": 32},
    "jsonl": {"lr": 5e-4, "epochs": 15},
    # The paper's answer generator; epochs, batches and smoothing are those of the released notebooks.
    "squad": {
        "epochs": 70,
        "batch_size": 64,
        "weight_decay": 0.05,
        "layers": 6,
        "width": 300,
        "heads": 6,
        "head_width": 50,
        "mlp_width": 1200,
        "dropout": 0.2,
        "label_smoothing": 0.1,
        "train_subset": 512,
        "rationale_k": (5,),
    },
    "kvqa": {
        "lr": 1e-3,
        "epochs": 3,
        "batch_size": 32,
        "layers": 2,
        "width": 64,
        "heads": 4,
        "head_width": 16,
        "mlp_width": 64,
        "context": 48,
        "start_scale": 0.25,
        "position_start": "waves",
        "train_subset": 512,
        "rationale_k": (5,),
    },
}


def usually(value: Any) -> Any:
    """A field that depends on the task; ``value`` for all that `TASK_SETTINGS` does not name."""
    return dataclasses.field(default=OF_TASK, metadata={USUALLY: value})


@dataclass(frozen=True)
class TrainConfig:
    """One cell: a task, an arm and a seed, with everything that decides its numbers.

    Fields marked ``OF_TASK`` or ``usually`` take what `TASK_SETTINGS` says for the task unless they are
    given. Whole numbers given for real fields become real ones, so that ``qk_ratio=30`` and
    ``qk_ratio=30.0`` are one run.

    >>> config = TrainConfig("hatexplain", qk_ratio=30)
    >>> config.qk_ratio, config.lr, config.epochs
    (30.0, 5e-05, 30)
    """

    task: str
    seed: int = 0

    # Optimisation. `qk_ratio` multiplies the learning rate of the query-key circuit. `decay` says whether
    # its weight decay is multiplied too ("coupled") or lr * weight_decay is equal for all ("independent").
    qk_ratio: float = 1.0
    lr: float = OF_TASK
    epochs: int = OF_TASK
    batch_size: int = OF_TASK
    optimizer: str = "adamw"
    momentum: float = 0.0
    weight_decay: float = OF_TASK
    decay: str = "independent"
    schedule: str = "cosine"
    warmup: float = 0.1
    clip: float | None = 1.0
    # Batches are cut from pools of this many batches that were sorted by length; 1 is plain shuffling.
    bucket: int = 16
    # Other ways to change the speeds: `ov_ratio` multiplies the rate of the output-value circuit;
    # `qk_imbalance` multiplies the queries and divides the keys at the start, which leaves the function as
    # it is; `gradient_norm` gives the gradient of each circuit this norm at every step.
    ov_ratio: float = 1.0
    qk_imbalance: float = 1.0
    gradient_norm: float | None = None
    # `embedding_ratio` multiplies the rate of the token embedding, which then does not decay. A step takes
    # `accumulate` batches. Answer generators alone: `dropout`, `label_smoothing`, and `autocast` to
    # bfloat16 where the device has it.
    embedding_ratio: float = 1.0
    accumulate: int = 1
    dropout: float = usually(0.0)
    label_smoothing: float = usually(0.0)
    autocast: bool = False

    # Shell-style patterns of parameter names. `faster` takes the multiplier instead of the query-key
    # circuit; `frozen` is not trained. With `stale_gradients` the gradients of frozen parameters are
    # still computed, never cleared, and enter the clipped norm, as in the released notebooks.
    faster: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    stale_gradients: bool = False

    # Model. `pretrained` names a folder or package with an encoder to fine-tune, in place of the paper's
    # model that the other fields describe. `read` is the row that makes the prediction: the first position
    # "after" the text (padding that sees the text and itself) or the "last" token. `mlp_width` 0 leaves
    # the MLP out.
    pretrained: str = ""
    layers: int = usually(1)
    width: int = usually(64)
    heads: int = usually(4)
    head_width: int = usually(64)
    mlp_width: int = OF_TASK
    context: int = OF_TASK
    residual: bool = OF_TASK
    read: str = OF_TASK
    init_scale: float = 0.02
    # Whether an answer generator starts from the task's word vectors, where it has some; else with token
    # embeddings, and positions, of this spread (None: as in the paper). Positions, which are learned, start
    # at random or as sine and cosine "waves", from which the distance of two of them is read more easily.
    word_vectors: bool = True
    start_scale: float | None = usually(None)
    position_start: str = usually("random")

    # Data. `form` chooses among the forms a task has; `file` and its `checksum` belong to task "jsonl".
    form: str = ""
    file: str = ""
    checksum: str = ""
    train_limit: int | None = None

    # Evaluation: a name in `fasterqk.lab.training.EVALUATIONS`, how often (and also whenever the running loss
    # has fallen to this share of what it was), on how many training examples, and the shares of tokens
    # (percent) that faithfulness keeps or removes. A run ends early when validation accuracy has not
    # risen and validation loss has not fallen for `patience` evaluations.
    evaluation: str = "paper"
    evaluations_per_epoch: int = 1
    evaluate_at_fall: float | None = None
    patience: int | None = None
    train_subset: int = usually(2048)
    rationale_k: tuple[int, ...] = usually((5, 10, 20, 50))
    # Of generated answers: how many questions of a split are looked at along training and at the end (all
    # when None), and how many tokens an answer has at most.
    along_subset: int = 256
    test_subset: int | None = None
    answer_tokens: int = 32

    def __post_init__(self) -> None:
        fields = dataclasses.fields(self)
        usual = {field.name: field.metadata[USUALLY] for field in fields if USUALLY in field.metadata}
        settings = usual | PAPER_SETTINGS | TASK_SETTINGS.get(self.task, {})
        for field in fields:
            value = getattr(self, field.name)
            given = settings[field.name] if value is OF_TASK and field.name in settings else value
            object.__setattr__(self, field.name, _typed(field, given))
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("decay", self.decay, DECAYS)
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("read", self.read, READ_POSITIONS)
        _one_of("position_start", self.position_start, POSITION_STARTS)
        for name in ("qk_ratio", "ov_ratio", "embedding_ratio", "qk_imbalance", "lr", "init_scale"):
            _at_least(name, getattr(self, name), 0.0, strictly=True)
        for name in ("seed", "weight_decay", "momentum", "warmup", "dropout", "label_smoothing"):
            _at_least(name, getattr(self, name), 0.0)
        for name in ("dropout", "label_smoothing"):
            if getattr(self, name) >= 1:
                raise InputError(f"{name} {getattr(self, name)} is a share below 1")
        for name in _COUNTS:
            _at_least(name, getattr(self, name), 1)
        _at_least("mlp_width", self.mlp_width, 0)
        if self.warmup > 1:
            raise InputError(f"warmup {self.warmup} is a share of all steps; give a number from 0 to 1")
        for name in ("clip", "gradient_norm", "start_scale"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 0.0, strictly=True)
        for name in ("train_limit", "test_subset", "patience"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.evaluate_at_fall is not None and not 0 < self.evaluate_at_fall < 1:
            raise InputError(
                f"evaluate_at_fall {self.evaluate_at_fall} is a share of the loss, between 0 and 1"
            )
        if any(not 0 < k <= 100 for k in self.rationale_k):
            raise InputError(f"rationale_k {list(self.rationale_k)}: give percentages from 1 to 100")

    def replace(self, **changes: Any) -> "TrainConfig":
        """This configuration with some fields changed; an unknown field is an error that names it."""
        names = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in names:
                raise InputError(f"{name!r} is no field of a training run; fields are {', '.join(names)}")
        return dataclasses.replace(self, **changes)


_COUNTS = (
    "epochs",
    "batch_size",
    "bucket",
    "layers",
    "width",
    "heads",
    "head_width",
    "context",
    "evaluations_per_epoch",
    "train_subset",
    "accumulate",
    "along_subset",
    "answer_tokens",
)


def _typed(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """``value`` in the type the field declares, where that loses nothing; an error otherwise."""
    declared = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    if value is None and declared.endswith("None"):
        return None
    if declared.startswith("tuple") and isinstance(value, list | tuple):
        item = int if "int" in declared else str
        if all(isinstance(entry, item) and not isinstance(entry, bool) for entry in value):
            return tuple(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if declared.startswith("float") and number and math.isfinite(value):
        return float(value)
    if declared.startswith("int") and number and float(value).is_integer():
        return int(value)
    if declared == "bool" and isinstance(value, bool):
        return value
    if declared == "str" and isinstance(value, str):
        return value
    raise InputError(f"{field.name} {value!r} is not of type {declared}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{name} {value!r} is not one of {', '.join(allowed)}")


def _at_least(name: str, value: float, least: float, *, strictly: bool = False) -> None:
    if value < least or (strictly and value == least):
        raise InputError(f"{name} {value} is not {'above' if strictly else 'at least'} {least:g}")
