"""`fasterqk-lab bench all`: every benchmark, how far it is from the machine's limit, and how cost grows.

The *limit* of a benchmark is the time that its arithmetic takes at the speed of a plain matrix product, or
for the optimizer the time that its memory takes at the speed of a plain copy, both measured in the same run.
Growth is measured at sizes over two decades, each in a process of its own. The slope is that of a straight
line through the upper half of the sizes on logarithmic axes: 1 for a cost proportional to the size, 2 for
its square.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fasterqk.errors import InputError
from fasterqk.files import plain, read_json, write_text
from fasterqk_lab.benchmarks.library import Progress

# A ratio that got worse by more is told.
WORSE = 0.2
RECORD = "bench.json"
ADAM_BYTES = 7 * 4  # weight, gradient and both moments are read, all but the gradient are written

Work = Callable[[], Any]
Benchmark = Callable[[Progress], dict[str, Any]]


class Growth(NamedTuple):
    """What is timed (``prepare`` builds it for a size), and at which sizes of what."""

    of: str
    sizes: tuple[int, ...]
    prepare: Callable[[int], Work]


def _gpt2(layers: int, width: int = 64, tokens: int = 64) -> Any:
    transformers: Any = import_module("transformers")
    sizes = {"n_layer": layers, "n_embd": width, "n_head": 4, "n_positions": tokens, "vocab_size": 256}
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def _find_circuits(layers: int) -> Work:
    from fasterqk import find_circuits

    model = _gpt2(layers, 32)
    return lambda: find_circuits(model)


def _optimizer_step(width: int) -> Work:
    from fasterqk import make_optimizer

    model = _gpt2(4, width)
    optimizer = make_optimizer(model, torch.optim.AdamW, lr=1e-4, qk_ratio=10)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return optimizer.step


def _capture(tokens: int) -> Work:
    from fasterqk import capture

    model, inputs = _gpt2(2, tokens=tokens).eval(), {"input_ids": torch.arange(tokens)[None] % 256}
    return lambda: capture(model, inputs)


def _measure(posts: int) -> Work:
    from fasterqk.attention import HuggingFaceClassifier, Instance, measure

    transformers: Any = import_module("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=256, **sizes))
    draw, instances = np.random.default_rng(0), []
    for _ in range(posts):
        length = int(draw.integers(10, 40))
        relevance = (np.arange(length) == 3).astype(float)
        instances.append(Instance(draw.integers(5, 256, length), np.ones(length, bool), relevance, label=0))
    return lambda: measure(HuggingFaceClassifier(model), instances).summary()


def _training_step(vocabulary: int) -> Work:
    from fasterqk import make_optimizer
    from fasterqk_lab.models import Classifier, ClassifierConfig

    sizes: dict[str, Any] = {"layers": 1, "width": 64, "heads": 4, "head_width": 64, "mlp_width": 256}
    draw = torch.Generator().manual_seed(0)
    config = ClassifierConfig(vocabulary_size=vocabulary, classes=3, context=64, **sizes)
    model = Classifier(config, draw, torch.arange(vocabulary))
    optimizer = make_optimizer(model, torch.optim.AdamW, lr=1e-4, qk_ratio=30, fused=True)
    tokens = torch.randint(vocabulary, (32, 33), generator=draw)
    read = torch.full((32,), 32)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, read).square().mean().backward()
        optimizer.step()

    return step


def _toy_cells(cells: int) -> Work:
    from fasterqk_lab.experiments._synthetic import panels
    from fasterqk_lab.synthetic._train import Trainer

    [panel] = panels("literal", ["a"])
    cell = replace(panel.cell, fresh=True, stop="never")
    trainers = [Trainer(replace(cell, seed=seed)) for seed in range(cells)]
    for trainer in trainers:
        trainer.advance(1)  # compiles
    return lambda: [trainer.advance(100) for trainer in trainers]


def _theory(ratios: int) -> Work:
    from fasterqk.theory import Setting, solve

    grid, losses = np.geomspace(1e-4, 1e4, ratios)[:, None], np.geomspace(1.0, 1e-8, 50)
    return lambda: solve(Setting(), grid, loss=losses).time


DECADES = (1, 3, 10, 30, 100)
GROWTH = {
    "find_circuits": Growth("layers", tuple(2 * n for n in DECADES), _find_circuits),
    "optimizer step": Growth("width", (16, 32, 64, 128, 256, 512, 1024), _optimizer_step),
    "capture": Growth("tokens", tuple(32 * n for n in DECADES), _capture),
    "measure": Growth("posts", tuple(10 * n for n in DECADES), _measure),
    "training step": Growth("vocabulary", tuple(1000 * n for n in DECADES), _training_step),
    "toy language": Growth("cells", DECADES, _toy_cells),
    "theory": Growth("ratios", tuple(100 * n for n in DECADES), _theory),
}


def grown(name: str, size: int) -> dict[str, float]:
    """Seconds at one size, the shortest of a few runs, and the memory it takes beyond the smallest size."""
    torch.set_num_threads(1)
    GROWTH[name].prepare(GROWTH[name].sizes[0])()  # what first calls import and allocate
    before = _memory()
    work = GROWTH[name].prepare(size)
    work()
    seconds: list[float] = []
    while not seconds or (sum(seconds) < 0.3 and len(seconds) < 30):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return {"size": size, "seconds": min(seconds), "megabytes": _memory() - before}


def _memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_a_process(name: str, size: int) -> dict[str, float]:
    """:func:`grown` in a new process, so that memory is that of this size alone."""
    command = [sys.executable, "-m", __name__, name, str(size)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise InputError(f"{name} at {size} {GROWTH[name].of} ended with: {ended.stderr.strip()[-300:]}")
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def slope(points: list[dict[str, float]], of: str) -> float:
    """The slope of ``of`` over size on logarithmic axes, in the upper half of the sizes.

    >>> slope([{"size": n, "seconds": 2.0 * n**2} for n in (1, 10, 100)], "seconds")
    2.0
    """
    upper = points[len(points) // 2 :]
    x, y = (np.log([max(point[key], 1e-9) for point in upper]) for key in ("size", of))
    return round(float(np.polyfit(x, y, 1)[0]), 2)


# --- Limits ---


def machine() -> dict[str, float]:
    """What one core does in plain operations: matrix products in GFLOP/s, copies in GB/s."""
    side, rounds = 1024, 5
    left, right = torch.randn(2, side, side)
    source, target = torch.randn(2, 2**25)
    products, copies = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        left @ right
        middle = time.perf_counter()
        target.copy_(source)
        products.append(middle - start)
        copies.append(time.perf_counter() - middle)
    gigaflops = 2 * side**3 / statistics.median(products) / 1e9
    return {"gigaflops": gigaflops, "gigabytes": 2 * source.nbytes / statistics.median(copies) / 1e9}


def limits(speed: dict[str, float], names: Container[str]) -> dict[str, float]:
    """The least seconds of those of ``names`` whose work can be counted, at the speed of this machine."""
    from fasterqk_lab.benchmarks import library, training
    from fasterqk_lab.training import TrainConfig
    from fasterqk_lab.training._steps import Steps, build_trainable

    least = {}
    configs = {
        "training": TrainConfig("hatexplain", qk_ratio=30),
        "squad": training.squad_config(training.FORMS["random"]),
    }
    for name in [name for name in configs if name in names]:
        config = configs[name]
        step = Steps(config, build_trainable(config)).step
        step()
        least[name] = operations(step, 4) / speed["gigaflops"] / 1e9  # batches differ in length
    parameters = sum(weight.numel() for weight in library.decoder_in("columns").parameters())
    return least | {"circuits": parameters * ADAM_BYTES / speed["gigabytes"] / 1e9}


def operations(work: Work, times: int = 1) -> float:
    """The floating-point operations of matrix products in ``work``, mean over so many runs of it.

    >>> operations(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    48.0
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        for _ in range(times):
            work()
    return counter.get_total_flops() / times


# --- All of it ---


def run_all(progress: Progress, out: Path, benchmarks: Mapping[str, Benchmark]) -> dict[str, Any]:
    """Run everything, write ``bench.json`` and the figure to ``out``, and compare with the record there."""
    from fasterqk_lab.figures import Line, Panel, save_panels

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    speed = machine()
    before = read_json(out / RECORD) if (out / RECORD).is_file() else {}
    total = len(benchmarks) + sum(len(growth.sizes) for growth in GROWTH.values())
    done, results = 0, {}
    for name, run in benchmarks.items():
        progress(done, total, name)
        results[name] = run(lambda *_: None)
        done += 1
    torch.set_num_threads(1)
    least = limits(speed, results)
    torch.set_num_threads(threads)
    growth: dict[str, Any] = {}
    for name, kind in GROWTH.items():
        points = []
        for size in kind.sizes:
            progress(done, total, f"{name}, {size} {kind.of}")
            points.append(in_a_process(name, size))
            done += 1
        slopes = {f"{of}_slope": slope(points, of) for of in ("seconds", "megabytes")}
        growth[name] = {"of": kind.of, "points": points, **slopes}
    panels = [
        Panel(
            f"{name}: slope {growth[name][f'{of}_slope']:g}",
            (kind.of, of),
            [Line("", kind.sizes, [point[of] for point in growth[name]["points"]], {"marker": "o"})],
            log="xy",
        )
        for of in ("seconds", "megabytes")
        for name, kind in GROWTH.items()
    ]
    caption = "Seconds on one core, and memory beyond the smallest size; slopes are of the upper half."
    about: dict[str, Any] = {"title": "How cost grows", "caption": caption}
    figure = save_panels(panels, out, "bench-growth", columns=len(GROWTH), **about)
    record = plain({"machine": speed, "benchmarks": results, "limits": least, "growth": growth})
    write_text(out / RECORD, json.dumps(record, indent=1) + "\n")
    return record | {"worse": worse(before.get("benchmarks", {}), results), "files": figure}


def worse(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The speedups that fell by more than a fifth since an earlier run.

    >>> worse({"theory": {"speedup": 10.0}}, {"theory": {"speedup": 7.0}})
    ['theory: 10.0 times the plain way before, 7.0 now']
    """
    return [
        f"{name}: {before[name]['speedup']:.1f} times the plain way before, {result['speedup']:.1f} now"
        for name, result in now.items()
        if name in before and result["speedup"] < (1 - WORSE) * before[name]["speedup"]
    ]


def rows(record: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The record as tables for people: benchmarks with their limits, and growth."""
    least = record["limits"]
    return {
        "benchmarks": [
            {
                "benchmark": name,
                "times the plain way": result["speedup"],
                "seconds": result["seconds"],
                "limit": least.get(name),
                "times the limit": result["seconds"] / least[name] if name in least else None,
            }
            for name, result in record["benchmarks"].items()
        ],
        "growth": [
            {
                "what": name,
                "with": entry["of"],
                "from": int(entry["points"][0]["size"]),
                "to": int(entry["points"][-1]["size"]),
                "seconds at the end": entry["points"][-1]["seconds"],
                "slope": entry["seconds_slope"],
                "megabytes at the end": entry["points"][-1]["megabytes"],
            }
            for name, entry in record["growth"].items()
        ],
    }


if __name__ == "__main__":
    print(json.dumps(grown(sys.argv[1], int(sys.argv[2]))))
