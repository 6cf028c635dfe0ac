"""Command lines over all commands and options, with good, odd and hostile values, each in a child of its own.

``python -m lab.tests.crash.lines --lines 400 --seed 0``, or ``make lines``. The lines are built from the
parsers, so a new option takes part at once. A line is right if it ends with exit code 0, 1 (the machine) or
2 (the input, one line on standard error), prints no traceback, keeps below the memory limit, never waits for
ever and leaves no half-written file. What is rightly long is stopped by SIGTERM after some seconds of
computing and must leave a store that can be read.
"""

import argparse
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from lab.tests.crash.faults import respect_permissions
from lab.tests.crash.sweeps import run_undisturbed, unreadable, write_spec
from tests.cli.lines import parsers

from fasterqk.cli.common import Parser, positive_int
from fasterqk.cli.main import PROGRAM as LIBRARY
from fasterqk_lab.cli.main import PROGRAM as LAB
from fasterqk_lab.cli.reproduce import experiment_parser
from fasterqk_lab.experiments import EXPERIMENTS, find_experiment

GIGABYTE = 2**30
# Commands that may rightly compute for longer than a line is given.
LONG = ("train", "tune", "sweep", "reproduce", "bench", "synthetic", "demo", "measure")
# Seconds of processor time after which a long command is stopped, and after which any other one hangs;
# seconds in which a process that sleeps all the time waits for something that never comes.
ENOUGH, HANGS, WAITS = 3.0, 60.0, 25.0

HEAVY = (
    "torch",
    "transformers",
    "transformers.models.bert.modeling_bert",
    "scipy.optimize",
    "matplotlib.pyplot",
)

WORDS = (
    *("", " ", "-", "-1", "0", "1", "2", "0.5", "1e30", "1e400", "999999999999", "9" * 5000, "nan", "-inf"),
    *(
        "inf",
        "1,2",
        "1,,2",
        "1,nan",
        "q=1,q=2",
        "q=inf",
        "layer:999999",
        "layer:-1/head:x",
        "½",
        "٣",
        "ſ",
        "İ",
    ),
    *(
        "<script>alert(1)</script>",
        '" onload="',
        "${HOME}",
        "{{7*7}}",
        "%s%n%d",
        "`id`",
        "a\nb",
        "\x1b[2J\x07",
    ),
    *(
        "\u202egnp.exe",
        "\U0001f600",
        "e\u0301",
        "a/b/c",
        "x" * 300,
        "y" * 5000,
        "none",
        "all",
        "None",
        "\udcff",
    ),
    *(
        "os:system",
        "nosuch:thing",
        "torch.optim.AdamW",
        "os.system",
        "*=q",
        "=",
        "a=b=c",
        "1/0",
        "3/2",
        "1/1",
    ),
)

NUMBERS = (
    *("0", "1", "2", "3", "7", "0.5", "100", "1e-30", "1e-300", "1e30", "1e300", "1e400", "-1", "-0.0", ""),
    *("nan", "inf", "-inf", "999", "1000000", "999999999999", "1" + "0" * 30, "9" * 5000, "1_0", " 2 ", "½"),
    *("0x10", "1,2", "1,,2", "1,nan", "1e-3,1e3", "2,2", ",".join(map(str, range(1, 60))), "none", "random"),
    *("٣", "1/1", "3/2", "1/0"),
)


@dataclass
class Line:
    """One command line, and how it ended."""

    words: list[str]
    program: str
    code: int | None = None
    stopped: bool = False
    seconds: float = 0.0
    memory: float = 0.0
    told: str = ""
    problems: list[str] = field(default_factory=list)


