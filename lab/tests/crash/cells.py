"""Small cells that do real work in steps and keep checkpoints, for the crash tests to interrupt."""

import hashlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasterqk.console import Progress
from fasterqk.files import write_text
from fasterqk_lab.runs._store import read_sealed, write_sealed


@dataclass(frozen=True)
class Empty:
    """A cell that does nothing: what remains is the cost of the store and the sweep."""

    seed: int = 0


def empty(config: Empty, *, folder: Path, progress: Progress) -> dict[str, Any]:
    return {"seed": config.seed}


@dataclass(frozen=True)
class Walk:
    """A chain of hashes, ``steps`` links of ``work`` rounds each, with a checkpoint after every link."""

    seed: int = 0
    steps: int = 20
    work: int = 10_000


def walk(config: Walk, *, folder: Path, progress: Progress) -> dict[str, Any]:
    """Any step that is lost, repeated or taken from another cell changes the last link."""
    path = folder / "checkpoint.json"
    saved = read_sealed(path)
    links = saved["links"] if saved else [f"{config.seed}"]
    for step in range(len(links), config.steps + 1):
        link = links[-1].encode()
        for _ in range(config.work):
            link = hashlib.blake2b(link).digest()
        links.append(link.hex()[:32])
        # The history first: killed between the two, the step is done again and the history written again.
        write_text(folder / "history.jsonl", "".join(f'{{"link": "{link}"}}\n' for link in links))
        write_sealed(path, {"links": links})
        progress(step, config.steps, links[-1])
    return {"links": links}


@dataclass(frozen=True)
class Held:
    """A cell that is done at once for seed 0, and otherwise waits for a signal in the middle of its work."""

    pipe: str
    seed: int = 0


def hold(config: Held, *, folder: Path, progress: Progress) -> dict[str, Any]:
    """Whoever opens the named pipe learns when the cell has a checkpoint and waits."""
    if config.seed == 0:
        return {"seed": 0}
    (folder / "checkpoint.json").write_text("half of it")
    with open(config.pipe, "w") as pipe:
        pipe.write("running")
    signal.pause()
    return {}


@dataclass(frozen=True)
class Gated:
    """A training of ``file`` that waits to be killed half way through its first attempt, if it is ``held``.

    It waits only while the folder ``gate`` exists: the same cells can be done undisturbed.
    """

    file: str
    gate: str
    held: bool = False
    qk_ratio: float = 1.0
    seed: int = 0


def train_gated(config: Gated, *, folder: Path, progress: Progress) -> dict[str, Any]:
    """Keeps in ``began.txt`` the step from which this attempt goes on.

    A held cell writes into the named pipe ``gate/SEED`` its process, and the step of its last
    checkpoint.
    """
    from fasterqk_lab.training import TrainConfig, train

    small = {"width": 16, "heads": 2, "head_width": 8, "mlp_width": 16, "context": 16, "train_subset": 64}
    training = TrainConfig(
        "jsonl", file=config.file, epochs=10, lr=3e-3, qk_ratio=config.qk_ratio, seed=config.seed, **small
    )
    began = step_of_checkpoint(folder)
    write_text(folder / "began.txt", str(began))
    pipe = Path(config.gate) / str(config.seed)

    def report(done: float, total: float, note: str = "") -> None:
        progress(done, total, note)
        if config.held and began == 0 and done > total / 2 and pipe.exists():
            pipe.write_text(f"{os.getpid()} {step_of_checkpoint(folder)}")
            signal.pause()

    return train(training, folder=folder, progress=report).to_json()


def step_of_checkpoint(folder: Path) -> int:
    """The step at which the training in ``folder`` was saved; 0 without a checkpoint."""
    from fasterqk_lab.training import _loop as checkpoint

    path = folder / checkpoint.CHECKPOINT
    if not path.exists():
        return 0
    document, tensors = checkpoint._parse(path, path.read_bytes())
    return int(checkpoint._decode(document["scalars"], tensors)["step"])


@dataclass(frozen=True)
class Learn:
    """A small network that learns, with AdamW, dropout and a checkpoint every few steps."""

    seed: int = 0
    steps: int = 120
    every: int = 10
    width: int = 192
    lr: float = 1e-3


def learn(config: Learn, *, folder: Path, progress: Progress) -> dict[str, Any]:
    """Weights, optimizer, random numbers and history must all come back for the losses to agree."""
    import torch
    from torch import nn

    from fasterqk_lab.training import _loop as checkpoint

    generators = {"data": torch.Generator().manual_seed(config.seed), "dropout": torch.default_generator}
    torch.manual_seed(config.seed)
    model = nn.Sequential(
        nn.Linear(16, config.width),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(config.width, config.width),
        nn.GELU(),
        nn.Linear(config.width, 1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "config": config}
    scalars = checkpoint.load_checkpoint(folder, **state) or {"losses": [], "generators": {}}
    losses = scalars["losses"]
    for name, random_state in scalars["generators"].items():
        generators[name].set_state(random_state)
    for step in range(len(losses), config.steps):
        inputs = torch.randn(256, 16, generator=generators["data"])
        loss = (model(inputs).squeeze(1) - inputs.prod(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        progress(step + 1, config.steps, f"loss {losses[-1]:.4f}")
        if (step + 1) % config.every == 0:
            write_text(folder / "history.jsonl", "".join(f'{{"loss": {value!r}}}\n' for value in losses))
            random_states = {name: generator.get_state() for name, generator in generators.items()}
            scalars = {"losses": losses, "generators": random_states}
            checkpoint.save_checkpoint(folder, scalars=scalars, **state)
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return {"losses": losses, "weights": digest.hexdigest()}
