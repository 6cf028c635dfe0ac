"""The training loop of all tasks, and its checkpoints.

A training that is stopped and resumed gives the same bits as one that is not. A training that diverges ends
there and says so.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.files import parse_json, plain, write_bytes, write_text
from fasterqk_lab.configs import content_hash
from fasterqk_lab.training._config import TrainConfig
from fasterqk_lab.training._steps import Steps, Trainable, build_optimizer, build_trainable, one_thread

# A training whose loss exceeds this multiple of its first loss has diverged, even if it is finite.
DIVERGED = 100.0
# Steps between progress reports if no evaluation comes first.
PROGRESS_EVERY = 50
# The weight of the newest batch in the running mean of losses, which spans about ten batches.
NEWEST_WEIGHT = 0.1

# Called with the steps done, the total number of steps, and a note.
Progress = Callable[[float, float, str], None]


@dataclass(frozen=True)
class TrainResult:
    """The result of one training.

    ``loss`` is the final loss on the fixed part of the training data. ``train``, ``validation`` and ``test``
    hold the final measurements; ``best`` is the record of the history that is best by ``best_by`` of the
    configuration. If the training diverged, these four are empty and ``loss`` is None. ``skipped`` counts
    examples that were left out of the data, by reason.

    >>> result = TrainResult("sva", 0, 30.0, diverged=True, steps=7, loss=None)
    >>> TrainResult.from_json(result.to_json()) == result
    True
    """

    task: str
    seed: int
    qk_ratio: float
    diverged: bool
    steps: int
    loss: float | None
    data_checksums: dict[str, str] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON data; null for everything that a diverged training lacks."""
        document = dict(vars(self))
        missing = {name: document[name] or None for name in ("train", "validation", "test", "best")}
        if not self.skipped:
            del document["skipped"]
        return document | missing

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "TrainResult":
        """The result that :meth:`to_json` wrote; unknown entries are ignored."""
        known = {entry.name for entry in fields(cls)}
        values = {name: value for name, value in document.items() if name in known and value is not None}
        return cls(**{"loss": None} | values)


def train(
    config: TrainConfig,
    *,
    folder: str | Path | None = None,
    progress: Progress | None = None,
    data_dir: str | Path | None = None,
) -> TrainResult:
    """Train one cell and return its result.

    If ``folder`` is given, the state is saved there at every evaluation. Another call resumes from the last
    one and returns the same result, bit for bit, as a training that never stopped.

    >>> from fasterqk_lab.training import TrainConfig
    >>> small = {"width": 8, "heads": 2, "head_width": 4, "mlp_width": 8, "train_limit": 200}
    >>> result = train(TrainConfig("agreement", epochs=1, qk_ratio=30, **small), folder="cell")
    >>> result.diverged
    False
    """
    with one_thread():
        return _Training(config, build_trainable(config, data_dir), folder, progress).run()


def load_trained(config: TrainConfig, folder: Path) -> Trainable:
    """The model and data of an earlier training, with the weights of its checkpoint.

    ``load_trained(config, Store("out").folder(config)).model`` is the model of a cell in a results folder.
    """
    trainable = build_trainable(config)
    optimizer = build_optimizer(trainable.model, config)
    scalars = load_checkpoint(folder, model=trainable.model, optimizer=optimizer, config=config)
    if scalars is None:
        raise InputError(f"there is no checkpoint in {str(folder)!r}; train this cell first")
    trainable.model.eval()
    return trainable


