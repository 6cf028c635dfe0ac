"""One self-contained HTML page: styles, scripts and data inside, nothing from the network."""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from fasterqk.files import plain


def asset(name: str) -> str:
    """The text of a file in ``report/assets``."""
    return files("fasterqk.report").joinpath("assets", name).read_text(encoding="utf-8")


def page_html(
    *, title: str, body: str, styles: Sequence[str], scripts: Sequence[str], data: Any = None
) -> str:
    """The page; ``styles`` and ``scripts`` name assets, which are joined in order into one of each.

    ``data`` is what the scripts find as JSON in the element ``#data``. The page's security policy forbids
    every request and runs no script but its own, so even a text that slipped through unescaped is inert.
    """
    style = "\n".join(asset(name) for name in styles)
    code = "\n".join(asset(name) for name in scripts)
    script = f'(() => {{\n"use strict";\n{code}\n}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
</head>
<body>
{body}
<script type="application/json" id="data">{json_text(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def json_text(value: Any) -> str:
    """``value`` as JSON that may stand inside a script element: no ``<``, ``>`` or ``&`` in it.

    >>> json_text("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(plain(value), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
