"""The configuration of one training: frozen dataclasses of plain values, in four parts.

The store hashes a configuration to name the folder of its results.
"""

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any, ClassVar

from fasterqk.errors import InputError
from fasterqk.files import PART
from fasterqk_lab.configs import config_types
from fasterqk_lab.tasks import check_task

OPTIMIZERS = ("adamw", "sgd")
DECAYS = ("coupled", "independent")
SCHEDULES = ("cosine", "half-cosine", "constant")
READ_POSITIONS = ("after", "last")
POSITION_STARTS = ("random", "waves")
RATIO_ROLES = ("q", "k", "v", "o", "embedding")
BEST_BY = ("validation_accuracy", "validation_loss")
MOST_LAYERS, MOST_WEIGHTS, MOST = 2000, 10**9, 10**6
# Described in `fasterqk_lab.training._readings`.
READINGS = ("heads", "plain", "residual", "carried", "norms")
PLAIN, QK_NORM, QK_CLIP, PARTNER_NORM, RATIO = "plain", "qk_norm", "qk_clip", "partner_norm", "qk_ratio"
# The ratio of QK to OV, with everything else at the base rate.
QK_VO = "qk_vo"
PRETRAINING_METHODS = (PLAIN, QK_NORM, QK_CLIP, PARTNER_NORM, RATIO, QK_VO)

