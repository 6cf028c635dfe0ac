"""A comparison from its arms to its page: cells, values, effects, one table, one forest, one curve.

An experiment says which arms there are, over which seeds, and which scores decide. Everything else is here:
its cells are trained or read, their values are kept as tidy rows, the arms are compared by the one rule
(``fasterqk_lab.compare``), and the table and the figures are written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fasterqk.attention import dtap_over_seeds, interval, table_scores, title_of
from fasterqk.console import print_table
from fasterqk.errors import InputError
from fasterqk.files import plain
from fasterqk_lab.compare import (
    BEST,
    END,
    LEVEL,
    LOSS,
    Claimed,
    Effect,
    Measured,
    Value,
    compare,
    correct,
    measured,
)
from fasterqk_lab.experiments._examples import attention_examples
from fasterqk_lab.experiments._registry import CellRunner
from fasterqk_lab.figures import (
    save_curve,
    save_curves,
    save_dtaps,
    save_effects,
    save_examples,
    save_forest,
    save_table,
)
from fasterqk_lab.tasks import left_out, load_task
from fasterqk_lab.training import TrainConfig, TrainResult

BASELINE, FASTER = "baseline", "faster_qk"
ARM_NAMES = {BASELINE: "baseline", FASTER: "faster QK"}
# What computes a cell.
TRAIN = "fasterqk_lab.training:train"
AT_TEXTS = {LEVEL: "equal loss", LOSS: "lowest common loss", END: "end", BEST: "best validation epoch"}
# Whose numbers stand beside ours.
SOURCES = {"paper": "paper", "released": "notebooks"}

Results = Mapping[tuple[str, int], TrainResult]
Printed = Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class Comparison:
    """Arms (their configurations; the seed is filled in) over the same seeds, and the scores that decide.

    The first arm is the baseline of all others, unless ``baselines`` names another. ``decides`` are named
    before the run; of the ``scores`` of the table (None: all that are known) the others are exploratory.
    ``derive`` adds scores to a record along training. ``printed`` maps a source (``paper``, ``released``) to
    arms to scores to a number. Of seeds that were added after looking the first ``planned`` decide.
    A score is claimed to be more than the baseline's and read at equal loss, unless ``claimed`` and
    ``read_at`` say otherwise. ``level`` is a training loss that decides because it was named before the run;
    arms are read at ``losses`` too.
    """

    name: str
    title: str
    protocol: str
    arms: Mapping[str, Any]
    seeds: tuple[int, ...]
    printed: Printed = field(default_factory=dict)
    decides: tuple[str, ...] = ("mrta",)
    scores: Mapping[str, str] | None = None
    baselines: Mapping[str, str] = field(default_factory=dict)
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda record: record
    planned: int | None = None
    claimed: Mapping[str, Claimed] = field(default_factory=dict)
    read_at: Mapping[str, str] = field(default_factory=dict)
    level: float | None = None
    losses: tuple[float, ...] = ()

    @property
    def key(self) -> str:
        """The name under which its values and files are kept."""
        return f"{self.name}-{self.protocol}" if self.protocol else self.name

    def cells(self) -> dict[tuple[str, int], Any]:
        """All cells, seed by seed, so that a sweep that is stopped early has whole comparisons."""
        return {
            (arm, seed): replace(config, seed=seed)
            for seed in self.seeds
            for arm, config in self.arms.items()
        }

    def baseline_of(self, arm: str) -> str:
        return self.baselines.get(arm, next(iter(self.arms)))


def two_arms(
    name: str,
    title: str,
    base: TrainConfig,
    qk_ratio: float,
    seeds: Sequence[int],
    printed: Printed | None = None,
    **options: Any,
) -> Comparison:
    """The paper's protocol: ``base``, and the same with a faster query-key circuit and no other change."""
    arms = {BASELINE: base, FASTER: base.replace(qk_ratio=qk_ratio)}
    return Comparison(name, title, "paper", arms, tuple(seeds), printed or {}, **options)


