"""The paper as a whole: everything on one page, every claim with its verdict, and the open questions.

`all` is what `make reproduce` runs, and with ``--full`` every table at its full size. `claims` and
`questions` are computed from the published results; nothing is trained for them.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fasterqk.console import duration_text, text_table
from fasterqk.errors import InputError, WorkError
from fasterqk.files import plain
from fasterqk_lab.configs import content_hash
from fasterqk_lab.experiments._registry import (
    EXPERIMENTS,
    Cell,
    CellRunner,
    Experiment,
    Option,
    Results,
    find_experiment,
    sweep_cells,
)
from fasterqk_lab.experiments.table_main import FOUND_RATES
from fasterqk_lab.figures import effect_record, effect_text, save_document
from fasterqk_lab.page import count_verdicts, write_page
from fasterqk_lab.paper import FOLDER, Published, read_claims, read_lines, read_questions, save_picture
from fasterqk_lab.runs import Spec, SpecCell, Store, plan
from fasterqk_lab.runs._execute import Event

WORKERS = 2
MINUTE, HOUR = 60, 3600
# Seconds on one core of cells without a recorded time, by the class of their configuration.
USUAL = {"SyntheticCell": 2, "FixedAttentionCell": 45}
USUAL_TRAINING = 2 * MINUTE


@dataclass(frozen=True)
class Part:
    """One experiment with its options.

    ``seconds`` is the measured time of a cell on one core (None: the usual time of such cells). ``later``
    counts the cells that become known only when the first ones are done (the arms after a search for their
    rate).
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    later: int = 0

    @property
    def command(self) -> str:
        """Its command line."""
        texts = {key: _word(value) for key, value in self.options.items()}
        return " ".join([self.name, *(f"--{key.replace('_', '-')} {text}" for key, text in texts.items())])


