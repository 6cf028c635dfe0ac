"""Sweeps killed at random moments and started again, until each has finished."""

import itertools
import random
import subprocess
from pathlib import Path
from typing import Any

from lab.tests.crash.sweeps import SweepUnderTest, kill, unreadable

from fasterqk.console import Progress
from fasterqk_lab.runs._store import Store, read_result

# The share of kills that take the sweep but leave its workers, who must then end by themselves.
LEADER_ALONE = 0.25


def kill_at_random_moments(
    sweep: SweepUnderTest, kills: int, generator: random.Random, progress: Progress
) -> dict[str, Any]:
    """Kill sweeps ``kills`` times; a store that is finished is judged, and a new one begun."""
    killed = attempts = cells = 0
    problems: list[str] = []
    for stores in itertools.count(1):
        out = sweep.folder / f"killed-{stores}"
        killed_here, found = _one_store(sweep, out, kills - killed, generator)
        killed += killed_here
        problems += found + sweep.problems(out)
        documents = [read_result(folder) for folder in Store(out).cells()]
        attempts += sum(document["attempt"] for document in documents if document)
        cells += len(documents)
        progress(killed, kills, f"{killed} kills, {stores} stores finished")
        if killed >= kills:
            break
    return {
        "fault": f"SIGKILL at {killed} random moments",
        "passed": not problems,
        "told": f"{stores} stores with {cells} cells in {attempts} attempts"
        + ("; each cell done once and as if undisturbed" if not problems else ""),
        "problems": problems,
        "kills": killed,
        "stores": stores,
        "cells": cells,
        "attempts": attempts,
    }


def _one_store(
    sweep: SweepUnderTest, out: Path, kills: int, generator: random.Random
) -> tuple[int, list[str]]:
    """Start, kill, start again, until the sweep ends by itself; returns how often it was killed."""
    problems: list[str] = []
    for killed in itertools.count():
        process = sweep.start(out)
        moment = generator.uniform(0.0, sweep.seconds) if killed < kills else None
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            kill(process, group=generator.random() >= LEADER_ALONE)
            problems += unreadable(out)
            continue
        _, told = process.communicate()
        if process.returncode != 0:
            problems.append(f"a sweep after {killed} kills ended with {process.returncode}: {told.strip()}")
        return killed, problems
    raise AssertionError("a sweep that never ends")
