"""What holds, in one picture: attention with equal rates and with a faster circuit, in every comparison.

Like the page of questions, which shows it, it is read from the tables in `docs/results`. A comparison that
is not published there is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasterqk.attention import Interval, title_of
from fasterqk.lab.experiments._evidence import Effect, Results, read_interval, stands_alone
from fasterqk.lab.report import COLORS, INK, plotting, save_figure

NAME = "questions"
TITLE = "What a faster query-key circuit does to attention"


@dataclass(frozen=True)
class Shown:
    """One comparison at equal training loss: both arms, their paired difference, and uniform attention."""

    group: str
    label: str
    baseline: float
    faster: float
    difference: Interval
    null: float


_LARGE, _TUNED, _DEEP = "one layer, a large ratio", "both arms tuned", "deeper or pretrained"
# Tables of two arms.
_PAIRS = {
    "table-hatexplain-paper": (_LARGE, "HateXplain, ratio 30"),
    "table-sva-whole-paper": (_LARGE, "agreement, whole sentences, ratio 100"),
    "table-sva-prefix-paper": (_LARGE, "agreement, up to the verb, ratio 100"),
    "table-agreement-paper": (_LARGE, "agreement, made-up sentences, ratio 30"),
    "tuned-hatexplain-paper": (_TUNED, "HateXplain, ratio 10"),
    "tuned-sva-whole-paper": (_TUNED, "agreement, whole sentences, ratio 10"),
    "tuned-sva-prefix-paper": (_TUNED, "agreement, up to the verb, ratio 30"),
    "tuned-squad-paper": (_TUNED, "SQuAD, 6 layers, ratio 3"),
    "table-layers-2-paper": (_DEEP, "HateXplain, 2 layers, ratio 30"),
    "table-layers-4-paper": (_DEEP, "HateXplain, 4 layers, ratio 30"),
}
# Tables of several arms: the score and the arm that are shown.
_ARMS = {
    "depth-hatexplain-2": (_DEEP, "HateXplain, 2 layers, ratio 3", "rollout, no residual", "QK ×3"),
    "depth-hatexplain-4": (_DEEP, "HateXplain, 4 layers, ratio 3", "rollout, no residual", "QK ×3"),
    "carried-kvqa": (_DEEP, "key-value questions, 2 layers, ratio 5", "rollout", "QK ×5"),
    "finetune-hatexplain-words": (_DEEP, "MiniLM, pretrained, ratio 20", "MRTA among words", "QK ×20"),
}
_LAST = {"table-squad-small-paper": (_DEEP, "SQuAD, 6 layers, ratio 20")}


def comparisons(results: Results) -> list[Shown]:
    """Every published comparison, from top to bottom."""
    return [*_pairs(results, _PAIRS), *_arms(results), *_pairs(results, _LAST)]


def _pairs(results: Results, tables: dict[str, tuple[str, str]]) -> Iterator[Shown]:
    mrta = title_of("mrta")
    for name, (group, label) in tables.items():
        if (results.folder / f"{name}-matched.csv").is_file():
            rows = [row for row in results.rows(f"{name}-matched") if row["metric"] == mrta]
            lowest = min(rows, key=lambda row: float(row["at loss"]))
            end = next(row for row in results.rows(f"{name}-end") if row["metric"] == mrta)
            arms = float(lowest["baseline"]), float(lowest["faster_qk"])
            null = float(end["null, baseline"])
            yield Shown(group, label, *arms, read_interval(lowest, "difference"), null)


def _arms(results: Results) -> Iterator[Shown]:
    for name, (group, label, score, arm) in _ARMS.items():
        if (results.folder / f"{name}.csv").is_file():
            rows = [row for row in results.rows(name) if row["score"] == score]
            first = min(rows, key=lambda row: float(row["loss"]))  # the arm with equal rates is the first
            own = next(row for row in rows if (row["arm"], row["loss"]) == (arm, first["loss"]))
            arms = float(first["value"]), float(own["value"])
            yield Shown(group, label, *arms, read_interval(own, "difference"), float(first["null"]))


RISES, FALLS, OPEN = "rises", "falls", "not told apart"
_STYLE = {RISES: COLORS[0], OPEN: "#737373", FALLS: COLORS[1]}


def outcomes(shown: Sequence[Shown]) -> list[str]:
    """What attention does in each comparison, corrected for their number (Holm)."""
    effects = [Effect(each.label, each.difference, "more") for each in shown]
    names = {"supports": RISES, "against": FALLS}
    return [
        OPEN if alone else names.get(effect.standing, OPEN)
        for effect, alone in zip(effects, stands_alone(effects), strict=True)
    ]


def save_what_holds(shown: Sequence[Shown], out: Path) -> dict[str, str]:
    """Draw the comparisons, one line each; returns the paths of the figure."""
    places, found = _places(shown), outcomes(shown)
    with plotting() as plt:
        figure, axis = plt.subplots(figsize=(8.6, 1.2 + 0.29 * (max(places) + 1)))
        for place, each, outcome in zip(places, shown, found, strict=True):
            _draw(axis, place, each, _STYLE[outcome])
        for group in dict.fromkeys(each.group for each in shown):
            first = next(place for place, each in zip(places, shown, strict=True) if each.group == group)
            axis.annotate(
                group,
                (0, first - 1),
                xytext=(-8, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=10,
                fontweight="bold",
            )
        axis.set_yticks(places, [each.label for each in shown])
        axis.tick_params(axis="y", length=0)
        axis.set_ylim(max(places) + 0.7, -1.6)
        axis.set_xlim(0, 1)
        axis.set_xlabel("attention on the relevant tokens, at equal training loss")
        axis.grid(axis="y", visible=False)
        _legend(axis)
        return save_figure(
            figure,
            out,
            NAME,
            title=TITLE,
            caption="At the right: the difference, paired by seed, with its 95% interval and the number of"
            " seeds. Relevant tokens and readings differ between data sets: compare the arms of a line, not"
            " the lines. Colours are corrected for the number of comparisons (Holm, 5%).",
            rows=[{**_row(each), "outcome": outcome} for each, outcome in zip(shown, found, strict=True)],
            see=f"Of {len(shown)} comparisons attention rises in {found.count(RISES)}, falls in"
            f" {found.count(FALLS)}, and is not told apart in {found.count(OPEN)}.",
        )


def _places(shown: Sequence[Shown]) -> list[int]:
    """The line of every comparison: one is left free before each group."""
    places, group = [], None
    for each in shown:
        places.append((places[-1] + 1 if places else 0) + (each.group != group and bool(places)))
        group = each.group
    return places


def _draw(axis: Any, place: int, each: Shown, colour: str) -> None:
    axis.plot([each.null] * 2, [place - 0.35, place + 0.35], color="#737373", linestyle=":", linewidth=1.4)
    axis.plot([each.baseline, each.faster], [place] * 2, color=colour, linewidth=2.2, alpha=0.55, zorder=2)
    axis.plot(each.baseline, place, "o", markerfacecolor="white", markeredgecolor=colour, zorder=3)
    axis.plot(each.faster, place, "o", color=colour, zorder=4)
    axis.annotate(
        difference_text(each),
        (1.02, place),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=9,
        color=colour,
    )


def difference_text(each: Shown) -> str:
    """The difference as the picture prints it."""
    value = each.difference
    return f"{value.mean:+.3f} ± {value.half_width:.3f}   n = {value.n}"


def _legend(axis: Any) -> None:
    from matplotlib.lines import Line2D

    def dot(colour: str, face: str) -> Line2D:
        return Line2D([], [], marker="o", linestyle="none", markeredgecolor=colour, markerfacecolor=face)

    marks = {
        "equal rates": dot(INK, "white"),
        "faster QK": dot(INK, INK),
        "uniform attention": Line2D([], [], color="#737373", linestyle=":"),
    } | {outcome: dot(colour, colour) for outcome, colour in _STYLE.items()}
    axis.figure.legend(list(marks.values()), list(marks), loc="outside lower center", ncols=6, fontsize=9)


def _row(each: Shown) -> dict[str, Any]:
    value = each.difference
    about = {"group": each.group, "comparison": each.label, "equal_rates": each.baseline}
    about |= {"faster_qk": each.faster, "null": each.null}
    return about | {"difference": value.mean, "half_width": value.half_width, "n": value.n}
