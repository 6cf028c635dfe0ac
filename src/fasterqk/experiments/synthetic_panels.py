"""The panels of figure 2 under each protocol: what every cell trains.

- ``paper``: as the paper's text and equation 1 say.
- ``scaled``: the same, with scores divided by the square root of the width, as the released code does.
- ``closed``: as ``paper``, with the softmax over the four next tokens only: the theory's setting.
- ``released``: the notebooks' literal settings.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fasterqk.errors import InputError
from fasterqk.synthetic import Init, Language, SyntheticCell

PROTOCOLS = ("paper", "scaled", "closed", "released")
# The released ramp takes 200,000 steps at a base rate of 0.01; ours covers the same training time.
RAMP_STEPS = round(200_000 * 0.01 / SyntheticCell("FAFO").lr)


@dataclass(frozen=True)
class Panel:
    """One heat map: its letter, a title, and the cell of each seed."""

    name: str
    title: str
    cell: SyntheticCell
    torch_seeds: tuple[int, ...] = ()  # where the init is that of a torch seed: for data seed i, the i-th

    def for_seed(self, seed: int) -> SyntheticCell:
        """The cell of one seed."""
        if not self.torch_seeds:
            return replace(self.cell, seed=seed)
        return replace(self.cell, seed=seed, init_seed=self.torch_seeds[seed % len(self.torch_seeds)])


def panels(protocol: str, names: list[str] | None = None) -> list[Panel]:
    """The panels of a protocol, or those that are named; a name that it has not is an error."""
    if protocol not in _PANELS:
        raise InputError(f"unknown protocol {protocol!r}; choose from {', '.join(PROTOCOLS)}")
    found = {panel.name: panel for panel in _PANELS[protocol]()}
    for name in names or []:
        if name not in found:
            raise InputError(f"protocol {protocol!r} has no panel {name!r}; choose from {','.join(found)}")
    return [found[name] for name in dict.fromkeys(names or found)]


def _paper(**changes: object) -> list[Panel]:
    def panel(name: str, title: str, parameterization: str, **settings: object) -> Panel:
        return Panel(name, title, SyntheticCell(parameterization, **(changes | settings)))  # type: ignore[arg-type]

    found = [
        panel("a", "FAFO", "FAFO"),
        panel("b", "FACO", "FACO"),
        panel("c", "CAFO", "CAFO"),
        panel("d", "CACO", "CACO"),
        panel("e", "FAFO, QK 10x", "FAFO", qk_ratio=10.0),
        panel("f", "FAFO, QK 1-20x", "FAFO", qk_ratio=20.0, ramp_steps=RAMP_STEPS),
        panel("g", "CACO, QK 5x", "CACO", qk_ratio=5.0),
        panel("h", "CACO, QK 1-10x", "CACO", qk_ratio=10.0, ramp_steps=RAMP_STEPS),
        # Claimed for all parameterizations, but run by nobody.
        panel("i", "FACO, QK 10x", "FACO", qk_ratio=10.0),
        panel("j", "CAFO, QK 10x", "CAFO", qk_ratio=10.0),
    ]
    if not changes:
        attended = Language(attend_query=True)
        found.append(panel("k", "CACO, query attended", "CACO", language=attended))
    return found


def _released() -> list[Panel]:
    tiny = Init("identity", 1e-6)
    linear = Init("linear")
    base = SyntheticCell(
        "FAFO",
        lr=0.01,
        language=Language(context=62, gamma=5.5 / 15.5, tilted=True, attend_query=True),
        qk_init=tiny,
        ov_init=tiny,
        scaled_scores=True,
        fresh=True,
        batches=250,
        stop="accumulated",
        max_steps=2500 * 250,
        evaluated=6400,
    )
    longer = replace(base.language, context=126)
    ramped = {"ramp_steps": 200_000, "stop": "never", "batches": 100, "max_steps": 2000 * 100}
    caco = replace(base, parameterization="CACO", qk_init=linear, ov_init=linear)
    faster_caco = replace(caco, language=longer, stop="never", batches=100, max_steps=2000 * 100)
    one, several = (1234,), (1234, 1235, 1236, 1237, 1238)
    return [
        Panel("a", "FAFO", replace(base, qk_init=linear), one),
        Panel("b", "FACO", replace(base, parameterization="FACO"), one),
        Panel("c", "CAFO", replace(base, parameterization="CAFO", batches=200, max_steps=5000 * 200)),
        Panel("d", "CACO", replace(caco, batches=200, max_steps=2500 * 200), several),
        Panel("e", "FAFO, QK 20x", replace(base, qk_ratio=20.0, batches=100, max_steps=1000 * 100)),
        Panel("f", "FAFO, QK 1-40x", replace(base, qk_ratio=40.0, **ramped)),  # type: ignore[arg-type]
        Panel("g", "CACO, QK 5x", replace(faster_caco, qk_ratio=5.0), several),
        Panel("h", "CACO, QK 1-10x", replace(faster_caco, qk_ratio=10.0, ramp_steps=200_000), several),
    ]


_PANELS: dict[str, Callable[[], list[Panel]]] = {
    "paper": _paper,
    "scaled": lambda: _paper(scaled_scores=True),
    "closed": lambda: _paper(closed=True),
    "released": _released,
}
