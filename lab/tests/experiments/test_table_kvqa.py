from fasterqk_lab.experiments._arms import BASELINE, FASTER

from fasterqk_lab.experiments.table_kvqa import QK_RATIO, table_kvqa


def test_arms_differ_in_the_query_key_rate_alone():
    experiment = table_kvqa(seeds=2)
    assert experiment.arms[FASTER] == experiment.arms[BASELINE].replace(qk_ratio=QK_RATIO)
    assert experiment.seeds == (0, 1)
    assert table_kvqa(epochs=3).arms[BASELINE].optimisation.epochs == 3
