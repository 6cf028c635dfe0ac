"""Paths and dotted names in the documents exist."""

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fasterqk"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_of_the_repository_exists(page):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"(?<![\w/.-])(?:src|tests|tools|benchmarks|examples)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_dotted_name_can_be_imported(page):
    blocks = re.findall(r"```(?:python)?\n.*?```|`[^`\n]+`", page.read_text(encoding="utf-8"), re.DOTALL)
    for name in re.findall(r"\bfasterqk(?:\.\w+)+", "\n".join(blocks)):
        javascript = re.search(r"\.[a-z]+[A-Z]", name)
        assert javascript or resolves(name), f"{page.name} names {name}"


def resolves(name):
    """Whether a dotted name is a module, or an attribute of one."""
    module, rest = import_module("fasterqk"), name.split(".")[1:]
    for place, part in enumerate(rest):
        if not hasattr(module, part):
            try:
                import_module(".".join(["fasterqk", *rest[: place + 1]]))
            except ModuleNotFoundError:
                return False
        module = getattr(module, part)
    return True


def test_the_map_of_the_tree_names_every_package_and_nothing_else():
    block = re.search(r"```\nsrc/fasterqk/\n(.*?)```", CONTRIBUTING, re.DOTALL).group(1)
    named, lab = set(), ""
    for indent, entry in re.findall(r"^( *)([\w./]+)", block, re.MULTILINE):
        if indent:
            lab = "" if len(indent) == 2 else "lab/"
            named.add(lab + entry)
    found = {
        f"{path.relative_to(SOURCE)}/" for path in SOURCE.rglob("*") if (path / "__init__.py").exists()
    } | {path.name for path in SOURCE.glob("[a-z]*.py")}
    assert named == found