# The defaults of the parts below are the paper's one-layer HateXplain model. Other tasks override these.
TASK_SETTINGS: dict[str, dict[str, Any]] = {
    "sva": {"lr": 1e-3, "epochs": 6, "batch_size": 256, "mlp_width": 0, "residual": False, "read": "last"},
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


def half_precision() -> bool:
    """Whether ``--precision`` or ``$FASTERQK_PRECISION`` asks for training in bfloat16.

    Configurations record it as ``autocast``, which is part of their hash: cells of two precisions do not mix.
    """
    name = os.environ.get("FASTERQK_PRECISION") or "fp32"
    if name not in ("fp32", "bf16"):
        raise InputError(f"$FASTERQK_PRECISION is {name!r}; set it to fp32 or bf16")
    return name == "bf16"


@dataclass(frozen=True)
class Optimisation:
    """The optimizer, its learning rates and its schedule.

    ``qk_ratio`` multiplies the learning rate of the query-key circuit, ``ov_ratio`` that of the output-value
    circuit and ``embedding_ratio`` that of the token embedding, which then does not decay. ``ratios`` sets
    them by role instead, as in ``"q=10,k=3"``; roles are q, k, v, o and embedding.
    """

    qk_ratio: float = 1.0
    lr: float = 5e-5
    epochs: int = 30
    batch_size: int = 32
    # Batches per optimizer step.
    accumulate: int = 1
    # Batches are cut from pools of this many batches, sorted by length; 1 is plain shuffling.
    bucket: int = 16
    optimizer: str = "adamw"
    momentum: float = 0.0
    weight_decay: float = 1e-4
    # "coupled": the ratio also multiplies the weight decay of its circuit. "independent": lr * weight_decay
    # is the same for all parameters.
    decay: str = "independent"
    schedule: str = "cosine"
    # The share of all steps over which the learning rate rises from zero.
    warmup: float = 0.1
    # The largest joint norm of the gradients.
    clip: float | None = 1.0
    ov_ratio: float = 1.0
    ratios: str = ""
    embedding_ratio: float = 1.0
    # Multiplies the queries and divides the keys at the start, which does not change the function.
    qk_imbalance: float = 1.0
    # Multiplies the product of queries and keys and divides that of values and outputs at the start.
    circuit_imbalance: float = 1.0
    # The norm given to the gradient of each circuit at every step.
    gradient_norm: float | None = None
    # The weight decay of one circuit, instead of that of all parameters.
    qk_decay: float | None = None
    ov_decay: float | None = None
    # Whether training steps run under torch's autocast in bfloat16; `--precision` sets it.
    autocast: bool = False
    # Answer generators only.
    label_smoothing: float = 0.0
    # Shell-style patterns of parameter names. Parameters that match `faster` get the ratio instead of the
    # query-key circuit; those that match `frozen` are not trained. With `stale_gradients`, gradients of
    # frozen parameters are computed, never cleared, and count in the clipped norm, as in the released
    # notebooks.
    faster: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    stale_gradients: bool = False
    # The shares of all steps between which `qk_ratio` holds; before and after, it is 1.
    ratio_from: float = 0.0
    ratio_until: float = 1.0
    # Weights of two losses on the attention of the read position, in classifiers of one layer: its
    # cross-entropy with the relevant tokens, and its entropy.
    attention_loss: float = 0.0
    entropy_loss: float = 0.0

    def __post_init__(self) -> None:
        _set_types(self)
        _one_of(self, optimizer=OPTIMIZERS, decay=DECAYS, schedule=SCHEDULES)
        _above_zero(
            self, "qk_ratio", "ov_ratio", "embedding_ratio", "qk_imbalance", "circuit_imbalance", "lr"
        )
        object.__setattr__(self, "ratios", _written(self.by_role()))
        for name in ("qk_ratio", "ov_ratio", "embedding_ratio", "faster"):
            if self.ratios and getattr(self, name) not in (1.0, ()):
                raise InputError(
                    f"{name} {getattr(self, name)} and ratios {self.ratios!r} both set rates; "
                    "give one of them"
                )
        _above_zero(self, "clip", "gradient_norm")
        _at_least(self, 1, "epochs", "batch_size", "accumulate", "bucket")
        _at_least(self, 0, "weight_decay", "qk_decay", "ov_decay", "momentum", "warmup", "label_smoothing")
        _at_least(self, 0, "attention_loss", "entropy_loss")
        if not 0 <= self.ratio_from < self.ratio_until <= 1:
            raise InputError(
                f"ratio_from {self.ratio_from} and ratio_until {self.ratio_until} are shares of all steps; "
                "give two numbers from 0 to 1, the first one smaller"
            )
        _below_one(self, "label_smoothing")
        if self.warmup > 1:
            raise InputError(f"warmup {self.warmup} is a share of all steps; give a number from 0 to 1")

    def by_role(self) -> dict[str, float]:
        """``ratios`` as numbers by role; empty if there are none.

        >>> Optimisation(ratios="k=3, q=10").by_role()
        {'q': 10.0, 'k': 3.0}
        """
        ratios: dict[str, float] = {}
        for item in filter(None, (item.strip() for item in self.ratios.split(","))):
            role, _, number = (part.strip() for part in item.partition("="))
            try:
                ratio = float(number)
            except ValueError:
                ratio = math.nan
            if role not in RATIO_ROLES or role in ratios or not 0 < ratio < math.inf:
                raise InputError(
                    f"ratios {self.ratios!r}: {item!r} is not a role and a number above 0; write q=10,k=3 "
                    f"with the roles {', '.join(RATIO_ROLES)}, each once"
                )
            ratios[role] = ratio
        return {role: ratios[role] for role in RATIO_ROLES if role in ratios}


@dataclass(frozen=True)
class Model:
    """The paper's transformer, or the pretrained model that is fine-tuned in its place."""

    # A folder, or an installed package, with an encoder or a decoder. Of the other fields only `context` and,
    # for a decoder, `lora` apply: the rank of the adapters (0 trains all weights).
    pretrained: str = ""
    lora: int = 0
    layers: int = 1
    width: int = 64
    heads: int = 4
    head_width: int = 64
    # 0: no MLP.
    mlp_width: int = 256
    # The longest text in tokens; longer ones are cut.
    context: int = 256
    residual: bool = True
    # Whether each head learns a factor of its attention scores, which starts at 1.
    temperature: bool = False
    # The row of attention that makes the prediction: the first position "after" the text (padding that sees
    # the text and itself) or the "last" token.
    read: str = "after"
    init_scale: float = 0.02
    # Answer generators only. With `word_vectors`, the embedding starts from the task's word vectors, if it
    # has any. Otherwise embedding and positions start with the spread `start_scale` (None: as in the paper).
    # Positions are learned; they start at random or as sine and cosine "waves", which make distances between
    # positions easier to read.
    dropout: float = 0.0
    word_vectors: bool = True
    start_scale: float | None = None
    position_start: str = "random"
    # The gain of the last norm at the start. With 1 the first loss over word vectors is far above chance.
    head_scale: float = 1.0

    def __post_init__(self) -> None:
        _set_types(self)
        _one_of(self, read=READ_POSITIONS, position_start=POSITION_STARTS)
        _above_zero(self, "init_scale", "start_scale", "head_scale")
        _at_least(self, 1, "layers", "width", "heads", "head_width", "context")
        if self.layers > MOST_LAYERS:
            raise InputError(f"layers {self.layers}: at most {MOST_LAYERS} can be built")
        inside = 4 * self.heads * self.head_width + 2 * self.mlp_width + self.context
        if (weights := self.layers * self.width * inside) > MOST_WEIGHTS:
            raise InputError(
                f"a model with {weights:.1e} weights is too large; at most {MOST_WEIGHTS:.0e} are allowed"
            )
        _at_least(self, 0, "mlp_width", "dropout", "lora")
        _below_one(self, "dropout")

    def sizes(self) -> dict[str, int]:
        """The sizes that classifiers and answer generators share."""
        names = ("layers", "width", "heads", "head_width", "mlp_width", "context")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Data:
    """The form of the task's data, and the number of training examples; ``file`` is for task "jsonl"."""

    form: str = ""
    file: str = ""
    checksum: str = ""
    train_limit: int | None = None

    def __post_init__(self) -> None:
        _set_types(self)
        _at_least(self, 1, "train_limit")


@dataclass(frozen=True)
class Evaluation:
    """The measurements: which, how often, and on how many examples."""

    # A name in `EVALUATIONS` of `fasterqk_lab.training._classification`.
    protocol: str = "paper"
    evaluations_per_epoch: int = 1
    # Evenly spaced evaluations from start to end, instead of a number per epoch.
    evaluations: int | None = None
    # Also evaluate whenever the running loss has fallen to this share of its value at the last evaluation.
    evaluate_at_fall: float | None = None
    # Training ends early if, for this many evaluations, validation accuracy has not risen and validation loss
    # has not fallen.
    patience: int | None = None
    # The score that chooses the best evaluation of a training.
    best_by: str = "validation_accuracy"
    # Training ends at the first evaluation whose training loss is at most this.
    stop_at_loss: float | None = None
    # Classifiers only: measure random rankings along training too, not only at the end.
    random_along: bool = False
    # More readings of attention along training; see `fasterqk_lab.training._readings`.
    readings: tuple[str, ...] = ()
    # The number of training examples on which the training loss is measured.
    train_subset: int = 2048
    # Percentages of tokens that faithfulness keeps or removes.
    rationale_k: tuple[int, ...] = (5, 10, 20, 50)
    # Answer generators and pretrained decoders: the number of examples per split that are measured along
    # training and at the end (None: all). Generators: the longest answer in tokens.
    along_subset: int = 256
    test_subset: int | None = None
    answer_tokens: int = 32

    def __post_init__(self) -> None:
        _set_types(self)
        _at_least(self, 1, "evaluations_per_epoch", "evaluations", "patience", "train_subset", "along_subset")
        _at_least(self, 1, "test_subset", "answer_tokens")
        _above_zero(self, "stop_at_loss")
        _one_of(self, best_by=BEST_BY)
        fall = self.evaluate_at_fall
        if fall is not None and not 0 < fall < 1:
            raise InputError(f"evaluate_at_fall {fall} is a share of the loss, between 0 and 1")
        for reading in self.readings:
            if reading not in READINGS:
                raise InputError(f"readings {reading!r} is not one of {', '.join(READINGS)}")
        if any(not 0 < k <= 100 for k in self.rationale_k):
            raise InputError(f"rationale_k {list(self.rationale_k)}: give percentages from 1 to 100")


@dataclass(frozen=True, init=False)
class TrainConfig:
    """One cell: a task, an arm and a seed, with everything that decides its numbers.

    Pass fields by name: names are unique across the parts. Fields that are not given take the task's setting
    (`TASK_SETTINGS`) or else the default of their part. A part passed whole ignores the task's settings.
    Integers passed for real fields become real, so ``qk_ratio=30`` and ``qk_ratio=30.0`` are one
    configuration.

    >>> config = TrainConfig("agreement", qk_ratio=30)
    >>> config.optimisation.qk_ratio, config.optimisation.lr, config.model.context
    (30.0, 0.0001, 32)
    >>> TrainConfig("agreement", data=Data(train_limit=100)).replace(seed=3, lr=1e-3).data.train_limit
    100
    """

    task: str
    seed: int = 0
    optimisation: Optimisation = dataclasses.field(default_factory=Optimisation, metadata=PART)
    model: Model = dataclasses.field(default_factory=Model, metadata=PART)
    data: Data = dataclasses.field(default_factory=Data, metadata=PART)
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation, metadata=PART)

    def __init__(self, task: str, seed: int = 0, **fields: Any) -> None:
        values = {"task": task, "seed": seed}
        if half_precision():
            fields["autocast"] = True
        for name, kind in PARTS.items():
            names = [field.name for field in dataclasses.fields(kind)]
            changes = {name: fields.pop(name) for name in names if name in fields}
            if name in fields:
                whole = fields.pop(name)
                if type(whole) is not kind:
                    raise InputError(f"{name} {whole!r} is not of type {kind.__name__}")
                values[name] = dataclasses.replace(whole, **changes)
            else:
                settings = TASK_SETTINGS.get(task, {})
                values[name] = kind(**{name: settings[name] for name in names if name in settings} | changes)
        for name in fields:
            known = ", ".join(config_types(type(self)))
            raise InputError(f"{name!r} is not a field of TrainConfig; fields are {known}")
        for name, value in values.items():
            object.__setattr__(self, name, value)
        _set_types(self, "task", "seed")
        check_task(self.task)
        _at_least(self, 0, "seed")

    def replace(self, **changes: Any) -> "TrainConfig":
        """A copy with some fields, or whole parts, changed."""
        return dataclasses.replace(self, **changes)


