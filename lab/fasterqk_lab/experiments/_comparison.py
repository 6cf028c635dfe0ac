"""A comparison from its arms to its page: cells, values, effects, one table, one forest, one curve.

An experiment says which arms there are, over which seeds, and which scores decide. Everything else is here:
its cells are trained or read, their values are kept as tidy rows, the arms are compared by the one rule
(``fasterqk_lab.compare``), and the table and the figures are written.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, wraps
from importlib.resources import files
from pathlib import Path
from typing import Any

from fasterqk.attention.scores import STRONGER_NULLS, dtap_over_seeds, table_scores, title_of
from fasterqk.attention.statistics import interval
from fasterqk.files import plain
from fasterqk_lab.compare import (
    BEST,
    END,
    LAYER_SCORES,
    LEVEL,
    LOSS,
    Claimed,
    Effect,
    Measured,
    Value,
    baselines_of,
    compare_arms,
    correct,
    measured,
)
from fasterqk_lab.experiments._registry import Cell, CellRunner, Experiment, Option
from fasterqk_lab.figures import effect_record, save_curve, save_document, save_dtaps, save_forest, save_table
from fasterqk_lab.tasks import load_task
from fasterqk_lab.training import TrainConfig

BASELINE, FASTER = "baseline", "faster_qk"
ARM_NAMES = {BASELINE: "baseline", FASTER: "faster QK"}
# When a value was read (`fasterqk_lab.compare`), in words.
AT_TEXTS = {LEVEL: "equal loss", LOSS: "lowest common loss", END: "end", BEST: "best validation epoch"}
# The columns of every table, and those of the numbers that others print.
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
SOURCES = {"paper": "paper", "released": "notebooks"}


def arm_text(arm: str) -> str:
    """An arm as people read it."""
    return ARM_NAMES.get(arm, arm)


def is_null(name: str) -> bool:
    """Whether a score is that of the model's attention made sharp or permuted, which is compared like it."""
    return any(f"{null}_" in name for null in STRONGER_NULLS)


# The baseline where there are more arms than two.
EQUAL = "equal rates"
# The function that computes a cell.
TRAIN = "fasterqk_lab.training:train"
# The first seed of the released notebooks.
FIRST_SEED = 1234
Printed = Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class Comparison:
    """Arms (their configurations; the seed is filled in) over the same seeds, and the scores that decide.

    The first arm is the baseline of all others, unless ``baselines`` names another. ``decides`` are named
    before the run, and so is the moment ``at`` which they are read (``read_at`` by score); of the ``scores``
    of the table (None: all that are known, those of single layers included) the others are exploratory. A
    score is claimed to be more than the baseline's, unless ``claimed`` says otherwise. ``level`` is a
    training loss that decides because it was named before the run; arms are read at ``losses`` too.
    ``derive`` adds scores to a record along training. ``printed`` maps a source (``paper``, ``released``) to
    arms to scores to a number. Of seeds that were added after looking the first ``planned`` decide.

    ``function`` computes a cell, ``more`` further values from the outcome, ``answers`` what else the summary
    says. The forest shows ``forest`` instead of the scores that decide; ``figure`` draws the one special
    figure; ``examples`` are for the page.
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
    at: str = LEVEL
    claimed: Mapping[str, Claimed] = field(default_factory=dict)
    read_at: Mapping[str, str] = field(default_factory=dict)
    level: float | None = None
    losses: tuple[float, ...] = ()
    function: str = TRAIN
    more: "Callable[[Outcome], Sequence[Value]]" = lambda outcome: ()
    answers: "Callable[[Outcome], Mapping[str, Any]]" = lambda outcome: {}
    forest: tuple[str, ...] = ()
    figure: "Callable[[Outcome, Path], Mapping[str, Any]] | None" = None
    examples: bool = False

    @property
    def key(self) -> str:
        """The name under which its values and files are kept."""
        return f"{self.name}-{self.protocol}" if self.protocol else self.name

    def cells(self) -> dict[Cell, Any]:
        """All cells, seed by seed, so that a sweep that is stopped early has whole comparisons."""
        return {
            (arm, seed): replace(config, seed=seed)
            for seed in self.seeds
            for arm, config in self.arms.items()
        }

    def baseline_of(self, arm: str) -> str:
        return baselines_of(self.arms, self.baselines)[arm]


def seeds_from(count: int, first: int = FIRST_SEED) -> tuple[int, ...]:
    """``count`` consecutive seeds; the first is that of the notebooks unless given."""
    return tuple(range(first, first + count))


def qk_arm(ratio: float) -> str:
    """The name of the arm in which the query-key circuit alone is ``ratio`` times faster."""
    return f"QK ×{ratio:g}"


def ratio_arms(base: TrainConfig, ratios: Iterable[float]) -> dict[str, TrainConfig]:
    """Equal rates, and the query-key circuit alone faster by each of ``ratios``."""
    return {EQUAL: base} | {qk_arm(ratio): base.replace(qk_ratio=ratio) for ratio in ratios}


def two_arms(
    name: str,
    title: str,
    base: TrainConfig,
    qk_ratio: float,
    seeds: Sequence[int],
    numbers: Printed | None = None,
    **options: Any,
) -> Comparison:
    """The paper's protocol: ``base``, and the same with a faster query-key circuit alone."""
    arms = {BASELINE: base, FASTER: base.replace(qk_ratio=qk_ratio)}
    return Comparison(name, title, "paper", arms, tuple(seeds), numbers or {}, **options)


