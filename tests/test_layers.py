"""The import graph: packages are layers that import only earlier ones; the library does not know the lab."""

import ast
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {"fasterqk": ROOT / "src" / "fasterqk", "fasterqk_lab": ROOT / "lab" / "fasterqk_lab"}

LIBRARY = ["errors", "files", "processor", "console", "pages", "theory", "trace", "labels", "optim"]
LIBRARY += ["stability", "attention", "huggingface"]
LAB = [
    "configs",
    "synthetic",
    "tasks",
    "models",
    "theory",
    "training",
    "runs",
    "compare",
    "figures",
    "page",
    "paper",
    "experiments",
    "benchmarks",
]
LAYERS = [f"fasterqk.{name}" for name in (*LIBRARY, "cli", "__main__")]
LAYERS += [f"fasterqk_lab.{name}" for name in (*LAB, "cli", "__main__")]


def name_of(path: Path) -> str:
    """``fasterqk_lab/runs/_store.py`` is ``fasterqk_lab.runs._store``; a package is named like its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_of(path): path for source in SOURCES.values() for path in sorted(source.rglob("*.py"))}


def layer(module: str) -> str:
    return ".".join(module.split(".")[:2])


@cache
def tree_of(path: Path) -> ast.Module:
    """The parsed source of a module, which nobody changes."""
    return ast.parse(path.read_text())


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported(path: Path, *, types: bool) -> set[str]:
    """The modules of both packages that a file imports, also in functions; with ``types`` also for types."""
    modules = set()
    body = [node for node in tree_of(path).body if types or not is_type_checking(node)]
    for node in (inner for statement in body for inner in ast.walk(statement)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            # `from fasterqk_lab import runs` names a module, `from fasterqk.files import plain` does not.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else str(node.module) for name in names]
        else:
            continue
        modules |= {name for name in names if name.split(".")[0] in SOURCES}
    return modules


@cache
def imported_names() -> dict[str, set[str]]:
    """Every name that each module imports from either package, with the module it comes from."""
    names: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom)]
        dotted = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
        names[module] = {name for name in dotted if name.split(".")[0] in SOURCES and name.count(".") > 1}
    return names


@cache
def imports(*, types: bool) -> dict[str, set[str]]:
    return {name: imported(path, types=types) - {name, *SOURCES} for name, path in MODULES.items()}


def test_a_layer_imports_only_earlier_ones() -> None:
    order = {name: place for place, name in enumerate(LAYERS)}
    wrong = [
        f"{module} imports {name}"
        for module, names in imports(types=True).items()
        for name in sorted(names)
        if module not in SOURCES and order[layer(name)] > order[layer(module)]
    ]
    assert wrong == []


def test_packages_use_public_names_of_others() -> None:
    """Also the lab and the command lines: a module or name that begins with ``_`` stays in its package."""
    wrong = {
        f"{module} imports {name}"
        for module, names in imported_names().items()
        for name in names
        if layer(name) != layer(module) and "._" in name.replace(".__", ".")
        # Until the lab's packages have public modules of their own.
        if not (module.startswith("fasterqk_lab.") and name.startswith("fasterqk_lab."))
    }
    assert wrong == set()


def test_the_library_does_not_mention_the_lab() -> None:
    for path in SOURCES["fasterqk"].rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            text = path.read_text(encoding="utf-8")
            assert "fasterqk_lab" not in text and "fasterqk-lab" not in text, path


def test_there_are_no_cycles() -> None:
    list(TopologicalSorter(imports(types=False)).static_order())  # raises CycleError, which names the cycle


PACKAGES = [path for source in SOURCES.values() for path in sorted(source.rglob("__init__.py"))]


@pytest.mark.parametrize("path", PACKAGES, ids=name_of)
def test_a_package_file_only_names_what_is_public(path: Path) -> None:
    for node in tree_of(path).body:
        names = isinstance(node, ast.Expr | ast.Import | ast.ImportFrom | ast.Assign | ast.AugAssign)
        lazy = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
        assert names or is_type_checking(node) or lazy, f"line {node.lineno}: {ast.unparse(node)}"


def test_wheels_hold_their_package_alone() -> None:
    """Tests, tools and data are not installed, and neither package imports them."""
    for folder, package in ((ROOT, "src/fasterqk"), (ROOT / "lab", "fasterqk_lab")):
        build = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
        assert build["targets"]["wheel"] == {"packages": [package]}
    for path in MODULES.values():
        for node in ast.walk(tree_of(path)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in modules} & {"lab", "tests", "tools"}, path
