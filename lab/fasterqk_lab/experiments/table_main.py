"""The paper's main table: subject-verb agreement, SQuAD, and every data set with nulls and effects.

`table-sva`: one layer of attention, with and without faster QK learning. `table-squad`: SQuAD answered by
generating, the paper's largest experiment, in its size and in sizes for a laptop. `table-main`: agreement,
HateXplain and SQuAD side by side, beside the paper's numbers, with faithfulness by two ways to remove tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fasterqk.attention.scores import title_of
from fasterqk.attention.statistics import Interval
from fasterqk.errors import InputError
from fasterqk_lab.compare import BEST, END, Effect, margin_of, measured
from fasterqk_lab.experiments._comparison import (
    ARM_NAMES,
    AT_TEXTS,
    BASELINE,
    COLUMNS,
    FASTER,
    FIRST_SEED,
    SOURCES,
    TRAIN,
    Comparison,
    Outcome,
    of_arms,
    printed,
    run_arms,
    run_comparison,
    seeds_from,
    two_arms,
)
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option
from fasterqk_lab.experiments.table_hatexplain import table_hatexplain
from fasterqk_lab.figures import save_forest, save_table, wide_rows
from fasterqk_lab.tasks import load_task
from fasterqk_lab.training import TrainConfig

# --- Subject-verb agreement ---

# Forms of the task each protocol is about: the notebooks show the verb to the model.
FORMS = {"paper": ("whole", "prefix"), "released": ("whole",)}
SVA_RATIO = 100
# Base rates from which validation accuracy chooses, with equal rates and the first seed, as the paper
# does (its range is 1e-6 to 1e-2; the lower half does not get anywhere in six epochs).
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
# What the search found; its accuracies are the values of table-sva-FORM-rates.
FOUND_RATES = {"whole": 1e-3, "prefix": 1e-2}
# The base rate that the paper states.
STATED_RATE = 1e-5
EVALUATE_AT_FALL = 0.8
# The notebooks' 15 epochs over 157,721 sentences.
RELEASED_STEPS, RELEASED_BATCH = 73_935, 32
TITLES = {
    "whole": "Subject-verb agreement, whole sentences",
    "prefix": "Subject-verb agreement, up to the verb",
}


def table_sva(
    protocol: str = "paper",
    form: str = "whole",
    seeds: int = 5,
    epochs: int | None = None,
    lr: float | None = None,
) -> Comparison:
    """Both arms; in the `paper` protocol ``lr`` is the base rate that :func:`choose_rate` found.

    >>> table_sva("paper", "prefix", seeds=2, lr=1e-3).arms["faster_qk"].optimisation.qk_ratio
    100.0
    """
    if form not in FORMS[protocol]:
        raise InputError(
            f"protocol {protocol!r} has no form {form!r}; its forms are {', '.join(FORMS[protocol])}"
        )
    name, title, chosen = f"table-sva-{form}", TITLES[form], seeds_from(seeds)
    if protocol == "released":
        arms, numbers = _released(epochs), printed("sva")
        return Comparison(name, title, protocol, arms, chosen, numbers, examples=True)
    base = _paper(form, epochs) if lr is None else _paper(form, epochs).replace(lr=lr)
    if lr == STATED_RATE:
        name, title = f"{name}-stated", f"{title}, as the paper states"
        if epochs:
            name, title = f"{name}-{epochs}", f"{title}, but {epochs} epochs"
    numbers = printed("sva", "paper") if form == "whole" else {}
    return two_arms(name, title, base, SVA_RATIO, chosen, numbers, examples=True)


def released_epochs(sentences: int) -> int:
    """As many epochs as take the notebooks' number of steps: with less data their 15 lead nowhere.

    >>> released_epochs(157_721), released_epochs(50_000)
    (15, 47)
    """
    return max(1, round(RELEASED_STEPS / math.ceil(sentences / RELEASED_BATCH)))


def choose_rate(form: str, runner: CellRunner, epochs: int | None = None) -> dict[str, Any]:
    """The base rate by validation accuracy at the end of training, with equal rates and one seed.

    The smallest rate within one standard error of the best: with a thousand validation sentences the
    higher ones differ by two or three of them. Returns ``lr``, the ``validation_accuracy`` of every rate
    tried (None where it diverged), its ``standard_error`` and the ``seed``. Attention is not looked at.
    """
    base, name = _paper(form, epochs).replace(seed=FIRST_SEED), f"table-sva-{form}-rates"
    cells = {(f"base rate {rate:g}", FIRST_SEED): base.replace(lr=rate) for rate in RATES}
    # Not by force: the arms that follow are.
    results = runner.run(cells, TRAIN, title=f"table-sva-{form}: base rate", table=name, force=False)
    runner.add(measured(name, results).values)
    accuracy = {
        rate: None if result["diverged"] else float(result["validation"]["accuracy"])
        for rate, result in zip(RATES, results.values(), strict=True)
    }
    finished = {rate: value for rate, value in accuracy.items() if value is not None}
    if not finished:
        raise InputError(f"table-sva {form}: training diverged at every base rate in {list(RATES)}")
    best = max(finished.values())
    error = math.sqrt(best * (1 - best) / _sentences(runner, form, "validation"))
    return {
        "lr": min(rate for rate, value in finished.items() if value >= best - error),
        "seed": FIRST_SEED,
        "standard_error": error,
        "validation_accuracy": {f"{rate:g}": value for rate, value in accuracy.items()},
    }


def _sentences(runner: CellRunner, form: str, split: str) -> int:
    """How many sentences a split has; missing or damaged data is an error before any worker starts."""
    return int(
        runner.fact(f"sva {form} {split} sentences", lambda: len(load_task("sva", form=form).splits[split]))
    )


def _paper(form: str, epochs: int | None) -> TrainConfig:
    """AdamW with batches of 256; the loss falls within the first epochs, and points on the way are needed."""
    config = TrainConfig("sva", form=form, evaluate_at_fall=EVALUATE_AT_FALL)
    return config if epochs is None else config.replace(epochs=epochs)


def _released(epochs: int | None) -> dict[str, TrainConfig]:
    """The notebooks' recipe: SGD with much momentum and no clipping; the faster arm also multiplies the
    embeddings of tokens and positions."""
    base = TrainConfig(
        "sva",
        form="released",
        lr=5e-4,
        epochs=15 if epochs is None else epochs,
        batch_size=RELEASED_BATCH,
        bucket=1,
        optimizer="sgd",
        momentum=0.99,
        weight_decay=1e-5,
        decay="coupled",
        clip=None,
        protocol="released-sva",
        evaluate_at_fall=EVALUATE_AT_FALL,
        rationale_k=(5,),
    )
    multiplied = ("embedding.*", "positions", "*.W_Q", "*.b_Q", "*.W_K", "*.b_K")
    return {BASELINE: base, FASTER: base.replace(qk_ratio=SVA_RATIO, faster=multiplied)}


def choose_arms(
    runner: CellRunner, protocol: str, form: str, seeds: int, epochs: int | None, lr: float | None = None
) -> tuple[Comparison, dict[str, Any] | None]:
    """Both arms and how their base rate was chosen; trains the candidates that are not done yet.

    With ``lr`` nothing is chosen: it is the base rate of both arms.
    """
    table_sva(protocol, form)  # a form that the protocol does not have is an error now
    if lr is not None and protocol == "released":
        raise InputError(f"lr {lr:g}: the rates of protocol 'released' are the notebooks'; leave lr out")
    if lr is not None:
        return table_sva(protocol, form, seeds, epochs, lr), None
    if protocol == "released":
        epochs = epochs or released_epochs(_sentences(runner, "released", "train"))
        return table_sva(protocol, form, seeds, epochs), None
    _sentences(runner, form, "validation")
    chosen = choose_rate(form, runner, epochs)
    return table_sva(protocol, form, seeds, epochs, chosen["lr"]), chosen


def run_sva(
    runner: CellRunner,
    protocol: str = "paper",
    form: str | None = None,
    seeds: int = 5,
    epochs: int | None = None,
    lr: float | None = None,
) -> dict[str, Any]:
    tables = {}
    for name in [form] if form else FORMS[protocol]:
        comparison, chosen = choose_arms(runner, protocol, name, seeds, epochs, lr)
        tables[name] = run_comparison(comparison, runner) | {"chosen_rate": chosen}
    return {"experiment": "table-sva", "protocol": protocol, "forms": tables}


SVA = Experiment(
    "table-sva",
    run_sva,
    (
        Option("form", str, "whole sentences, or up to the verb (default: all)", choices=tuple(TITLES)),
        Option("lr", float, "base rate of both arms, instead of the search for it (it found 0.001 and 0.01)"),
    ),
    examples=(
        "--protocol released",
        "--form whole --seeds 1 --lr 1e-3 # at the rate of the search",
        "--form whole --lr 1e-5 # at the rate that the paper states",
    ),
    needs_data=True,
)

# --- SQuAD ---

# Steps an epoch of the released notebooks: 60,000 questions, 64 a step; they warm up for 1,000 steps.
SQUAD_STEPS = 938
SQUAD_RATIO = 20


def _warmup(epochs: int) -> float:
    """The share of the notebooks' training that is warm-up."""
    return 1_000 / (epochs * SQUAD_STEPS)


