"""One row per arm, seed and score: what every interval of an experiment can be recomputed from."""

from collections.abc import Mapping, Sequence
from typing import Any

from fasterqk.attention import common_levels, matched_loss

END, BEST = "end", "best validation epoch"
Cells = Mapping[tuple[str, int], Mapping[str, Any]]


def per_seed_rows(cells: Cells) -> list[dict[str, Any]]:
    """Rows ``{arm, seed, at, score, value}`` of cells that are compared with each other.

    ``at`` is the end of training, the best validation epoch, or one of the three training losses at which
    they are compared (`levels_for`). A cell that did not reach a loss, or diverged, has no row there.
    """
    rows = []
    for (arm, seed), result in cells.items():
        for at, numbers in (moments(result) if not result.get("diverged") else {}).items():
            rows += [_row(arm, seed, at, name, value) for name, value in numbers.items() if _is_number(value)]
    for level in levels_for(cells):
        for (arm, seed), result in cells.items():
            if not result.get("diverged"):
                rows += rows_at(level, arm, seed, result.get("history", []))
    return rows


def levels_for(cells: Cells, count: int = 3) -> list[float]:
    """Losses at which cells are compared: decided by the cells that met their stop rule, if any did."""
    finished = {cell: result for cell, result in cells.items() if not result.get("diverged")}
    reached = {cell: result for cell, result in finished.items() if result.get("reached")}
    histories: dict[Any, Any] = {
        cell: result.get("history", []) for cell, result in (reached or finished).items()
    }
    return common_levels(histories, count) if any(histories.values()) else []


def rows_at(level: float, arm: str, seed: int, history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one cell where its training loss first falls to ``level``; none if it does not."""
    names = [name for name, value in history[-1].items() if _is_number(value)] if history else []
    found = matched_loss({(arm, seed): history}, [name for name in names if name != "loss"], [level])
    at = f"training loss {level:.6g}"
    return [_row(arm, seed, at, name, value.mean) for name, value in found[0]["arms"].get(arm, {}).items()]


def _row(arm: str, seed: int, at: str, score: str, value: float) -> dict[str, Any]:
    return {"arm": arm, "seed": seed, "at": at, "score": score, "value": float(value)}


def moments(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The numbers of a finished cell at the end and at its best validation epoch."""
    from fasterqk_lab.training._classification import flat

    if "test" not in result:  # of the toy language
        return {END: {name: value for name, value in flat(dict(result)).items() if name != "seed"}}
    splits = ("train", "validation", "test")
    numbers: dict[str, Any] = {"loss": result["loss"]}
    numbers |= {
        f"{split}_{name}": result[split][name]
        for split in splits
        for name in ("loss", "accuracy", "f1")
        if name in result[split]
    }
    numbers |= flat({name: value for name, value in result["test"].items() if name not in ("loss", "groups")})
    for group, values in (result["test"].get("groups") or {}).items():
        numbers |= {f"accuracy, {group} {value}": entry["accuracy"] for value, entry in values.items()}
    return {END: numbers} | ({BEST: dict(result["best"])} if result.get("best") else {})


def null_name(name: str) -> str:
    """The name of the null of a score, in the histories and in the values of single seeds.

    >>> null_name("carried_layer_2_best_head_mrta"), null_name("mrta"), null_name("sufficiency_5")
    ('carried_layer_2_best_head_null_mrta', 'null_mrta', 'null_sufficiency_5')
    """
    kind = "mrta" if name.endswith("mrta") else name
    return f"{name.removesuffix(kind)}null_{kind}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