@dataclass
class _Training:
    """One training: its steps, its history, and the folder that both are saved in."""

    config: TrainConfig
    trainable: Trainable
    folder: str | Path | None
    progress: Progress | None
    history: list[dict[str, Any]] = field(default_factory=list)
    diverged: bool = False

    def __post_init__(self) -> None:
        config = self.config
        self.steps = Steps(config, self.trainable)
        points = config.evaluation.evaluations or (
            config.optimisation.epochs * config.evaluation.evaluations_per_epoch
        )
        self.evaluated_at = {round(self.steps.total * point / points) for point in range(points + 1)}
        # The running mean of batch losses, now and at the last evaluation.
        self.mean_loss = self.mean_loss_then = 0.0

    def run(self) -> TrainResult:
        """Train from the checkpoint or from the start, then measure the model."""
        self._resume()
        if not self.history:
            self._evaluate()
            self.mean_loss = self.mean_loss_then = self.history[0]["loss"]
        while self.steps.done < self.steps.total and not self._ends_early():
            loss = self.steps.step()
            self.diverged = not math.isfinite(loss)
            self.mean_loss = (1 - NEWEST_WEIGHT) * self.mean_loss + NEWEST_WEIGHT * loss
            fell = self.mean_loss < (self.config.evaluation.evaluate_at_fall or 0.0) * self.mean_loss_then
            if self.steps.done in self.evaluated_at or self.diverged or fell:
                self._evaluate()
                self._save()
            elif self.steps.done % PROGRESS_EVERY == 0:
                self._show_progress()
        return self._result()

    def _ends_early(self) -> bool:
        """Whether it diverged, reached ``stop_at_loss``, or has not improved for ``patience`` evaluations.

        Either score counts as an improvement: on a plateau where the model predicts the most frequent class,
        accuracy is constant while the validation loss still falls.
        """
        level = self.config.evaluation.stop_at_loss
        if self.diverged or (level is not None and float(self.history[-1]["loss"]) <= level):
            return True
        if self.config.evaluation.patience is None:
            return False
        accuracies = [record["validation_accuracy"] for record in self.history]
        losses = [record["validation_loss"] for record in self.history]
        last_rise = max(accuracies.index(max(accuracies)), losses.index(min(losses)))
        return len(self.history) - 1 - last_rise >= self.config.evaluation.patience

    def _evaluate(self) -> None:
        """Measure the model as it is now."""
        self.mean_loss_then = self.mean_loss
        measured = {} if self.diverged else self.trainable.evaluate()
        start = self.history[0]["loss"] if self.history else math.inf
        if not measured or not measured["loss"] <= DIVERGED * start:
            self.diverged = True
            measured = {"loss": None, "diverged": True}
        when = {"step": self.steps.done, "epoch": self.steps.done / self.steps.per_epoch}
        self.history.append(when | measured)
        self._show_progress()

    def _result(self) -> TrainResult:
        measured: dict[str, Any] = {}
        if not self.diverged:
            measured = self.trainable.results()
            by = self.config.evaluation.best_by
            measured["best"] = (min if by.endswith("loss") else max)(self.history, key=lambda row: row[by])
        return TrainResult(
            task=self.config.task,
            seed=self.config.seed,
            qk_ratio=self.config.optimisation.qk_ratio,
            diverged=self.diverged,
            steps=self.steps.done,
            loss=self.history[-1]["loss"],
            data_checksums=self.trainable.files,
            history=self.history,
            **measured,
        )

    def _show_progress(self) -> None:
        if self.progress:
            self.progress(self.steps.done, self.steps.total, _note(self.history[-1]))

    def _save(self) -> None:
        if self.folder is None or self.diverged:
            return
        lines = [json.dumps(plain(record)) for record in self.history]
        write_text(Path(self.folder) / "history.jsonl", "\n".join(lines) + "\n")
        scalars = {"step": self.steps.done, "running": self.mean_loss, "history": self.history}
        scalars["stale_gradients"] = self.steps.stale_gradients()
        state: dict[str, Any] = {"model": self.trainable.model, "optimizer": self.steps.optimizer}
        save_checkpoint(self.folder, **state, scalars=scalars, config=self.config)

    def _resume(self) -> None:
        if self.folder is None:
            return
        saved = load_checkpoint(
            self.folder, model=self.trainable.model, optimizer=self.steps.optimizer, config=self.config
        )
        if saved is not None:
            self.steps.done, self.history = saved["step"], saved["history"]
            self.mean_loss = self.mean_loss_then = saved["running"]
            self.steps.restore_stale_gradients(saved["stale_gradients"])


def _note(record: dict[str, Any]) -> str:
    if record.get("diverged"):
        return "diverged"
    shown = {"loss": "loss", "accuracy": "validation_accuracy", "mass": "mrta"}
    return "  ".join(
        f"{label} {record[key]:.3f}" for label, key in shown.items() if record.get(key) is not None
    )


# --- Checkpoints: everything a training needs to resume, in one safetensors file, written atomically ---
# The tensors of model and optimizer are stored by name; everything else (step counters, learning rates,
# scalars) is JSON in the file's header. Nothing is pickled. A checksum over all of it reveals damage.

CHECKPOINT = "checkpoint.safetensors"
_FORMAT = "fasterqk-checkpoint"
_VERSION = 1


def save_checkpoint(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scalars: Mapping[str, Any],
    config: Any = None,
) -> None:
    """Atomically replace the checkpoint in ``folder`` by the current state.

    ``scalars`` is any nesting of dicts, lists, tuples, numbers, strings, None and tensors. ``config``
    (a frozen dataclass) binds the checkpoint to one configuration: :func:`load_checkpoint` refuses any other.

    >>> model = nn.Linear(2, 2)
    >>> state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    >>> save_checkpoint("linear", **state, scalars={"step": 100})
    >>> load_checkpoint("linear", **state)
    {'step': 100}
    """
    tensors: dict[str, Tensor] = {}
    states = optimizer.state_dict()
    labels = _labels(model, optimizer)
    document = {
        "config": None if config is None else content_hash(config),
        "optimizer_class": type(optimizer).__name__,
        "labels": labels,
        "model": _encode(dict(model.state_dict()), "model", tensors),
        "optimizer": {
            "state": [
                [index, _encode(entries, f"optimizer/{labels[index]}", tensors)]
                for index, entries in states["state"].items()
            ],
            "param_groups": _encode(states["param_groups"], "groups", tensors),
        },
        "scalars": _encode(dict(scalars), "scalars", tensors),
    }
    text = json.dumps(document)
    header = {"version": _VERSION, "sha256": _checksum(text, tensors), "document": text}
    # A single entry: safetensors writes several in any order, and equal states must give equal files.
    write_bytes(Path(folder) / CHECKPOINT, safetensors.torch.save(tensors, {_FORMAT: json.dumps(header)}))


