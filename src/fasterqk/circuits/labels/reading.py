"""From what a gradient reached to roles: one code for each number of a parameter, read along an axis."""

from dataclasses import dataclass

from torch import Tensor

from fasterqk.circuits.slices import Role

# A number was reached from queries, keys, contexts, probabilities, the block's output.
QUERY, KEY, CONTEXT, SCORE, OUTPUT = 1, 2, 4, 8, 16
_ROLES: tuple[Role, ...] = ("q", "k", "v", "o", "shared")


@dataclass(frozen=True)
class Finding:
    """What the probe saw of one parameter: roles of the runs ``(start, stop, role)`` along ``axis``.

    ``axis`` None means that the whole tensor has one role. ``direct``: the parameter acts on a context
    itself, as an output projection does.
    """

    axis: int | None
    runs: tuple[tuple[int, int, Role], ...]
    direct: bool = False

    @property
    def role(self) -> Role | None:
        """The role of the whole tensor, None where it is split."""
        return self.runs[0][2] if self.axis is None else None


def read(code: Tensor) -> Finding | None:
    """The roles along the axis that explains the codes best; None where nothing was seen or no axis does."""
    roles = code.new_zeros(code.shape)
    for value in code.unique().tolist():
        role = _role(value)
        if role is not None:
            roles[code == value] = 1 + _ROLES.index(role)
    seen = [number for number in roles.unique().tolist() if number]
    if not seen:
        return None
    if len(seen) == 1:
        # Unused rows of a table, dead units: nothing was seen there, and nothing contradicts.
        return Finding(None, ((0, 0, _ROLES[seen[0] - 1]),))
    best = None
    for axis in range(code.dim()):
        lines = roles.movedim(axis, 0).reshape(roles.shape[axis], -1)
        top = lines.amax(1)
        if bool(((lines == top[:, None]) | (lines == 0)).all()):
            runs = _runs([int(number) for number in top])
            if best is None or len(runs) < len(best.runs):
                best = Finding(axis, runs)
    return best


def _role(code: int) -> Role | None:
    looks = code & (QUERY | KEY)
    if code & CONTEXT:
        return "shared" if looks or code & SCORE else "v"
    if looks:
        return "k" if looks == KEY else "q"
    if code & SCORE:
        return "k"
    return "o" if code & OUTPUT else None


def _runs(numbers: list[int]) -> tuple[tuple[int, int, Role], ...]:
    """Neighbouring rows of one role; rows where nothing was seen go with the run before them."""
    runs: list[tuple[int, int, Role]] = []
    first = next(number for number in numbers if number)
    for row, number in enumerate(numbers):
        role = _ROLES[number - 1] if number else (runs[-1][2] if runs else _ROLES[first - 1])
        if runs and runs[-1][2] == role:
            runs[-1] = (runs[-1][0], row + 1, role)
        else:
            runs.append((row, row + 1, role))
    return tuple(runs)