def make_values(folder: Path) -> dict[str, list[str]]:
    """Files and folders for the lines, made in ``folder``: good ones by option, and hostile ones."""
    subprocess.run(
        [sys.executable, "-m", "fasterqk", "demo", "demo"], cwd=folder, check=True, capture_output=True
    )
    store = run_undisturbed(write_spec("walk", 2, folder), folder).reference
    names = {
        name: folder / name for name in ("tiny.jsonl", "spec.toml", "deep.json", "broken.jsonl", "binary")
    }
    lines = (folder / "demo" / "train.jsonl").read_text().splitlines()[:16]
    names["tiny.jsonl"].write_text("\n".join(lines))
    names["spec.toml"].write_text('seeds = [0]\n[base]\ntask = "agreement"\nepochs = 1\ntrain_limit = 64\n')
    names["deep.json"].write_text("[" * 100_000)
    names["broken.jsonl"].write_text(lines[0] + '\n{"text": "half a li')
    names["binary"].write_bytes(random.Random(0).randbytes(4096))
    (folder / "function.toml").write_text('function = "os:system"\n[base]\ntask = "agreement"\n')
    (folder / "giant.jsonl").write_text(json.dumps({"text": "fine film " * 1_500_000, "label": "positive"}))
    (folder / "hostile.jsonl").write_text(
        "\n".join(
            json.dumps({"id": w, "text": f"{w} fine", "spans": [[0, 1]], "label": w}) for w in WORDS[-30:-10]
        )
    )
    os.truncate(os.open(folder / "zeros.jsonl", os.O_CREAT | os.O_WRONLY), 4 * GIGABYTE)
    (folder / "unreadable").write_text("{}")
    (folder / "unreadable").chmod(0)
    (folder / "closed").mkdir()
    (folder / "closed").chmod(0o500)
    (folder / "empty").touch()
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere/file")
    (folder / "link.jsonl").symlink_to("tiny.jsonl")
    shutil.copytree(folder / "demo" / "equal-rates", folder / "no-tokenizer")
    (folder / "no-tokenizer" / "tokenizer.json").unlink()
    os.mkfifo(folder / "no-tokenizer" / "tokenizer.json")
    shutil.copytree(folder / "demo" / "equal-rates", folder / "pipe-weights")
    (folder / "pipe-weights" / "model.safetensors").unlink()
    os.mkfifo(folder / "pipe-weights" / "model.safetensors")
    shutil.copytree(store, folder / "damaged")
    next((folder / "damaged" / "runs").glob("*/result.json")).write_text("{")
    hostile = [str(folder / name) for name in sorted(os.listdir(folder)) if name != "undisturbed"]
    hostile += [
        str(folder / name) for name in ("missing", "missing/deep", "loop/x", "tiny.jsonl/x", "closed/x")
    ]
    model, data = str(folder / "demo" / "equal-rates"), str(names["tiny.jsonl"])
    cell = next((store / "runs").iterdir()).name[:6]
    good = {
        "model": model,
        "data": data,
        "config": f"{model}/config.json",
        "spec": str(names["spec.toml"]),
        "out": "out",
        "folder": "new",
        "others": str(store),
        "store": str(store),
        "cell": cell,
        "task": "jsonl",
        "output": "page.html",
        "parameterization": "CACO",
        "max_steps": "50",
        "resamples": "20",
        "qk_ratio": "2",
        "loss": "1e-3",
        "alpha": "0.9",
        "rates": "1e-3",
        "ratios": "5",
    }
    devices = ["/dev/zero", "/dev/null", "/dev/full", "/proc/self/mem", "/proc", str(folder)]
    return {"hostile": [*hostile, *devices], **{name: [value] for name, value in good.items()}}


def leaves() -> dict[tuple[str, tuple[str, ...]], argparse.ArgumentParser]:
    """The parser of each command line without further actions, by its program and words."""
    every: dict[tuple[str, tuple[str, ...]], argparse.ArgumentParser] = {}
    for module, program in (("fasterqk", LIBRARY), ("fasterqk_lab", LAB)):
        for words, parser in parsers(program).items():
            if not any(isinstance(action, argparse._SubParsersAction) for action in parser._actions):
                every[module, words] = parser
    del every["fasterqk_lab", ("reproduce",)]
    for name in EXPERIMENTS:
        every["fasterqk_lab", ("reproduce", name)] = experiment_parser(find_experiment(name))
    return every


def make_lines(count: int, values: dict[str, list[str]], generator: random.Random) -> list[Line]:
    """At least ``count`` lines: a good one per command, then each option with hostile values in turn."""
    every = leaves()
    lines = [
        Line(_good(words, parser, values, generator), module) for (module, words), parser in every.items()
    ]
    lines += [Line([*words, "--no-such-option"], module) for module, words in list(every)[::6]]
    while len(lines) < count:
        for (module, words), parser in every.items():
            options = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
            # Experiments have their options in common, so that each needs but some of them.
            chosen = generator.sample(options, min(2, len(options))) if words[0] == "reproduce" else options
            for action in chosen:
                pool = _pool(action, values, generator)
                bad = {action.dest: generator.choice(pool)}
                if generator.random() < 0.25:
                    bad[generator.choice(options).dest] = generator.choice(WORDS)
                lines.append(Line(_good(words, parser, values, generator, bad), module))
    generator.shuffle(lines)
    return lines


