"""Arms of one recipe over several seeds: run, summarise, compare and show them, and what they attend to."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fasterqk.attention import (
    SCORES,
    Aggregation,
    dtap_over_seeds,
    interval,
    matched_loss,
    null_row,
    paired_difference,
    place_of,
    score_of,
    table_scores,
)
from fasterqk.console import print_table
from fasterqk.files import plain
from fasterqk_lab.experiments import _arm_tables as tables
from fasterqk_lab.experiments._registry import CellRunner
from fasterqk_lab.models._classifier import attention_rows, head_rows
from fasterqk_lab.models._generator import GPTAnswerGenerator
from fasterqk_lab.runs import Store
from fasterqk_lab.tasks import LabelledInstances, Task, left_out, load_task
from fasterqk_lab.training import TrainConfig, TrainResult
from fasterqk_lab.training._batches import pack_questions
from fasterqk_lab.training._classification import Classification, flat
from fasterqk_lab.training._generation import (
    ROLLOUT,
    Generation,
    MeasuredGenerator,
    answered_instances,
    generate,
    measure_fit,
    measure_steps,
)
from fasterqk_lab.training._loop import load_trained

BASELINE, FASTER = "baseline", "faster_qk"
# What computes a cell.
TRAIN = "fasterqk_lab.training:train"

Record = Mapping[str, Any]
Results = Mapping[tuple[str, int], TrainResult]


@dataclass(frozen=True)
class Comparison:
    """Arms (their configurations; the seed is filled in) over the same seeds, and others' numbers to match.

    ``printed`` maps a source (``paper``, ``released``) to arms to scores to a number.
    """

    name: str
    title: str
    protocol: str
    arms: Mapping[str, TrainConfig]
    seeds: tuple[int, ...]
    printed: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)

    def cells(self) -> dict[tuple[str, int], TrainConfig]:
        """All cells, seed by seed, so that a sweep that is stopped early has whole comparisons."""
        return {
            (arm, seed): config.replace(seed=seed) for seed in self.seeds for arm, config in self.arms.items()
        }


def two_arms(
    name: str,
    title: str,
    base: TrainConfig,
    qk_ratio: float,
    seeds: Sequence[int],
    printed: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
) -> Comparison:
    """The paper's protocol: ``base``, and the same with a faster query-key circuit and no other change."""
    arms = {BASELINE: base, FASTER: base.replace(qk_ratio=qk_ratio)}
    return Comparison(name, title, "paper", arms, tuple(seeds), printed or {})


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


def run_comparison(comparison: Comparison, runner: CellRunner) -> dict[str, Any]:
    """Run what is not done yet, write tables and figures of two arms, and return what ``--json`` prints."""
    return save_comparison(comparison, run_arms(comparison, runner), runner)


def run_arms(comparison: Comparison, runner: CellRunner) -> dict[tuple[str, int], TrainResult]:
    """The result of every cell; those that are done already are read, not trained again."""
    if not runner.rebuilds:
        _task(comparison)  # missing or damaged data is an error before any worker starts
    name = comparison.name
    results = runner.run(comparison.cells(), TRAIN, title=name, protocol=comparison.protocol, table=name)
    return {cell: TrainResult.from_json(result) for cell, result in results.items()}


def save_comparison(comparison: Comparison, results: Results, runner: CellRunner) -> dict[str, Any]:
    """Write tables, figures and examples of both arms; returns the summary with their ``files``."""
    summary = summarize_arms(comparison, results)
    files = tables.save_arms(summary, results, runner.out, title=comparison.title)
    diverged = any(result.diverged for result in results.values())
    if not diverged and not runner.rebuilds:  # examples need the weights
        examples = attention_examples(comparison.arms, comparison.seeds[0], runner.out)
        sensitive = _task(comparison).sensitive
        tables.save_arm_examples(summary, examples, runner.out, title=comparison.title, sensitive=sensitive)
    # What the cells left out, which may be more than the task did: prompts too long for the model.
    skipped = next((result.skipped for result in results.values() if result.skipped), {})
    return {**summary, "files": files, "skipped": dict(skipped)}


def _task(comparison: Comparison) -> Task:
    config = next(iter(comparison.arms.values()))
    return load_task(config.task, form=config.data.form, file=config.data.file)