def _word(value: Any) -> str:
    """An option's value as the command line takes it."""
    if isinstance(value, tuple):
        return ",".join(map(_word, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# The paper as published and the protocol with controls: about eight minutes of two cores. Figures first; of
# the tables those with long cells, so that no core waits for the last one.
QUICK = (
    Part("fig4"),
    Part("fig3", seconds=45),
    Part("fig2", {"seeds": 2}, seconds=8, later=96),
    Part("table-sva", {"form": "whole", "seeds": 1, "lr": FOUND_RATES["whole"]}, seconds=90),
    Part("table-hatexplain", {"seeds": 2}, seconds=75),
    Part("table-agreement", {"seeds": 2}, seconds=20),
)
# The pages of docs/results. SQuAD at the paper's size comes last, because it takes weeks.
_FULL = (
    Part("fig2", seconds=9, later=96),
    *(Part("fig2", {"protocol": name}, seconds=2) for name in ("literal", "scaled-scores", "four-tokens")),
    *(Part("fig2-init", {"protocol": name}, seconds=2) for name in ("literal", "four-tokens")),
    Part("fig2-init", {"protocol": "published", "seeds": 1}, seconds=3),
    Part("fig3", {"protocol": "both"}, seconds=45),
    Part("fig4"),
    Part("phase", seconds=2),
    Part("phase", {"over": "gamma"}, seconds=2),
    Part("table-agreement", seconds=20),
    Part("table-kvqa", {"seeds": 3}, seconds=100),
    Part("table-hatexplain", seconds=75),
    Part("table-hatexplain", {"protocol": "released"}, seconds=75),
    Part("table-layers", {"layers": (2,)}, seconds=2 * MINUTE),
    Part("table-layers", {"layers": (4,)}, seconds=5 * MINUTE),
    Part("ablation-hatexplain", seconds=40),
    Part("table-sva", {"form": "whole"}, seconds=90, later=9),
    Part("table-sva", {"form": "prefix"}, seconds=90, later=9),
    Part("table-sva", {"protocol": "released"}, seconds=6 * MINUTE),
    Part("finetune-hatexplain", seconds=12 * MINUTE),
    Part("finetune-decoder", seconds=12 * MINUTE),
    Part("table-squad", {"size": "small", "seeds": 2}, seconds=25 * MINUTE),
    Part("stability", seconds=30),
    Part("table-main", {"squad": "small", "squad_seeds": 2}, seconds=90),
)
_LAST = (Part("table-squad", {"size": "paper", "arms": ("same", "faster_qk")}, seconds=110 * HOUR),)


def full_parts() -> tuple[Part, ...]:
    """Every table and figure; an experiment that is not named above takes part with its defaults."""
    named = {part.name for part in (*_FULL, *_LAST)}
    others = (Part(name) for name in EXPERIMENTS if name not in named and find_experiment(name).trains)
    return (*_FULL, *others, *_LAST)


# --- Plan: which cells there are, which are done, how long the others take ---


class Unfinished(Exception):
    """A part cannot go on before cells are done that are not."""


class Planner(CellRunner):
    """Gives a part the cells that are done, notes all cells that it asks for, and stops it at a missing one.

    A part that is not stopped is done. Its files are written under ``out``, or under ``scratch``, so that a
    plan leaves no trace.
    """

    def __init__(self, part: Part, out: Path, scratch: str | None = None) -> None:
        super().__init__(scratch or out, experiment=part.name)
        self.asked: dict[str, tuple[str, Any]] = {}  # by cell: function and configuration
        self._part, self._store, self._scratch = part, Store(out), scratch is not None

    @property
    def rebuilds(self) -> bool:
        """Whether a plan has handed out cells: their weights are not under its ``out``."""
        return self._scratch and bool(self._lines)

    def run(
        self, cells: Mapping[Cell, Any], function: str, *, protocol: str = "", table: str = "", **_: Any
    ) -> Results:
        self.asked |= {content_hash(config): (function, config) for config in cells.values()}
        done = {cell: self._store.result(config) for cell, config in cells.items()}
        results = {cell: result for cell, result in done.items() if result is not None}
        if len(results) < len(cells):
            raise Unfinished
        self._remember(cells, results, protocol, table)
        return results

    def fact(self, name: str, compute: Callable[[], Any]) -> Any:
        return plain(compute())

    def finish(self) -> bool:
        """Run the part as far as its cells are done; returns whether it came to its end."""
        experiment = find_experiment(self._part.name)
        chosen = experiment.check_options(self._part.options)
        try:
            experiment.run(self, **{option.name: chosen[option.name] for option in experiment.options})
        except Unfinished:
            return False
        self.write_results()
        return True


def make_plan(parts: Sequence[Part], out: Path) -> list[dict[str, Any]]:
    """One row per part: its cells, how many are done, and the hours of one core for the rest.

    A cell that two parts share is counted with the first. Hours are those of finished cells of the same
    part, else those recorded in this file. A part whose data or model is missing says so. Nothing is run,
    and nothing is written under ``out``.
    """
    rows: list[dict[str, Any]] = []
    counted: set[str] = set()
    for part in parts:
        row: dict[str, Any] = {"part": part.command, "cells": 0, "done": 0, "hours": 0.0, "note": ""}
        rows.append(row)
        if not find_experiment(part.name).trains:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            planner = Planner(part, out, scratch)
            try:
                complete = planner.finish()
            except InputError as error:
                row["note"] = f"cannot run: {error}"
                continue
        cells = tuple(SpecCell("", task[1]) for cell, task in planner.asked.items() if cell not in counted)
        counted |= planner.asked.keys()
        estimate = plan(Spec(Path(part.name), "", cells), out)
        later = 0 if complete else part.later
        comparable = estimate.left and estimate.seconds
        kind = type(cells[0].config).__name__ if cells else ""
        recorded = part.seconds or USUAL.get(kind, USUAL_TRAINING)
        seconds = estimate.seconds / estimate.left if comparable and estimate.seconds else recorded
        row |= {
            "cells": len(cells) + later,
            "done": len(cells) - estimate.left,
            "hours": (estimate.left + later) * seconds / HOUR,
            "note": "" if complete else f"{later or 'more'} cells become known on the way",
        }
    return rows


def show_plan(rows: Sequence[Mapping[str, Any]], workers: int = WORKERS) -> None:
    """Print the plan and its sums on standard error, where it does not mix with results."""
    shown = [{**row, "hours": duration_text(row["hours"] * HOUR)} for row in rows]
    print(text_table(shown, right=("cells", "done", "hours")), file=sys.stderr)
    cells, done, hours = (sum(row[key] for row in rows) for key in ("cells", "done", "hours"))
    print(
        f"\n{cells} cells, {done} done; about {duration_text(hours * HOUR)} of one core are left, "
        f"{duration_text(hours * HOUR / workers)} with {workers} workers. What is done stays: stop it and "
        "give the same command again, or choose --parts.\n",
        file=sys.stderr,
    )


# --- Run ---


def run(
    runner: CellRunner, full: bool = False, plan: bool = False, parts: list[str] | None = None
) -> dict[str, Any]:
    chosen = choose_parts(full_parts() if full else QUICK, parts)
    summary: dict[str, Any] = {}
    if plan or full:
        summary["plan"] = make_plan(chosen, runner.out)
        show_plan(summary["plan"])
    if plan:
        return summary
    if full:
        # One part after the other, so that whole tables come early; one that cannot run stops no other.
        summary["parts"] = [row for part in chosen for row in run_together([part], runner.out, go_on=True)]
    else:
        summary["parts"] = run_together(chosen, runner.out)
    if FOLDER.is_dir():  # of a checkout
        write_claims(runner.out)
    return summary | {"report": str(write_page(runner.out))}


def choose_parts(parts: Sequence[Part], names: list[str] | None) -> tuple[Part, ...]:
    """The parts with these names, or all."""
    known = dict.fromkeys(part.name for part in parts)
    for name in names or ():
        if name not in known:
            raise InputError(f"no part {name!r}; choose from {','.join(known)}")
    return tuple(part for part in parts if not names or part.name in names)


def run_together(parts: Sequence[Part], out: Path, go_on: bool = False) -> list[dict[str, Any]]:
    """Run all parts, the cells of all in one sweep, so that no worker waits at the end of each.

    A part is finished with its last cell. Returns one row per part in the order in which they were done;
    ``seconds`` counts from the start. With ``go_on`` a part that cannot run has an ``error`` there.
    """
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    waiting = list(parts)

    def end(part: Part, error: Exception | None = None) -> None:
        if error is not None and not go_on:
            raise error
        waiting.remove(part)
        row = {"experiment": part.name, "command": f"fasterqk-lab reproduce {part.command}"}
        seconds = round(time.perf_counter() - start, 1)
        rows.append(row | {"seconds": seconds} | ({"error": str(error)} if error else {}))
        print(f"{part.name}: {error or duration_text(seconds)}", file=sys.stderr, flush=True)

    while waiting:
        asked: dict[str, tuple[str, Any]] = {}
        left: list[tuple[Part, set[str]]] = []
        for part in list(waiting):
            planner = Planner(part, out)
            try:
                if planner.finish():
                    end(part)
                else:
                    asked |= planner.asked
                    left.append((part, set(planner.asked)))
            except (InputError, WorkError) as error:
                end(part, error)

        def observe(event: Event, left: list[tuple[Part, set[str]]] = left) -> None:
            for part, cells in left:
                if event.kind in ("saved", "found", "skipped") and event.cell in cells:
                    cells.remove(event.cell)
                    with suppress(InputError, WorkError):  # raised again when the others are done
                        if not cells and Planner(part, out).finish():
                            end(part)

        try:
            if asked:
                functions, configs = zip(*asked.values(), strict=True)
                title = ", ".join(part.name for part in waiting)
                sweep_cells(configs, functions, out, title, workers=WORKERS, observe=observe)
        except (InputError, WorkError) as error:
            for part in list(waiting):
                end(part, error)
    return rows


EXPERIMENT = Experiment(
    "all",
    run,
    (
        Option("full", bool, "every table at full size; prints its plan, can be stopped"),
        Option("plan", bool, "print the plan (cells, done, hours) and stop"),
        Option("parts", str, "only these experiments", many=True, metavar="NAME"),
    ),
    examples=(
        "--full --plan --out out # how much is left",
        "--full --parts table-sva,table-layers --out out",
    ),
    details="Cells that are done are not done again: after Ctrl-C, or kill, the same command goes on.",
    trains=False,
    needs_data=True,
    shown=lambda summary: {key: summary[key] for key in ("parts", "report") if key in summary},
)

# --- Claims and questions ---

RESULTS_OPTION = Option(
    "results", str, "published results (default: lab/paper of the checkout)", metavar="DIR"
)


def write_claims(out: Path, results: str | None = None) -> list[dict[str, str]]:
    """Save the claims under ``out`` for the page, and return them as it shows them."""
    claims = [
        {
            "claim": claim.text,
            "where": claim.where,
            "verdict": claim.verdict,
            "effect": "" if not claim.effects or claim.effects[0].exact else effect_text(claim.effects[0]),
            "remark": claim.remark,
            "experiment": claim.command,
            "group": claim.group,
        }
        for claim in read_claims(Published(Path(results or FOLDER)))
    ]
    save_document(out, "claims", "paper", {"title": "Every claim of the paper", "claims": claims})
    return claims


def run_claims(runner: CellRunner, results: str | None = None) -> dict[str, Any]:
    claims = write_claims(runner.out, results)
    return {"claims": claims, "verdicts": count_verdicts(claims), "evidence": "docs/results/claims.md"}


def shown_claims(summary: Mapping[str, Any]) -> dict[str, Any]:
    columns = ("group", "claim", "verdict", "effect")
    return {**summary, "claims": [{key: claim[key] for key in columns} for claim in summary["claims"]]}


def run_questions(runner: CellRunner, results: str | None = None) -> dict[str, Any]:
    published = Published(Path(results or FOLDER))
    questions = []
    for question in read_questions(published):
        about = {name: getattr(question, name) for name in ("title", "hypothesis", "verdict", "becomes")}
        both = {"effects": question.effects, "explored": question.explored}
        questions.append(about | {name: list(map(effect_record, effects)) for name, effects in both.items()})
    picture = save_picture(read_lines(published), runner.out / "figures")
    return {"questions": questions, "figure": str(picture)}


READ = "Reads lab/paper; nothing is trained."
CLAIMS = Experiment(
    "claims",
    run_claims,
    (RESULTS_OPTION,),
    examples=("--json",),
    details=f"{READ} tools/publish.py writes the pages of docs/results.",
    trains=False,
    shown=shown_claims,
)
QUESTIONS = Experiment(
    "questions", run_questions, (RESULTS_OPTION,), examples=("--json",), details=READ, trains=False
)