def _pool(action: argparse.Action, values: dict[str, list[str]], generator: random.Random) -> Sequence[str]:
    """Values for an option: mostly such as it may take for a moment, sometimes any."""
    if generator.random() < 0.2:
        return WORDS
    if action.type not in (None, str) and not action.choices:
        return NUMBERS
    takes_files = re.search(r"DIR|FILE|OUT|OTHER|MODEL|SPEC|CELL", str(action.metavar))
    if not takes_files and action.dest not in ("spec", "others", "folder"):
        return WORDS
    # Where root writes /proc names this very process.
    return [value for value in values["hostile"] if value != "/proc" or "out" not in action.dest]


def _good(
    words: Sequence[str],
    parser: argparse.ArgumentParser,
    values: dict[str, list[str]],
    generator: random.Random,
    bad: dict[str, str] | None = None,
) -> list[str]:
    """A cheap line of this command, with the values in ``bad`` in place of good ones."""
    cheap = (
        "data",
        "out",
        "epochs",
        "seeds",
        "workers",
        "steps",
        "max_steps",
        "resamples",
        "output",
        "rates",
        "ratios",
    )
    line, bad = list(words), bad or {}
    exclusive = {id(a): group for group in parser._mutually_exclusive_groups for a in group._group_actions}
    for action in parser._actions:
        value = bad.get(action.dest)
        needed = action.required or (action.dest in cheap and (action.dest, words[0]) != ("ratios", "train"))
        needed |= words[0] == "circuits" and action.dest == "model" and "config" not in bad
        group = exclusive.get(id(action))
        if group is not None and group.required and action is group._group_actions[0]:
            needed = not any(other.dest in bad for other in group._group_actions)
        if value is None and not needed and action.nargs != "+":
            continue
        if action.nargs == 0:
            line += [action.option_strings[-1]] if action.dest in bad else []
            continue
        good = str(generator.choice(list(action.choices))) if action.choices else None
        if words[0] in ("runs", "report", "plan") and action.dest == "out":
            good = "store"  # a copy that is made for every line
        value = value if value is not None else good or generator.choice(values.get(action.dest, ["1"]))
        line += [f"{action.option_strings[-1]}={value}"] if action.option_strings else [value]
    return line


