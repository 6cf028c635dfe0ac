"""A measurement as HTML, for notebooks and for the page of ``fasterqk measure``, and the files beside it.

It shows scores beside their nulls, and single instances with tokens shaded by every importance, side by side.
Everything from the data is escaped. The surrounding page may set the colours (``--shade``, ``--against``), so
that they fit light and dark themes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fasterqk.attention.instances import RATIONALE_FROM, Instance
from fasterqk.attention.scores import SCORES, STRONGER_NULLS, Score, format_score
from fasterqk.attention.statistics import Bounds
from fasterqk.files import write_csv, write_text
from fasterqk.pages import page_html

if TYPE_CHECKING:
    from fasterqk.attention.measurement import Measurement

Numbers = NDArray[np.float64]
PAGE = "measure.html"
SHOWN = 5
TOKENS_SHOWN = 200
_SHADE, _AGAINST = "var(--shade, 0, 114, 178)", "var(--against, 213, 94, 0)"
_GRID = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,16rem),1fr));gap:.4rem 1.2rem"
_LABELS = {"k": "k %", "low": "95% from", "high": "to", "null error": "standard error", **STRONGER_NULLS}
_NULLS = {
    "null": "the same score of attention that is uniform over what each row may see, or of a random ranking",
    "sharp null": "the same score if all attention is on one random token",
    "permuted null": "the same score with the model's own weights randomly permuted over the tokens",
    "wins": "the share of random rankings that the ranking beats, text by text; ties count half",
    "95% from, to": "bootstrap interval over the instances; each holds for its own score, without correction"
    " for the number of scores",
    "n": "the instances that define the score",
}
_INTRODUCTION = (
    "Does the model look at the tokens that matter, is that why it predicts what it predicts, and would "
    "people have pointed at the same tokens? Every score stands beside its null, that of a blind ranking or "
    "of uniform attention. Intervals hold for single scores and are not corrected for their number."
)


@dataclass(frozen=True, eq=False)
class Measured:
    """One model measured on one data set, the paths of both, and the intervals of the scores."""

    measurement: "Measurement"
    model: str
    data: str
    intervals: Sequence[Mapping[str, Bounds] | None] = ()


def save_measured(
    out: Path, models: Mapping[str, Measured], difference: list[dict[str, Any]] | None = None
) -> Path:
    """Write all tables and figures and the page of one or two models into ``out``; returns the page's path.

    ``models`` maps a model's name to its measurement; ``difference`` has one row per score with the second
    model minus the first. The files of two models are numbered in their order.
    """
    for place, measured in enumerate(models.values(), 1):
        suffix = "" if len(models) == 1 else f"-{place}"
        instances = [
            {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
            for row in measured.measurement.instances_table()
        ]
        tables = measured.measurement.tables(measured.intervals) | {"instances": instances}
        for name, rows in tables.items():
            write_csv(out / "tables" / f"measure-{name}{suffix}.csv", rows)
    if difference:
        write_csv(out / "tables" / "measure-difference.csv", difference)
    return write_text(out / PAGE, _page_html(models, difference))


def _page_html(models: Mapping[str, Measured], difference: list[dict[str, Any]] | None) -> str:
    """The page as text: every score beside its null, and single instances with shaded tokens."""
    names = list(models)
    title = " and ".join(names)
    parts = [f'<header>\n<p class="kicker">fasterqk measure</p>\n<h1>{escape(title)}</h1>']
    parts.append(f"<p>{_INTRODUCTION}</p>\n</header>")
    if difference:
        parts.append(
            f"<section>\n<h2>{escape(names[1])} minus {escape(names[0])}</h2>\n"
            "<p>The same instances, paired. Intervals hold for one score each; a difference is called better"
            " or worse if it is not zero at 95% for all scores of the table together.</p>\n"
            f"{_table(difference)}\n{_both_html(models)}</section>"
        )
    for name, measured in models.items():
        heading = f'<h2 class="model">{escape(name)}</h2>\n' if len(models) > 1 else ""
        origin = f" Model <code>{escape(measured.model)}</code>, data <code>{escape(measured.data)}</code>."
        parts.append(f"<section>\n{heading}{_sections(measured, 'h2', origin)}\n</section>")
    body = "<main>\n" + "\n".join(parts) + "\n</main>\n"
    return page_html(f"{title}: attention and faithfulness", body, styles=("base.css", "measurement.css"))


def measurement_html(measurement: "Measurement", intervals: Mapping[str, Bounds] | None = None) -> str:
    """The whole measurement: its scores, and the instances with most and least agreement."""
    return _sections(Measured(measurement, "", "", [intervals]), "h4")


def _sections(measured: Measured, level: str, origin: str = "") -> str:
    """Tables and texts, each part under a heading of this ``level``; all functions escape their data."""
    measurement = measured.measurement
    tables = measurement.tables(measured.intervals)
    sections = {
        measurement.titles[name]: _table(rows, name in ("heads", "dtap")) for name, rows in tables.items()
    }
    sections[measurement.titles["scores"]] += _definitions(tables["scores"])
    for title, numbers in extremes(measurement).items():
        heading = title if title == "the first instances" else f"Instances with {title}"
        shown = [legend_html(measurement), *(instance_html(measurement, number) for number in numbers)]
        sections[heading] = "\n".join(shown)
    parts = [f'<p class="from">{escape(measurement.counts)}{origin}</p>']
    parts += [f'<p class="note"><b>Note</b>: {escape(note)}.</p>' for note in measurement.notes]
    for title, content in sections.items():
        parts.append(f"<{level}>{escape(title[0].upper() + title[1:])}</{level}>\n{content}")
    return "\n".join(parts)


# --- Tables ---


def _table(rows: Sequence[Mapping[str, Any]], shaded: bool = False) -> str:
    """Rows of a tidy table; differences with a verdict are marked, numbers of a map shaded by their size."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    keys = [key for key in keys if any(row.get(key) is not None for row in rows)]
    head = "".join(f"<th>{escape(_LABELS.get(key, key))}</th>" for key in keys)
    numbers = [x for row in rows for x in row.values() if shaded and isinstance(x, float)]
    largest = max(numbers, default=0) or 1
    body = ""
    for row in rows:
        cells = ""
        for key in keys:
            # A square-root scale: most cells of a map are small and would look alike on a linear scale.
            share = (row[key] / largest) ** 0.5 if shaded and isinstance(row.get(key), float) else 0.0
            cells += f'<td style="{_shade(share)}">' if share else "<td>"
            cells += escape(_cell(row, key)) + "</td>"
        body += ('<tr class="apart">' if row.get("verdict") else "<tr>") + cells + "</tr>\n"
    return (
        f'<div class="scroll" style="overflow-x:auto"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def _cell(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if key == "k" or not isinstance(value, float):
        return "" if value is None else str(value)
    score = _score(row)
    plain = f"{value:.3g}" if abs(value) >= 1 or not value else f"{value:.3f}"
    return plain if score is None else format_score(score, value)


def _score(row: Mapping[str, Any]) -> Score | None:
    return SCORES.get(str(row.get("score")).replace("aopc ", "aopc_").replace("wins ", "wins_"))


def _definitions(rows: Sequence[Mapping[str, Any]]) -> str:
    """The meaning of the scores of a table, folded."""
    scores = dict.fromkeys(score for row in rows if (score := _score(row)))
    terms = {
        score.title: score.description + (f"; {score.better} is better" if score.better else "")
        for score in scores
    }
    listed = "".join(
        f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in (terms | _NULLS).items()
    )
    return f"<details><summary>What these words mean</summary><dl>{listed}</dl></details>"


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
    panels = [_panel(measurement, number, name) for name in measurement.rankings]
    return _side_by_side(measurement.instances[number].id, _answer(measurement, number), panels)


def _both_html(models: Mapping[str, Measured]) -> str:
    """The texts on which two models differ most, under both of them side by side."""
    pair = {name: measured.measurement for name, measured in models.items()}
    first = next(iter(pair.values()))
    values = [measurement.instance_ranking_scores() for measurement in pair.values()]
    names = [name for name in ("auprc", "aopc_comprehensiveness") if all(name in x for x in values)]
    if not names:
        return ""
    score, (before, after) = SCORES[names[0]], (x[names[0]] for x in values)
    change = after - before
    defined = np.flatnonzero(~np.isnan(change))
    order = defined[np.argsort(-change[defined], kind="stable")].tolist()
    half = min(SHOWN, len(order) // 2)
    texts = []
    for number in [*order[:half], *order[len(order) - half :]]:
        panels = [
            _panel(x, number, next(iter(x.rankings)), f"{name}: {_answer(x, number)}")
            for name, x in pair.items()
        ]
        both = " and ".join(format_score(score, x[number]) for x in (before, after))
        texts.append(_side_by_side(first.instances[number].id, f"{score.title}: {both}", panels))
    return (
        "<h2>The same texts under both models</h2>\n<p>Those that gain and lose most in"
        f" {escape(score.title)}.</p>\n{legend_html(first)}\n" + "\n".join(texts)
    )


def _answer(measurement: "Measurement", number: int) -> str:
    """The model's answer, with the probabilities of its prediction and of the label."""
    whole, label = measurement.faithfulness.whole[number], measurement.instances[number].label
    answer = f"p = {float(measurement.columns['probability'][number]):.3f}"
    if measurement.classes and label is not None:
        predicted = int(whole.argmax())
        wrong = f"; label {measurement.classes[label]}, p = {whole[label]:.3f}"
        answer = f"predicted {measurement.classes[predicted]}, p = {whole[predicted]:.3f}"
        answer += " (right)" if predicted == label else wrong
    return answer


def _side_by_side(name: str, text: str, panels: Sequence[str]) -> str:
    return (
        f'<div style="margin:0 0 1.2em"><div><b>{escape(name)}</b> {escape(text)}</div>'
        f'<div style="{_GRID}">{"".join(panels)}</div></div>'
    )


def _panel(measurement: "Measurement", number: int, name: str, title: str | None = None) -> str:
    """The text shaded by one importance; how much of it special tokens have, which are never shaded."""
    instance, importance = measurement.instances[number], measurement.rankings[name].importance[number]
    sizes = np.abs(importance)
    special = float(sizes[~instance.rankable].sum() / (sizes.sum() or 1))
    share = f", {special:.0%} on special tokens" if special else ""
    # Special tokens are never ranked, so they do not set the scale.
    shares = np.clip(importance / (sizes[instance.rankable].max(initial=0) or 1), -1, 1) * instance.rankable
    words = ""
    tokens = zip(_written(instance), importance, shares, instance.relevance, strict=True)
    for (before, piece), value, shade, relevance in islice(tokens, TOKENS_SHOWN):
        line = ";text-decoration:underline" if relevance >= RATIONALE_FROM else ""
        words += (
            f'{escape(before)}<span title="{value:.3g}" style="{_shade(shade)}{line}">{escape(piece)}</span>'
        )
    rest = f" and {len(sizes) - TOKENS_SHOWN} more" if len(sizes) > TOKENS_SHOWN else ""
    return (
        '<div style="min-width:0"><div style="font-size:.8em;opacity:.75">'
        f"<span>{escape(title or name)}</span>{share}</div>"
        f'<div style="line-height:1.7;overflow-wrap:anywhere">{words}{rest}</div></div>'
    )


def _written(instance: Instance) -> list[tuple[str, str]]:
    """Each token as it is written in the text, after what stands between it and the token before.

    Special tokens are written as the model has them, with blanks around them; a token of white space alone,
    such as the end of a line, is written as an arrow.
    """
    if instance.places is None:
        return [(" ", piece) for piece in instance.texts_of_tokens]
    written, ends, gap, last = [], [0] * len(instance.texts), "", 0
    for (part, start, end), piece in zip(instance.places.tolist(), instance.texts_of_tokens, strict=True):
        if part < 0:
            written.append((" ", piece))
            ends[last], gap = max(end, ends[last]), " "  # it may stand in the text, as in a chat
            continue
        text, begin, last = instance.texts[part][:end], max(start, ends[part]), part
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        shown = text[begin:] or "↵" * (end > ends[part])
        written.append((gap + text[ends[part] : begin], shown))
        ends[part], gap = max(end, ends[part]), ""
    return written


def _shade(share: float) -> str:
    """The background for a share of the largest importance; another colour below zero."""
    colour = _SHADE if share >= 0 else _AGAINST
    return f"background:rgba({colour}, {abs(share) * 0.6:.2f});border-radius:3px;padding:0 .1em"
