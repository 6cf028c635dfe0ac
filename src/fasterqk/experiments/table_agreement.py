"""The generated agreement language with and without faster query-key learning; needs no file."""

from fasterqk.experiments.arms import BASELINE, FASTER, Experiment
from fasterqk.training import TrainConfig

QK_RATIO = 30
EVALUATIONS_PER_EPOCH = 4


def table_agreement(seeds: int = 3, epochs: int | None = None) -> Experiment:
    """The experiment; both arms differ in the rate of the query-key circuit and in nothing else."""
    # The loss falls within an epoch or two; comparing at equal loss needs points on the way.
    base = TrainConfig("agreement", evaluations_per_epoch=EVALUATIONS_PER_EPOCH)
    if epochs is not None:
        base = base.replace(epochs=epochs)
    return Experiment(
        name="table-agreement",
        title="Generated subject-verb agreement, one layer",
        protocol="paper",
        arms={BASELINE: base, FASTER: base.replace(qk_ratio=QK_RATIO)},
        seeds=tuple(range(seeds)),
    )