# The released notebooks train at these sizes and with these settings wherever the paper says nothing.
# A window at a random offset does not give the answer's position away, as their centred one does.
_PAPER: dict[str, Any] = {
    "form": "random-full-vocabulary",
    "epochs": 100,
    "batch_size": 32,
    "accumulate": 2,
    "clip": 0.5,
    "warmup": 0.01,
    "answer_tokens": 50,
    "test_subset": None,
}
# Windows of 140 characters, from which a model learns to answer in an hour of one core.
_WINDOWS: dict[str, Any] = {
    "form": "random-short",
    "epochs": 2,
    "batch_size": 16,
    "bucket": 64,
    "schedule": "constant",
    "weight_decay": 0.01,
    "context": 128,
    "label_smoothing": 0.0,
    "warmup": 0.05,
    "along_subset": 128,
    "answer_tokens": 24,
}
_SMALL: dict[str, Any] = _WINDOWS | {
    # At 20 times 1e-3 attention hardens onto single tokens within 300 steps, before it means anything; at
    # 20 times 2.5e-4 learning stops at loss 6.6. 20 times 1e-4 learns as fast as equal rates do.
    "lr": 1e-4,
    "width": 96,
    "head_width": 16,
    "mlp_width": 384,
    "dropout": 0.1,
    "evaluations_per_epoch": 6,
    "test_subset": 1000,
}
# The paper's architecture. Training on windows of all widths, it copies after a tenth of the questions that
# windows of 140 characters alone would take, and bfloat16 is half as fast again. With QK at 1.5e-3 attention
# hardens too early: the largest rate is 9e-4, after the notebooks' warm-up of 1,000 steps.
_SHORT = _WINDOWS | {
    "form": "random-mixed",
    "lr": 3e-4,
    "epochs": 4,
    "warmup": 0.11,
    "batch_size": 32,
    "autocast": True,
    "dropout": 0.0,
    "head_scale": 0.1,
    "clip": 1.0,
    "evaluations_per_epoch": 3,
    "along_subset": 256,
    "test_subset": 1000,
}
SHORT_RATIO = 3
_TINY: dict[str, Any] = _SMALL | {
    "layers": 2,
    "width": 16,
    "heads": 2,
    "head_width": 8,
    "mlp_width": 32,
    "train_limit": 256,
    "train_subset": 64,
    "along_subset": 16,
    "test_subset": 32,
    "answer_tokens": 8,
    "evaluations_per_epoch": 1,
}
SIZES = {"paper": _PAPER, "paper-short": _SHORT, "small": _SMALL, "tiny": _TINY}

