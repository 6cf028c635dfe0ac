"""`fasterqk-lab bench all`: every benchmark, its distance from the machine's limit, and the growth of costs.

The *limit* of a benchmark is the time of its arithmetic at the speed of a plain matrix product, or of its
memory traffic at the speed of a plain copy, both measured in the same run, or the time of its indispensable
part. Growth is measured at sizes over two decades, each kind in its own process. The slope is that of a
straight line through the upper half of the sizes on logarithmic axes: 1 for a cost proportional to the size,
2 for its square.

The record is written after every part. A run that was stopped resumes from it if the versions are the same.
"""

import json
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fasterqk.console import duration_text
from fasterqk.errors import InputError
from fasterqk.files import plain, read_json, write_text
from fasterqk_lab.benchmarks.library import Progress, gpt2, timed
from fasterqk_lab.models._generator import multiply
from fasterqk_lab.runs._store import environment
from fasterqk_lab.training._steps import one_thread

# Speedups that fell by more than this share are reported.
WORSE = 0.2
RECORD = "bench.json"

Work = Callable[[], Any]
Benchmark = Callable[[Progress], dict[str, Any]]
small_gpt2 = partial(gpt2, n_head=4, vocab_size=256)


class Growth(NamedTuple):
    """Work to time (``prepare`` builds it for a size), and the sizes, in units ``of``."""

    of: str
    sizes: tuple[int, ...]
    prepare: Callable[[int], Work]


def _find_circuits(layers: int) -> Work:
    from fasterqk import find_circuits

    model = small_gpt2(n_layer=layers, n_embd=32)
    return lambda: find_circuits(model)


def _optimizer_step(width: int) -> Work:
    from fasterqk import make_optimizer

    model = small_gpt2(n_layer=4, n_embd=width, n_positions=64)
    optimizer = make_optimizer(model, torch.optim.AdamW, lr=1e-4, qk_ratio=10)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return lambda: optimizer.step()  # keeps a reference to the optimizer


def _capture(tokens: int) -> Work:
    from fasterqk import capture

    model = small_gpt2(n_layer=2, n_embd=64, n_positions=tokens).eval()
    return lambda: capture(model, {"input_ids": torch.arange(tokens)[None] % 256})


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


def grown(name: str, sizes: Sequence[int]) -> list[dict[str, float]]:
    """Seconds at growing sizes (the shortest of a few runs), and memory beyond that of the smallest size."""
    torch.set_num_threads(1)
    GROWTH[name].prepare(GROWTH[name].sizes[0])()  # first calls import and allocate more
    before, points = _memory(), []
    for size in sizes:
        work = GROWTH[name].prepare(size)
        seconds = [timed(work)[1]]
        if seconds[0] < 1:  # longer runs need no warm-up
            seconds = [timed(work)[1]]
            while sum(seconds) < 0.3 and len(seconds) < 30:
                seconds.append(timed(work)[1])
        points.append({"size": size, "seconds": min(seconds), "megabytes": _memory() - before})
    return points


def _memory() -> float:
    """The peak memory of this process, in MB."""
    status = Path("/proc/self/status")
    if status.is_file():  # a child inherits its parent's `ru_maxrss`
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_a_process(name: str, sizes: Sequence[int]) -> list[dict[str, float]]:
    """:func:`grown` in a new process, so that its memory is only that of this kind."""
    ended = subprocess.run(
        [sys.executable, "-m", __name__, name, *map(str, sizes)], capture_output=True, text=True
    )
    if ended.returncode:
        raise InputError(f"{name} with {GROWTH[name].of} {sizes} ended with: {ended.stderr.strip()[-300:]}")
    points: list[dict[str, float]] = json.loads(ended.stdout.splitlines()[-1])
    return points


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
    """The speed of one core in plain operations: matrix products in GFLOP/s, copies in GB/s."""
    side, rounds = 1024, 20
    left, right = torch.randn(2, side, side)
    source, target = torch.randn(2, 2**25)
    with one_thread():
        # By MKL and by oneDNN: the faster one is the speed of the machine.
        ways = (lambda: left @ right, lambda: multiply(left, right))
        products = [timed(way)[1] for way in ways for _ in range(rounds)]
        copies = [timed(lambda: target.copy_(source))[1] for _ in range(rounds)]
    gigabytes = 2 * source.nbytes / min(copies) / 1e9
    return {"gigaflops": 2 * side**3 / min(products) / 1e9, "gigabytes": gigabytes}