def summarize_arms(comparison: Comparison, results: Results) -> dict[str, Any]:
    """The whole comparison as plain JSON data.

    ``arms`` maps an arm to its metrics at the end of training, each ``{mean, half_width, n, null, ...}``
    with others' printed numbers beside, and to the same ``at_best_validation`` and ``on_validation``;
    ``difference`` is faster QK minus baseline, paired by seed; ``matched`` compares at equal loss.
    """
    ends = {cell: _end_record(result, "test") for cell, result in results.items()}
    names = score_names(ends.values())
    return plain(
        {
            "experiment": comparison.name,
            "protocol": comparison.protocol,
            "seeds": list(comparison.seeds),
            "epochs": next(iter(comparison.arms.values())).optimisation.epochs,
            "arms": {arm: _arm(comparison, results, ends, arm) for arm in comparison.arms},
            "difference": _nested(names, lambda name: _difference(comparison, ends, name)),
            "matched": _matched(comparison, results, [name for name in names if name != "loss"]),
        }
    )


def score_names(records: Iterable[Record]) -> list[str]:
    """The flat names of all scores that any record has, in the order of a table."""
    return table_scores(name for record in records for name in record)


def _arm(comparison: Comparison, results: Results, ends: Mapping[Any, Record], arm: str) -> dict[str, Any]:
    own = [results[arm, seed] for seed in comparison.seeds]
    best = {seed: results[arm, seed].best for seed in comparison.seeds}
    validation = {seed: _end_record(results[arm, seed], "validation") for seed in comparison.seeds}
    at_end = {seed: ends[arm, seed] for seed in comparison.seeds}
    finished = [result for result in own if not result.diverged]
    printed = {source: arms[arm] for source, arms in comparison.printed.items() if arm in arms}
    summary = _table(at_end, printed)
    summary["null"] = {
        name: interval(record.get(f"null_{name}") for record in at_end.values()).mean
        for name in tables.UNIFORM
        if SCORES[name].better
    }
    options = comparison.arms[arm].optimisation
    summary |= {"qk_ratio": options.qk_ratio, "lr": options.lr, "epochs": options.epochs}
    summary["diverged"] = [result.seed for result in own if result.diverged]
    summary["at_best_validation"] = _table(best, {})
    summary["at_best_validation"]["epochs"] = [record.get("epoch") for record in best.values()]
    summary["on_validation"] = _table(validation, {})
    if finished:
        mean, deviation = dtap_over_seeds([result.test["dtap"] for result in finished])
        edges = finished[0].test["dtap_edges"]
        summary["dtap"] = {"mean": mean, "standard_deviation": deviation, "edges": edges}
        summary["majority_accuracy"] = finished[0].test["majority_accuracy"]
        summary["groups"] = _group_table(finished)
    return summary


def _end_record(result: TrainResult, split: str) -> dict[str, Any]:
    """The end of a run as one flat record; attention is that on ``split``; empty when it diverged."""
    if result.diverged:
        return {}
    fit = {
        f"{name}_{score.name}": getattr(result, name)[score.name]
        for score in SCORES.values()
        for name in ("train", "validation", "test")
        if score.by_split and score.name in getattr(result, name)
    }
    scores = {key: value for key, value in getattr(result, split).items() if key not in ("loss", "groups")}
    return {"loss": result.loss, **fit, **flat(scores)}