# The notebooks' recipe: rates that differ between the arms, a slow embedding, a centred window. Their
# schedule stops half way through its cosine; the cycling of Adam's first beta is left out.
_RELEASED: dict[str, Any] = {
    "form": "centred-full-vocabulary",
    "train_limit": 60_000,
    "schedule": "half-cosine",
    "decay": "coupled",
    "embedding_ratio": 0.1,
}
# What an arm is called: the protocol it belongs to, which of that protocol's two it is, and what it changes.
ARMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "same": ("paper", BASELINE, {}),
    "faster_qk": ("paper", FASTER, {"qk_ratio": SQUAD_RATIO}),
    "released_same": (
        "released",
        BASELINE,
        _RELEASED | {"lr": 5e-4, "epochs": 70, "warmup": _warmup(70)},
    ),
    "released_faster": (
        "released",
        FASTER,
        _RELEASED | {"lr": 5e-5, "qk_ratio": SQUAD_RATIO, "epochs": 100, "warmup": _warmup(100)},
    ),
}


def arms_of(size: str) -> tuple[str, ...]:
    """The arms that a size has; the notebooks' own rates belong to the paper's."""
    if size not in SIZES:
        raise InputError(f"unknown size {size!r}; choose from {', '.join(SIZES)}")
    return tuple(ARMS) if size == "paper" else tuple(arm for arm in ARMS if ARMS[arm][0] == "paper")


