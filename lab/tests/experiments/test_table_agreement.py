from fasterqk_lab.experiments._arms import BASELINE, FASTER

from fasterqk_lab.experiments.table_agreement import table_agreement


def test_arms_differ_in_the_query_key_rate_alone():
    experiment = table_agreement(seeds=2)
    assert experiment.arms[FASTER] == experiment.arms[BASELINE].replace(qk_ratio=30)
    assert experiment.seeds == (0, 1)
    assert table_agreement(epochs=3).arms[BASELINE].optimisation.epochs == 3