def _table(records: Mapping[int, Record], printed: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    def cell(name: str) -> dict[str, Any]:
        found = interval(record.get(name) for record in records.values())
        null = interval(record.get(f"null_{name}") for record in records.values())
        entry = {"mean": found.mean, "half_width": found.half_width, "n": found.n, "null": null.mean}
        return entry | {source: numbers[name] for source, numbers in printed.items() if name in numbers}

    return _nested(score_names(records.values()), cell)


def _nested(names: Sequence[str], value: Callable[[str], Any]) -> dict[str, Any]:
    """``{"sufficiency": {"5": ...}}`` from flat names such as ``sufficiency_5``."""
    nested: dict[str, Any] = {}
    for name in names:
        *group, key = place_of(name)
        (nested.setdefault(group[0], {}) if group else nested)[key] = value(name)
    return nested


def _difference(comparison: Comparison, ends: Mapping[Any, Record], name: str) -> Any:
    faster, baseline = (
        [ends[arm, seed].get(name) for seed in comparison.seeds] for arm in (FASTER, BASELINE)
    )
    return paired_difference(faster, baseline)


def _matched(comparison: Comparison, results: Results, names: Sequence[str]) -> list[dict[str, Any]]:
    # A diverged cell has no say in where the others are compared, and is listed as missing there.
    histories: dict[tuple[Hashable, Hashable], Any] = {
        (arm, seed): [] if results[arm, seed].diverged else results[arm, seed].history
        for arm in comparison.arms
        for seed in comparison.seeds
    }
    recorded = [name for name in names if any(name in row for rows in histories.values() for row in rows)]
    return matched_loss(histories, recorded)


def _group_table(finished: Sequence[TrainResult]) -> dict[str, Any]:
    """Accuracy by group (number of attractors, say), with intervals over seeds."""
    first = finished[0].test["groups"]
    return {
        name: {
            value: {
                "n": entry["n"],
                "majority_accuracy": entry["majority_accuracy"],
                "accuracy": interval(result.test["groups"][name][value]["accuracy"] for result in finished),
            }
            for value, entry in values.items()
        }
        for name, values in first.items()
    }


def _shown_at_equal_loss(name: str) -> bool:
    """Whether the terminal shows a score at equal loss; the table that is written has all of them."""
    score = score_of(name)
    if score.per_k or score.better is None or score.group == "plausibility":
        return False
    return not score.by_split or name.startswith("test_")


def show_arms(summary: dict[str, Any]) -> None:
    """Print the table at the end of training and the one at equal loss."""

    def labelled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        keys = tables.column_keys(rows)
        return [{tables.column_label(key): row.get(key) for key in keys} for row in rows]

    print(tables.describe(summary))
    print_table(labelled(tables.end_rows(summary)), title="\nat the end of training (test split)")
    print_table(
        labelled(tables.matched_rows(summary, _shown_at_equal_loss)), title="\nat equal training loss"
    )
    for group in summary["arms"]["baseline"].get("groups") or {}:
        print_table(labelled(tables.group_rows(summary, group)), title=f"\naccuracy by {group}")
    print_diverged(summary)
    if summary.get("skipped"):
        print(f"\nleft out of the data: {left_out(summary['skipped'])}")
    print(f"\nfigures: {summary['files']['dtap']['png']} {summary['files']['loss']['png']}")


def print_diverged(summary: Mapping[str, Any]) -> None:
    """Print which seeds of which arms diverged, if any did."""
    diverged = {arm: entry["diverged"] for arm, entry in summary["arms"].items() if entry["diverged"]}
    if diverged:
        print(f"\ndiverged: {diverged}")


# --- Single examples with the attention that each arm pays to them ---

COUNT = 12
READ_POSITION = "[read]"
# Stands for all that an arm had written before a step.
ANSWER = "[its own answer so far]"


def attention_examples(
    arms: Mapping[str, TrainConfig], seed: int, out: Path, count: int = COUNT
) -> list[dict[str, Any]]:
    """Test examples with relevant tokens, as `fasterqk_lab.figures._documents` keeps them.

    Each has its ``tokens`` (the read position last, where it is one of its own), their ``relevance``, the
    ``label`` and, for each of ``arms`` with ``seed``, ``prediction``, ``probability`` of the right answer and
    the weights of each token. The weights of the models come from the store under ``out``.
    """
    cells = {arm: config.replace(seed=seed) for arm, config in arms.items()}
    loaded: dict[str, Any] = {arm: load_trained(cell, Store(out).folder(cell)) for arm, cell in cells.items()}
    first = next(iter(loaded.values()))
    if isinstance(first, Generation):
        return answer_examples(loaded, count)
    task = first.task
    # The position that is read is the last token, or one of its own after it.
    added = 1 if next(iter(cells.values())).model.read == "after" else 0
    chosen = _choose(task.splits["test"], count)
    readings = {arm: _read(workload, chosen) for arm, workload in loaded.items()}
    found = []
    for place, number in enumerate(chosen):
        example = task.splits["test"][number]
        relevance = np.zeros(len(example.tokens)) if example.relevance is None else example.relevance
        found.append(
            {
                "tokens": [*(task.vocabulary[token] for token in example.tokens), *[READ_POSITION] * added],
                "relevance": [*relevance.tolist(), *[0.0] * added],
                "read": len(example.tokens) - 1 + added,
                "label": task.classes[example.label],
                "arms": {arm: reading[place] for arm, reading in readings.items()},
            }
        )
    return found


def _choose(test: LabelledInstances, count: int) -> list[int]:
    """Rated examples: as many of each group (number of attractors, say) as there are to go round."""
    rated = np.flatnonzero(test.rated)
    groups = next(iter(test.groups.values()), np.zeros(len(test), dtype=np.int64))
    values = np.unique(groups[rated])
    queues = [list(rated[groups[rated] == value]) for value in values]
    chosen: list[int] = []
    while len(chosen) < count and any(queues):
        chosen += [int(queue.pop(0)) for queue in queues if queue]
    return chosen[:count]


def _read(workload: Classification, chosen: Sequence[int]) -> list[dict[str, Any]]:
    split, classes = workload.splits["test"], workload.task.classes
    readings = []
    for number in chosen:
        tokens, read, labels = split.batch(torch.tensor([number]))
        logits, rows, _ = attention_rows(workload.model, tokens, read)
        probability = logits.double().softmax(1)[0]
        heads = head_rows(workload.model, tokens, read)
        names = ["attention"] if len(heads) == 1 else [f"layer {k + 1}" for k in range(len(heads))]
        layers = {name: layer[0].mean(0).tolist() for name, layer in zip(names, heads, strict=True)}
        readings.append(
            {
                "prediction": classes[int(probability.argmax())],
                "probability": float(probability[labels[0]]),
                "layers": ({} if len(heads) == 1 else {"rollout": rows[0].tolist()}) | layers,
                "heads": {name: layer[0].tolist() for name, layer in zip(names, heads, strict=True)},
            }
        )
    return readings


def answer_examples(workloads: Mapping[str, Generation], count: int) -> list[dict[str, Any]]:
    """The first test questions, as `fasterqk_lab.figures._documents` keeps them.

    The weights of an arm are its rollout over the prompt, averaged over the steps of its own answer, and
    last what it has on the answer itself.
    """
    first = next(iter(workloads.values()))
    questions = first.at_end["test"].questions
    shown = questions.take(np.arange(min(count, len(questions))))
    readings = {arm: _readings(workload, shown) for arm, workload in workloads.items()}
    return [
        {
            "tokens": [*_words([first.task.vocabulary[token] for token in prompt]), ANSWER],
            "relevance": [*shown.relevance[place].tolist(), 0],
            "null": _null(first.model, prompt, shown.answers[place], shown.relevance[place]),
            "read": len(prompt) - 1,
            "label": " / ".join(dict.fromkeys(shown.gold[place])),
            "arms": {arm: reading[place] for arm, reading in readings.items()},
        }
        for place, prompt in enumerate(shown.prompts)
    ]


def _words(tokens: Sequence[str]) -> list[str]:
    """Tokens as the page shows them: a part of a word begins with ``##``, if blanks begin the others.

    >>> _words(["Q:", " Who", "ever"]), _words(["Q:", "k01"])
    (['Q:', 'Who', '##ever'], ['Q:', 'k01'])
    """
    if not any(token.startswith(" ") for token in tokens):
        return list(tokens)
    return [
        token[1:] if token.startswith(" ") else f"##{token}" if place else token
        for place, token in enumerate(tokens)
    ]


def _null(model: GPTAnswerGenerator, prompt: Any, answer: Any, relevance: Any) -> float:
    """What rollout of uniform attention puts on the relevant tokens, mean over the gold answer's steps."""
    patterns = (MeasuredGenerator.pattern,) * len(model.blocks)
    lengths = range(len(prompt), len(prompt) + len(answer))
    rows = [null_row(patterns, ROLLOUT, length, length - 1)[: len(prompt)] for length in lengths]
    return float((torch.stack(rows).double() @ torch.from_numpy(relevance)).mean())


def _readings(workload: Generation, questions: Any) -> list[dict[str, Any]]:
    model, task = workload.model, workload.task
    packed = pack_questions(questions)
    written = generate(model, packed, task.end, workload.config.evaluation.answer_tokens)
    probability = measure_fit(model, packed).mean
    reader = MeasuredGenerator(model, probability, np.zeros(len(written), dtype=bool))
    instances = answered_instances(questions, written)

    def rows(aggregation: Aggregation) -> list[list[float]]:
        measured = measure_steps(
            reader, instances, aggregation=aggregation, percents=(), need_relevance=False
        )
        prompts = [
            row[: len(prompt)] for row, prompt in zip(measured.importance, questions.prompts, strict=True)
        ]
        return [[*row.tolist(), 1 - float(row.sum())] for row in prompts]

    layers = {"rollout": rows(ROLLOUT)}
    heads: dict[str, list[list[list[float]]]] = {}
    for k in range(len(model.blocks)):
        layers[f"layer {k + 1}"] = rows(Aggregation("layer", k))
        heads[f"layer {k + 1}"] = [
            rows(Aggregation("layer", k, head=head)) for head in range(workload.config.model.heads)
        ]
    return [
        {
            "prediction": task.text([token for token in answer if token != task.end]),
            "probability": float(probability[place]),
            "layers": {name: weights[place] for name, weights in layers.items()},
            "heads": {name: [weights[place] for weights in own] for name, own in heads.items()},
        }
        for place, answer in enumerate(written)
    ]
