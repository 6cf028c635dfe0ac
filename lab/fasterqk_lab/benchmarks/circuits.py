"""What circuits cost at the size of GPT-2, on one thread: the optimizer, ``qk_clip`` and ``LogitMonitor``.

Seconds are of the processor: with one thread that is the time on an idle machine, and stays close to it on a
busy one. An overhead is the median over rounds of one way over plain in the same round.
"""

import copy
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasterqk.labels import Circuits, Role, Slice, find_circuits
from fasterqk.optim import make_optimizer
from fasterqk.stability import LogitMonitor, qk_clip
from fasterqk_lab.benchmarks._plain import Progress, compared, overhead, take_turns
from fasterqk_lab.training._steps import one_thread

LAYERS, WIDTH, HEADS, VOCABULARY, POSITIONS = 12, 768, 12, 50257, 1024

# --- AdamW by circuit against the plain one: a step and ``zero_grad`` ---

ROUNDS = {"loop": 15, "fused": 31}
LAYOUTS = ("rows", "columns", "interleaved")
KERNELS: dict[str, dict[str, Any]] = {"loop": {}, "fused": {"fused": True}}


def run_circuits(progress: Progress) -> dict[str, Any]:
    """Median seconds of both, and the overhead, for every layout and kernel.

    ``speedup``, ``plain_seconds`` and ``seconds`` are of rows and columns together with the kernel that
    AdamW has by default on a processor, the loop; the others stand beside it.
    """
    cases = [(layout, kernel) for kernel in KERNELS for layout in LAYOUTS]
    medians: dict[tuple[str, str], dict[str, float]] = {}
    measured: dict[str, Any] = {}
    with one_thread():
        for done, (layout, kernel) in enumerate(cases):
            seconds = _step_seconds(layout, kernel)
            medians[layout, kernel] = {way: statistics.median(values) for way, values in seconds.items()}
            name = layout if kernel == "loop" else f"{layout}_{kernel}"
            measured |= {
                f"overhead_{name}": overhead(seconds, "ours"),
                f"plain_seconds_{name}": medians[layout, kernel]["plain"],
                f"seconds_{name}": medians[layout, kernel]["ours"],
            }
            progress(done + 1, len(cases), f"{layout}, {kernel}")
    plain, ours = (
        sum(medians[layout, "loop"][way] for layout in ("rows", "columns")) for way in ("plain", "ours")
    )
    return (
        compared(plain, ours)
        | measured
        | {
            "parameters": sum(parameter.numel() for parameter in _model("rows").parameters()),
            "layers": LAYERS,
            "width": WIDTH,
            "rounds": ROUNDS,
            "threads": 1,
        }
    )


def _step_seconds(layout: str, kernel: str) -> dict[str, list[float]]:
    """Seconds of a step and ``zero_grad``, plain and ours on the same weights."""
    torch.manual_seed(0)
    model, options = _model(layout), {"lr": 1e-5, **KERNELS[kernel]}
    circuits = _labels(model, layout)
    optimizers = {
        "plain": torch.optim.AdamW(model.parameters(), **options),
        "ours": make_optimizer(model, torch.optim.AdamW, qk_ratio=10, circuits=circuits, **options),
    }
    gradients = [1e-3 * torch.randn_like(parameter) for parameter in model.parameters()]

    def set_gradients() -> None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    ways = {name: partial(step, optimizer) for name, optimizer in optimizers.items()}
    return take_turns(ways, ROUNDS[kernel], before=set_gradients, clock=time.process_time)


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
    slices = []
    for name, parameter in model.named_parameters():
        layer = int(name.split(".")[1]) if name.startswith("layers") else None
        if ".qkv." not in name:
            whole: Role = "o" if ".out." in name else "rest"
            slices.append(Slice(name, None, None, None, whole, layer, "label", parameter.numel()))
            continue
        axis = 1 if layout == "columns" and parameter.ndim == 2 else 0
        runs = 3 * HEADS if layout == "interleaved" else 3
        length = 3 * WIDTH // runs
        roles: tuple[Role, ...] = ("q", "k", "v")
        for i in range(runs):
            role, numel = roles[i % 3], parameter.numel() // runs
            slices.append(Slice(name, axis, i * length, (i + 1) * length, role, layer, "label", numel))
    return Circuits(tuple(slices))


# --- Training steps with and without ``qk_clip`` and ``LogitMonitor`` ---
# Four models share one set of weights and one optimizer, and take turns on the same batch: plain; clipped,
# with logits below the threshold; clipped, with the scores of every head formed; read by the monitor.

BATCH, TOKENS = 4, 256
STABILITY_ROUNDS = 6
EVERY = 100  # steps between two readings of the monitor
_NEVER, _ALWAYS = 1e6, 1e-6  # thresholds


class Attention(nn.Module):
    """Queries, keys and values in one weight; torch's kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = HEADS
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Decoder(nn.Module):
    """GPT-2 without dropout; the token table is also the output."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.tokens.weight, 0, 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x[:, :-1]), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def run_stability(progress: Progress) -> dict[str, Any]:
    """Seconds of a training step each way, and their ratios to the plain step.

    ``overhead_clip`` is that of a step in which no head can be above the threshold, ``overhead_clip_all`` of
    one in which the scores of every head are formed. ``overhead_monitor`` is the mean over steps of which
    every hundredth is read; ``overhead_monitor_step`` that of the step itself.
    """
    with one_thread():
        seconds = _training_seconds(progress)
    plain, clipped = (statistics.median(seconds[name]) for name in ("plain", "clip"))
    read = overhead(seconds, "monitor")
    return compared(plain, clipped) | {
        "overhead_clip": overhead(seconds, "clip"),
        "overhead_clip_all": overhead(seconds, "clip_all"),
        "overhead_monitor": 1 + (read - 1) / EVERY,
        "overhead_monitor_step": read,
        "every": EVERY,
        "layers": LAYERS,
        "width": WIDTH,
        "batch": [BATCH, TOKENS],
        "rounds": STABILITY_ROUNDS,
        "threads": 1,
    }


def _training_seconds(progress: Progress) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model = Decoder()
    ids = torch.randint(VOCABULARY, (BATCH, TOKENS))
    circuits = find_circuits(model, heads=True, inputs=ids[:1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    models = {name: _sharing(model) for name in ("plain", "clip", "clip_all", "monitor")}
    # A clip that saw nothing before a step does nothing after it, so the ways do not meet.
    qk_clip(models["clip"], optimizer, _NEVER, circuits=circuits)
    qk_clip(models["clip_all"], optimizer, _ALWAYS, circuits=circuits, log_only=True)
    LogitMonitor(models["monitor"], every=1, limit=_NEVER, circuits=circuits)
    # The first pass of a clip verifies it, so every model runs once; then the first round makes the states.
    for shared in models.values():
        shared(ids).backward()

    def step(shared: nn.Module) -> None:
        shared(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    ways = {name: partial(step, shared) for name, shared in models.items()}
    return take_turns(ways, STABILITY_ROUNDS, progress, clock=time.process_time)


def _sharing(model: nn.Module) -> nn.Module:
    """Other modules with the same parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
