"""A measurement as HTML, for notebooks and for the page of ``fasterqk measure``.

It shows scores beside their nulls, their spread over the instances, and single instances with tokens shaded
by every importance, side by side. Everything from the data is escaped. The surrounding page may set the
colours (``--shade``, ``--against``), so that they fit light and dark themes.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.attention._importance import kendall_tau
from fasterqk.attention._scores import SCORES, STRONGER_NULLS, format_score

if TYPE_CHECKING:
    from fasterqk.attention._measurement import Measurement
    from fasterqk.attention._resampling import Bounds

Numbers = NDArray[np.float64]
SHOWN = 5
TOKENS_SHOWN = 200
# From this share on, the first token counts as having nearly all of a row.
_COLLAPSED = 0.9
_BINS = 20
_SHADE, _AGAINST = "var(--shade, 0, 114, 178)", "var(--against, 213, 94, 0)"
# The scores whose spread over instances is drawn, in this order, if they were measured.
SPREAD = ("mrta", "aopc_comprehensiveness", "aopc_sufficiency", "auprc", "tau_leave_one_out", "entropy")


def measurement_html(measurement: "Measurement", intervals: Mapping[str, "Bounds"] | None = None) -> str:
    """The whole measurement: scores, their spread, and the instances with most and least agreement."""
    parts = [
        f"<p>{counts_text(measurement)} {escape(first_token_note(measurement))}</p>",
        scores_html(measurement, intervals),
        rankings_html(measurement),
        f'<div style="{_GRID}">{spreads_html(measurement)}</div>',
    ]
    for title, numbers in extremes(measurement).items():
        parts.append(f"<h4>{escape(title)}</h4>{legend_html(measurement)}")
        parts += [instance_html(measurement, number) for number in numbers]
    return "".join(parts)


def first_token_note(measurement: "Measurement") -> str:
    """One sentence on how much of the aggregated attention is on the first token, and what follows."""
    if "first_token_share" not in measurement.columns:
        return ""
    share, null = (float(measurement.columns[f"{x}first_token_share"].mean()) for x in ("", "null_"))
    note = f"{share:.2%} of the aggregated attention is on the first token (uniform attention: {null:.2%})"
    how = measurement.settings["aggregation"]
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
    measured = measurement.summary(plausibility_sample=0).measured
    cut, lost = measured["n_truncated"], measured["n_relevance_cut"]
    truncated = f" {cut} were cut at the end" if cut else ""
    truncated += f", {lost} of them with all that was relevant" if lost else ""
    truncated += "." if cut else ""
    if not relevant:
        return (
            f"{count} instances. The data does not say which tokens are relevant, so attention on relevant"
            f" tokens and plausibility are left out.{truncated}"
        )
    return f"{count} instances, {count - relevant} of them without a relevant token.{truncated}"


# --- Tables ---


def scores_html(measurement: "Measurement", intervals: Mapping[str, "Bounds"] | None = None) -> str:
    """A table of every score with its interval over instances, if given, and its nulls."""
    rows = measurement.scores_table(intervals)
    labels = {"k": "k %", "low": "95% from", "high": "to", "null error": "standard error", **STRONGER_NULLS}
    return _table(rows, labels)


def rankings_html(measurement: "Measurement") -> str:
    """A table of the scores of every importance, one column each; empty for a single importance."""
    return _table(measurement.rankings_table(), {"k": "k %"}) if len(measurement.rankings) > 1 else ""


def _table(rows: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    keys = [key for key in keys if any(row.get(key) is not None for row in rows)]
    head = "".join(f"<th>{escape(labels.get(key, key))}</th>" for key in keys)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_cell(row, key))}</td>" for key in keys) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll" style="overflow-x:auto"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if key == "k" or not isinstance(value, float):
        return "" if value is None else str(value)
    return format_score(str(row["score"]).replace("aopc ", "aopc_"), value)


# --- How scores spread over the instances ---


def spreads_html(measurement: "Measurement") -> str:
    """One small histogram over instances per score, with marks for the mean and the null."""
    summary, values = measurement.summary(), measurement.instance_scores()
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
        lines.append(f"<g><title>{label} {format_score(name, value)}</title>{line}</g>")
    marks_text = ", ".join(f"{label} {format_score(name, value)}" for label, value in marks.items())
    ends = (
        f'<text x="6" y="{height - 4:g}">{format_score(name, low)}</text>'
        f'<text x="{width - 6:g}" y="{height - 4:g}" text-anchor="end">{format_score(name, high)}</text>'
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
        criterion, order = "agreement with the rationale (AUPRC)", values["auprc"]
    elif len(names) > 1:
        criterion = f"agreement of {names[0]} with {names[1]} (rank correlation)"
        pairs = zip(
            measurement.instances, *(measurement.rankings[x].importance for x in names[:2]), strict=True
        )
        taus = [
            kendall_tau(importance[x.rankable], other_importance[x.rankable])
            for x, importance, other_importance in pairs
        ]
        order = np.array([np.nan if tau is None else tau for tau in taus])
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
        ' <span style="text-decoration:underline">underlined</span>: relevant</p>'
    )


def instance_html(measurement: "Measurement", number: int) -> str:
    """One instance with tokens shaded by every importance, side by side; relevant tokens are underlined."""
    instance = measurement.instances[number]
    probability = float(measurement.columns["probability"][number])
    predicted = measurement.outcomes()[int(measurement.faithfulness.predicted[number])]
    label = "" if instance.label is None or not measurement.classes else measurement.classes[instance.label]
    answer = f"predicted {predicted}, label {label}, " if measurement.classes else ""
    panels = "".join(
        f'<div style="min-width:0"><div style="font-size:.8em;opacity:.75">{escape(name)}</div>'
        f'<div style="line-height:1.7;overflow-wrap:anywhere">{_tokens(measurement, number, name)}</div>'
        "</div>"
        for name in measurement.rankings
    )
    return (
        '<div style="margin:0 0 1.2em">'
        f"<div><b>{escape(instance.id)}</b> {escape(answer)}p = {probability:.3f}</div>"
        f'<div style="{_GRID}">{panels}</div></div>'
    )


_GRID = "display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,16rem),1fr));gap:.4rem 1.2rem"


def _tokens(measurement: "Measurement", number: int, name: str) -> str:
    instance = measurement.instances[number]
    pieces = instance.pieces or tuple(str(token) for token in instance.tokens)
    importance = measurement.rankings[name].importance[number]
    # Special tokens are never ranked, so they do not set the scale.
    ranked = np.abs(importance[instance.rankable])
    top = float(ranked.max()) if ranked.size and ranked.max() > 0 else 1.0
    words = [
        _token(piece, float(np.clip(value / top, -1, 1)) if may else 0.0, relevance, value)
        for piece, value, relevance, may in zip(
            pieces, importance, instance.relevance, instance.rankable, strict=True
        )
    ]
    rest = "" if len(words) <= TOKENS_SHOWN else f" and {len(words) - TOKENS_SHOWN} more"
    return " ".join(words[:TOKENS_SHOWN]) + rest


def _token(piece: str, share: float, relevance: float, value: float) -> str:
    line = ";text-decoration:underline" if relevance > 0 else ""
    return f'<span title="{value:.3g}" style="{_shade(share)}{line}">{escape(piece)}</span>'


def _shade(share: float) -> str:
    """The background for a share of the largest importance; another colour below zero."""
    colour = _SHADE if share >= 0 else _AGAINST
    return f"background:rgba({colour}, {abs(share) * 0.6:.2f});border-radius:3px;padding:0 .1em"
