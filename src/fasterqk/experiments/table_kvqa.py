"""Generated key-value questions with and without faster query-key learning; needs no file."""

from fasterqk.experiments.arms import BASELINE, FASTER, Experiment
from fasterqk.training import TrainConfig

# Five times the base rate is 5e-3: at 1e-2 attention hardens before it has found the pairs.
QK_RATIO = 5
EVALUATE_AT_FALL = 0.5


def table_kvqa(seeds: int = 1, epochs: int | None = None) -> Experiment:
    """The experiment; both arms differ in the rate of the query-key circuit and in nothing else."""
    base = TrainConfig("kvqa", evaluate_at_fall=EVALUATE_AT_FALL, along_subset=128)
    if epochs is not None:
        base = base.replace(epochs=epochs)
    return Experiment(
        name="table-kvqa",
        title="Generated key-value questions (accuracy is exact match)",
        protocol="paper",
        arms={BASELINE: base, FASTER: base.replace(qk_ratio=QK_RATIO)},
        seeds=tuple(range(seeds)),
    )
