"""The files of `fasterqk measure --out`: tables of scores and instances, the DTAP figure, and a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fasterqk.attention._measurement import Measurement
from fasterqk.attention._resampling import Bounds
from fasterqk.attention._scores import STRONGER_NULLS
from fasterqk.attention._shown import (
    counts_text,
    extremes,
    first_token_note,
    instance_html,
    legend_html,
    rankings_html,
    scores_html,
    spreads_html,
)
from fasterqk.files import write_csv, write_text
from fasterqk.pages import page_html

PAGE = "measure.html"
_LABELS = {
    "k": "k %",
    "low": "95% from",
    "high": "to",
    "null": "uniform or random",
    "null error": "standard error of random",
    **STRONGER_NULLS,
}
_INTRODUCTION = (
    "Does the model look at the tokens that matter, is that why it predicts what it predicts, and would "
    "people have pointed at the same tokens? Every score stands beside its null, what a blind ranking or "
    "uniform attention gets."
)


@dataclass(frozen=True, eq=False)
class Measured:
    """One model measured on one data set, the paths of both, and the intervals of the scores."""

    measurement: Measurement
    model: str
    data: str
    intervals: Mapping[str, Bounds] | None = None


def save_measured(
    out: Path, models: Mapping[str, Measured], difference: list[dict[str, Any]] | None = None
) -> Path:
    """Write all tables and figures and the page of one or two models into ``out``; returns the page's path.

    ``models`` maps a model's name to its measurement; ``difference`` has one row per score with the second
    model minus the first. The files of two models are numbered in their order.
    """
    for place, measured in enumerate(models.values(), 1):
        _save_model(out, "" if len(models) == 1 else f"-{place}", measured)
    if difference:
        write_csv(out / "tables" / "measure-difference.csv", difference)
    return write_text(out / PAGE, measured_html(models, difference))


def _save_model(out: Path, suffix: str, measured: Measured) -> None:
    measurement = measured.measurement
    summary = measurement.summary()
    tables = {"scores": measurement.scores_table(measured.intervals)}
    if len(measurement.rankings) > 1:
        tables["importances"] = measurement.rankings_table()
    tables["instances"] = measurement.instances_table()
    for name, rows in tables.items():
        write_csv(out / "tables" / f"measure-{name}{suffix}.csv", rows)
    if summary.dtap is not None and summary.dtap_edges is not None:
        write_text(
            out / "figures" / f"measure-dtap{suffix}.svg", dtap_svg(summary.dtap, summary.dtap_edges) + "\n"
        )


# --- The page ---


def measured_html(models: Mapping[str, Measured], difference: list[dict[str, Any]] | None = None) -> str:
    """The page as text: every score beside its null, its spread, and single instances with shaded tokens."""
    names = list(models)
    heading = escape(" and ".join(names))
    sections = [_section(name, measured, len(models) > 1) for name, measured in models.items()]
    if difference:
        sections.insert(0, _difference_section(names, difference))
    body = (
        f'<main>\n<header>\n<p class="kicker">fasterqk measure</p>\n<h1>{heading}</h1>\n'
        f"<p>{_INTRODUCTION}</p>\n</header>\n{''.join(sections)}</main>\n"
    )
    title = f"{' and '.join(names)}: attention and faithfulness"
    return page_html(title, body, styles=("base.css", "measurement.css"))


def _difference_section(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{escape(_LABELS.get(key, key))}</th>" for key in rows[0])
    lines = "\n".join(
        ('<tr class="apart">' if row["low"] > 0 or row["high"] < 0 else "<tr>")
        + "".join(f"<td>{escape(_cell(value))}</td>" for value in row.values())
        + "</tr>"
        for row in rows
    )
    return (
        f"<section>\n<h2>{escape(names[1])} minus {escape(names[0])}</h2>\n"
        "<p>The same instances, paired. An interval that leaves out zero is marked.</p>\n"
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n'
        "</table></div>\n</section>\n"
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _section(name: str, measured: Measured, several: bool) -> str:
    measurement, summary = measured.measurement, measured.measurement.summary()
    counts = escape(f"{counts_text(measurement)} {first_token_note(measurement)}")
    parts = [f'<h2 class="model">{escape(name)}</h2>'] if several else []
    parts.append(
        f'<p class="from">{counts} Model <code>{escape(measured.model)}</code>,'
        f" data <code>{escape(measured.data)}</code>.</p>"
    )
    # These functions return escaped HTML.
    parts += ["<h2>Every score beside its null</h2>", scores_html(measurement, measured.intervals)]
    if rankings := rankings_html(measurement):
        parts += ["<h2>Every importance of the tokens</h2>", rankings]
    if spreads := spreads_html(measurement):
        parts += [
            "<h2>How the scores spread over the instances</h2>",
            f'<div class="spreads">{spreads}</div>',
        ]
    if summary.dtap is not None and summary.dtap_edges is not None:
        parts += [
            "<h2>Attention on relevant tokens and probability of the answer</h2>",
            f'<div class="dtap">{dtap_svg(summary.dtap, summary.dtap_edges)}</div>',
            f"<p>Percent of {summary.n - summary.n_without_relevance} instances with relevant tokens."
            f" AC {summary['ac']:.1f} (uniform {summary.null['ac']:.1f}), ACMC {summary['acmc']:.1f}.</p>",
        ]
    for title, numbers in extremes(measurement).items():
        heading = title.capitalize() if title == "the first instances" else f"Instances with {title}"
        parts += [f"<h2>{escape(heading)}</h2>", legend_html(measurement)]
        parts += [instance_html(measurement, number) for number in numbers]
    return "<section>\n" + "\n".join(parts) + "\n</section>\n"


# --- The DTAP heat map ---

_CELL, _LEFT, _TOP = 52, 60, 8


def dtap_svg(dtap: ArrayLike, edges: Sequence[float]) -> str:
    """A DTAP table as an SVG figure: attention to the right, probability upwards, darker for more instances.

    ``dtap[i][j]`` is the percentage of instances in probability row i and mass column j. All cells are drawn
    equally large, whatever their edges.
    """
    cells = np.asarray(dtap, dtype=float)
    rows, columns = cells.shape
    width, height = _LEFT + columns * _CELL + 20, _TOP + rows * _CELL + 46
    right, bottom = _LEFT + columns * _CELL, _TOP + rows * _CELL
    drawn = []
    for (row, column), percent in np.ndenumerate(cells):
        x, y = _LEFT + column * _CELL, bottom - (row + 1) * _CELL
        # A square-root scale: most cells hold a few percent and would look alike on a linear scale.
        shade = (percent / 100) ** 0.5
        ink, text = "#ffffff" if shade > 0.6 else "currentColor", f"{percent:.1f}" if percent else "0"
        drawn.append(
            f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="#0072b2"'
            f' fill-opacity="{0.04 + 0.9 * shade:.3f}" stroke="currentColor" stroke-opacity=".15"/>'
            f'<text x="{x + _CELL / 2:g}" y="{y + _CELL / 2 + 4:g}" text-anchor="middle"'
            f' fill="{ink}">{text}</text>'
        )
    # The released edges end at 1.001 or 1.1 to close the last interval; they stand for 1.
    for place, edge in enumerate(f"{min(edge, 1):g}" for edge in edges):
        x, y = _LEFT + place * _CELL, bottom - place * _CELL
        drawn.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{edge}</text>')
        drawn.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{edge}</text>')
    middle = (_TOP + bottom) / 2
    drawn += [
        f'<text x="{(_LEFT + right) / 2:g}" y="{bottom + 36}" text-anchor="middle">'
        "attention on relevant tokens</text>",
        f'<text transform="translate(16 {middle:g}) rotate(-90)" text-anchor="middle">'
        "probability of the answer</text>",
    ]
    spoken = "; ".join(
        f"probability {low:g} to {min(high, 1):g}: {', '.join(f'{percent:.1f}' for percent in row)} percent"
        for (low, high), row in zip(pairwise(edges), cells, strict=True)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
        f' font-size="12" font-family="sans-serif" fill="currentColor" aria-label="DTAP, {spoken}">'
        f"{''.join(drawn)}</svg>"
    )
