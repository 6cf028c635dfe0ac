"""Generated key-value questions with and without faster query-key learning; needs no file."""

from fasterqk.experiments.arms import BASELINE, FASTER, Experiment
from fasterqk.training import TrainConfig

# The paper's ratio for its answer generator.
QK_RATIO = 20
EVALUATE_AT_FALL = 0.6


def table_kvqa(seeds: int = 1, epochs: int | None = None) -> Experiment:
    """The experiment; both arms differ in the rate of the query-key circuit and in nothing else."""
    base = TrainConfig("kvqa", evaluate_at_fall=EVALUATE_AT_FALL)
    if epochs is not None:
        base = base.replace(epochs=epochs)
    return Experiment(
        name="table-kvqa",
        title="Generated key-value questions (accuracy is exact match)",
        protocol="paper",
        arms={BASELINE: base, FASTER: base.replace(qk_ratio=QK_RATIO)},
        seeds=tuple(range(seeds)),
    )
