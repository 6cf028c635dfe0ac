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
from fasterqk_lab.experiments._arms import Comparison, run_arms
from fasterqk_lab.experiments._equal_loss import (
    compare_at_equal_loss,
    histories_of,
    save_panels,
    save_rows,
    show_rows,
)
from fasterqk_lab.experiments._per_seed import null_name
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
    arms = {EQUAL: base, qk_arm(ratio): base.replace(qk_ratio=ratio)}
    name, title = f"depth-hatexplain-{layers}", f"{table.title}, a stable QK rate"
    return Comparison(name, title, "paper", arms, table.seeds)


def scores_of(layers: int) -> dict[str, str]:
    """The scores that are compared, with their titles."""
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
    found = {str(depth): _run(depth_hatexplain(depth, seeds, ratio), depth, runner) for depth in layers}
    return {"experiment": "depth-hatexplain", "seeds": seeds, "layers": found}


def _run(comparison: Comparison, layers: int, runner: CellRunner) -> dict[str, Any]:
    histories = histories_of(run_arms(comparison, runner))
    scores = scores_of(layers)
    nulls = {name: null_name(name) for name in scores if name.endswith("mrta")}
    found = compare_at_equal_loss(histories, scores, decides=DECIDES, nulls=nulls)
    faster = list(comparison.arms.values())[-1].optimisation
    setting = f"{comparison.name}: {len(comparison.seeds)} seeds, QK rate {faster.lr * faster.qk_ratio:.2g}"
    caption = (
        "Test split, mean and 95% interval over seeds; differences paired by seed. The best head is the one "
        f"with the highest score, so that it is above the null by choice alone. {setting}."
    )
    shared = {"title": comparison.title, "caption": caption}
    shown = [scores[name] for name in (*DECIDES, f"layer_{layers}_mrta", f"layer_{layers}_best_head_mrta")]
    see = "Each dot is an arm; the dashed mark is uniform attention."
    files = {
        "table": save_rows(found["rows"], runner.out, comparison.name, **shared),
        "figure": save_panels(found["rows"], shown, runner.out, comparison.name, **shared, see=see),
    }
    return {**found, "title": comparison.title, "files": files}


def show(summary: dict[str, Any]) -> None:
    for found in summary["layers"].values():
        print(f"\n{found['title']}: {summary['seeds']} seeds")
        show_rows(found)
        print(f"figure: {found['files']['figure']['png']}")


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