PARTS: dict[str, Any] = {"optimisation": Optimisation, "model": Model, "data": Data, "evaluation": Evaluation}


@dataclass(frozen=True)
class PretrainingCell:
    """One cell of `pretrain`. Only the methods ``qk_ratio`` and ``qk_vo`` use the field ``qk_ratio``."""

    method: str = PLAIN
    qk_ratio: float = 1.0
    lr: float = 1e-3
    width: int = 96
    steps: int = 400
    seed: int = 0
    layers: int = 2
    heads: int = 4
    context: int = 128
    batch: int = 16
    warmup: int = 40
    weight_decay: float = 0.01
    autocast: bool = False
    CLIP_THRESHOLD: ClassVar[float] = 100.0

    def __post_init__(self) -> None:
        if self.method not in PRETRAINING_METHODS:
            raise InputError(f"unknown method {self.method!r}; choose from {', '.join(PRETRAINING_METHODS)}")
        if half_precision():
            object.__setattr__(self, "autocast", True)

    @property
    def last(self) -> int:
        """The number of last steps over which the loss is averaged: a tenth."""
        return max(1, self.steps // 10)


def _written(ratios: dict[str, float]) -> str:
    """The canonical text of ratios, so that equal ratios are one configuration."""
    return ",".join(f"{role}={repr(ratio).removesuffix('.0')}" for role, ratio in ratios.items())


def _set_types(config: Any, *names: str) -> None:
    """Convert each field (or those named) to its declared type if that loses nothing; otherwise raise."""
    for field in dataclasses.fields(config):
        if not names or field.name in names:
            object.__setattr__(config, field.name, _typed(field, getattr(config, field.name)))


def _typed(field: "dataclasses.Field[Any]", value: Any) -> Any:
    declared = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    if value is None and declared.endswith("None"):
        return None
    if declared.startswith("tuple") and isinstance(value, list | tuple):
        item = int if "int" in declared else str
        if all(isinstance(entry, item) and not isinstance(entry, bool) for entry in value):
            return tuple(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if declared.startswith("float") and number:
        if not math.isfinite(value):
            raise InputError(f"{field.name} {value!r} is not a finite number")
        return float(value)
    if declared.startswith("int") and number and (isinstance(value, int) or value.is_integer()):
        if value > MOST and field.name != "seed":
            raise InputError(f"{field.name} {value} is too large; the largest allowed value is {MOST}")
        return int(value)
    if declared == "bool" and isinstance(value, bool):
        return value
    if declared == "str" and isinstance(value, str):
        return value
    raise InputError(f"{field.name} {value!r} is not of type {declared}")


def _one_of(config: Any, **allowed: tuple[str, ...]) -> None:
    for name, values in allowed.items():
        if getattr(config, name) not in values:
            raise InputError(f"{name} {getattr(config, name)!r} is not one of {', '.join(values)}")


def _at_least(config: Any, least: int, *names: str) -> None:
    for name in names:
        if (value := getattr(config, name)) is not None and value < least:
            raise InputError(f"{name} {value} is not at least {least}")


def _above_zero(config: Any, *names: str) -> None:
    for name in names:
        if (value := getattr(config, name)) is not None and value <= 0:
            raise InputError(f"{name} {value} is not above 0")


def _below_one(config: Any, name: str) -> None:
    if getattr(config, name) >= 1:
        raise InputError(f"{name} {getattr(config, name)} is a share below 1")
