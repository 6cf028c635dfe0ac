"""Hooks of the site (mkdocs.yml): formulas as MathML, published tables, docstrings as Markdown.

Browsers draw MathML themselves, so no page loads a script for its formulas. Pages link to tables of the
checkout (``../lab/paper/results/fig2.csv``); the site has them under ``data``.
"""

import re
from html import unescape
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "lab" / "paper"
FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', flags=re.DOTALL
)


def on_files(files: Files, config: Any) -> Files:
    """Add the published tables."""
    for path in sorted(PUBLISHED.rglob("*.csv")):
        name = f"data/{path.relative_to(PUBLISHED)}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to published tables to the site's own copy."""
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)+lab/paper/([^)]+\.csv)\)", rf"]({up}data/\1)", markdown)
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


def _mathml(match: re.Match[str]) -> str:
    return convert(unescape(match["tex"]), display="block" if match["tag"] == "div" else "inline")


EXAMPLE = re.compile(r"(?:^>>> .*\n(?:.+\n?)*\n?)+", flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    """Docstrings are written for ``help``: turn examples into code blocks and ``:func:`` into plain code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r":(?:func|class|mod|meth):(`[^`]+`)", r"\1", obj.docstring.value) + "\n"
            obj.docstring.value = EXAMPLE.sub(lambda part: f"```pycon\n{part[0].rstrip()}\n```\n\n", text)