def load_checkpoint(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Any = None,
) -> dict[str, Any] | None:
    """Restore the state saved in ``folder``, bit for bit; returns the scalars, or None without a checkpoint.

    Everything is checked before anything is changed: a damaged file, or the checkpoint of another
    configuration, model or optimizer, raises :class:`~fasterqk.errors.InputError` naming the file.
    """
    path = Path(folder) / CHECKPOINT
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    document, tensors = parse_checkpoint(path, data)
    wanted = None if config is None else content_hash(config)
    if document["config"] != wanted:
        raise InputError(
            f"{path} is a checkpoint of another configuration ({document['config']}, not {wanted}); "
            "remove it or use another folder"
        )
    weights = _decode(document["model"], tensors)
    states = {
        "state": {index: _decode(entries, tensors) for index, entries in document["optimizer"]["state"]},
        "param_groups": _decode(document["optimizer"]["param_groups"], tensors),
    }
    places = _places(type(optimizer).__name__, _labels(model, optimizer), optimizer.param_groups)
    saved_places = _places(document["optimizer_class"], document["labels"], states["param_groups"])
    pairs = {"model": (_shapes(model.state_dict()), _shapes(weights)), "optimizer": (places, saved_places)}
    for part, (current, saved) in pairs.items():
        for name in [*current, *saved]:
            if current.get(name) != saved.get(name):
                raise InputError(
                    f"{path} is a checkpoint of another {part}: {name!r} is {saved.get(name)} there "
                    f"and {current.get(name)} here"
                )
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    scalars: dict[str, Any] = _decode(document["scalars"], tensors)
    return scalars


def parse_checkpoint(path: Path, data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header document and the tensors of a checkpoint with a correct checksum; raises otherwise."""
    try:
        tensors = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = parse_json(data[8 : 8 + length], "its header").get("__metadata__", {})
        header = parse_json(metadata.get(_FORMAT, "null"), "its header")
    except (SafetensorError, ValueError, KeyError) as error:
        if data.startswith((b"\x80", b"PK\x03\x04")):
            reason = "it looks like a pickle, which is never loaded"
        else:
            reason = f"truncated or damaged: {error}"
        raise InputError(
            f"{path} is not a fasterqk checkpoint ({reason}); remove it to start again"
        ) from None
    if not isinstance(header, dict):
        raise InputError(
            f"{path} is a safetensors file but not a fasterqk checkpoint; remove it to start again"
        )
    if header.get("version") != _VERSION:
        raise InputError(
            f"{path} is a checkpoint of format version {header.get('version')!r}; "
            f"this fasterqk reads version {_VERSION}"
        )
    if header.get("sha256") != _checksum(header.get("document", ""), tensors):
        raise InputError(f"{path} is damaged (its checksum is wrong); remove it to start again")
    return json.loads(header["document"]), tensors


def _shapes(weights: Mapping[str, Any]) -> dict[str, str]:
    """The shape and type of every tensor of a model."""
    return {
        name: f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        for name, value in weights.items()
    }


def _places(kind: str, labels: list[str], groups: Any) -> dict[str, str]:
    """The class of an optimizer, and the place of every parameter that it trains."""
    numbers = [number for number, group in enumerate(groups) for _ in group["params"]]
    places = enumerate(zip(labels, numbers, strict=True))
    return {"its class": kind} | {name: f"parameter {i}, in group {number}" for i, (name, number) in places}


def _labels(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """A name for each parameter of the optimizer, in the order of its ``state_dict``.

    Optimizers of :mod:`fasterqk.optim` name their parameters, including views of fused weights. Other names
    come from the model, or else from the position in the optimizer.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    labels: list[str] = []
    for group in optimizer.param_groups:
        for parameter, label in zip_longest(group["params"], group.get("param_names", [])):
            labels.append(label or names.get(id(parameter), f"#{len(labels)}"))
    return labels


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON; tensors go to ``tensors`` under their path, containers keep their type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        if path in tensors:
            raise ValueError(f"two tensors of a checkpoint have the path {path!r}")
        # A copy: safetensors refuses tensors that share memory, as tied weights do.
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"dict": [[key, _encode(item, f"{path}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]}
    raise TypeError(f"cannot save {path} in a checkpoint: {type(value).__name__} is not plain data")


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`_encode`."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content}
    items = [_decode(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def _checksum(document: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(document.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
