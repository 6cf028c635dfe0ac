"""Self-contained HTML pages, and the explorer, which is one: the theory, computed in the browser.

A page is a Jinja template in ``assets`` that extends ``page.html``. Autoescape is on: text from data is shown
as text. Only what is made here (styles, script, JSON) or percent-encoded (pictures) is marked as safe.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from fasterqk.errors import needs_extra
from fasterqk.files import plain, write_text

# Joined in this order into one script; each file holds one concept.
THEORY_SCRIPTS = ("special.js", "dynamics.js", "solve.js", "time.js")
CHART_SCRIPTS = ("format.js", "scale.js", "chart.js", "pointer.js", "clipboard.js")
_EXPLORER_PARTS = ("state", "controls", "curves", "charts", "words", "main")
EXPLORER_SCRIPTS = (*THEORY_SCRIPTS, *CHART_SCRIPTS, *(f"explorer-{part}.js" for part in _EXPLORER_PARTS))


def render_page(
    template: str, *, styles: Sequence[str], scripts: Sequence[str], data: Any = None, **values: Any
) -> str:
    """The page that ``template`` makes of ``values``.

    ``styles`` and ``scripts`` name assets, which are joined in order into one of each. Scripts find ``data``
    as JSON in the element ``#data``.
    """
    with needs_extra("lab"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup

    script = f'(() => {{\n"use strict";\n{_assets(scripts)}\n}})();\n'
    environment = Environment(
        loader=PackageLoader("fasterqk.lab.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(
        style=Markup(_assets(styles)),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii"),
        data=json_text(data),
        **values,
    )


def json_text(value: Any) -> str:
    r"""``value`` as JSON that may stand inside a script element, and is marked as safe there.

    >>> print(json_text("</script>"))
    "\u003c/script\u003e"
    """
    with needs_extra("lab"):
        from jinja2.utils import htmlsafe_json_dumps

    return htmlsafe_json_dumps(plain(value), separators=(",", ":"), allow_nan=False)


def _assets(names: Sequence[str]) -> str:
    folder = files("fasterqk.lab.report").joinpath("assets")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def explorer_html() -> str:
    """The explorer as text; it needs no server and no network."""
    return render_page("explorer.html", styles=("base.css", "explorer.css"), scripts=EXPLORER_SCRIPTS)


def write_explorer(path: Path) -> Path:
    """Write the explorer to ``path`` and return it.

    >>> write_explorer(Path("explorer.html"))
    PosixPath('explorer.html')
    """
    return write_text(path, explorer_html())
