"""How much of an effect is chance beside the choice of the seed: another processor, other test texts.

    fasterqk-lab reproduce table-hatexplain --seeds 1 --out there    # on another processor
    fasterqk-lab reproduce table-layers --layers 2 --seeds 1 --out there
    fasterqk-lab reproduce table-sva --form whole --lr 1e-3 --seeds 1 --out there
    python -m tools.noise there > lab/paper/noise.csv

Per comparison and score, after training: the largest difference over arms between the cells there and the
published ones; half the width of the 95% bootstrap interval of the effect over test texts, in the models
there; and half the width of the published interval over seeds. The kernels of a processor without AVX-512
are used with `ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2`.
"""

import csv
import sys
from pathlib import Path

import numpy as np

from fasterqk.attention.statistics import Bounds, paired_scores
from fasterqk_lab.compare import END, compare, read_values
from fasterqk_lab.experiments._comparison import BASELINE, FASTER, Comparison
from fasterqk_lab.experiments.table_hatexplain import table_hatexplain, table_layers
from fasterqk_lab.experiments.table_main import FOUND_RATES, table_sva
from fasterqk_lab.paper import Published
from fasterqk_lab.runs import Store
from fasterqk_lab.training._classification import Classification, measure_attention
from fasterqk_lab.training._loop import load_trained
from fasterqk_lab.training._steps import one_thread

# Scores of a comparison, each with its name among those of single texts.
SCORES = {"mrta": "mrta", "test_accuracy": "accuracy", "aopc_comprehensiveness": "aopc_comprehensiveness"}


def main() -> None:
    there, published = Path(sys.argv[1]), Published()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["experiment", "score", "processor", "texts", "seeds"])
    again = [value for path in sorted(there.glob("results/*.csv")) for value in read_values(path)]
    comparisons = [table_hatexplain(seeds=1), table_layers(2, seeds=1), table_sva(lr=FOUND_RATES["whole"])]
    for comparison in comparisons:
        measured, over_texts = published.measured(comparison.key), resampled(comparison, Store(there))
        for score, of_texts in SCORES.items():
            differences = [
                abs(value.value - measured.of(value.arm, score, END)[value.seed])
                for value in again
                if (value.experiment, value.score, value.at) == (comparison.key, score, END)
            ]
            over_seeds = compare(measured, (FASTER, BASELINE), score, at=END).value.half_width
            bounds = over_texts[of_texts]
            widths = max(differences), (bounds.high - bounds.low) / 2, over_seeds
            writer.writerow([comparison.key, score, *(f"{width:.6f}" for width in widths)])


def resampled(comparison: Comparison, store: Store) -> dict[str, Bounds]:
    """The effects of the first seed with bootstrap intervals over test texts; models are in ``store``."""
    measurements = []
    for arm in (BASELINE, FASTER):
        config = comparison.cells()[arm, comparison.seeds[0]]
        trained = load_trained(config, store.folder(config))
        assert isinstance(trained, Classification)
        percents = config.evaluation.rationale_k
        measurements.append(measure_attention(trained.model, trained.splits["test"], percents))
    return paired_scores(*measurements, np.random.default_rng(0))


if __name__ == "__main__":
    with one_thread():
        main()
