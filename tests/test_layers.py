"""The import graph: packages are layers that import only earlier ones, without cycles."""

import ast
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fasterqk"

LIBRARY = [
    "errors",
    "files",
    "processor",
    "console",
    "theory",
    "capture",
    "circuits",
    "attention",
    "integrations",
]
LAB = ["synthetic", "tasks", "models", "training", "runs", "report", "experiments"]
LAYERS = [*LIBRARY, *(f"lab.{name}" for name in LAB), "lab", "cli", "__main__"]


def name_of(path: Path) -> str:
    """``fasterqk/lab/runs/_store.py`` is ``lab.runs._store``; a package is named like its folder."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


def layer(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "lab" else 1])


@cache
def tree_of(path: Path) -> ast.Module:
    """The parsed source of a module, which nobody changes."""
    return ast.parse(path.read_text())


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported(path: Path, *, types: bool) -> set[str]:
    """The modules of fasterqk that the file imports, also inside functions; with ``types`` also for types."""
    found = set()
    body = [node for node in tree_of(path).body if types or not is_type_checking(node)]
    for node in (inner for statement in body for inner in ast.walk(statement)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            # `from fasterqk.lab import runs` names a module, `from fasterqk.files import plain` does not.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name[len("fasterqk.") :] in MODULES else str(node.module) for name in names]
        else:
            continue
        found |= {
            name.removeprefix("fasterqk").removeprefix(".") for name in names if name.startswith("fasterqk")
        }
    return found


@cache
def imports(*, types: bool) -> dict[str, set[str]]:
    return {name: imported(path, types=types) - {name, ""} for name, path in MODULES.items()}


def test_a_layer_imports_only_earlier_ones() -> None:
    order = {name: place for place, name in enumerate(LAYERS)}
    wrong = [
        f"{module} imports {name}"
        for module, names in imports(types=True).items()
        for name in sorted(names)
        if module and order[layer(name)] > order[layer(module)]
    ]
    assert wrong == []


def test_packages_of_the_library_use_public_names_of_others() -> None:
    wrong = {
        f"{module} imports {name}"
        for module, names in imports(types=True).items()
        for name in names
        if layer(module) in LIBRARY and layer(name) != layer(module) and "._" in name
        # Attention is found and circuits are probed by the same recordings.
        if (layer(module), layer(name)) != ("circuits", "capture")
    }
    assert wrong == set()


def test_there_are_no_cycles() -> None:
    list(TopologicalSorter(imports(types=False)).static_order())  # raises CycleError, which names the cycle


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("__init__.py")), ids=name_of)
def test_a_package_file_only_names_what_is_public(path: Path) -> None:
    for node in tree_of(path).body:
        text_or_import = isinstance(node, ast.Expr | ast.Import | ast.ImportFrom | ast.Assign)
        lazy = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
        assert text_or_import or is_type_checking(node) or lazy, f"line {node.lineno}: {ast.unparse(node)}"


def test_the_wheel_holds_the_package_alone() -> None:
    """Benchmarks, tests and data are not installed, and nothing of the package imports them."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"] == {"packages": ["src/fasterqk"]}
    assert build["targets"]["sdist"] == {"exclude": ["/data"]}
    for path in MODULES.values():
        for node in ast.walk(tree_of(path)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in modules} & {"benchmarks", "tests", "tools"}, path
