"""Checkpoints: everything a training needs to go on, in one safetensors file that appears at once.

The tensors of the model, of the optimizer and of the random generators are stored by name; whatever is
not a tensor (step counters, learning rates, scalars) is JSON in the file's header. Nothing is pickled,
so nothing is ever unpickled. A checksum over all of it tells a damaged file from a good one.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fasterqk.errors import InputError
from fasterqk.files import parse_json, write_bytes
from fasterqk_lab.configs import content_hash

FILE_NAME = "checkpoint.safetensors"
FORMAT = "fasterqk-checkpoint"
VERSION = 1
_NO_GENERATORS: Mapping[str, torch.Generator] = {}


def save(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scalars: Mapping[str, Any],
    generators: Mapping[str, torch.Generator] = _NO_GENERATORS,
    config: Any = None,
) -> None:
    """Replace the checkpoint in ``folder`` atomically by the present state.

    ``scalars`` is any nesting of dicts, lists, tuples, numbers, strings, None and tensors. ``config``
    (a frozen dataclass) binds the checkpoint to one configuration: :func:`load` refuses any other.

    >>> model, generator = nn.Linear(2, 2), torch.Generator().manual_seed(0)
    >>> state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    >>> save("cell", **state, scalars={"step": 100}, generators={"batches": generator})
    >>> load("cell", **state, generators={"batches": generator})
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
        "generators": _encode(
            {name: generator.get_state() for name, generator in generators.items()}, "generator", tensors
        ),
    }
    text = json.dumps(document)
    header = {"version": VERSION, "sha256": _checksum(text, tensors), "document": text}
    # One entry only: safetensors writes several in any order, and equal states shall be equal files.
    write_bytes(Path(folder) / FILE_NAME, safetensors.torch.save(tensors, {FORMAT: json.dumps(header)}))


def load(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generators: Mapping[str, torch.Generator] = _NO_GENERATORS,
    config: Any = None,
) -> dict[str, Any] | None:
    """Put the state saved in ``folder`` back, bit for bit; returns the scalars, or None without a checkpoint.

    Everything is checked before anything is changed: a damaged file, or the checkpoint of another
    configuration, model or optimizer, raises :class:`~fasterqk.errors.InputError` naming the file.
    """
    path = Path(folder) / FILE_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    document, tensors = _parse(path, data)
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
    random_states = _decode(document["generators"], tensors)
    saved_groups, labels = states["param_groups"], _labels(model, optimizer)
    there = _shapes(weights), _places(document["optimizer_class"], document["labels"], saved_groups)
    here = _shapes(model.state_dict()), _places(type(optimizer).__name__, labels, optimizer.param_groups)
    for what, ours, theirs in zip(("model", "optimizer"), here, there, strict=True):
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                raise InputError(
                    f"{path} is a checkpoint of another {what}: {name!r} is {theirs.get(name)} there "
                    f"and {ours.get(name)} here"
                )
    if random_states.keys() != generators.keys():
        raise InputError(
            f"{path} holds the random generators {sorted(random_states)}, not {sorted(generators)}"
        )
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    for name, generator in generators.items():
        generator.set_state(random_states[name])
    scalars: dict[str, Any] = _decode(document["scalars"], tensors)
    return scalars


def verify(path: str | os.PathLike[str]) -> None:
    """Raise :class:`~fasterqk.errors.InputError` unless the file at ``path`` is a whole checkpoint."""
    _parse(Path(path), Path(path).read_bytes())


def _parse(path: Path, data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header document and the tensors of a checkpoint whose checksum is right."""
    try:
        tensors = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = parse_json(data[8 : 8 + length], "its header").get("__metadata__", {})
        header = parse_json(metadata.get(FORMAT, "null"), "its header")
    except (SafetensorError, ValueError, KeyError) as error:
        if data.startswith((b"\x80", b"PK\x03\x04")):
            reason = "it looks like a pickle, and nothing is unpickled here"
        else:
            reason = f"truncated or damaged: {error}"
        raise InputError(
            f"{path} is not a fasterqk checkpoint ({reason}); remove it to start again"
        ) from None
    if not isinstance(header, dict):
        raise InputError(f"{path} is a safetensors file, but no fasterqk checkpoint; remove it to start")
    if header.get("version") != VERSION:
        raise InputError(
            f"{path} is a checkpoint of format version {header.get('version')!r}; "
            f"this fasterqk reads version {VERSION}"
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

    The optimizers of :mod:`fasterqk.optim` name theirs, views of fused weights too. Otherwise the
    model knows the name, or the place in the optimizer has to do.
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
        # A copy: safetensors refuses tensors that share memory, and tied weights do.
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
