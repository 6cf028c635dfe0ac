"""A figure on disk: SVG and PNG, the CSV it was drawn from, and a caption that says what was run."""

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasterqk.files import write_bytes, write_csv, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(
    figure: "Figure",
    out: Path,
    name: str,
    *,
    title: str,
    caption: str,
    rows: Iterable[Mapping[str, Any]],
) -> dict[str, str]:
    """Write ``out/figures/NAME.{svg,png,csv,json}`` and return their paths by suffix.

    ``rows`` is the tidy table the figure shows. The JSON holds title and caption for the report.
    """
    import matplotlib.pyplot as plt

    folder = Path(out) / "figures"
    paths = {}
    for suffix, metadata in (("svg", {"Date": None}), ("png", {})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, metadata=metadata)
        paths[suffix] = str(write_bytes(folder / f"{name}.{suffix}", buffer.getvalue()))
    plt.close(figure)
    paths["csv"] = str(write_csv(folder / f"{name}.csv", rows))
    about = {"name": name, "title": title, "caption": caption}
    paths["json"] = str(write_text(folder / f"{name}.json", json.dumps(about, indent=1) + "\n"))
    return paths