def limit(name: str, result: Mapping[str, Any], speed: Mapping[str, float]) -> dict[str, Any] | None:
    """The fewest seconds of a benchmark on a machine of this ``speed``, and for ``what``; None if unknown."""
    if name == "stability":
        return {"seconds": result["plain_seconds"], "what": "the plain step"}
    if "needed_seconds" in result:
        return {"seconds": result["needed_seconds"], "what": "its forward passes"}
    for key, unit, sign in (("operations", "gigaflops", "GFLOP"), ("bytes", "gigabytes", "GB")):
        if key in result:
            billions = result[key] / 1e9
            return {"seconds": billions / speed[unit], "what": f"{billions:.3g} {sign}"}
    return None


# --- All of it ---


def run_all(progress: Progress, out: Path, benchmarks: Mapping[str, Benchmark]) -> dict[str, Any]:
    """Run all benchmarks, write ``bench.json`` and the figure to ``out``, and compare with the record there.

    Prints one line per part on standard error. Parts in the record of a stopped run are not measured again.
    """
    record = read_json(out / RECORD) if (out / RECORD).is_file() else {}
    versions = environment() | {"platform": f"{platform.system()} {platform.machine()}"}
    if record.get("done", True) or record["environment"] != plain(versions):
        before = record.get("before", {}) | {
            name: result["speedup"] for name, result in record.get("benchmarks", {}).items()
        }
        record = {"environment": versions, "before": before, "machine": machine(), "done": False}
        record |= {"benchmarks": {}, "limits": {}, "growth": {}, "seconds": {}}
    total = len(benchmarks) + len(GROWTH)

    def measured(kind: str, name: str, work: Work) -> None:
        if name not in record[kind]:
            record[kind][name], seconds = timed(work)
            record["seconds"][f"{kind}: {name}"] = seconds
            write_text(out / RECORD, json.dumps(plain(record), indent=1) + "\n")
            print(f"bench all: {kind}: {name}: {duration_text(seconds)}", file=sys.stderr, flush=True)
        progress(len(record["benchmarks"]) + len(record["growth"]), total, name)

    for name, run in benchmarks.items():
        measured("benchmarks", name, partial(run, lambda *_: None))
        record["limits"][name] = limit(name, record["benchmarks"][name], record["machine"])
    for name, growth in GROWTH.items():
        measured("growth", name, partial(in_a_process, name, growth.sizes))
    record["done"] = True
    write_text(out / RECORD, json.dumps(plain(record), indent=1) + "\n")
    return record | {"worse": worse(record["before"], record["benchmarks"]), "files": _draw(record, out)}


def _draw(record: Mapping[str, Any], out: Path) -> dict[str, str]:
    from fasterqk_lab.figures import Line, Panel, save_panels

    panels = [
        Panel(
            f"{name}: slope {slope(points, of):g}",
            (GROWTH[name].of, of),
            [Line("", [point["size"] for point in points], [point[of] for point in points], {"marker": "o"})],
            log="xy",
        )
        for of in ("seconds", "megabytes")
        for name, points in record["growth"].items()
    ]
    caption = "Seconds on one core, and memory beyond the smallest size; slopes are of the upper half."
    about: dict[str, Any] = {"title": "How cost grows", "caption": caption}
    return save_panels(panels, out, "bench-growth", columns=len(record["growth"]), **about)


def worse(before: Mapping[str, float], now: Mapping[str, Any]) -> list[str]:
    """The speedups that fell by more than a fifth since the previous run.

    >>> worse({"theory": 10.0}, {"theory": {"speedup": 7.0}})
    ['theory: 10.0 times the plain way before, 7.0 now']
    """
    return [
        f"{name}: {before[name]:.1f} times the plain way before, {result['speedup']:.1f} now"
        for name, result in now.items()
        if name in before and result["speedup"] < (1 - WORSE) * before[name]
    ]


def rows(record: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The record as tables: benchmarks with their limits, and growth."""
    benchmarks, growth = [], []
    for name, result in record["benchmarks"].items():
        least = record["limits"][name] or {"seconds": None, "what": None}
        row = {"benchmark": name, "times the plain way": result["speedup"], "seconds": result["seconds"]}
        row |= {"limit": least["seconds"], "of": least["what"]}
        benchmarks.append(
            row | {"times the limit": least["seconds"] and result["seconds"] / least["seconds"]}
        )
    for name, points in record["growth"].items():
        first, *_, last = points
        row = {"what": name, "with": GROWTH[name].of, "from": first["size"], "to": last["size"]}
        row |= {"seconds at the end": last["seconds"], "slope": slope(points, "seconds")}
        growth.append(
            row | {"megabytes at the end": last["megabytes"], "memory slope": slope(points, "megabytes")}
        )
    return {"benchmarks": benchmarks, "growth": growth}


if __name__ == "__main__":
    print(json.dumps(grown(sys.argv[1], [int(size) for size in sys.argv[2:]])))
