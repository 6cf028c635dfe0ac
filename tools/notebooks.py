"""Run the notebooks of `examples` and write their outputs into them, without Jupyter.

    python tools/notebooks.py                      # all of them
    python tools/notebooks.py examples/sharpen.ipynb

A cell shows what it prints, and its last expression: as a picture if it is a matplotlib figure, as HTML if it
has `_repr_html_`, else as text.
"""

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from fasterqk.files import write_text

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_notebook(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The notebook with fresh outputs, and the names that its cells have bound."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            cell["execution_count"] = number
            cell["outputs"] = _outputs("".join(cell["source"]), names, f"{path.name}, cell {number}", number)
    return notebook, names


def _outputs(source: str, names: dict[str, Any], where: str, number: int) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value, printed = None, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    if value is not None:
        shown = {"output_type": "execute_result", "execution_count": number, "metadata": {}}
        outputs.append(shown | {"data": _shown(value)})
    return outputs


def _shown(value: Any) -> dict[str, Any]:
    """A value as Jupyter would show it, by kind of content."""
    if hasattr(value, "savefig"):
        picture = io.BytesIO()
        value.savefig(picture, format="png", dpi=70, bbox_inches="tight", metadata={"Software": None})
        return {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": ["figure"]}
    text = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        return {"text/html": value._repr_html_().splitlines(keepends=True)} | text
    return text


def main() -> None:
    for path in [Path(word) for word in sys.argv[1:]] or sorted(EXAMPLES.glob("*.ipynb")):
        notebook, _ = run_notebook(path)
        write_text(path, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(path)


if __name__ == "__main__":
    main()
