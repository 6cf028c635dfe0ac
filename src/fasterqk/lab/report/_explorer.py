"""The explorer: the theory on one page, computed in the browser by the closed form."""

from pathlib import Path

from fasterqk.files import write_text
from fasterqk.lab.report._html import asset, page_html

# Joined in this order into one script; each file holds one concept.
THEORY_SCRIPTS = ("special.js", "dynamics.js", "solve.js", "time.js")
CHART_SCRIPTS = ("format.js", "scale.js", "chart.js", "pointer.js", "clipboard.js")
EXPLORER_SCRIPTS = (
    "explorer-state.js",
    "explorer-controls.js",
    "explorer-curves.js",
    "explorer-charts.js",
    "explorer-words.js",
    "explorer-main.js",
)


def explorer_html() -> str:
    """The whole page as text; it needs no server and no network."""
    return page_html(
        title="How sharply will it attend? The fasterqk explorer",
        body=asset("explorer.html"),
        styles=("base.css", "explorer.css"),
        scripts=(*THEORY_SCRIPTS, *CHART_SCRIPTS, *EXPLORER_SCRIPTS),
    )


def write_explorer(path: Path) -> Path:
    """Write the page to ``path`` and return it.

    >>> write_explorer(Path("explorer.html"))     # doctest: +SKIP
    """
    return write_text(path, explorer_html())
