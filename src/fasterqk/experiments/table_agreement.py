"""The generated agreement language with and without faster query-key learning; needs no file."""

from fasterqk.experiments.arms import BASELINE, FASTER, Experiment
from fasterqk.training import TrainConfig

QK_RATIO = 30
EVALUATE_AT_FALL = 0.6


def table_agreement(seeds: int = 3, epochs: int | None = None) -> Experiment:
    """The experiment; both arms differ in the rate of the query-key circuit and in nothing else."""
    # The loss falls within a fraction of an epoch; comparing at equal loss needs points on the way.
    base = TrainConfig("agreement", evaluate_at_fall=EVALUATE_AT_FALL)
    if epochs is not None:
        base = base.replace(epochs=epochs)
    return Experiment(
        name="table-agreement",
        title="Generated subject-verb agreement, one layer",
        protocol="paper",
        arms={BASELINE: base, FASTER: base.replace(qk_ratio=QK_RATIO)},
        seeds=tuple(range(seeds)),
    )
