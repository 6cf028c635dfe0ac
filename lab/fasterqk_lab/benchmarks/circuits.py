"""AdamW by circuit against the plain one: a step and ``zero_grad`` at the size of GPT-2, on one thread."""

import statistics
import time
from typing import Any

import torch
from torch import nn

from fasterqk.circuits import Circuits, Role, Slice, make_optimizer

LAYERS, WIDTH, HEADS, VOCABULARY, POSITIONS = 12, 768, 12, 50257, 1024
ROUNDS = {"loop": 15, "fused": 31}
LAYOUTS = ("rows", "columns", "interleaved")
KERNELS: dict[str, dict[str, Any]] = {"loop": {}, "fused": {"fused": True}}


def run(progress: Any) -> dict[str, Any]:
    """Median seconds of both, and the overhead, for every layout and kernel.

    Seconds are of the processor: with one thread that is the time on an idle machine, and stays close to
    it on a busy one. The two take turns; an overhead is the median of ours over plain in the same turn.
    ``speedup``, ``plain_seconds`` and ``seconds`` are of rows and columns together with the kernel that
    AdamW has by default on a processor, the loop; the others stand beside it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = [(layout, kernel) for layout in LAYOUTS for kernel in KERNELS]
        measured = {}
        for done, (layout, kernel) in enumerate(cases):
            measured[layout, kernel] = _compare(layout, KERNELS[kernel], ROUNDS[kernel])
            progress(done + 1, len(cases), f"{layout}, {kernel}")
    finally:
        torch.set_num_threads(threads)
    plain, ours = (sum(measured[layout, "loop"][i] for layout in ("rows", "columns")) for i in (0, 1))
    result: dict[str, Any] = {"speedup": plain / ours, "plain_seconds": plain, "seconds": ours}
    for kernel in KERNELS:
        for layout in LAYOUTS:
            stock, mine, overhead = measured[layout, kernel]
            name = layout if kernel == "loop" else f"{layout}_{kernel}"
            result |= {
                f"overhead_{name}": overhead,
                f"plain_seconds_{name}": stock,
                f"seconds_{name}": mine,
            }
    return result | {
        "parameters": sum(parameter.numel() for parameter in _model("rows").parameters()),
        "layers": LAYERS,
        "width": WIDTH,
        "rounds": ROUNDS,
        "threads": 1,
    }


def _compare(layout: str, kernel: dict[str, Any], rounds: int) -> tuple[float, float, float]:
    """Median seconds of a step and ``zero_grad``, plain and ours on the same weights, and the overhead."""
    torch.manual_seed(0)
    model = _model(layout)
    circuits = _labels(model, layout)
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=1e-5, **kernel),
        make_optimizer(model, torch.optim.AdamW, lr=1e-5, qk_ratio=10, circuits=circuits, **kernel),
    ]
    gradients = [1e-3 * torch.randn_like(parameter) for parameter in model.parameters()]
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            start = time.process_time()
            optimizers[which].step()
            optimizers[which].zero_grad()
            if turn:  # the first turn makes the states
                seconds[which].append(time.process_time() - start)
    overhead = statistics.median(mine / plain for plain, mine in zip(*seconds, strict=True))
    return statistics.median(seconds[0]), statistics.median(seconds[1]), overhead


def _model(layout: str) -> nn.Module:
    """The parameters of GPT-2 under its names; fused weights lie in rows, columns or head by head."""

    def layer() -> nn.Module:
        shape = (WIDTH, 3 * WIDTH) if layout == "columns" else (3 * WIDTH, WIDTH)
        fused = nn.Module()
        fused.weight = nn.Parameter(0.02 * torch.randn(shape))
        fused.bias = nn.Parameter(torch.zeros(3 * WIDTH))
        modules = {
            "ln_1": nn.LayerNorm(WIDTH),
            "qkv": fused,
            "out": nn.Linear(WIDTH, WIDTH),
            "ln_2": nn.LayerNorm(WIDTH),
            "up": nn.Linear(WIDTH, 4 * WIDTH),
            "down": nn.Linear(4 * WIDTH, WIDTH),
        }
        return nn.ModuleDict(modules)

    return nn.ModuleDict(
        {
            "tokens": nn.Embedding(VOCABULARY, WIDTH),
            "positions": nn.Embedding(POSITIONS, WIDTH),
            "layers": nn.ModuleList(layer() for _ in range(LAYERS)),
            "norm": nn.LayerNorm(WIDTH),
        }
    )


def _labels(model: nn.Module, layout: str) -> Circuits:
    found = []
    for name, parameter in model.named_parameters():
        layer = int(name.split(".")[1]) if name.startswith("layers") else None
        if ".qkv." not in name:
            whole: Role = "o" if ".out." in name else "rest"
            found.append(Slice(name, None, None, None, whole, layer, "label", parameter.numel()))
            continue
        axis = 1 if layout == "columns" and parameter.ndim == 2 else 0
        runs = 3 * HEADS if layout == "interleaved" else 3
        length = 3 * WIDTH // runs
        roles: tuple[Role, ...] = ("q", "k", "v")
        for i in range(runs):
            role, numel = roles[i % 3], parameter.numel() // runs
            found.append(Slice(name, axis, i * length, (i + 1) * length, role, layer, "label", numel))
    return Circuits(tuple(found))