def printed(data: str, *sources: str) -> Printed:
    """The numbers that ``sources`` (by default the paper and the notebooks) print of both arms.

    >>> printed("hatexplain", "paper")["paper"]["faster_qk"]["mrta"]
    0.31
    """
    entry = printed_numbers()[data]
    return {
        source: {arm: dict(zip(entry["scores"], row, strict=False)) for arm, row in entry[source].items()}
        for source in sources or SOURCES
    }


@cache
def printed_numbers() -> dict[str, Any]:
    """Everything in ``printed.toml``."""
    text = files("fasterqk_lab.experiments").joinpath("printed.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def layer_scores(layers: int) -> dict[str, str]:
    """Scores of the average of all layers and of single ones, with their titles.

    >>> layer_scores(2)["layer_2_entropy"]
    'layer 2: attention entropy, nats'
    """
    places = {"average": "layer average"} | {f"layer_{n}": f"layer {n}" for n in range(1, layers + 1)}
    kinds = [kind for name in LAYER_SCORES for kind in (name, *(f"{null}_{name}" for null in STRONGER_NULLS))]
    return {
        f"{place}_{kind}": f"{text}: {title_of(kind)}" for place, text in places.items() for kind in kinds
    }


@dataclass(frozen=True, eq=False)
class Outcome:
    """A comparison with the results of its cells and everything that follows from them.

    The ``runner`` gives facts that need more than results, such as weights.
    """

    comparison: Comparison
    results: Mapping[Cell, Mapping[str, Any]]
    measured: Measured
    runner: CellRunner | None = None

    @cached_property
    def effects(self) -> list[Effect]:
        """Every arm minus its baseline in every score that decides, corrected for their number."""
        return correct(self._effects(self.comparison.decides))

    @cached_property
    def explored(self) -> list[Effect]:
        """The same in all other scores of the table but nulls, corrected among themselves."""
        others = [name for name in self.scores if name not in self.comparison.decides]
        return correct(self._effects([name for name in others if not is_null(name)]))

    def _effects(self, scores: Sequence[str], at: str | None = None) -> list[Effect]:
        """The differences in ``scores`` at one moment, or where they decide; without those not measured."""
        comparison = self.comparison
        moments = {
            score: at or comparison.read_at.get(score) or self.moments.get(score, comparison.at)
            for score in scores
        }
        return compare_arms(
            self.measured, moments, comparison.arms, claimed=comparison.claimed, seeds=comparison.planned
        )

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
        by_arm = {arm: self.measured.interval(arm, score, *moment) for arm in self.comparison.arms}
        return {arm: value.mean for arm, value in by_arm.items() if value}

    @cached_property
    def moments(self) -> dict[str, str]:
        """The moments that only this experiment has (``exact match 0.95``), by score."""
        usual = (LEVEL, LOSS, END, BEST)
        known = {value.score for value in self.measured.values if value.at in usual}
        return {
            value.score: value.at
            for value in self.measured.values
            if value.at not in usual and value.score not in known
        }

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that decide: those that were planned."""
        return self.comparison.seeds[: self.comparison.planned]

    @property
    def _layers(self) -> int:
        model = getattr(next(iter(self.comparison.arms.values())), "model", None)
        return 1 if model is None else int(model.layers)

    @cached_property
    def scores(self) -> dict[str, str]:
        """The scores of the table with their titles."""
        if self.comparison.scores is not None:
            return dict(self.comparison.scores)
        known = dict.fromkeys(value.score for value in self.measured.values)
        titles = {name: title_of(name) for name in table_scores(known)} | self._groups()
        layers = layer_scores(self._layers) if self._layers > 1 else {}
        titles |= {name: title for name, title in layers.items() if name in known}
        return titles | {name: name for name in self.moments}

    def _groups(self) -> dict[str, str]:
        """Accuracy by group of test instances, such as the number of attractors."""
        tests = (result.get("test", {}).get("groups") for result in self.results.values())
        return {
            f"accuracy, {group} {value}": f"test accuracy, {value} {group} ({entry['n']} instances)"
            for group, values in (next((groups for groups in tests if groups), None) or {}).items()
            for value, entry in values.items()
        }

    @property
    def diverged(self) -> dict[str, list[int]]:
        """The seeds that diverged, by arm."""
        seeds: dict[str, list[int]] = {}
        for (arm, seed), result in self.results.items():
            if result.get("diverged"):
                seeds.setdefault(arm, []).append(seed)
        return seeds

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The table: one row per moment, score and arm, with null, difference and others' numbers.

        The ``name`` of a score stands beside its title.
        """
        decided = [*self.effects, *self.explored]
        moments = dict.fromkeys(value.at for value in self.measured.values if value.at != LOSS)
        rows = []
        for at in dict.fromkeys((LEVEL, END, BEST, *moments)):
            read = [effect for effect in decided if effect.at == at or (at, effect.at) == (LEVEL, LOSS)]
            decides = {(effect.label, effect.score): effect for effect in read}
            known = {effect.score for effect in read}
            others = self._effects([score for score in self.scores if score not in known], at)
            effects = {(effect.label, effect.score): effect for effect in others} | decides
            for score in self.scores:
                if self.comparison.read_at.get(score, at) != at:
                    continue
                for arm in self.comparison.arms:
                    if row := self._row(arm, score, at, effects):
                        if (arm, score) in decides:
                            row |= {"p": decides[arm, score].p, "stands": decides[arm, score].stands}
                        rows.append(plain(row))
        return rows

    def _row(
        self, arm: str, score: str, at: str, effects: Mapping[tuple[str, str], Effect]
    ) -> dict[str, Any]:
        """One row of the table; empty if the score was not measured then."""
        comparison, effect = self.comparison, effects.get((arm, score))
        # A baseline is read where the first arm that is compared with it is.
        others = (other for other in comparison.arms if comparison.baseline_of(other) == arm)
        like = effect or next((effects[other, score] for other in others if (other, score) in effects), None)
        if like is not None:
            at, loss = like.at, like.loss
        else:
            loss = next(iter(self.measured.losses(at, arm, score)), None)
        values = self.measured.of(arm, score, at, loss)
        chosen = [values[seed] for seed in self.seeds if seed in values]
        if not chosen:
            return {}
        row: dict[str, Any] = {"name": score, "score": self.scores[score], "at": AT_TEXTS.get(at, at)}
        row |= {"loss": loss, "arm": arm}
        kind = "null" if is_null(score) else "exploratory"
        row["kind"] = "decides" if score in comparison.decides else kind
        row |= {"value": interval(chosen), "null": self.measured.null(arm, score, at, loss)}
        if effect:
            row["difference"] = effect.value
            row |= {"levels": effect.agreement} if effect.curve else {}
        if at == END:
            numbers = {source: arms.get(arm, {}) for source, arms in comparison.printed.items()}
            row |= {source: scores[score] for source, scores in numbers.items() if score in scores}
        return row

    def summary(self) -> dict[str, Any]:
        """The comparison as plain JSON data."""
        comparison = self.comparison
        arms: dict[str, Any] = {arm: {"diverged": self.diverged.get(arm, [])} for arm in comparison.arms}
        for arm, entry in arms.items():
            if (options := getattr(comparison.arms[arm], "optimisation", None)) is not None:
                entry |= {"qk_ratio": options.qk_ratio, "lr": options.lr, "epochs": options.epochs}
            entry |= {"dtap": self.dtaps[arm]} if arm in self.dtaps else {}
        skipped = (result["skipped"] for result in self.results.values() if result.get("skipped"))
        return plain(
            {
                "experiment": comparison.name,
                "protocol": comparison.protocol,
                "title": comparison.title,
                "setting": self.setting(),
                "seeds": list(comparison.seeds),
                "decides": list(comparison.decides),
                "arms": arms,
                "rows": self.rows,
                "effects": [effect_record(effect) for effect in self.effects],
                "skipped": next(skipped, {}),
            }
        )

    def setting(self) -> str:
        """The arms, epochs, seeds and rates that were run, in a few words."""
        comparison = self.comparison
        count, added = len(self.seeds), len(comparison.seeds) - len(self.seeds)
        words = [f"{comparison.key}: {len(comparison.arms)} arm{'s' * (len(comparison.arms) > 1)}"]
        words.append(f"{count} seed{'s' * (count > 1)}" + f" ({added} added later left out)" * (added > 0))
        options = [getattr(config, "optimisation", None) for config in comparison.arms.values()]
        base, faster = options[0], options[-1]
        if base is not None:
            words.insert(1, f"{base.epochs:g} epochs")
        if FASTER in comparison.arms and base is not None and faster is not None:
            words.append(f"QK learning rate times {faster.qk_ratio:g} in the faster arm")
            if faster.lr != base.lr:
                words.append(f"base rate {faster.lr:g} instead of {base.lr:g}")
            if faster.epochs != base.epochs:
                words.append(f"{faster.epochs:g} epochs instead of {base.epochs:g}")
        return ", ".join(words)

    @cached_property
    def dtaps(self) -> dict[str, dict[str, Any]]:
        """The DTAP table of every arm over its seeds, where it was measured."""
        tables: dict[str, list[Any]] = {}
        edges: dict[str, Any] = {}
        for (arm, seed), result in self.results.items():
            scores = result.get("test", result)
            if seed in self.seeds and not result.get("diverged") and scores.get("dtap") is not None:
                tables.setdefault(arm, []).append(scores["dtap"])
                edges[arm] = scores["dtap_edges"]
        averaged = {arm: dtap_over_seeds(of_seeds) for arm, of_seeds in tables.items()}
        return {
            arm: {"mean": mean, "standard_deviation": deviation, "edges": edges[arm]}
            for arm, (mean, deviation) in averaged.items()
        }

    def by_layer(self) -> list[Effect]:
        """Mass and entropy of the whole model and of every layer; the label of an effect is the layer.

        Empty with one layer, and with more than two arms.
        """
        effects = {effect.score: effect for effect in (*self.effects, *self.explored)}
        if len(self.comparison.arms) != 2 or "layer_1_mrta" not in effects:
            return []
        places = {"": "rollout", "average_": "layer average"}
        places |= {f"layer_{n}_": f"layer {n}" for n in range(1, self._layers + 1)}
        return [
            replace(effects[f"{prefix}{score}"], label=place, score=score)
            for score in ("mrta", "entropy")
            for prefix, place in places.items()
            if f"{prefix}{score}" in effects and f"layer_1_{score}" in effects
        ]

    def save(self, out: Path) -> dict[str, Any]:
        """Write the table, the forest, curves, heat maps and the special figure; returns the paths.

        Of models with several layers there is also a forest with one row per layer.
        """
        name, title, setting = self.comparison.key, self.comparison.title, self.setting()
        caption = f"Mean and 95% interval over seeds; differences to the baseline, paired by seed. {setting}."
        about: dict[str, Any] = {"title": title, "caption": caption}
        shown = self.comparison.forest or self.comparison.decides
        effects = [effect for effect in (*self.effects, *self.explored) if effect.score in shown]
        titles = {score: self.scores.get(score, score) for score in shown}
        paths: dict[str, Any] = {"table": self._save_table(out, **about)}
        if effects:
            paths["forest"] = save_forest(effects, titles, out, name, names=ARM_NAMES, **about)
        curves = [effect for effect in effects if effect.curve] or self._effects(list(shown), LEVEL)
        if any(effect.curve for effect in curves):
            paths["curve"] = save_curve(curves, titles, out, f"{name}-curve", names=ARM_NAMES, **about)
        if layers := self.by_layer():
            titles = {score: title_of(score) for score in dict.fromkeys(effect.score for effect in layers)}
            about["title"] = f"{title}: attention by layer"
            paths["layers"] = save_forest(layers, titles, out, f"{name}-by-layer", **about)
        if 0 < len(self.dtaps) <= 4:
            dtaps = {arm_text(arm): table for arm, table in self.dtaps.items()}
            about = {"title": f"{title}: DTAP", "caption": f"{setting}."}
            paths["dtap"] = save_dtaps(dtaps, out, f"{name}-dtap", **about)
        self._save_effects(out)
        if self.comparison.figure is not None:
            paths["figure"] = self.comparison.figure(self, out)
        return paths

    def _save_table(self, out: Path, *, title: str, caption: str) -> dict[str, str]:
        rows = [
            {key: value for key, value in row.items() if key != "name"} | {"arm": arm_text(row["arm"])}
            for row in self.rows
        ]
        columns = [{"key": key, "label": label} for key, label in COLUMNS.items()]
        for source, label in SOURCES.items():
            if any(source in row for row in rows):
                columns.append({"key": source, "label": label, "source": "paper"})
        return save_table(out, self.comparison.key, title=title, caption=caption, columns=columns, rows=rows)

    def _save_effects(self, out: Path) -> None:
        """Write the effects, from which the page draws its first chart."""
        options = {arm: getattr(config, "optimisation", None) for arm, config in self.comparison.arms.items()}
        records = [
            effect_record(effect)
            | {"arm": arm_text(effect.label), "ratio": getattr(options[effect.label], "qk_ratio", None)}
            for effect in (*self.effects, *self.explored)
        ]
        document = {"title": self.comparison.title, "effects": records}
        save_document(out, "effects", self.comparison.key, document)


def run_arms(comparison: Comparison, runner: CellRunner) -> Outcome:
    """Train the cells of a comparison, or read those that are done; its values go to the table of results."""
    config = next(iter(comparison.arms.values()))
    if not runner.rebuilds and isinstance(config, TrainConfig):
        # Missing or damaged data, or a missing model, is an error before any worker starts.
        load_task(config.task, form=config.data.form, file=config.data.file)
        if config.model.pretrained:
            from fasterqk_lab.training._finetuning import pretrained_folder

            pretrained_folder(config.model.pretrained)
    name, function = comparison.name, comparison.function
    results = runner.run(comparison.cells(), function, title=name, protocol=comparison.protocol, table=name)
    table = measured(
        comparison.key,
        results,
        baselines=comparison.baselines,
        derive=comparison.derive,
        level=comparison.level,
        losses=comparison.losses,
    )
    outcome = Outcome(comparison, results, table, runner)
    values = (*outcome.measured.values, *comparison.more(outcome))
    runner.add(values)
    return replace(outcome, measured=replace(outcome.measured, values=values))


def run_comparison(comparison: Comparison, runner: CellRunner) -> dict[str, Any]:
    """Run missing cells, write all files, and return the summary that ``--json`` prints."""
    outcome = run_arms(comparison, runner)
    paths = outcome.save(runner.out)
    if comparison.examples and not runner.rebuilds and not outcome.diverged:  # they need the weights
        from fasterqk_lab.experiments._examples import save_attention

        arms = {arm_text(arm): config for arm, config in comparison.arms.items()}
        save_attention(outcome, arms, runner.out)
    return {**outcome.summary(), **plain(comparison.answers(outcome)), "files": paths}


def of_arms(
    name: str,
    build: Callable[..., Comparison | Sequence[Comparison] | Mapping[str, Comparison]],
    *special: Option,
    examples: tuple[str, ...] = ("--seeds 1 # a quick look",),
    needs_data: bool = True,
) -> Experiment:
    """An experiment made of the comparisons that ``build`` returns; its parameters are the options."""

    @wraps(build)
    def run(runner: CellRunner, **options: Any) -> dict[str, Any]:
        built = build(**options)
        if isinstance(built, Comparison):
            return run_comparison(built, runner)
        comparisons = built.values() if isinstance(built, Mapping) else built
        tables = {comparison.key: run_comparison(comparison, runner) for comparison in comparisons}
        return {"experiment": name, "tables": tables}

    return Experiment(name, run, special, examples, needs_data=needs_data)
