"""Where the files of a results folder lie as seen from the page, and which pictures fit into it."""

import base64
import os
from html import escape
from pathlib import Path
from urllib.parse import quote

from fasterqk.report.budget import IMAGE_BYTES, ONE_IMAGE_BYTES


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
        """The figure as a data address: SVG, or PNG when that is too large; None when neither fits."""
        for suffix, kind in (("svg", "svg+xml"), ("png", "png")):
            path = self.out / "figures" / f"{name}.{suffix}"
            if path.is_file() and path.stat().st_size <= min(ONE_IMAGE_BYTES, self._left):
                self._left -= path.stat().st_size
                return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
        return None
