"""Where the files of a results folder lie as seen from the page, and which pictures fit into it."""

import base64
import os
from html import escape
from pathlib import Path
from urllib.parse import quote

from fasterqk.report.budget import IMAGE_BYTES, ONE_IMAGE_BYTES

# What may stand unchanged in a data address inside a quoted attribute; quotes and ampersands may not.
_SAFE = " <>/:;=?@[]^`{|}~!$'()*+,"


class Links:
    """Addresses for one page; pictures are taken in until the page is full."""

    def __init__(self, out: Path, page: Path) -> None:
        self.out = out
        self._base = os.path.relpath(out.resolve(), page.resolve().parent)
        self._left = IMAGE_BYTES

    def to(self, folder: str, name: str, text: str) -> str:
        """A link with ``text`` to a file of the results folder."""
        address = quote(Path(self._base, folder, name).as_posix())
        return f'<a href="{escape(address)}">{escape(text)}</a>'

    def picture(self, name: str) -> str | None:
        """The figure as a data address: SVG, or PNG when that is too large; None when neither fits.

        As pictures, several SVGs can use the same ids, and a script inside one is dead.
        """
        for suffix, address in (("svg", _svg_address), ("png", _png_address)):
            path = self.out / "figures" / f"{name}.{suffix}"
            if not path.is_file():
                continue
            found = address(path)
            if len(found) <= min(ONE_IMAGE_BYTES, self._left):
                self._left -= len(found)
                return found
        return None


def _svg_address(path: Path) -> str:
    # Percent-encoding leaves nearly all of an SVG as it is, where base64 would add a third.
    return "data:image/svg+xml," + quote(path.read_text(encoding="utf-8"), safe=_SAFE)


def _png_address(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