def table_squad(
    size: str = "small", arms: Sequence[str] = (), seeds: int = 1, epochs: int | None = None
) -> dict[str, Comparison]:
    """The comparison of each protocol that the chosen ``arms`` (all of the size's) belong to.

    >>> experiment = table_squad("small")["paper"]
    >>> {arm: config.optimisation.qk_ratio for arm, config in experiment.arms.items()}
    {'baseline': 1.0, 'faster_qk': 20.0}
    """
    known = arms_of(size)
    for arm in arms:
        if arm not in known:
            raise InputError(f"size {size!r} has no arm {arm!r}; choose from {', '.join(known)}")
    base = TrainConfig("squad", **SIZES[size])
    shorter = {"epochs": epochs} if epochs else {}
    configs: dict[str, dict[str, TrainConfig]] = {}
    for arm in known:
        if arm in arms or not arms:
            protocol, place, changes = ARMS[arm]
            if size == "paper-short" and place == FASTER:
                changes = {"qk_ratio": SHORT_RATIO}
            configs.setdefault(protocol, {})[place] = base.replace(**(changes | shorter))
    return {
        protocol: Comparison(
            name=f"table-squad-{size}",
            title=f"SQuAD, answers generated, {size} size (accuracy is exact match)",
            protocol=protocol,
            arms=chosen,
            seeds=seeds_from(seeds),
            printed=printed("squad") if size == "paper" else {},
            examples=True,
        )
        for protocol, chosen in configs.items()
    }


SQUAD = of_arms(
    "table-squad",
    table_squad,
    Option("size", str, "paper, paper-short (its model, short windows), small (default) or tiny (a test)"),
    Option(
        "arms",
        str,
        "of same, faster_qk and, in the paper's size, released_same, released_faster (default: all)",
        many=True,
        metavar="ARM",
    ),
    examples=(
        "--arms same --out out # one arm, to run them apart",
        "--size paper --arms released_same --seeds 5 --json",
    ),
)

# --- Every data set ---

# The columns of the paper's Table 1, and those of the figure.
METRICS = (
    *("train_accuracy", "test_accuracy", "train_f1", "test_f1", "ac", "acmc", "mrta"),
    *("sufficiency_5", "comprehensiveness_5", "sharp_ac", "permuted_ac", "permuted_mrta"),
)
SHOWN = ("mrta", "ac", "test_accuracy", "sufficiency_5", "comprehensiveness_5", "test_f1")
TITLE = "Faster query-key learning on real data"
# What depends on how tokens are removed.
FAITHFUL = ("sufficiency_5", "comprehensiveness_5")
# Random rankings double what an evaluation costs, so there are fewer of them than in the tables.
EVALUATIONS = 10
MEASURED = (
    "Both arms at equal training loss, then at the end; differences paired by seed. Null: uniform attention, "
    "the most frequent class, or tokens ranked by chance."
)


