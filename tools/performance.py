"""Make docs/performance.md from the record of `fasterqk-lab bench all`.

fasterqk-lab bench all --out bench     # about six minutes on two quiet cores
python -m tools.performance bench      # the page, its picture, its place in mkdocs.yml
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasterqk.console import cell_text, duration_text
from fasterqk.errors import InputError
from fasterqk.files import read_json, write_bytes, write_text
from fasterqk_lab.benchmarks.growth import RECORD, rows
from tools.publish import table

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# After this page of the site comes ours.
BEFORE, NAV = "sweeps.md\n", "      - Performance: performance.md\n"
PICTURE = "bench-growth.svg"

PAGE = """# Performance

How fast the code is beside a plain implementation, how far from what the machine allows, and how cost grows
with size. Two commands make this page; a run that was stopped goes on where it was:

    fasterqk-lab bench all --out bench
    python -m tools.performance bench

{machine}

## How far from the limit

*Plain* is the code that anybody would write first, timed in turns in the same process. A *limit* is the time
that the work takes at the speed of a plain operation, here {gigaflops} GFLOP/s in a matrix product and
{gigabytes} GB/s in a copy on one core, or the time of what cannot be left out.

{benchmarks}

{cases}

For the closed form and the toy language no limit is known: their plain ways do other arithmetic. The bytes of
an optimizer step count every weight, gradient and moment once.

## How cost grows

Seconds on one core, and memory beyond the smallest size. The slope is that of a straight line through the
upper half of the sizes on logarithmic axes: 1 for a cost proportional to the size, 2 for its square. The
number of parameters grows with the square of the width.

![Seconds and memory over size, one panel per part](images/{picture})

{growth}

`capture` holds whole attention matrices, whose size is the square of the number of tokens.

## What the time goes into

- **HateXplain, one layer.** The optimizer takes about a third of a training step, most of it AdamW on the
  token embedding: rows of tokens that are not in the batch still move by their momentum, so leaving them out
  would change the result. The rest is mostly the overhead of some eighty small operations.
- **`measure`** spends all but a few percent in the forward passes that it needs: texts are sorted by length,
  and variants of many texts are predicted together.
- **Fused weights in columns** (GPT-2) are stepped as copies or views. Torch's fused kernel is slower on such
  views than on whole weights; the loop, torch's default on a processor, is not.

## What a short run leaves out

Medians are over few rounds ({rounds}).
`measure` runs on {posts} posts, `stability` on one text of {tokens}
tokens, `squad` on windows at a random offset alone. `bench all` names a ratio that fell by more than a fifth
since the run before.
"""
# What is timed, per benchmark.
CASES = {
    "circuits": "a step of AdamW and `zero_grad` on GPT-2's parameters, fused weights in columns",
    "measure": "sufficiency and comprehensiveness of HateXplain posts; plain: one text at a time",
    "stability": "a training step of GPT-2 with `qk_clip`, no head above the threshold",
    "theory": "fifty states of the closed form; plain: a Runge-Kutta loop",
    "training": "a step of the paper's HateXplain model; plain: padded texts, every position",
    "squad": "a step of the paper's SQuAD model; plain: padded texts, the head at every position",
    "synthetic": "a step of a toy cell, two threads; plain: a PyTorch loop",
}


def page(record: Mapping[str, Any]) -> str:
    """The page of a finished record."""
    if not record["done"]:
        raise InputError("the record is of a run that was stopped; run `fasterqk-lab bench all` again")
    about, results = record["environment"], record["benchmarks"]
    tables = {
        name: "\n".join(table(list(lines[0]), [[_cell(cell) for cell in row.values()] for row in lines]))
        for name, lines in rows(record).items()
    }
    machine = (
        f"fasterqk {about['fasterqk']}, torch {about['packages']['torch']}, Python {about['python']}, "
        f"{about['processors']} cores, {about['platform']}; "
        f"{duration_text(sum(record['seconds'].values()))} in all."
    )
    rounds = {name: result["rounds"] for name, result in results.items() if "rounds" in result}
    return PAGE.format(
        machine=machine,
        picture=PICTURE,
        cases="\n".join(f"- `{name}`: {CASES.get(name, '')}." for name in results),
        rounds=", ".join(f"{name} {number}" for name, number in rounds.items()),
        posts=results.get("measure", {}).get("posts", 0),
        tokens=results.get("stability", {}).get("tokens", 0),
        **{unit: f"{number:.0f}" for unit, number in record["machine"].items()},
        **tables,
    )


def _cell(value: Any) -> str:
    return cell_text(float(f"{value:.3g}") if isinstance(value, float) else value)


def main(folder: Path) -> None:
    """Write the page, its picture and its place in the site; keep the record in lab/paper."""
    text, site = page(read_json(folder / RECORD)), (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    write_bytes(ROOT / "lab" / "paper" / RECORD, (folder / RECORD).read_bytes())
    write_bytes(DOCS / "images" / PICTURE, (folder / "figures" / PICTURE).read_bytes())
    if NAV not in site:
        write_text(ROOT / "mkdocs.yml", site.replace(BEFORE, BEFORE + NAV))
    print(write_text(DOCS / "performance.md", text))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "bench"))
