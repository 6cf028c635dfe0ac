"""What `fasterqk measure --out` writes: tables, one row per instance, the DTAP picture, a page to look at."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasterqk.attention import (
    STRONGER_NULLS,
    Bounds,
    Measurement,
    counts_text,
    extremes,
    first_token_note,
    instance_html,
    legend_html,
    rankings_html,
    scores_html,
    spreads_html,
)
from fasterqk.errors import needs_extra
from fasterqk.files import write_csv, write_text
from fasterqk.lab.report._figure import save_dtap
from fasterqk.lab.report._html import render_page
from fasterqk.lab.report._records import save_table

PAGE = "measure.html"
_LABELS = {
    "k": "k %",
    "low": "95% from",
    "high": "to",
    "null": "uniform or random",
    "null error": "standard error of random",
    **STRONGER_NULLS,
}


@dataclass(frozen=True, eq=False)
class Measured:
    """One model on one data set: the measurement, where both lie, and the intervals of its scores."""

    measurement: Measurement
    model: str
    data: str
    intervals: Mapping[str, Bounds] | None = None


def save_measured(
    out: Path, models: Mapping[str, Measured], difference: list[dict[str, Any]] | None = None
) -> Path:
    """Write everything about one or two models into ``out``; returns the path of the page.

    ``models`` maps what a model is called to what was measured; ``difference`` has one row per score of how
    the second differs from the first. Of two models, the files of each are numbered in their order.
    """
    for place, (name, measured) in enumerate(models.items(), 1):
        _save_one(out, "" if len(models) == 1 else f"-{place}", name, measured)
    if difference:
        save_table(
            out,
            "measure-difference",
            title=" and ".join(models),
            caption="The second minus the first, paired by instance, with 95% bootstrap intervals.",
            columns=[{"key": key, "label": _LABELS.get(key, key), "digits": 4} for key in difference[0]],
            rows=difference,
        )
    return write_text(out / PAGE, measured_html(models, difference))


def _save_one(out: Path, suffix: str, name: str, measured: Measured) -> None:
    measurement = measured.measurement
    summary = measurement.summary()
    rows = measurement.scores_table(measured.intervals)
    nulls = ("null", "null error", *STRONGER_NULLS)
    columns: list[dict[str, Any]] = [{"key": "score", "label": "score"}, {"key": "k", "label": "k %"}]
    for key in list(rows[0])[2:]:
        source = {"source": "null"} if key in nulls else {}
        columns.append({"key": key, "label": _LABELS.get(key, key), "digits": 3, **source})
    caption = f"{counts_text(measurement)} Data {measured.data}, model {measured.model}."
    title = f"Attention and faithfulness: {name}"
    save_table(out, f"measure-scores{suffix}", title=title, caption=caption, columns=columns, rows=rows)
    if len(measurement.rankings) > 1:
        table = measurement.rankings_table()
        save_table(
            out,
            f"measure-importances{suffix}",
            title=f"Every importance of the tokens: {name}",
            caption="The same instances, with tokens ranked by each importance and by chance.",
            columns=[{"key": key, "label": _LABELS.get(key, key), "digits": 3} for key in table[0]],
            rows=table,
        )
    write_csv(out / "tables" / f"measure-instances{suffix}.csv", measurement.instances_table())
    if summary.dtap is None or summary.dtap_edges is None:
        return
    save_dtap(
        out,
        f"measure-dtap{suffix}",
        summary.dtap,
        summary.dtap_edges,
        title=f"Attention on relevant tokens and probability of the answer: {name}",
        caption=f"Percent of {summary.n - summary.n_without_relevance} instances with relevant tokens."
        f" AC {summary['ac']:.1f} (uniform {summary.null['ac']:.1f}), ACMC {summary['acmc']:.1f}.",
    )


def measured_html(models: Mapping[str, Measured], difference: list[dict[str, Any]] | None = None) -> str:
    """The page as text: every score beside its null, its spread, and single instances with shaded tokens."""
    with needs_extra("lab"):
        from markupsafe import Markup

    parts = []
    for name, measured in models.items():
        measurement = measured.measurement
        # What these functions return is escaped.
        parts.append(
            {
                "name": name,
                "model": measured.model,
                "data": measured.data,
                "counts": f"{counts_text(measurement)} {first_token_note(measurement)}",
                "scores": Markup(scores_html(measurement, measured.intervals)),
                "rankings": Markup(rankings_html(measurement)),
                "spreads": Markup(spreads_html(measurement)),
                "legend": Markup(legend_html(measurement)),
                "extremes": {
                    title: [Markup(instance_html(measurement, number)) for number in numbers]
                    for title, numbers in extremes(measurement).items()
                },
            }
        )
    return render_page(
        "measurement.html",
        styles=("base.css", "measurement.css"),
        scripts=(),
        models=parts,
        difference=difference,
        labels=_LABELS,
    )
