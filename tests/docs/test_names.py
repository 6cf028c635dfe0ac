"""Paths and dotted names in the documents exist."""

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_of_the_repository_exists(page):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"(?<![\w/.-])(?:src|lab|tests|tools|examples)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_dotted_name_can_be_imported(page):
    blocks = re.findall(r"```(?:python)?\n.*?```|`[^`\n]+`", page.read_text(encoding="utf-8"), re.DOTALL)
    for name in re.findall(r"\bfasterqk(?:_lab)?(?:\.\w+)+", "\n".join(blocks)):
        javascript = re.search(r"\.[a-z]+[A-Z]", name)
        assert javascript or resolves(name), f"{page.name} names {name}"


def resolves(name):
    """Whether a dotted name is a module, or an attribute of one."""
    package, *rest = name.split(".")
    module = import_module(package)
    for place, part in enumerate(rest):
        if not hasattr(module, part):
            try:
                import_module(".".join([package, *rest[: place + 1]]))
            except ModuleNotFoundError:
                return False
        module = getattr(module, part)
    return True


@pytest.mark.parametrize("package", ["src/fasterqk", "lab/fasterqk_lab"])
def test_the_map_of_the_tree_names_every_package_and_nothing_else(package):
    block = re.search(rf"^{package}/\n((?:  .*\n)*)", CONTRIBUTING, re.MULTILINE).group(1)
    named = set(re.findall(r"^  ([\w./]+)", block, re.MULTILINE))
    source = ROOT / package
    entries = {f"{path.parent.name}/" for path in source.glob("*/__init__.py")}
    assert named == entries | {path.name for path in source.glob("[a-z]*.py")}