def printed_row(
    train: float,
    test: float,
    ac: float,
    acmc: float,
    mrta: float,
    sufficiency: float,
    comprehensiveness: float,
    *,
    fit: str = "accuracy",
    **others: float,
) -> dict[str, float]:
    """One row of a table of the paper, in the order of its columns, under our names of the scores."""
    row = {f"train_{fit}": train, f"test_{fit}": test, "ac": ac, "acmc": acmc, "mrta": mrta}
    return row | {"sufficiency_5": sufficiency, "comprehensiveness_5": comprehensiveness} | others


@dataclass(frozen=True, eq=False)
class Outcome:
    """A comparison with the results of its cells and everything that follows from them."""

    comparison: Comparison
    results: Mapping[tuple[str, int], Mapping[str, Any]]
    measured: Measured

    def with_values(self, values: Sequence[Value], runner: CellRunner) -> "Outcome":
        """The outcome with values that were computed from it; they go to the table of results, too."""
        runner.add(values)
        return replace(self, measured=replace(self.measured, values=(*self.measured.values, *values)))

    @cached_property
    def effects(self) -> list[Effect]:
        """Every arm minus its baseline in every score that decides, corrected for their number."""
        return correct(self._effects(self.comparison.decides))

    @cached_property
    def explored(self) -> list[Effect]:
        """The same in all other scores of the table, corrected among themselves."""
        return correct(self._effects([name for name in self.scores if name not in self.comparison.decides]))

    def _effects(self, scores: Sequence[str], at: str = LEVEL) -> list[Effect]:
        effects = []
        for arm in self.comparison.arms:
            baseline = self.comparison.baseline_of(arm)
            for score in scores if arm != baseline else ():
                try:
                    effects.append(
                        compare(
                            self.measured,
                            (arm, baseline),
                            score,
                            self.comparison.claimed.get(score, "more"),
                            at=self.comparison.read_at.get(score, at),
                            label=arm,
                            seeds=self.comparison.planned,
                        )
                    )
                except InputError:  # it was not measured in both
                    continue
        return effects

    def shared_moment(self) -> tuple[str, float | None]:
        """Where a chart reads all arms: at the level if it is one for all, else at the lowest common loss."""
        moments = {(effect.at, effect.loss) for effect in self.effects if effect.at in (LEVEL, LOSS)}
        if len(moments) == 1:
            return moments.pop()
        losses = [self.measured.losses(LOSS, effect.label, effect.score) for effect in self.effects]
        return LOSS, next((levels[0] for levels in losses if levels), None)

    def means(self, score: str) -> dict[str, float]:
        """The mean of every arm that has the score at :meth:`shared_moment`."""
        moment = self.shared_moment()
        by_arm = {arm: self.measured.of(arm, score, *moment) for arm in self.comparison.arms}
        return {arm: interval(values.values()).mean for arm, values in by_arm.items() if values}

    @cached_property
    def scores(self) -> dict[str, str]:
        """The scores of the table with their titles."""
        if self.comparison.scores is not None:
            return dict(self.comparison.scores)
        names = table_scores(dict.fromkeys(value.score for value in self.measured.values))
        return {name: title_of(name) for name in names}

    @property
    def diverged(self) -> dict[str, list[int]]:
        """The seeds that diverged, by arm."""
        seeds: dict[str, list[int]] = {}
        for (arm, seed), result in self.results.items():
            if result.get("diverged"):
                seeds.setdefault(arm, []).append(seed)
        return seeds

    def rows(self) -> list[dict[str, Any]]:
        """The table: one row per moment, score and arm, with null, difference and others' numbers."""
        by_place = {
            (effect.label, effect.score, at): effect
            for at, effects in (
                (LEVEL, [*self.effects, *self.explored]),
                (END, self._effects(list(self.scores), END)),
                (BEST, self._effects(list(self.scores), BEST)),
            )
            for effect in effects
        }
        rows = []
        for at in (LEVEL, END, BEST):
            for score, title in self.scores.items():
                if at != LEVEL and score in self.comparison.read_at:
                    continue
                for arm in self.comparison.arms:
                    effect = by_place.get((arm, score, at))
                    moment, loss = self._moment(arm, score, at, effect)
                    values = self.measured.of(arm, score, moment, loss)
                    if not values:
                        continue
                    row: dict[str, Any] = {
                        "score": title,
                        "at": AT_TEXTS.get(moment, moment),
                        "loss": loss,
                        "arm": arm,
                    }
                    row["kind"] = "decides" if score in self.comparison.decides else "exploratory"
                    row["value"] = interval(values.values())
                    row["null"] = self.measured.null(arm, score, moment, loss)
                    if effect:
                        row |= {"difference": effect.value, "levels": effect.agreement}
                        row |= {"p": effect.p, "stands": effect.shows} if at == LEVEL else {}
                    if at == END:
                        printed = self.comparison.printed
                        row |= {
                            source: arms[arm][score]
                            for source, arms in printed.items()
                            if score in arms.get(arm, {})
                        }
                    rows.append(row)
        return [plain(row) for row in rows]

    def _moment(self, arm: str, score: str, at: str, effect: Effect | None) -> tuple[str, float | None]:
        if at != LEVEL:
            return at, None
        if effect is not None:
            return effect.at, effect.loss
        # A baseline is read where the first arm that is compared with it was.
        others = [e for e in (*self.effects, *self.explored) if self.comparison.baseline_of(e.label) == arm]
        effect = next((e for e in others if e.score == score), None)
        if effect is not None:
            return effect.at, effect.loss
        return LEVEL, next(iter(self.measured.losses(LEVEL, arm, score)), None)

    def summary(self) -> dict[str, Any]:
        """The comparison as plain JSON data: what ``--json`` prints."""
        comparison = self.comparison
        arms: dict[str, Any] = {arm: {"diverged": self.diverged.get(arm, [])} for arm in comparison.arms}
        for arm, entry in arms.items():
            if (options := getattr(comparison.arms[arm], "optimisation", None)) is not None:
                entry |= {"qk_ratio": options.qk_ratio, "lr": options.lr, "epochs": options.epochs}
            dtap = self.dtaps().get(arm)
            entry |= {"dtap": dtap} if dtap else {}
        skipped: Mapping[str, Any] = next(
            (result["skipped"] for result in self.results.values() if result.get("skipped")), {}
        )
        return plain(
            {
                "experiment": comparison.name,
                "protocol": comparison.protocol,
                "title": comparison.title,
                "setting": self.setting(),
                "seeds": list(comparison.seeds),
                "decides": list(comparison.decides),
                "arms": arms,
                "rows": self.rows(),
                "effects": [effect_record(effect) for effect in self.effects],
                "skipped": skipped,
            }
        )

    def setting(self) -> str:
        """What was run, in a few words."""
        comparison = self.comparison
        count = len(comparison.seeds)
        words = [f"{comparison.key}: {len(comparison.arms)} arms", f"{count} seed{'s' if count > 1 else ''}"]
        options = [getattr(config, "optimisation", None) for config in comparison.arms.values()]
        base, faster = options[0], options[-1]
        if base is not None:
            words.insert(1, f"{base.epochs:g} epochs")
        if FASTER in comparison.arms and base is not None and faster is not None:
            words.append(f"QK learning rate times {faster.qk_ratio:g} in the faster arm")
            if faster.lr != base.lr:
                words.append(f"base rate {faster.lr:g} instead of {base.lr:g}")
        return ", ".join(words)

    def dtaps(self) -> dict[str, dict[str, Any]]:
        """The DTAP table of every arm over its seeds, where it was measured."""
        tables: dict[str, list[Any]] = {}
        edges: dict[str, Any] = {}
        for (arm, _), result in self.results.items():
            scores = result.get("test", result)
            if not result.get("diverged") and scores.get("dtap") is not None:
                tables.setdefault(arm, []).append(scores["dtap"])
                edges[arm] = scores["dtap_edges"]
        found = {arm: dtap_over_seeds(own) for arm, own in tables.items()}
        return {
            arm: {"mean": mean, "standard_deviation": deviation, "edges": edges[arm]}
            for arm, (mean, deviation) in found.items()
        }

    def save(self, out: Path, *, forest: Sequence[str] | None = None) -> dict[str, Any]:
        """Write the table, the forest of the scores that decide (or ``forest``), curves and heat maps."""
        comparison, name, setting = self.comparison, self.comparison.key, self.setting()
        caption = f"Mean and 95% interval over seeds; differences to the baseline, paired by seed. {setting}."
        shown = forest or comparison.decides
        effects = [effect for effect in (*self.effects, *self.explored) if effect.score in shown]
        titles = {score: self.scores.get(score, score) for score in shown}
        table_columns = [{"key": key, "label": label} for key, label in COLUMNS.items()]
        rows = self.rows()
        for source, label in SOURCES.items():
            if any(source in row for row in rows):
                table_columns.append({"key": source, "label": label, "source": "paper"})
        files: dict[str, Any] = {
            "table": save_table(
                out,
                name,
                title=comparison.title,
                caption=caption,
                columns=table_columns,
                rows=[{**row, "arm": ARM_NAMES.get(row["arm"], row["arm"])} for row in rows],
            ),
            "forest": save_forest(
                effects, titles, out, name, title=comparison.title, caption=caption, names=ARM_NAMES
            ),
        }
        if any(effect.curve for effect in effects):
            files["curve"] = save_curve(
                effects,
                titles,
                out,
                f"{name}-curve",
                title=comparison.title,
                caption=caption,
                names=ARM_NAMES,
            )
        if 0 < len(self.dtaps()) <= 4:
            dtaps = {ARM_NAMES.get(arm, arm): table for arm, table in self.dtaps().items()}
            files["dtap"] = save_dtaps(
                dtaps, out, f"{name}-dtap", title=comparison.title, caption=f"{setting}."
            )
        null = next((effect.null for effect in effects if effect.score == "mrta"), None)
        save_curves(
            out,
            name,
            title=f"{comparison.title}: along training",
            caption=f"{setting}.",
            x={"key": "epoch", "label": "epoch"},
            metrics=[
                {"key": "loss", "label": "training loss", "log": True},
                {"key": "mrta", "label": "attention on relevant tokens (MRTA)"}
                | ({"null": null} if null else {}),
                {"key": "test_accuracy", "label": "test accuracy"},
            ],
            cells=[
                {"arm": ARM_NAMES.get(arm, arm), "seed": seed, "points": history}
                for (arm, seed), history in self.measured.histories.items()
            ],
        )
        save_effects(
            out,
            name,
            title=comparison.title,
            setting=setting,
            effects=[
                effect_record(effect)
                | {"arm": ARM_NAMES.get(effect.label, effect.label), "ratio": self._ratio(effect)}
                for effect in (*self.effects, *self.explored)
            ],
        )
        return files

    def _ratio(self, effect: Effect) -> float | None:
        options = getattr(self.comparison.arms[effect.label], "optimisation", None)
        return None if options is None else float(options.qk_ratio)

    def save_examples(self, out: Path) -> None:
        """Write single examples with the attention of both arms, for the page; needs the weights."""
        comparison = self.comparison
        if self.diverged:
            return
        config = next(iter(comparison.arms.values()))
        examples = attention_examples(comparison.arms, comparison.seeds[0], out)
        save_examples(
            out,
            comparison.key,
            title=f"{comparison.title}: where it looks",
            caption=f"Seed {comparison.seeds[0]}. {self.setting()}.",
            arms=[ARM_NAMES.get(arm, arm) for arm in comparison.arms],
            examples=[
                {**example, "arms": {ARM_NAMES.get(arm, arm): own for arm, own in example["arms"].items()}}
                for example in examples
            ],
            sensitive=load_task(config.task, form=config.data.form, file=config.data.file).sensitive,
        )