def main_rows(outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    """One row per data set, moment and score of the paper's table: both arms, difference, null, paper.

    Moments are equal loss and the end of training.
    """
    rows = [
        row | {"data set": dataset, "arm": ARM_NAMES[row["arm"]]}
        for dataset, outcome in outcomes.items()
        for row in outcome.rows
        if row["name"] in METRICS and row["at"] != AT_TEXTS[BEST]
    ]
    columns = {key: COLUMNS[key] for key in ("at", "loss", "score", *COLUMNS)} | SOURCES
    wide, labels = wide_rows(rows, {"data set": "data set", **columns}, joined=("data set", "at", "score"))
    return [{label: row.get(key) for key, label in labels.items()} for row in wide]


def _papers(dataset: str) -> str:
    return f"{dataset}, the paper"


def main_effects(outcomes: Mapping[str, Outcome]) -> list[Effect]:
    """Every effect under the name of its data set, and below it the difference that the paper prints."""
    effects = []
    for dataset, outcome in outcomes.items():
        measured = [effect for effect in (*outcome.effects, *outcome.explored) if effect.score in SHOWN]
        effects += [replace(effect, label=dataset) for effect in measured]
        papers = outcome.comparison.printed.get("paper", {})
        for score in SHOWN:
            if all(score in papers.get(arm, {}) for arm in (BASELINE, FASTER)):
                first, second = (Interval(papers[arm][score], math.nan, 0) for arm in (FASTER, BASELINE))
                difference = Interval(first.mean - second.mean, math.nan, 0)
                label, margin = _papers(dataset), margin_of(score)
                effects.append(Effect(label, score, "more", difference, first, second, END, margin=margin))
    return effects


def measured_again(table: Comparison, remove: str = "mask") -> dict[str, TrainConfig]:
    """The arms of ``table`` with random rankings along training, and tokens masked instead of deleted.

    >>> measured_again(table_hatexplain())["baseline"].evaluation.protocol
    'masked'
    """
    changes: dict[str, Any] = {"random_along": True, "evaluations": EVALUATIONS}
    changes |= {"protocol": "masked"} if remove == "mask" else {}
    return {arm: config.replace(**changes) for arm, config in table.arms.items()}


def masked(table: Comparison) -> Comparison:
    """The faithfulness of both arms of ``table`` with tokens masked."""
    scores = {name: title_of(name) for name in FAITHFUL}
    name, title = f"{table.name}-masked", f"{table.title}, tokens masked"
    decides = FAITHFUL[1:]
    return Comparison(
        name, title, "paper", measured_again(table), table.seeds, decides=decides, scores=scores
    )


def comparisons(
    runner: CellRunner, protocol: str, seeds: int, squad: str | None, squad_seeds: int, epochs: int | None
) -> dict[str, Comparison]:
    """The two arms of every data set; the base rate of agreement is searched where it is not known yet."""
    sva, _ = choose_arms(runner, protocol, "whole", seeds, epochs)
    tables = {"SVA": sva, "HateXplain": table_hatexplain(protocol, seeds, epochs)}
    if protocol == "paper":
        tables |= {f"{dataset}, tokens masked": masked(table) for dataset, table in tables.items()}
    if squad:
        protocols = table_squad(squad, seeds=squad_seeds, epochs=epochs)
        if protocol not in protocols:
            raise InputError(f"--squad {squad} has no protocol {protocol!r}; choose --squad paper")
        tables[f"SQuAD, {squad}"] = replace(
            protocols[protocol], printed={**printed("squad", "paper"), **protocols[protocol].printed}
        )
    return tables


def run(
    runner: CellRunner,
    protocol: str = "paper",
    seeds: int = 5,
    squad: str | None = None,
    squad_seeds: int = 1,
    epochs: int | None = None,
) -> dict[str, Any]:
    tables = comparisons(runner, protocol, seeds, squad, squad_seeds, epochs)
    outcomes = {dataset: run_arms(comparison, runner) for dataset, comparison in tables.items()}
    rows, effects, name = main_rows(outcomes), main_effects(outcomes), f"table-main-{protocol}"
    caption = f"{MEASURED} {'; '.join(outcome.setting() for outcome in outcomes.values())}."
    if squad:
        caption += " Of SQuAD accuracy is exact match, and AC and ACMC count from .1 on, not from .5."
    papers = {f"{source}, {arm}" for source in SOURCES.values() for arm in ARM_NAMES.values()}
    columns = [
        {"key": key, "label": key} | ({"source": "paper"} if key in papers else {})
        for key in dict.fromkeys(key for row in rows for key in row)
    ]
    names = {_papers(f"SQuAD, {size}"): _papers("SQuAD") for size in SIZES}
    titles = {score: title_of(score) for score in SHOWN if any(effect.score == score for effect in effects)}
    files = {
        "table": save_table(runner.out, name, title=TITLE, caption=caption, columns=columns, rows=rows),
        "forest": save_forest(effects, titles, runner.out, name, title=TITLE, caption=caption, names=names),
    }
    return {"experiment": "table-main", "protocol": protocol, "rows": rows, "files": files}


EXPERIMENT = Experiment(
    "table-main",
    run,
    (
        Option("squad", str, "SQuAD too, in this size (accuracy is exact match)", choices=tuple(SIZES)),
        Option("squad_seeds", int, "how many of SQuAD", most=1000),
    ),
    examples=("--squad small # with SQuAD, in a size for one core", "--protocol released --json"),
    needs_data=True,
)
