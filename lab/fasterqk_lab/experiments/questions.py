"""The open questions: what was believed, run and found, computed from published results."""

from pathlib import Path
from typing import Any

from fasterqk.console import print_table
from fasterqk_lab.experiments._registry import CellRunner, Experiment
from fasterqk_lab.experiments.claims import RESULTS_OPTION
from fasterqk_lab.figures import effect_rows
from fasterqk_lab.paper import FOLDER, Published, read_lines, read_questions, save_picture


def run(runner: CellRunner, results: str | None) -> dict[str, Any]:
    published = Published(Path(results) if results else FOLDER)
    return {
        "questions": [
            {
                "title": question.title,
                "hypothesis": question.hypothesis,
                "verdict": question.verdict,
                "becomes": question.becomes,
                "effects": effect_rows(question.effects),
                "explored": effect_rows(question.explored),
            }
            for question in read_questions(published)
        ],
        "figure": str(save_picture(read_lines(published), runner.out / "figures")),
    }


def show(summary: dict[str, Any]) -> None:
    for number, question in enumerate(summary["questions"], 1):
        columns = ("arm", "baseline", "value", "difference", "half_width", "n", "p", "levels", "stands")
        rows = [{name: row[name] for name in columns} for row in question["effects"]]
        print_table(
            rows, title=f"{number}. {question['title']} {question['hypothesis']}: {question['verdict']}"
        )
        print(f"{question['becomes']}\n")
    print(f"figure: {summary['figure']}")


EXPERIMENT = Experiment(
    name="questions",
    chapter="Questions",
    options=(RESULTS_OPTION,),
    run=run,
    show=show,
    examples=("fasterqk-lab reproduce questions --out out", "fasterqk-lab reproduce questions --json"),
    details="Reads lab/paper; nothing is trained.",
    trains=False,
)
