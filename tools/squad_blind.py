"""Scores on SQuAD's test questions of two rules that never read the question, for each form of the context.

`everything` answers with the whole window. `middle` answers with the text between two margins of 200
characters, or with the two words in the middle if the window is shorter. Prints the CSV
`lab/paper/squad-blind.csv`:

    python tools/squad_blind.py > lab/paper/squad-blind.csv
"""

import csv
import sys
from collections import Counter
from pathlib import Path

from fasterqk_lab.tasks.squad import read_squad, require_squad, window
from fasterqk_lab.training._generation import exact_match, token_f1

MARGIN = 200
DATA = Path(__file__).parents[1] / "data"


def everything(text: str) -> str:
    return text


def middle(text: str) -> str:
    words = text.split()
    half = len(words) // 2
    return text[MARGIN:-MARGIN] if len(text) > 2 * MARGIN else " ".join(words[max(0, half - 1) : half + 1])


def main() -> None:
    questions = read_squad(require_squad(DATA, "dev"), Counter())
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["form", "rule", "f1", "exact_match", "questions"])
    for form in ("random", "random-short", "whole", "centred"):
        shown = [(asked, window(asked, form)) for asked in questions]
        texts = [(asked, asked.context[place[0] : place[1]]) for asked, place in shown if place is not None]
        for rule in (everything, middle):
            answers = [(rule(text), asked.gold) for asked, text in texts]
            f1 = sum(token_f1(*answer) for answer in answers) / len(answers)
            exact = sum(exact_match(*answer) for answer in answers) / len(answers)
            writer.writerow([form, rule.__name__, f"{f1:.4f}", f"{exact:.4f}", len(answers)])


if __name__ == "__main__":
    main()