COLUMNS = {
    "score": "score",
    "kind": "kind",
    "at": "at",
    "loss": "training loss",
    "arm": "arm",
    "value": "value",
    "null": "null",
    "difference": "difference",
    "p": "p (Holm)",
    "levels": "share of levels",
    "stands": "stands",
}


def effect_record(effect: Effect) -> dict[str, Any]:
    """An effect as plain JSON data, for ``--json`` and the page."""
    return plain(
        {
            "arm": effect.label,
            "score": effect.score,
            "at": effect.at,
            "loss": effect.loss,
            "before": effect.second,
            "after": effect.first,
            "difference": effect.value,
            "null": effect.null,
            "p": effect.p,
            "stands": effect.shows,
            "levels": effect.agreement,
            "progress": effect.progress,
            "lowest": effect.lowest,
            "missing": effect.missing,
        }
    )


def run_arms(
    comparison: Comparison, runner: CellRunner, *, more: Sequence[Value] = (), function: str = TRAIN
) -> Outcome:
    """The comparison with the results of its cells; those that are done already are read, not trained again.

    Its values, and ``more`` that the experiment computed itself, go to the table of results. ``function``
    computes one cell.
    """
    config = next(iter(comparison.arms.values()))
    if not runner.rebuilds and isinstance(config, TrainConfig):
        # Missing or damaged data is an error before any worker starts.
        load_task(config.task, form=config.data.form, file=config.data.file)
    name = comparison.name
    results = runner.run(comparison.cells(), function, title=name, protocol=comparison.protocol, table=name)
    outcome = Outcome(
        comparison,
        results,
        measured(
            comparison.key,
            results,
            baselines=comparison.baselines,
            derive=comparison.derive,
            level=comparison.level,
            losses=comparison.losses,
            more=more,
        ),
    )
    runner.add(outcome.measured.values)
    return outcome


