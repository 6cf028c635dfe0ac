"""Training steps of a decoder of GPT-2's size, with and without ``qk_clip`` and ``LogitMonitor``: one thread.

Four models share one set of weights and one optimizer, and take turns on the same batch: plain; clipped, with
logits below the threshold; clipped, with the scores of every head formed; read by the monitor. Times are
processor time, which a busy machine changes little; a ratio is the median over rounds of one way over plain
in the same round.
"""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasterqk.circuits import LogitMonitor, find_circuits, qk_clip

LAYERS, WIDTH, HEADS, VOCABULARY = 12, 768, 12, 50257
BATCH, TOKENS = 4, 256
ROUNDS = 6
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


def run(progress: Callable[..., None]) -> dict[str, Any]:
    """Seconds of a training step each way, and their ratios to the plain step.

    ``overhead_clip`` is that of a step in which no head can be above the threshold, ``overhead_clip_all`` of
    one in which the scores of every head are formed. ``overhead_monitor`` is the mean over steps of which
    every hundredth is read; ``overhead_monitor_step`` that of the step itself.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = _seconds(progress)
    finally:
        torch.set_num_threads(threads)
    ratios = {
        name: statistics.median(own / plain for own, plain in zip(found, seconds["plain"], strict=True))
        for name, found in seconds.items()
    }
    plain, clipped = (statistics.median(seconds[name]) for name in ("plain", "clip"))
    return {
        "speedup": plain / clipped,
        "plain_seconds": plain,
        "seconds": clipped,
        "overhead_clip": ratios["clip"],
        "overhead_clip_all": ratios["clip_all"],
        "overhead_monitor": 1 + (ratios["monitor"] - 1) / EVERY,
        "overhead_monitor_step": ratios["monitor"],
        "every": EVERY,
        "layers": LAYERS,
        "width": WIDTH,
        "batch": [BATCH, TOKENS],
        "rounds": ROUNDS,
        "threads": 1,
    }


def _seconds(progress: Callable[..., None]) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model = Decoder()
    ids = torch.randint(VOCABULARY, (BATCH, TOKENS))
    circuits = find_circuits(model, heads=True, inputs=ids[:1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ways = {name: _sharing(model) for name in ("plain", "clip", "clip_all", "monitor")}
    # A clip that saw nothing before a step does nothing after it, so the ways do not meet.
    qk_clip(ways["clip"], optimizer, _NEVER, circuits=circuits)
    qk_clip(ways["clip_all"], optimizer, _ALWAYS, circuits=circuits, log_only=True)
    LogitMonitor(ways["monitor"], every=1, limit=_NEVER, circuits=circuits)
    # The first pass of a clip verifies it, so every model runs once; then the first round makes the states.
    for each in ways.values():
        each(ids).backward()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        order = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for name in order:
            start = time.process_time()
            ways[name](ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            if turn:
                seconds[name].append(time.process_time() - start)
        progress(turn + 1, ROUNDS + 1)
    return seconds


def _sharing(model: nn.Module) -> nn.Module:
    """Other modules with the same parameters."""
    return copy.deepcopy(model, {id(each): each for each in model.parameters()})
