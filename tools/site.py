"""Hooks of the site (mkdocs.yml): formulas as MathML, published tables, notebooks, docstrings as Markdown.

Browsers draw MathML themselves, so no page loads a script for its formulas. Pages link to files of the
checkout: tables (``../lab/paper/results/fig2.csv``) are under ``data`` in the site, notebooks
(``../examples/sharpen.ipynb``) are pages under ``notebooks``. Other files have no page, and lose their link.
The explorer of the theory runs inside its page.
"""

import json
import re
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "lab" / "paper"
EXPLORER = "theory-explorer.html"
FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', flags=re.DOTALL
)


def on_files(files: Files, config: Any) -> Files:
    """Add the notebooks and the published tables."""
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        parts = [part for cell in notebook["cells"] for part in _as_markdown(cell)]
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content="\n\n".join(parts)))
    for path in sorted(PUBLISHED.rglob("*.csv")):
        name = f"data/{path.relative_to(PUBLISHED)}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_post_build(config: Any) -> None:
    """Add the explorer."""
    sys.path.insert(0, str(ROOT / "src"))
    from fasterqk.pages import write_explorer

    write_explorer(Path(config.site_dir) / EXPLORER)


def _as_markdown(cell: dict[str, Any]) -> Iterator[str]:
    """A cell of a notebook: its text, or its code and what it shows."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source.replace("](../docs/", "](../")
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {"text/plain": output.get("text")})
        if "image/png" in data:
            yield f'<img class="output" alt="" src="data:image/png;base64,{data["image/png"]}">'
        elif "text/html" in data:
            # Blank lines would end the HTML in Markdown.
            lines = "".join(data["text/html"]).splitlines()
            yield '<div class="output">' + "\n".join(line for line in lines if line.strip()) + "</div>"
        else:
            yield "```text\n" + "".join(data["text/plain"]) + "\n```"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to notebooks and published tables to the site's own copies."""
    if page.parent is None or page.is_homepage:
        page.meta.setdefault("hide", ["navigation"])  # a section of one page
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)+examples/(\w+)\.ipynb\)", rf"]({up}notebooks/\1.md)", markdown)
    markdown = re.sub(r"\]\((?:\.\./)+lab/paper/([^)]+\.csv)\)", rf"]({up}data/\1)", markdown)
    if page.file.src_uri == "explorer.md":
        frame = f'<iframe class="explorer" title="explorer" src="{EXPLORER}"></iframe>'
        markdown = markdown.replace(
            "\n## Report", f"\n[Open it in a page of its own]({EXPLORER})\n\n{frame}\n\n## Report"
        )
    # Other files of the checkout have no page: keep the words, drop the link.
    return re.sub(r"\[([^\]\[]+)\]\((?:\.\./)+(?!data/)[^)]*\)(?<!\.md\))", _kept_inside(page), markdown)


def _kept_inside(page: Any) -> Any:
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        target = match[0].rsplit("](", 1)[1][:-1].split("#")[0]
        inside = (folder / target).resolve().is_relative_to(ROOT / "docs")
        return match[0] if inside else match[1]

    return replace


def on_page_content(html: str, **_: Any) -> str:
    """Formulas as MathML."""
    return FORMULA.sub(_mathml, html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that loads anything from the web: the site opens from disk, offline."""
    if loaded := re.search(
        r"""<(?:script|img|iframe|link rel="stylesheet")[^>]*?(?:src|href)="(https?:[^"]+)""", output
    ):
        raise PluginError(f"{page.file.src_uri} loads {loaded[1]}")
    return output


def _mathml(match: re.Match[str]) -> str:
    return convert(unescape(match["tex"]), display="block" if match["tag"] == "div" else "inline")


EXAMPLE = re.compile(r"(?:^>>> .*\n(?:.+\n?)*\n?)+", flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    """Docstrings are written for ``help``: turn examples into code blocks and ``:func:`` into plain code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r":(?:func|class|mod|meth):(`[^`]+`)", r"\1", obj.docstring.value) + "\n"
            obj.docstring.value = EXAMPLE.sub(lambda part: f"```pycon\n{part[0].rstrip()}\n```\n\n", text)
