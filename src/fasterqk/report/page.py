"""One self-contained HTML page from the figures of a results folder."""

import base64
import html
import json
from pathlib import Path

from fasterqk import __version__
from fasterqk.files import write_text

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
figure { margin: 2.5rem 0; }
img { width: 100%; background: #fff; border-radius: 4px; }
figcaption { font-size: .9rem; opacity: .85; }
@media print { figure { break-inside: avoid; } }
"""


def write_page(out: Path) -> Path:
    """Write ``out/report.html`` from ``out/figures`` and return its path."""
    figures = "\n".join(_figure(path) for path in sorted((out / "figures").glob("*.json")))
    text = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fasterqk report</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Faster query-key learning sharpens attention</h1>
<p>Made by fasterqk {html.escape(__version__)}. Each figure stands on the CSV file of the same name.</p>
{figures}
</body>
</html>
"""
    return write_text(out / "report.html", text)


def _figure(about_path: Path) -> str:
    about = json.loads(about_path.read_text(encoding="utf-8"))
    image = base64.b64encode(about_path.with_suffix(".svg").read_bytes()).decode("ascii")
    title, caption = html.escape(about["title"]), html.escape(about["caption"])
    return (
        f'<figure><h2>{title}</h2><img alt="{title}" src="data:image/svg+xml;base64,{image}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )
