"""What holds, in one picture: attention with equal rates and with a faster circuit, in every comparison.

Like the page of questions, which shows it, it is read from the tables in `docs/results`. A comparison that
is not published there is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasterqk.attention import Interval, holm
from fasterqk_lab.experiments._arms import BASELINE, FASTER
from fasterqk_lab.experiments._evidence import Results
from fasterqk_lab.experiments.ablation_hatexplain import EQUAL, qk_arm
from fasterqk_lab.figures import COLORS, INK, plotting, save_figure

NAME = "questions"
TITLE = "What a faster query-key circuit does to attention"


@dataclass(frozen=True)
class Line:
    """A comparison that the picture shows: its table, the faster arm and the baseline, and the score."""

    group: str
    label: str
    table: str
    arms: tuple[str, str] = (FASTER, BASELINE)
    score: str = "mrta"


_LARGE, _TUNED, _DEEP = "one layer, a large ratio", "each arm with rates of its own", "deeper or pretrained"
LINES = (
    Line(_LARGE, "HateXplain, ratio 30", "table-hatexplain-paper"),
    Line(_LARGE, "agreement, whole sentences, ratio 100", "table-sva-whole-paper"),
    Line(_LARGE, "agreement, up to the verb, ratio 100", "table-sva-prefix-paper"),
    Line(_LARGE, "agreement, made-up sentences, ratio 30", "table-agreement-paper"),
    Line(_TUNED, "HateXplain, tuned", "tuned-hatexplain-paper"),
    Line(_TUNED, "agreement, whole sentences, tuned", "tuned-sva-whole-paper"),
    Line(_TUNED, "agreement, up to the verb, tuned", "tuned-sva-prefix-paper"),
    Line(_TUNED, "SQuAD, small, 6 layers, tuned", "tuned-squad-paper"),
    Line(_DEEP, "HateXplain, 2 layers, ratio 30", "table-layers-2-paper"),
    Line(_DEEP, "HateXplain, 4 layers, ratio 30", "table-layers-4-paper"),
    Line(_DEEP, "HateXplain, 2 layers, ratio 3", "depth-hatexplain-2-paper", (qk_arm(3), EQUAL)),
    Line(_DEEP, "HateXplain, 4 layers, ratio 3", "depth-hatexplain-4-paper", (qk_arm(3), EQUAL)),
    Line(_DEEP, "SQuAD, small, 6 layers, ratio 20", "table-squad-small-paper"),
    Line(_DEEP, "key-value questions, 2 layers, ratio 5", "carried-kvqa-paper", (qk_arm(5), EQUAL)),
    Line(
        _DEEP, "MiniLM, among words, ratio 20", "finetune-hatexplain-paper", (qk_arm(20), EQUAL), "words_mrta"
    ),
)


@dataclass(frozen=True)
class Shown:
    """A line with its numbers at equal loss: both arms, their paired difference, and uniform attention."""

    line: Line
    baseline: float
    faster: float
    difference: Interval
    null: float


def comparisons(results: Results) -> list[Shown]:
    """Every comparison whose values of single seeds are published, from top to bottom."""
    return [_read(results, line) for line in LINES if results.has(line.table)]


def _read(results: Results, line: Line) -> Shown:
    both = results.paired(line.label, line.table, line.arms, "more", score=line.score)
    faster, baseline = (
        results.paired(line.label, line.table, arm, "more", score=line.score).value.mean for arm in line.arms
    )
    return Shown(line, baseline, faster, both.value, both.nulls[0])


RISES, FALLS, OPEN = "rises", "falls", "not told apart"
_STYLE = {RISES: COLORS[0], OPEN: "#737373", FALLS: COLORS[1]}


def outcomes(shown: Sequence[Shown]) -> list[str]:
    """What attention does in each comparison, corrected for their number (Holm)."""
    p_values = holm({place: each.difference for place, each in enumerate(shown)})
    signs = [RISES if each.difference.mean > 0 else FALLS for each in shown]
    return [sign if p_values[place] < 0.05 else OPEN for place, sign in enumerate(signs)]


def save_what_holds(shown: Sequence[Shown], out: Path) -> dict[str, str]:
    """Draw the comparisons, from top to bottom; returns the paths of the figure."""
    places, found = _places(shown), outcomes(shown)
    with plotting() as plt:
        figure, axis = plt.subplots(figsize=(8.6, 1.2 + 0.29 * (max(places) + 1)))
        for place, each, outcome in zip(places, shown, found, strict=True):
            _draw(axis, place, each, _STYLE[outcome])
        for group in dict.fromkeys(each.line.group for each in shown):
            first = next(place for place, each in zip(places, shown, strict=True) if each.line.group == group)
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
        axis.set_yticks(places, [each.line.label for each in shown])
        axis.tick_params(axis="y", length=0)
        axis.set_ylim(max(places) + 0.7, -1.6)
        axis.set_xlim(0, 1)
        axis.set_xlabel("attention on the relevant tokens, at equal training loss")
        axis.grid(axis="y", visible=False)
        _legend(axis, [outcome for outcome in _STYLE if outcome in found])
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
    places: list[int] = []
    group = None
    for each in shown:
        places.append((places[-1] + 1 if places else 0) + (each.line.group != group and bool(places)))
        group = each.line.group
    return places


def _draw(axis: Any, place: int, each: Shown, colour: str) -> None:
    axis.plot([each.null] * 2, [place - 0.35, place + 0.35], color="#737373", linestyle=":", linewidth=1.4)
    axis.plot([each.baseline, each.faster], [place] * 2, color=colour, linewidth=2.2, alpha=0.55, zorder=2)
    axis.plot(
        each.baseline, place, "o", markerfacecolor="white", markeredgecolor=colour, markersize=8, zorder=3
    )
    axis.plot(each.faster, place, "o", color=colour, markersize=5.5, zorder=4)
    axis.annotate(
        f"{each.difference.mean:+.3f} ± {each.difference.half_width:.3f}   n = {each.difference.n}",
        (1.02, place),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=9,
        color=colour,
    )


def _legend(axis: Any, outcomes: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    def dot(colour: str, face: str) -> Line2D:
        return Line2D([], [], marker="o", linestyle="none", markeredgecolor=colour, markerfacecolor=face)

    marks = {
        "equal rates": dot(INK, "white"),
        "faster QK": dot(INK, INK),
        "uniform attention": Line2D([], [], color="#737373", linestyle=":"),
    } | {outcome: dot(_STYLE[outcome], _STYLE[outcome]) for outcome in outcomes}
    axis.figure.legend(list(marks.values()), list(marks), loc="outside lower center", ncols=6, fontsize=9)


def _row(each: Shown) -> dict[str, Any]:
    value = each.difference
    about = {"group": each.line.group, "comparison": each.line.label, "equal_rates": each.baseline}
    about |= {"faster_qk": each.faster, "null": each.null}
    return about | {"difference": value.mean, "half_width": value.half_width, "n": value.n}