def run_line(line: Line, folder: Path, limit: float = 8.0, store: str | None = None) -> None:
    """Run ``line`` in the new ``folder`` and write into it how it ended."""
    folder.mkdir()
    if store is not None:
        shutil.copytree(store, folder / "store")
    outputs = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
    if (child := os.fork()) == 0:
        os._exit(_run(line, folder, outputs))
    slept = start = time.monotonic()
    told_to_stop = 0.0
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        time.sleep(0.1)
        states, line.seconds, memory = _look_at(child, line.seconds)
        line.memory = max(line.memory, memory / GIGABYTE)
        now = time.monotonic()
        slept = slept if states <= {"S", "Z"} else now
        if line.memory > limit:
            line.problems.append(f"took {line.memory:.1f} GB")
        elif now - slept > WAITS:
            line.problems.append(f"waits for ever ({now - start:.0f} s)")
        elif line.seconds > HANGS:
            line.problems.append(f"hangs ({line.seconds:.0f} s of computing)")
        elif line.seconds > ENOUGH and line.words[0] in LONG and not line.stopped:
            line.stopped, told_to_stop = True, line.seconds
            os.kill(child, signal.SIGTERM)
        elif line.stopped and line.seconds - told_to_stop > 20:
            line.problems.append("does not heed SIGTERM")
        if line.problems:
            os.killpg(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
            break
    line.code = os.waitstatus_to_exitcode(ended[1])
    out, told = (_text(stream) for stream in outputs)
    line.told = told.strip()
    if _look_at(child, 0.0)[0]:
        time.sleep(3)  # workers end when they notice that their sweep is gone
        if (left := _look_at(child, 0.0)[0]) - {"Z"}:
            line.problems.append(f"left processes behind: {left}")
            os.killpg(child, signal.SIGKILL)
    line.problems += _wrong(line, out, folder)


def _run(line: Line, folder: Path, outputs: Sequence[Any]) -> int:
    """Run ``line`` in this process, forked so that torch is imported but once; returns the exit code."""
    code: Any = 1
    try:
        os.setsid()
        respect_permissions()
        os.chdir(folder)
        for number, stream in enumerate([open(os.devnull), *outputs]):  # noqa: SIM115
            os.dup2(stream.fileno(), number)
        os.environ |= {"BROWSER": "true", "HF_HUB_OFFLINE": "1"}
        sys.argv = [line.program, *(os.fsdecode(os.fsencode(word)) for word in line.words)]
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        runpy.run_module(line.program, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code or 0)


def _wrong(line: Line, out: str, folder: Path) -> Iterator[str]:
    if line.code not in (0, 1, 2) and not (line.stopped and line.code == 143) and not line.problems:
        yield f"exit code {line.code}"
    if "Traceback (most recent call last)" in out + line.told:
        yield "a traceback"
    if line.code == 2 and len(line.told.splitlines()) != 1:
        yield f"{len(line.told.splitlines())} lines on standard error"
    if line.code and not line.told:
        yield "fails without a word"
    if re.search(r"Warning\b.*\n", line.told):
        yield "a warning of Python"
    if line.code == 0 and "--json" in line.words:
        try:
            json.loads(out, parse_constant=lambda name: 1 / 0)
        except (ValueError, ZeroDivisionError):
            yield "--json printed no JSON"
    if left := [path.name for path in folder.rglob("*.tmp")]:
        yield f"left {left[0]} behind"
    yield from (text for root in folder.rglob("runs") for text in unreadable(root.parent))


def _text(stream: Any) -> str:
    stream.seek(0)
    return str(stream.read().decode("utf-8", "replace"))


def _look_at(group: int, before: float) -> tuple[set[str], float, float]:
    """States of the processes of a group, the seconds that they computed, and their memory in bytes."""
    states, ticks, memory = set(), 0, 0
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group:
                states.add(fields[0])
                ticks += sum(map(int, fields[11:15]))  # its own and those of children that have ended
                memory += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return states, max(before, ticks / os.sysconf("SC_CLK_TCK")), memory


def run_lines(count: int, seed: int, limit: float = 8.0, log: Path | None = None) -> list[Line]:
    """Make and run ``count`` lines; ``log`` gets a JSON line for each as it ends."""
    for module in HEAVY:
        import_module(module)
    with tempfile.TemporaryDirectory(prefix="fasterqk-lines-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        values = make_values(folder)
        lines = make_lines(count, values, random.Random(seed))
        for number, line in enumerate(lines):
            run_line(line, folder / f"line-{number}", limit, values["store"][0])
            shutil.rmtree(folder / f"line-{number}", ignore_errors=True)
            if log is not None:
                with log.open("a") as stream:
                    stream.write(json.dumps(vars(line)) + "\n")
            for problem in line.problems:
                print(f"{line.program} {line.words!r:.300}: {problem}\n    {line.told[-300:]}", flush=True)
    return lines


def main(words: Sequence[str] | None = None) -> int:
    """Run the lines that ``words`` describe; returns the exit code."""
    parser = Parser(prog="python -m lab.tests.crash.lines", description=(__doc__ or "").partition("\n")[0])
    parser.add_option("--lines", positive_int, "N", "how many at least", default=400)
    parser.add_option("--seed", int, "N", "of their values", default=0)
    parser.add_option("--log", Path, "FILE.jsonl", "append how every line ended")
    arguments = parser.parse_args(words)
    lines = run_lines(arguments.lines, arguments.seed, log=arguments.log)
    codes = Counter("stopped" if line.stopped else f"exit code {line.code}" for line in lines)
    print(f"{len(lines)} command lines: " + ", ".join(f"{n} {code}" for code, n in sorted(codes.items())))
    memory, seconds = max(line.memory for line in lines), max(line.seconds for line in lines)
    print(f"most memory {memory:.1f} GB, most computing {seconds:.0f} s")
    wrong = sum(bool(line.problems) for line in lines)
    print(f"{wrong} wrong" if wrong else "0 tracebacks, 0 that wait or hang, 0 above the memory limit")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
