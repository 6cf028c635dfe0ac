"""Which change carries the effect: one-layer HateXplain, one thing changed in every arm."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fasterqk.attention import SCORES, holm, interval, matched_loss, title_of
from fasterqk.console import mean_of, print_table
from fasterqk.files import plain
from fasterqk_lab.experiments._arm_tables import UNIFORM
from fasterqk_lab.experiments._arms import Comparison, Results, print_diverged, run_arms
from fasterqk_lab.experiments._per_seed import END, moments
from fasterqk_lab.experiments._registry import EPOCHS_OPTION, CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments.table_hatexplain import FIRST_SEED, QK_RATIO
from fasterqk_lab.figures import COLORS, PAPER, plotting, save_figure, save_table
from fasterqk_lab.training import TrainConfig

EQUAL = "equal rates"
RATIOS = (3, 10, 30, 100)
# Arms are compared at equal loss, so the rate needs no cosine to the end: constant, eight epochs fit the
# training data as well as fourteen with it.
EPOCHS = 8
# All that the model knows of a text comes through OV: the arm that slows it needs longer to the same loss.
SLOWER = 3
# Arms that learn everything quickly pass the common loss within an epoch; look again on the way.
EVALUATE_AT_FALL = 0.85
# A decay that people use, at which it matters whether it grows with the rate.
STRONG_DECAY = 0.1

QUERIES, KEYS, EMBEDDING = ("*.W_Q", "*.b_Q"), ("*.W_K", "*.b_K"), ("embedding.*",)
# Of all scores of tables but the training loss; of the plausibility scores the one that needs no threshold.
LEFT_OUT = ("loss", "f1", "token_f1", "token_iou", "iou_f1", "tau_leave_one_out")
METRICS = tuple(
    name
    for score in SCORES.values()
    if score.tables and not score.per_k and score.name not in LEFT_OUT
    for name in (
        [f"test_{score.name}", f"validation_{score.name}"]
        if score.by_split
        else [score.name, *(f"{null}_{score.name}" for null in score.stronger_nulls)]
    )
)


def ablation_hatexplain(seeds: int = 3, epochs: int = EPOCHS, ratio: float = QK_RATIO) -> Comparison:
    """The arms; those with a multiplier use ``ratio``, query-key alone also `RATIOS`.

    >>> list(ablation_hatexplain().arms)[:3]
    ['equal rates', 'QK ×3', 'QK ×10']
    """
    base = TrainConfig("hatexplain", epochs=epochs, schedule="constant", evaluate_at_fall=EVALUATE_AT_FALL)
    faster = base.replace(qk_ratio=ratio)
    arms = {EQUAL: base}
    arms |= {qk_arm(each): base.replace(qk_ratio=each) for each in sorted({*RATIOS, ratio})}
    times = f"×{ratio:g}"
    arms |= {
        f"Q only {times}": faster.replace(faster=QUERIES),
        f"K only {times}": faster.replace(faster=KEYS),
        f"embedding {times}": faster.replace(faster=EMBEDDING),
        f"QK and embedding {times}": faster.replace(faster=QUERIES + KEYS + EMBEDDING),
        f"everything {times}": base.replace(lr=base.optimisation.lr * ratio),
        f"OV ÷{ratio:g}": base.replace(ov_ratio=1 / ratio, epochs=SLOWER * epochs),
        f"W_Q ×{ratio:g}, W_K ÷{ratio:g} at the start": base.replace(qk_imbalance=ratio),
        "gradients of QK and OV normalised": base.replace(gradient_norm=1.0),
        "MLP frozen": base.replace(frozen=("*.mlp.*",)),
        f"QK {times}, MLP frozen": faster.replace(frozen=("*.mlp.*",)),
        f"QK {times}, coupled decay": faster.replace(decay="coupled"),
        f"QK {times}, decay {STRONG_DECAY}": faster.replace(weight_decay=STRONG_DECAY),
        f"QK {times}, decay {STRONG_DECAY} coupled": faster.replace(
            weight_decay=STRONG_DECAY, decay="coupled"
        ),
    }
    title = "HateXplain, one layer: which change carries the effect"
    chosen = tuple(range(FIRST_SEED, FIRST_SEED + seeds))
    return Comparison("ablation-hatexplain", title, "paper", arms, chosen)


def qk_arm(ratio: float) -> str:
    """The name of the arm in which the query-key circuit alone is ``ratio`` times faster."""
    return f"QK ×{ratio:g}"


def summarize_ablation(comparison: Comparison, results: Results) -> dict[str, Any]:
    """Every arm at the end of training and at equal loss, as plain JSON data.

    ``arms`` maps an arm to ``end`` (metrics as ``{mean, half_width, n}``), ``diverged`` seeds and what its
    configuration changes; ``matched`` is what `matched_loss` returns, differences against equal rates;
    ``corrected`` has the p-values of the differences in attention at its lowest loss, by Holm.
    """
    histories: dict[tuple[Any, Any], Sequence[Mapping[str, Any]]] = {
        cell: [] if result.diverged else result.history for cell, result in results.items()
    }
    # What uniform attention scores is the same number in every cell, at every evaluation.
    last = next((history[-1] for history in histories.values() if history), {})
    matched = matched_loss(histories, METRICS)
    lowest = matched[0]["difference"] if matched else {}
    return plain(
        {
            "experiment": comparison.name,
            "protocol": comparison.protocol,
            "seeds": list(comparison.seeds),
            "epochs": comparison.arms[EQUAL].optimisation.epochs,
            "null": {name: last.get(f"null_{name}") for name in UNIFORM},
            "arms": {arm: _arm(comparison, results, arm) for arm in comparison.arms},
            "matched": matched,
            "corrected": holm({arm: found["mrta"] for arm, found in lowest.items()}),
        }
    )


def _arm(comparison: Comparison, results: Results, arm: str) -> dict[str, Any]:
    own = [results[arm, seed] for seed in comparison.seeds]
    ends = [{} if result.diverged else moments(result.to_json())[END] for result in own]
    return {
        "end": {
            name: interval(end.get(name) for end in ends) for name in ("loss", "train_accuracy", *METRICS)
        },
        "diverged": [result.seed for result in own if result.diverged],
    }


LABELS = {"arm": "arm", "p": "p, corrected"} | {
    name: title_of(name)
    for name in ("test_accuracy", "mrta", "ac", "acmc", "aopc_sufficiency", "aopc_comprehensiveness")
}
KIND_COLORS = {"QK alone": COLORS[1], "QK, and more": COLORS[4], "without faster QK": COLORS[0]}
LEAST_SPAN = 0.1
# From the left edge of a name to its point.
LEADER: dict[str, Any] = {
    "arrowstyle": "-",
    "color": "0.75",
    "linewidth": 0.6,
    "relpos": (0, 0.5),
    "shrinkA": 0,
    "shrinkB": 3,
}
Summary = Mapping[str, Any]


def save_ablation(
    summary: Summary, out: Path, *, title: str, on: str = "Test split"
) -> dict[str, dict[str, str]]:
    """Write the table and the figure of what :func:`summarize_ablation` found ``on`` data; returns paths."""
    name, setting = summary["experiment"], describe(summary)
    columns = [{"key": key, "label": key} for key in ("arm", "at", "loss")] + [
        {"key": key, "label": title_of(key)} for key in METRICS
    ]
    columns += [
        {"key": "difference", "label": "MRTA, minus equal rates"},
        {"key": "p", "label": "p, corrected (Holm)"},
    ]
    caption = (
        f"{on}, mean and 95% interval over seeds; at equal loss where the training loss first falls "
        f"to the level, and at the end of training. {setting}."
    )
    table = save_table(out, name, title=title, caption=caption, columns=columns, rows=ablation_rows(summary))
    return {"table": table, "figure": _save_figure(summary, out, name, title, setting)}


def describe(summary: Summary) -> str:
    """What was run, in a few words."""
    seeds = len(summary["seeds"])
    return (
        f"{summary['experiment']}: {len(summary['arms'])} arms, {summary['epochs']} epochs at a constant "
        f"rate, {seeds} seed{'s' if seeds > 1 else ''}"
    )


def ablation_rows(summary: Summary) -> list[dict[str, Any]]:
    """One row for every arm at every loss level, and at the end."""
    rows = [
        {"arm": arm, "at": "equal loss", "loss": level["loss"], **metrics}
        | {"difference": level["difference"].get(arm, {}).get("mrta")}
        | {"p": summary["corrected"].get(arm) if level is summary["matched"][0] else None}
        for level in summary["matched"]
        for arm, metrics in level["arms"].items()
    ]
    for arm, entry in summary["arms"].items():
        ends = entry["end"]
        rows.append({"arm": arm, "at": "end", "loss": ends["loss"]} | {name: ends[name] for name in METRICS})
    return rows


def _save_figure(summary: Summary, out: Path, name: str, title: str, setting: str) -> dict[str, str]:
    level = summary["matched"][0] if summary["matched"] else {"loss": None, "arms": {}}
    points = [
        {"arm": arm, "kind": kind_of(arm), "loss": level["loss"]}
        | {key: mean_of(metrics[key]) for key in ("mrta", "test_accuracy")}
        | {f"{key}_half_width": metrics[key]["half_width"] for key in ("mrta", "test_accuracy")}
        for arm, metrics in level["arms"].items()
    ]
    with plotting() as plt:
        figure, axis = plt.subplots(figsize=(7.4, 5.0))
        _draw(axis, points, summary["null"]["mrta"])
        return save_figure(
            figure,
            out,
            name,
            title=title,
            caption=f"Every arm where its training loss first falls to {level['loss']:.3f}, mean over seeds; "
            f"intervals are in the table. {setting}."
            if level["loss"]
            else f"No loss is reached by all arms. {setting}.",
            rows=points,
            see="Each dot is one change, at the same training loss: further right is more attention on the"
            " relevant words, higher is better accuracy.",
        )


def kind_of(arm: str) -> str:
    """How an arm is drawn.

    >>> kind_of("QK ×30"), kind_of("QK ×30, MLP frozen"), kind_of("OV ÷30")
    ('QK alone', 'QK, and more', 'without faster QK')
    """
    if arm == EQUAL or (arm.startswith("QK ×") and "," not in arm):
        return "QK alone"
    return "QK, and more" if arm.startswith("QK ") else "without faster QK"


def _draw(axis: Any, points: list[dict[str, Any]], null: float | None) -> None:
    for kind, color in KIND_COLORS.items():
        own = [point for point in points if point["kind"] == kind]
        line = "-" if kind == "QK alone" else "none"
        axis.plot(
            [point["mrta"] for point in own],
            [point["test_accuracy"] for point in own],
            color=color,
            marker="o",
            linestyle=line,
            linewidth=1,
            label=kind,
        )
    if null is not None:
        axis.axvline(null, color="0.4", linestyle="--", linewidth=1, label="uniform attention")
    at = f", at training loss {points[0]['loss']:.3f}" if points else ""
    axis.set(xlabel=f"attention on relevant tokens (MRTA){at}", ylabel="test accuracy")
    axis.legend(loc="lower center", ncols=4, bbox_to_anchor=(0.5, 1.0))
    # Never so narrow that noise between seeds looks like an effect.
    low, high = axis.get_ylim()
    more = max(0.0, LEAST_SPAN - (high - low)) / 2
    axis.set_ylim(low - more, high + more)
    _label_points(axis, points)


def _label_points(axis: Any, points: list[dict[str, Any]]) -> None:
    """Names in a column beside each of the two crowds that the widest gap in mass tells apart."""
    low, high = axis.get_ylim()
    left, right = axis.get_xlim()
    step = (high - low) / 26
    ordered = sorted(points, key=lambda point: point["mrta"])
    gaps = [after["mrta"] - before["mrta"] for before, after in pairwise(ordered)]
    middle = gaps.index(max(gaps)) + 1 if gaps else len(ordered)
    for crowd in filter(None, (ordered[:middle], ordered[middle:])):
        column = crowd[-1]["mrta"] + 0.05 * (right - left)
        crowd.sort(key=lambda point: -point["test_accuracy"])
        heights = _spread([point["test_accuracy"] for point in crowd], step)
        for point, height in zip(crowd, heights, strict=True):
            axis.annotate(
                point["arm"],
                (point["mrta"], point["test_accuracy"]),
                xytext=(column, height),
                va="center",
                fontsize=8.5,
                color=KIND_COLORS[point["kind"]],
                bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
                arrowprops=LEADER,
            )
    axis.set_xlim(left, right + 0.33 * (right - left))


def _spread(heights: Sequence[float], step: float) -> list[float]:
    """Falling ``heights`` moved apart to at least ``step``, each crowd around its own middle.

    >>> [round(height, 6) for height in _spread([0.5, 0.5, 0.1], 0.2)]
    [0.6, 0.4, 0.1]
    """
    # Groups of names that touch, as (sum of wished middles, how many); a group is `step` times as high.
    groups: list[tuple[float, int]] = []
    for height in heights:
        groups.append((height, 1))
        while len(groups) > 1:
            (upper, above), (lower, below) = groups[-2:]
            if upper / above - lower / below >= (above + below) / 2 * step:
                break
            groups[-2:] = [(upper + lower, above + below)]
    return [
        total / count + (count - 1) / 2 * step - place * step
        for total, count in groups
        for place in range(count)
    ]


def run_ablation(comparison: Comparison, runner: CellRunner) -> dict[str, Any]:
    """Run what is not done yet, write table and figure, and return what ``--json`` prints."""
    summary = summarize_ablation(comparison, run_arms(comparison, runner))
    return {**summary, "files": save_ablation(summary, runner.out, title=comparison.title)}


def run(runner: CellRunner, seeds: int, ratio: float, epochs: int | None) -> dict[str, Any]:
    return run_ablation(ablation_hatexplain(seeds, epochs or EPOCHS, ratio), runner)


def show(summary: dict[str, Any]) -> None:
    print(describe(summary))
    rows = [row for row in ablation_rows(summary) if row["at"] == "equal loss"]
    lowest = min((row["loss"] for row in rows), default=None)
    shown = [
        {LABELS[key]: value for key, value in row.items() if key in LABELS}
        for row in rows
        if row["loss"] == lowest
    ]
    print_table(shown, title=f"\nat equal training loss {lowest:.3f} (test split)" if shown else None)
    print(f"uniform attention: MRTA {summary['null']['mrta']:.3f}, AC {summary['null']['ac']:.1f}%")
    print_diverged(summary)
    print(f"\nfigure: {summary['files']['figure']['png']}")


EXPERIMENT = Experiment(
    name="ablation-hatexplain",
    chapter="Ablation",
    options=(
        seeds_option(3),
        Option(
            "ratio",
            float,
            "multiplier of all arms but QK alone, which has 3, 10, 30 and 100 as well",
            default=30.0,
        ),
        EPOCHS_OPTION,
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce ablation-hatexplain --out out",
        "fasterqk-lab reproduce ablation-hatexplain --seeds 1 --epochs 2       # a quick look",
        "fasterqk-lab reproduce ablation-hatexplain --ratio 10 --json",
    ),
    needs_data=True,
)
