"""Self-contained HTML pages, such as the explorer of the theory, which computes in the browser.

A page contains its style, script and data and needs no network. Its security policy allows no other script.
Callers escape the text of the body.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template
from typing import Any

from fasterqk.files import plain, write_text

# Joined in this order into one script; each file holds one concept.
THEORY_SCRIPTS = ("special.js", "dynamics.js", "solve.js", "time.js")
CHART_SCRIPTS = ("format.js", "scale.js", "chart.js", "pointer.js", "clipboard.js")
_EXPLORER_PARTS = ("state", "controls", "curves", "charts", "words", "main")
EXPLORER_SCRIPTS = (*THEORY_SCRIPTS, *CHART_SCRIPTS, *(f"explorer-{part}.js" for part in _EXPLORER_PARTS))

ASSETS = files("fasterqk.pages").joinpath("assets")
# Letters that could end a script element, with their JSON escapes.
_UNSAFE = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&'"}


def page_html(
    title: str,
    body: str,
    *,
    styles: Sequence[str],
    scripts: Sequence[str] = (),
    data: Any = None,
    folders: Sequence[Traversable] = (),
) -> str:
    """A complete HTML page.

    Arguments:
        title: The title, as text.
        body: The content, as HTML.
        styles: Names of style sheets in the assets of this package or in ``folders``, joined in order.
        scripts: Names of scripts, found and joined in the same way.
        data: Values for the scripts, as JSON in the element ``#data``.
        folders: Further folders of assets, searched first.

    Returns:
        The page as text.
    """
    script = f'(() => {{\n"use strict";\n{_joined(scripts, folders)}\n}})();\n'
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return Template(ASSETS.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        style=_joined(styles, folders),
        body=body,
        script=script,
        script_hash=base64.b64encode(digest).decode("ascii"),
        data=json_text(data),
    )


def json_text(value: Any) -> str:
    r"""``value`` as JSON that is safe inside a script element.

    >>> print(json_text("</script>"))
    "\u003c/script\u003e"
    """
    return json.dumps(plain(value), separators=(",", ":"), allow_nan=False).translate(_UNSAFE)


def _joined(names: Sequence[str], folders: Sequence[Traversable]) -> str:
    texts = []
    for name in names:
        paths = (folder.joinpath(name) for folder in (*folders, ASSETS))
        texts.append(next(path for path in paths if path.is_file()).read_text(encoding="utf-8"))
    return "\n".join(texts)


def explorer_html() -> str:
    """The explorer as text; it needs no server and no network."""
    return page_html(
        "How sharply will it attend? The fasterqk explorer",
        ASSETS.joinpath("explorer.html").read_text(encoding="utf-8"),
        styles=("base.css", "explorer.css"),
        scripts=EXPLORER_SCRIPTS,
    )


def write_explorer(path: Path) -> Path:
    """Write the explorer to ``path`` and return it.

    >>> write_explorer(Path("explorer.html"))
    PosixPath('explorer.html')
    """
    return write_text(path, explorer_html())
