"""A measurement as HTML, for notebooks and for the page of ``fasterqk measure``, and the files beside it.

It shows scores beside their nulls, their spread over the instances, and single instances with tokens shaded
by every importance, side by side. Everything from the data is escaped. The surrounding page may set the
colours (``--shade``, ``--against``), so that they fit light and dark themes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.attention.instances import RATIONALE_FROM, Instance
from fasterqk.attention.scores import SCORES, STRONGER_NULLS, format_score
from fasterqk.attention.statistics import Bounds
from fasterqk.files import write_csv, write_text
from fasterqk.pages import page_html

if TYPE_CHECKING:
    from fasterqk.attention.measurement import Measurement

Numbers = NDArray[np.float64]
PAGE = "measure.html"
SHOWN = 5
TOKENS_SHOWN = 200
# From this share on, the first token counts as having nearly all of a row.
_COLLAPSED = 0.9
_BINS = 20
_SHADE, _AGAINST = "var(--shade, 0, 114, 178)", "var(--against, 213, 94, 0)"
_GRID = "display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,16rem),1fr));gap:.4rem 1.2rem"
# The scores whose spread over instances is drawn, in this order, if they were measured.
SPREAD = ("mrta", "aopc_comprehensiveness", "aopc_sufficiency", "auprc", "tau_leave_one_out", "entropy")
_LABELS = {"k": "k %", "low": "95% from", "high": "to", "null error": "standard error", **STRONGER_NULLS}
_INTRODUCTION = (
    "Does the model look at the tokens that matter, is that why it predicts what it predicts, and would "
    "people have pointed at the same tokens? Every score stands beside its null, what a blind ranking or "
    "uniform attention gets."
)


@dataclass(frozen=True, eq=False)
class Measured:
    """One model measured on one data set, the paths of both, and the intervals of the scores."""

    measurement: "Measurement"
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
        suffix = "" if len(models) == 1 else f"-{place}"
        measurement = measured.measurement
        tables = {"scores": measurement.scores_table(measured.intervals)}
        if len(measurement.rankings) > 1:
            tables["importances"] = measurement.rankings_table()
        tables["instances"] = [
            {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
            for row in measurement.instances_table()
        ]
        for name, rows in tables.items():
            write_csv(out / "tables" / f"measure-{name}{suffix}.csv", rows)
        if figure := dtap_svg(measurement):
            write_text(out / "figures" / f"measure-dtap{suffix}.svg", figure + "\n")
    if difference:
        write_csv(out / "tables" / "measure-difference.csv", difference)
    return write_text(out / PAGE, _page_html(models, difference))


def _page_html(models: Mapping[str, Measured], difference: list[dict[str, Any]] | None) -> str:
    """The page as text: every score beside its null, its spread, and single instances with shaded tokens."""
    names = list(models)
    parts = [f'<header>\n<p class="kicker">fasterqk measure</p>\n<h1>{escape(" and ".join(names))}</h1>']
    parts.append(f"<p>{_INTRODUCTION}</p>\n</header>")
    if difference:
        parts.append(
            f"<section>\n<h2>{escape(names[1])} minus {escape(names[0])}</h2>\n"
            "<p>The same instances, paired. An interval that leaves out zero is marked.</p>\n"
            f"{_table(difference)}\n</section>"
        )
    for name, measured in models.items():
        heading = f'<h2 class="model">{escape(name)}</h2>\n' if len(models) > 1 else ""
        origin = f" Model <code>{escape(measured.model)}</code>, data <code>{escape(measured.data)}</code>."
        content = _sections(measured.measurement, measured.intervals, "h2", origin)
        parts.append(f"<section>\n{heading}{content}\n</section>")
    title = f"{' and '.join(names)}: attention and faithfulness"
    body = "<main>\n" + "\n".join(parts) + "\n</main>\n"
    return page_html(title, body, styles=("base.css", "measurement.css"))


def measurement_html(measurement: "Measurement", intervals: Mapping[str, Bounds] | None = None) -> str:
    """The whole measurement: scores, their spread, and the instances with most and least agreement."""
    return _sections(measurement, intervals, "h4")


def _sections(
    measurement: "Measurement", intervals: Mapping[str, Bounds] | None, level: str, origin: str = ""
) -> str:
    """What there is to show, each part under a heading of this ``level``; all functions escape their data."""
    summary = measurement.at_defaults
    sections = {"Every score beside its null": _table(measurement.scores_table(intervals))}
    if len(measurement.rankings) > 1:
        sections["Every importance of the tokens"] = _table(measurement.rankings_table())
    if spreads := spreads_html(measurement):
        spreads = f'<div class="spreads" style="{_GRID}">{spreads}</div>'
        sections["How the scores spread over the instances"] = spreads
    if figure := dtap_svg(measurement):
        sections["Attention on relevant tokens and probability of the answer"] = (
            f'<div class="dtap">{figure}</div>'
            f"<p>Percent of {summary.n - summary.n_without_relevance} instances with relevant tokens."
            f" AC {summary['ac']:.1f} (uniform {summary.null['ac']:.1f}), ACMC {summary['acmc']:.1f}.</p>"
        )
    for title, numbers in extremes(measurement).items():
        heading = title.capitalize() if title == "the first instances" else f"Instances with {title}"
        shown = [legend_html(measurement), *(instance_html(measurement, number) for number in numbers)]
        sections[heading] = "\n".join(shown)
    counts = escape(f"{counts_text(measurement)} {first_token_note(measurement)}")
    parts = [f'<p class="from">{counts}{origin}</p>']
    parts += [f'<p class="note"><b>Note</b>: {escape(note)}.</p>' for note in measurement.settings["notes"]]
    parts += [f"<{level}>{escape(title)}</{level}>\n{content}" for title, content in sections.items()]
    return "\n".join(parts)


def first_token_note(measurement: "Measurement") -> str:
    """How much of the aggregated attention is on special tokens and on the first, and what follows."""
    if "first_token_share" not in measurement.columns:
        return ""
    kinds = {"special": "special tokens", "first_token": "the first token"}
    shares = {
        kind: [float(measurement.columns[f"{x}{kind}_share"].mean()) for x in ("", "null_")] for kind in kinds
    }
    share, how = shares["first_token"][0], measurement.settings["aggregation"]
    texts = [
        f"{value:.2%} of the aggregated attention is on {kinds[kind]} (uniform attention: {null:.2%})"
        for kind, (value, null) in shares.items()
        if kind == "first_token" or value or null
    ]
    note = "; ".join(texts)
    if share < _COLLAPSED or how["without_first"]:
        return note
    if how["method"] == "rollout":
        return note + (
            "; over many causal layers rollout ends there whatever the model attends to:"
            " the mean over layers (mean) or attention without the first token say more"
        )
    return note + "; attention without the first token says more about the others"


def counts_text(measurement: "Measurement") -> str:
    """The number of instances, and what could not be measured on them."""
    count = len(measurement.instances)
    relevant = sum(instance.relevant for instance in measurement.instances)
    measured = measurement.at_defaults.measured
    cut, lost = measured["n_truncated"], measured["n_relevance_cut"]
    truncated = f" {cut} were cut to what the model reads" if cut else ""
    truncated += f", {lost} of them with all that was relevant" if lost else ""
    truncated += "." if cut else ""
    faint = sum(x.relevant and not x.rationale.any() for x in measurement.instances)
    if faint:
        truncated += (
            f" In {faint} no token has a relevance of one half: plausibility leaves them out, and their mass"
            " cannot reach the one half of AC."
        )
    if not relevant:
        return (
            f"{count} instances. The data does not say which tokens are relevant, so attention on relevant"
            f" tokens and plausibility are left out.{truncated}"
        )
    return f"{count} instances, {count - relevant} of them without a relevant token.{truncated}"


# --- Tables ---


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of a tidy table; intervals of differences that exclude zero are marked."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    keys = [key for key in keys if any(row.get(key) is not None for row in rows)]
    head = "".join(f"<th>{escape(_LABELS.get(key, key))}</th>" for key in keys)
    body = ""
    for row in rows:
        apart = "better" in row and (row["low"] > 0 or row["high"] < 0)
        cells = "".join(f"<td>{escape(_cell(row, key))}</td>" for key in keys)
        body += ('<tr class="apart">' if apart else "<tr>") + cells + "</tr>\n"
    return (
        f'<div class="scroll" style="overflow-x:auto"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def _cell(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if key == "k" or not isinstance(value, float):
        return "" if value is None else str(value)
    score = SCORES.get(str(row["score"]).replace("aopc ", "aopc_"))
    return f"{value:.4g}" if score is None else format_score(score, value)


# --- How scores spread over the instances ---


def spreads_html(measurement: "Measurement") -> str:
    """One small histogram over instances per score, with marks for the mean and the null."""
    summary, values = measurement.at_defaults, measurement.instance_scores()
    figures = []
    for name in SPREAD:
        defined = values.get(name, np.empty(0))
        defined = defined[~np.isnan(defined)]
        if defined.size:
            marks = {"mean": float(defined.mean()), "null": summary.null.get(name)}
            figures.append(_histogram(name, defined, marks))
    return "".join(figures)


def _histogram(name: str, values: Numbers, marks: Mapping[str, float | None]) -> str:
    score = SCORES[name]
    shown = [value for value in marks.values() if value is not None]
    low, high = min(values.min(), *shown), max(values.max(), *shown)
    if score.low == 0 and score.high == 1:
        low, high = 0.0, max(1.0, high)
    high = high if high > low else low + 1.0
    counts, edges = np.histogram(values, bins=_BINS, range=(low, high))
    width, height, base = 260.0, 92.0, 74.0
    x = (edges - low) / (high - low) * (width - 12) + 6
    bars = "".join(
        f'<rect x="{start:.1f}" y="{base - 60 * count / counts.max():.1f}" width="{stop - start - 0.6:.1f}"'
        f' height="{60 * count / counts.max():.1f}"/>'
        for start, stop, count in zip(x[:-1], x[1:], counts, strict=True)
        if count
    )
    lines = []
    for label, value in marks.items():
        if value is None:
            continue
        place = (value - low) / (high - low) * (width - 12) + 6
        dash = ' stroke-dasharray="4 3"' if label == "null" else ""
        line = f'<line x1="{place:.1f}" x2="{place:.1f}" y1="6" y2="{base:g}" stroke="currentColor"{dash}/>'
        lines.append(f"<g><title>{label} {format_score(score, value)}</title>{line}</g>")
    marks_text = ", ".join(f"{label} {format_score(score, value)}" for label, value in marks.items())
    ends = (
        f'<text x="6" y="{height - 4:g}">{format_score(score, low)}</text>'
        f'<text x="{width - 6:g}" y="{height - 4:g}" text-anchor="end">{format_score(score, high)}</text>'
    )
    drawing = (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="100%" role="img" font-size="11"'
        f' fill="currentColor" aria-label="{escape(score.title)}: {marks_text}">'
        f'<g fill="rgba({_SHADE}, .55)">{bars}</g>'
        f'<line x1="6" x2="{width - 6:g}" y1="{base:g}" y2="{base:g}" stroke="currentColor" opacity=".4"/>'
        f"{''.join(lines)}{ends}</svg>"
    )
    caption = (
        f"<b>{escape(score.title)}</b><br>{marks_text} (dashed)"
        if marks["null"] is not None
        else (f"<b>{escape(score.title)}</b><br>{marks_text}")
    )
    size = 'style="margin:0;font-size:.85em;line-height:1.4"'
    return f"<figure {size}>{drawing}<figcaption>{caption}</figcaption></figure>"


# --- Single instances ---


def extremes(measurement: "Measurement", count: int = SHOWN) -> dict[str, list[int]]:
    """The instances with most and with least agreement, by a title that says with what.

    Agreement is with people's rationales if there are any, else between the first two importances. Without
    either, the instances are those whose prediction depends most and least on the top tokens.
    """
    values = measurement.instance_ranking_scores()
    names = list(measurement.rankings)
    if "auprc" in values:
        # Every ranking agrees with a rationale of all tokens.
        everything = [x.rationale.all() for x in measurement.instances]
        criterion = "agreement with the rationale (AUPRC)"
        order = np.where(everything, np.nan, values["auprc"])
    elif len(names) > 1:
        criterion = f"agreement of {names[0]} with {names[1]} (rank correlation)"
        order = measurement.rank_correlations(*(measurement.rankings[name] for name in names[:2]))
    elif "aopc_comprehensiveness" in values:
        criterion, order = "comprehensiveness", values["aopc_comprehensiveness"]
    else:
        return {"the first instances": list(range(min(count, len(measurement.instances))))}
    defined = np.flatnonzero(~np.isnan(order))
    ranked = defined[np.argsort(-order[defined], kind="stable")].tolist()
    most = ranked[: min(count, -(-len(ranked) // 2))]
    least = [number for number in reversed(ranked) if number not in most][:count]
    return {f"most {criterion}": most, f"least {criterion}": least} if least else {f"most {criterion}": most}


def legend_html(measurement: "Measurement") -> str:
    """The legend of shades and underlines."""
    signed = any(
        (importance < 0).any()
        for ranking in measurement.rankings.values()
        for importance in ranking.importance
    )
    against = f', <span style="{_shade(-0.6)}">against it</span>' if signed else ""
    return (
        f'<p style="font-size:.85em"><span style="{_shade(0.6)}">shaded</span>: important{against};'
        ' <span style="text-decoration:underline">underlined</span>: relevant from one half on</p>'
    )


def instance_html(measurement: "Measurement", number: int) -> str:
    """One instance with tokens shaded by every importance, side by side; its rationale is underlined."""
    instance = measurement.instances[number]
    whole, label = measurement.faithfulness.whole[number], instance.label
    answer = f"p = {float(measurement.columns['probability'][number]):.3f}"
    if measurement.classes and label is not None:
        predicted = int(whole.argmax())
        wrong = f"; label {measurement.classes[label]}, p = {whole[label]:.3f}"
        answer = f"predicted {measurement.classes[predicted]}, p = {whole[predicted]:.3f}"
        answer += " (right)" if predicted == label else wrong
    panels = "".join(
        f'<div style="min-width:0"><div style="font-size:.8em;opacity:.75">{escape(name)}</div>'
        f'<div style="line-height:1.7;overflow-wrap:anywhere">{_tokens(measurement, number, name)}</div>'
        "</div>"
        for name in measurement.rankings
    )
    return (
        '<div style="margin:0 0 1.2em">'
        f"<div><b>{escape(instance.id)}</b> {escape(answer)}</div>"
        f'<div style="{_GRID}">{panels}</div></div>'
    )


def _tokens(measurement: "Measurement", number: int, name: str) -> str:
    instance = measurement.instances[number]
    importance = measurement.rankings[name].importance[number]
    # Special tokens are never ranked, so they do not set the scale.
    ranked = np.abs(importance[instance.rankable])
    top = float(ranked.max()) if ranked.size and ranked.max() > 0 else 1.0
    words = [
        _token(piece, float(np.clip(value / top, -1, 1)) if may else 0.0, relevance, value)
        for piece, value, relevance, may in zip(
            _texts(instance), importance, instance.relevance, instance.rankable, strict=True
        )
    ]
    rest = "" if len(words) <= TOKENS_SHOWN else f" and {len(words) - TOKENS_SHOWN} more"
    return " ".join(words[:TOKENS_SHOWN]) + rest


def _texts(instance: Instance) -> Sequence[str]:
    """The tokens as they stand in the text; special tokens as the model has them."""
    if instance.places is None:
        return instance.texts_of_tokens
    places = zip(instance.places.tolist(), instance.texts_of_tokens, strict=True)
    return [
        instance.texts[part][start:end].strip() or piece if part >= 0 else piece
        for (part, start, end), piece in places
    ]


def _token(piece: str, share: float, relevance: float, value: float) -> str:
    line = ";text-decoration:underline" if relevance >= RATIONALE_FROM else ""
    return f'<span title="{value:.3g}" style="{_shade(share)}{line}">{escape(piece)}</span>'


def _shade(share: float) -> str:
    """The background for a share of the largest importance; another colour below zero."""
    colour = _SHADE if share >= 0 else _AGAINST
    return f"background:rgba({colour}, {abs(share) * 0.6:.2f});border-radius:3px;padding:0 .1em"


# --- The DTAP heat map ---

_CELL, _LEFT, _TOP = 52, 60, 8


def dtap_svg(measurement: "Measurement") -> str:
    """The DTAP table as an SVG figure: attention to the right, probability upwards, darker for more.

    ``dtap[i][j]`` is the percentage of instances in probability row i and mass column j. All cells are drawn
    equally large, whatever their edges. The figure is empty if no token is relevant.
    """
    summary = measurement.at_defaults
    if summary.dtap is None or summary.dtap_edges is None:
        return ""
    cells, edges = np.asarray(summary.dtap, dtype=float), summary.dtap_edges
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
