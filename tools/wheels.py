"""List what the wheels of a folder hold, and refuse what does not belong: `python tools/wheels.py dist`."""

import sys
from collections import Counter
from pathlib import Path
from zipfile import ZipFile

PACKAGES = {"fasterqk": "fasterqk", "fasterqk_lab": "fasterqk_lab"}


def check(path: Path) -> str:
    """One line about a wheel; exits if it holds anything but its package and its metadata."""
    package = PACKAGES[path.name.split("-")[0]]
    names = [name for name in ZipFile(path).namelist() if ".dist-info/" not in name]
    strangers = [name for name in names if not name.startswith(f"{package}/")]
    if strangers:
        sys.exit(f"{path.name} also holds {', '.join(strangers[:5])}")
    kinds = Counter(Path(name).suffix or "no suffix" for name in names)
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"{path.name}: {path.stat().st_size / 1000:.0f} kB, {counted}"


for wheel in sorted(Path(sys.argv[1]).glob("*.whl")):
    print(check(wheel))
