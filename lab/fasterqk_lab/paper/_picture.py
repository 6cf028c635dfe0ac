"""Everything that was compared, in one picture: attention with equal rates and with a faster circuit."""

from collections.abc import Sequence
from pathlib import Path

from fasterqk.files import write_bytes
from fasterqk_lab.figures import draw_forest, plotting, svg_bytes
from fasterqk_lab.paper._claims import Line


def save_picture(lines: Sequence[Line], folder: Path) -> Path:
    """Draw one line per comparison, from top to bottom, as ``questions.svg``; returns its path."""
    places: list[int] = []
    headings: dict[str, int] = {}
    for line in lines:
        place = places[-1] + 1 if places else 1
        if line.group not in headings:
            place += bool(places)
            headings[line.group] = place - 1
        places.append(place)
    with plotting() as plt:
        figure, axis = plt.subplots(figsize=(8.6, 1.0 + 0.29 * (max(places) + 1)))
        draw_forest(axis, [line.effect for line in lines], places)
        for group, place in headings.items():
            axis.annotate(
                group,
                (0, place),
                xytext=(-8, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=10,
                fontweight="bold",
            )
        axis.set_yticks(places, [line.effect.label for line in lines])
        axis.set_ylim(max(places) + 0.7, -0.6)
        axis.set_xlim(0, 1)
        axis.set_xlabel("attention on the relevant tokens, at equal training loss")
        return write_bytes(folder / "questions.svg", svg_bytes(figure))