def run_comparison(
    comparison: Comparison, runner: CellRunner, *, forest: Sequence[str] | None = None
) -> dict[str, Any]:
    """Run what is not done yet, write everything, and return what ``--json`` prints."""
    outcome = run_arms(comparison, runner)
    files = outcome.save(runner.out, forest=forest)
    if not runner.rebuilds:
        outcome.save_examples(runner.out)
    return {**outcome.summary(), "files": files}


# --- What people see in the terminal ---


def show_comparison(summary: Mapping[str, Any], scores: Sequence[str] | None = None) -> None:
    """Print the table at equal loss and at the end, of the scores with these titles or of the main ones.

    The table that is written has all of them.
    """
    print(summary["setting"])
    rows = [row for row in summary["rows"] if row["score"] in scores] if scores else summary["rows"]
    if scores is None:  # percentages k and stronger nulls are in the table
        rows = [row for row in rows if ", top " not in row["score"] and not row["score"].endswith(" null")]
    for at in dict.fromkeys(row["at"] for row in rows):
        if at == AT_TEXTS[BEST]:
            continue
        moment = [row for row in rows if row["at"] == at]
        losses = [row["loss"] for row in moment if row["loss"] is not None]
        title = f"\nat the {at}" if not losses else f"\nat {at} (training loss {losses[0]:.3g})"
        print_table(_wide(moment) if len(summary["arms"]) == 2 else _long(moment), title=title)
    late = [f"{cell}" for effect in summary["effects"] for cell in effect["missing"]]
    if late:
        print(
            "\nthe lowest common loss decides, as these never reach the level: "
            + "; ".join(dict.fromkeys(late))
        )
    diverged = {arm: entry["diverged"] for arm, entry in summary["arms"].items() if entry["diverged"]}
    if diverged:
        print(f"\ndiverged: {diverged}")
    if summary.get("skipped"):
        print(f"\nleft out of the data: {left_out(summary['skipped'])}")
    if "files" in summary:
        print(f"\nfigure: {summary['files']['forest']['png']}")


def _wide(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per score, with a column for either arm."""
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        line = table.setdefault(row["score"], {"score": row["score"]})
        line[ARM_NAMES.get(row["arm"], row["arm"])] = row["value"]
    for row in rows:
        line = table[row["score"]]
        line |= {
            label: row[key]
            for key, label in COLUMNS.items()
            if key in ("difference", "p", "levels", "stands") and key in row
        }
        line["null"] = row["null"]
    for row in rows:
        for source, label in SOURCES.items():
            if source in row:
                table[row["score"]][f"{label}, {ARM_NAMES.get(row['arm'], row['arm'])}"] = row[source]
    return list(table.values())


def _long(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per score and arm."""
    keys = [key for key in (*COLUMNS, *SOURCES) if key not in ("at", "loss", "kind")]
    return [{COLUMNS.get(key, SOURCES.get(key, key)): row[key] for key in keys if key in row} for row in rows]
