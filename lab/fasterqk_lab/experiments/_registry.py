"""Experiments: what one is, which there are, and how its cells are run, exported and read back.

A new experiment is a module of this folder that ends with its `Experiment`, and one line in `EXPERIMENTS`.
The command line, ``reproduce all``, the documentation and the tests read this registry.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasterqk.console import progress_bar
from fasterqk.errors import InputError, suggestion
from fasterqk.files import canonical_json, check_output, plain
from fasterqk_lab.configs import config_fields
from fasterqk_lab.runs import Line, SweepError, read_cells, rounded, sweep, write_cells

if TYPE_CHECKING:
    from fasterqk_lab.compare import Value

# Name and summary of every experiment. The module of "table-sva" is `table_sva`, unless `_SHARED` names
# another; it is imported when it is asked for, so that listing the experiments imports nothing heavy.
EXPERIMENTS = {
    "fig2": "figure 2: where four parameterizations attend, with and without faster query-key learning",
    "fig2-init": "figure 2's dependence on the init: attention at equal loss against its scale",
    "fig3": "figure 3: loss and incentive to attend more, with attention held fixed",
    "fig4": "figure 4: scales and attention at matched loss for five ratios, exactly",
    "identities": "every identity of the theory, computed in two ways, with its largest error",
    "table-main": "the paper's main table: all data sets, both arms, nulls, equal loss, the paper's numbers",
    "table-hatexplain": "HateXplain, one layer: accuracy, attention and faithfulness of both arms",
    "table-layers": "HateXplain with two and with four layers: rollout and every layer by itself",
    "depth-hatexplain": "HateXplain, two and four layers, a stable QK rate: rollout, layers and single heads",
    "norms-hatexplain": "HateXplain, one layer: norms of the weights of both arms at equal loss",
    "ablation-hatexplain": "which change sharpens attention on HateXplain: one change per arm, at equal loss",
    "rivals-hatexplain": "faster QK beside supervised attention, an entropy penalty, a learned temperature",
    "rivals-sva": "subject-verb agreement: faster QK beside the same other ways to sharp attention",
    "timing-hatexplain": "the ratio in the first third of training, in the last third, or always",
    "timing-toy": "the toy language: the ratio in the first third of training, in the last third, or always",
    "ratio-or-rate": "HateXplain at equal loss over base rate and ratio, and with all but QK slowed",
    "temperature-hatexplain": "is faster QK more than a sharper softmax? both arms at equal loss and entropy",
    "faithfulness": "comprehensiveness and sufficiency minus those of random rankings, at equal loss",
    "tuned": "each arm with the base rate and the ratio that validation prefers for it, on all data sets",
    "table-sva": "subject-verb agreement (Linzen): accuracy, attention and faithfulness of both arms",
    "table-agreement": "generated subject-verb agreement with and without faster query-key learning",
    "table-kvqa": "generated key-value questions, answered by generating, with and without faster QK",
    "carried-kvqa": "key-value questions: steps until learnt, and attention where pairs were carried",
    "table-squad": "SQuAD, answers generated: F1, exact match, rollout and every layer, at matched loss",
    "finetune-hatexplain": "a pretrained encoder (MiniLM) fine-tuned on HateXplain, at equal loss",
    "finetune-decoder": "a pretrained decoder (SmolLM2) fine-tuned on HateXplain, at equal loss",
    "phase": "beyond the paper: attention at equal loss over ratio and init, the theory, and Adam",
    "prediction": "beyond the paper: the toy language with Adam beside both theories, and the ratio it needs",
    "product-law": "beyond the paper: rates of Q, K, V and O count only as r_Q r_K / (r_V r_O)",
    "covert-channel": "beyond the paper: right answers while attending to tokens that say nothing",
    "stability": "beyond the paper: loss, logits and sharpness in pretraining, QK slowed, bounded or faster",
    "future-work": "beyond the paper: imbalance at the start, decay or normalised gradients by circuit",
    "covert-hatexplain": "beyond the paper: does attention on unmarked words of HateXplain carry the label?",
    "claims": "every claim of the paper with its evidence and verdict, computed from published results",
    "questions": "the open questions: what was believed, run and found, computed from published results",
    "all": "the paper in a few minutes, or with --full every table, ending with a page to open",
}
# Experiments that are read together with others, by the module that has them all.
_SHARED = {
    name: module
    for module, names in {
        "ablation_hatexplain": (
            *("rivals-hatexplain", "rivals-sva", "timing-hatexplain", "timing-toy"),
            *("finetune-hatexplain", "finetune-decoder", "future-work"),
        ),
        "all": ("claims", "questions"),
        "covert": ("covert-channel", "covert-hatexplain"),
        "faithfulness": ("temperature-hatexplain",),
        "fig4": ("identities",),
        "phase": ("fig2-init", "prediction"),
        "table_generated": ("table-agreement", "table-kvqa", "carried-kvqa"),
        "table_hatexplain": ("table-layers", "depth-hatexplain", "norms-hatexplain"),
        "table_main": ("table-sva", "table-squad"),
        "tuning": ("tuned",),
    }.items()
    for name in names
}


@dataclass(frozen=True)
class Option:
    """One option of an experiment: ``--data-dir`` on the command line, ``data_dir=`` from Python.

    ``kind`` is ``int`` (a whole number from 1 to ``most``), ``float`` (a finite number above 0), ``str`` or
    ``bool`` (a flag). With ``many`` the value is a list, on the command line separated by commas, and
    ``choices`` are those of its entries.
    """

    name: str
    kind: type
    help: str
    default: Any = None
    choices: tuple[Any, ...] = ()
    many: bool = False
    metavar: str = ""
    most: int = 1_000_000

    def check(self, value: Any) -> Any:
        """``value`` as the experiment takes it; an error that quotes it if it does not fit."""
        if value is None or not self.many:
            return value if value is None else self._check_one(value)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise InputError(f"{self.name} {value!r} is not a list; give [{value!r}]")
        return [self._check_one(item) for item in value]

    def _check_one(self, value: Any) -> Any:
        quoted = f"{self.name} {value!r}"
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if self.choices and value not in self.choices:
            raise InputError(f"{quoted} is not one of {', '.join(map(str, self.choices))}")
        if self.kind is int:
            if not number or not math.isfinite(value) or value != int(value):
                raise InputError(f"{quoted} is not a whole number")
            if value < 1:
                raise InputError(f"{quoted} is not at least 1")
            if value > self.most:
                raise InputError(f"{quoted} is above {self.most}, the most that it may be")
            return int(value)
        if self.kind is float:
            if not number or not math.isfinite(value) or value <= 0:
                raise InputError(f"{quoted} is not a finite number above 0")
            return float(value)
        if self.kind is str and isinstance(value, str | os.PathLike):
            return os.fspath(value)
        if self.kind is bool and isinstance(value, bool):
            return value
        raise InputError(f"{quoted} is not of type {self.kind.__name__}")


# Options by name that several experiments have; their defaults are those of the parameters.
COMMON = {
    option.name: option
    for option in (
        Option("seeds", int, "how many", most=1000),
        Option("epochs", int, "instead of the protocol's own"),
        Option(
            "protocol",
            str,
            "paper: QK alone learns faster (default); released: what the notebooks do",
            choices=("paper", "released"),
        ),
        Option("ratios", float, "multipliers of the query-key rate, beside equal rates", many=True),
        Option("layers", int, "which depths", choices=(2, 4), many=True),
    )
}
DATA_OPTION = Option("data_dir", str, "data folder (default: $FASTERQK_DATA, checkout)", metavar="DIR")
# Options of every experiment that is made of cells.
CELL_OPTIONS = (
    Option("workers", int, "cells at a time", default=2, most=1000),
    Option("force", bool, "do finished cells again", default=False),
    Option("export", str, "also write every cell to FILE: .jsonl, .jsonl.gz or .jsonl.xz", metavar="FILE"),
    Option(
        "cells",
        str,
        "rebuild tables and figures from files that --export wrote; nothing is trained",
        many=True,
        metavar="FILE",
    ),
)


@dataclass(frozen=True)
class Experiment:
    """A figure or table that can be made again.

    ``run(runner, **options)`` computes it, writes its files under ``runner.out`` and returns the summary that
    ``--json`` prints; ``shown(summary)`` is what people see of it. ``special`` describes its parameters that
    `COMMON` lacks or describes too briefly. ``examples`` are options that its help shows. ``trains`` says
    that it is made of cells, ``needs_data`` that it reads data files.
    """

    name: str
    run: Callable[..., Mapping[str, Any]]
    special: tuple[Option, ...] = ()
    examples: tuple[str, ...] = ()
    details: str = ""
    trains: bool = True
    needs_data: bool = False
    shown: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda summary: summary

    @property
    def summary(self) -> str:
        """What it shows, in one line."""
        return EXPERIMENTS[self.name]

    @property
    def options(self) -> tuple[Option, ...]:
        """One option per parameter of ``run``, with the parameter's default."""
        known = COMMON | {option.name: option for option in self.special}
        parameters = dict(signature(self.run).parameters)
        parameters.pop("runner", None)
        return tuple(
            replace(known[name], default=None if parameter.default is parameter.empty else parameter.default)
            for name, parameter in parameters.items()
        )

    @property
    def all_options(self) -> dict[str, Option]:
        """Its own options and those that it shares with others, by name."""
        shared = ((DATA_OPTION,) if self.needs_data else ()) + (CELL_OPTIONS if self.trains else ())
        return {option.name: option for option in (*self.options, *shared)}

    def check_options(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The value of every option: ``values``, checked, and the defaults of the others."""
        options = self.all_options
        for name in values:
            if name not in options:
                choices = ", ".join(("out", *options))
                raise InputError(f"{self.name} has no option {name!r}; choose from {choices}")
        return {name: option.check(values.get(name, option.default)) for name, option in options.items()}


def find_experiment(name: str) -> Experiment:
    """The experiment with this name; imports its module."""
    if name not in EXPERIMENTS:
        raise InputError(f"unknown experiment {name!r}{suggestion(str(name), list(EXPERIMENTS))}")
    module = import_module(f"fasterqk_lab.experiments.{_SHARED.get(name, name.replace('-', '_'))}")
    members = vars(module).values()
    return next(member for member in members if isinstance(member, Experiment) and member.name == name)


def reproduce(name: str, out: str | os.PathLike[str] = "out", **options: Any) -> dict[str, Any]:
    """Make a figure or table of the paper under ``out``; returns the summary that ``--json`` prints.

    Options are those of ``fasterqk-lab reproduce NAME --help``, with underscores. Cells that are done already
    are read from the store in ``out``::

        reproduce("table-hatexplain", out="out", seeds=5)["effects"][0]["difference"]
        # {'mean': 0.126, 'half_width': 0.025, 'n': 5}: attention on relevant words at equal loss
    """
    from fasterqk_lab.tasks import use_data_folder

    experiment = find_experiment(name)
    if options.get("cells"):
        options = _exported_options(experiment, options["cells"]) | options
    chosen = experiment.check_options(options)
    folder = Path(out)
    if folder.exists() and not folder.is_dir():  # now, not after minutes of work
        raise InputError(f"--out {str(out)!r} is a file; name a folder")
    shared = {option.name: chosen.pop(option.name, option.default) for option in (DATA_OPTION, *CELL_OPTIONS)}
    if shared["export"] is not None:
        folders = [folder / kind for kind in ("runs", "figures", "tables")]
        check_output(shared["export"], reads=[*(shared["cells"] or ()), *folders])
    runner = CellRunner(
        folder, experiment=name, workers=shared["workers"], force=shared["force"], files=shared["cells"]
    )
    with use_data_folder(shared["data_dir"]):
        summary = dict(plain(experiment.run(runner, **chosen)))
    if results := runner.write_results():
        summary["results"] = results
    if shared["export"]:
        usual = experiment.check_options({})
        runner.keep("options", {key: value for key, value in chosen.items() if value != usual[key]})
        summary["exported"] = str(runner.export(shared["export"]))
    return summary | ({"rebuilt_from": shared["cells"]} if shared["cells"] else {})


def _exported_options(experiment: Experiment, files: Sequence[str]) -> dict[str, Any]:
    """The options with which the cells in ``files`` were exported."""
    options: dict[str, Any] = {}
    for line in (line for file in files for line in read_cells(file)):
        if (line.get("experiment"), line.get("fact")) == (experiment.name, "options"):
            options |= line["value"]
    return {name: value for name, value in options.items() if name in experiment.all_options}


# --- Cells: trained now, read from the store, or read from a file ---


def sweep_cells(configs: Sequence[Any], function: Any, out: Path, title: str, **options: Any) -> list[Any]:
    """The results of a sweep, with progress under ``title``; a cell that fails is an error of one line."""
    with progress_bar(title) as progress:
        try:
            return sweep(configs, function, out, progress=progress, **options)
        except SweepError as error:
            raise error.as_cli_error() from None


Cell = tuple[str, int]  # an arm and a seed
Results = dict[Cell, dict[str, Any]]


class CellRunner:
    """Gives an experiment the results of its cells, and remembers them for :meth:`export`.

    Results come from the store under ``out``, where cells that are missing are trained by ``workers``
    processes (0: this one) and with ``force`` all of them, or from ``files`` of compact cells.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        experiment: str = "",
        workers: int = 2,
        force: bool = False,
        files: Sequence[str] | None = None,
    ) -> None:
        self.out = Path(out)
        self.experiment = experiment
        self.workers = workers
        self.force = force
        self._files = list(files or ())
        self._stored: dict[str, Any] = {}
        self._facts: dict[str, Any] = {}
        self._lines: list[Line] = []
        self._values: list[Value] = []
        for line in (line for file in self._files for line in read_cells(file)):
            if "fact" in line:
                self._facts[line["fact"]] = line["value"]
            else:
                self._stored[_identity(line["settings"], line["seed"])] = line["result"]

    @property
    def rebuilds(self) -> bool:
        """Whether results come from files, so that there are no weights and perhaps no data."""
        return bool(self._files)

    def run(
        self,
        cells: Mapping[Cell, Any],
        function: str,
        *,
        title: str,
        protocol: str = "",
        table: str = "",
        force: bool | None = None,
    ) -> Results:
        """The result of every cell.

        ``cells`` maps an arm and a seed to a configuration; ``function`` computes one cell (see
        :func:`fasterqk_lab.runs.sweep`); ``title`` stands beside the progress bar; ``table`` names the table
        of the cells, where an experiment has several.
        """
        if self.rebuilds:
            results = {cell: self._find(cell, config) for cell, config in cells.items()}
        else:
            options = {"workers": self.workers, "force": self.force if force is None else force}
            done = sweep_cells(list(cells.values()), function, self.out, title, **options)
            results = dict(zip(cells, done, strict=True))
        self._remember(cells, results, protocol, table)
        return results

    def _remember(self, cells: Mapping[Cell, Any], results: Results, protocol: str, table: str) -> None:
        for (arm, seed), config in cells.items():
            about: Line = {"experiment": self.experiment} | ({"protocol": protocol} if protocol else {})
            about |= {"table": table} if table not in ("", self.experiment) else {}
            about |= {"arm": arm, "seed": config.seed, "settings": settings_of(config)}
            self._lines.append(about | {"result": results[arm, seed]})

    def fact(self, name: str, compute: Callable[[], Any]) -> Any:
        """A value that the experiment needs beside its cells, such as the size of a split."""
        if name not in self._facts:
            if self.rebuilds:
                raise InputError(f"{self._named()} has no fact {name!r}; export its cells again")
            self._facts[name] = plain(compute())
        self.keep(name, self._facts[name])
        return self._facts[name]

    def keep(self, name: str, value: Any) -> None:
        """Remember a value beside the cells for :meth:`export`."""
        if not any(line.get("fact") == name for line in self._lines):
            self._lines.append({"experiment": self.experiment, "fact": name, "value": plain(value)})

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write every cell that was asked for to ``path``, one line each; returns the path."""
        return write_cells(path, self._lines)

    def add(self, values: "Iterable[Value]") -> None:
        """Values for the experiment's tidy table, which :meth:`write_results` writes."""
        self._values += values

    def write_results(self) -> str | None:
        """Write ``results/EXPERIMENT.csv`` under ``out``, the values of every cell; returns its path.

        Comparisons that the file has and that were not made now (another protocol's) stay in it.
        """
        from fasterqk_lab.compare import read_values, write_values

        if not self._values:
            return None
        path = self.out / "results" / f"{self.experiment}.csv"
        written = {value.experiment for value in self._values}
        before = read_values(path) if path.is_file() else ()
        kept = [value for value in before if value.experiment not in written]
        return str(write_values(path, [*kept, *self._values]))

    def _find(self, cell: Cell, config: Any) -> dict[str, Any]:
        result = self._stored.get(_identity(settings_of(config), config.seed))
        if result is None:
            raise InputError(
                f"{self._named()} has no cell of arm {cell[0]!r} with seed {config.seed} and these settings; "
                "give the options with which it was exported"
            )
        return dict(result)

    def _named(self) -> str:
        return ", ".join(repr(file) for file in self._files)


def settings_of(config: Any) -> dict[str, Any]:
    """The fields of a cell's configuration that differ from their defaults, without its seed."""
    return {name: value for name, value in config_fields(config).items() if name != "seed"}


def _identity(settings: Mapping[str, Any], seed: int) -> str:
    return canonical_json([rounded(plain(settings)), seed])
