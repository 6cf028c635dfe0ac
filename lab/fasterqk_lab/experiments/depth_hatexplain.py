"""HateXplain with two and four layers and a QK rate that is stable: rollout, every layer, and single heads.

`table-layers` multiplies rates that are already several times the paper's (fewer epochs) by 30. A QK rate of
5e-3 and more hardens attention early, in some seeds on nothing of use. Here the ratio is small enough for the
QK rate to stay between 5e-4 and 1e-3 at either depth. Rollout is read without a residual, as in the
notebooks, and with one; every layer by its mean over heads, and by its best head.

The scores that decide, named before any run: attention on relevant tokens (MRTA) of rollout at equal training
loss, without and with a residual. Layers and heads are exploratory.
"""

from typing import Any

from fasterqk.errors import InputError
from fasterqk_lab.experiments._comparison import Comparison, run_arms, show_comparison
from fasterqk_lab.experiments._registry import CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments.ablation_hatexplain import EQUAL, qk_arm
from fasterqk_lab.experiments.table_layers import MODELS, table_layers

# The QK rate is 5.6e-4 with two layers and 9e-4 with four.
RATIO = 3.0
DECIDES = ("mrta", "residual_mrta")


def depth_hatexplain(layers: int, seeds: int = 5, ratio: float = RATIO) -> Comparison:
    """Equal rates and a faster QK with ``layers`` layers, sizes and base rates as in `table-layers`.

    >>> faster = depth_hatexplain(2).arms["QK ×3"].optimisation
    >>> f"{faster.lr * faster.qk_ratio:.1e}"
    '5.6e-04'
    """
    table = table_layers(layers, seeds)
    # Attention alone is asked for: nothing is removed from the posts.
    base = table.arms["baseline"].replace(rationale_k=(), readings=("heads", "residual"))
    return Comparison(
        f"depth-hatexplain-{layers}",
        f"{table.title}, a stable QK rate",
        "paper",
        {EQUAL: base, qk_arm(ratio): base.replace(qk_ratio=ratio)},
        table.seeds,
        decides=DECIDES,
        scores=scores_of(layers),
    )


def scores_of(layers: int) -> dict[str, str]:
    """The scores of the table; the best head of a layer is above its null by choice alone."""
    numbers = range(1, layers + 1)
    return (
        {"mrta": "rollout, no residual", "residual_mrta": "rollout, residual .5"}
        | {f"layer_{n}_mrta": f"layer {n}" for n in numbers}
        | {f"layer_{n}_best_head_mrta": f"layer {n}, best head" for n in numbers}
        | {"test_accuracy": "test accuracy", "validation_loss": "validation loss"}
    )


def run(runner: CellRunner, layers: list[int], seeds: int, ratio: float) -> dict[str, Any]:
    for depth in layers:
        if depth not in MODELS:
            raise InputError(f"--layers {depth}: the paper has 2 and 4 layers; choose of these")
    depths = {}
    for depth in layers:
        outcome = run_arms(depth_hatexplain(depth, seeds, ratio), runner)
        forest = (*DECIDES, f"layer_{depth}_mrta", f"layer_{depth}_best_head_mrta")
        depths[str(depth)] = {**outcome.summary(), "files": outcome.save(runner.out, forest=forest)}
    return {"experiment": "depth-hatexplain", "layers": depths}


def show(summary: dict[str, Any]) -> None:
    for depth in summary["layers"].values():
        show_comparison(depth)


EXPERIMENT = Experiment(
    name="depth-hatexplain",
    chapter="Depth",
    options=(
        Option("layers", int, "which depths, of 2 and 4", default=(2, 4), many=True),
        seeds_option(5),
        Option("ratio", float, "of the faster arm", default=RATIO),
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce depth-hatexplain --out out",
        "fasterqk-lab reproduce depth-hatexplain --layers 2 --seeds 1       # a quick look",
    ),
    needs_data=True,
)
