import pytest
from fasterqk_lab.experiments._arms import BASELINE, FASTER

from fasterqk.errors import InputError
from fasterqk_lab.experiments.table_squad import PAPER, RELEASED, RELEASED_STEPS, SIZES, arms_of, table_squad


@pytest.mark.parametrize("size", SIZES)
def test_arms_of_the_paper_differ_in_the_query_key_rate_alone(size):
    experiment = table_squad(size)["paper"]
    assert experiment.arms[FASTER] == experiment.arms[BASELINE].replace(qk_ratio=20)
    assert experiment.arms[BASELINE].optimisation.qk_ratio == 1


def test_the_papers_size_and_rates():
    found = table_squad("paper", seeds=5)
    arm = found["paper"].arms[BASELINE]
    assert (
        arm.model.layers,
        arm.model.width,
        arm.model.heads,
        arm.model.head_width,
        arm.model.mlp_width,
        arm.model.context,
    ) == (
        6,
        300,
        6,
        50,
        1200,
        256,
    )
    assert (
        arm.optimisation.lr,
        arm.model.dropout,
        arm.optimisation.batch_size * arm.optimisation.accumulate,
    ) == (5e-5, 0.2, 64)
    released = found["released"].arms
    rates = {
        place: (config.optimisation.lr * config.optimisation.qk_ratio, config.optimisation.lr)
        for place, config in released.items()
    }
    assert rates == {BASELINE: (5e-4, 5e-4), FASTER: (pytest.approx(1e-3), 5e-5)}
    assert [config.optimisation.epochs for config in released.values()] == [70, 100]
    warm = [
        config.optimisation.warmup * config.optimisation.epochs * RELEASED_STEPS
        for config in released.values()
    ]
    assert warm == [pytest.approx(1000)] * 2
    assert found["paper"].seeds == tuple(range(1234, 1239))
    assert set(PAPER[BASELINE]) == set(RELEASED[FASTER])


def test_arms_are_chosen_by_name():
    assert arms_of("small") == ("same", "faster_qk")
    (alone,) = table_squad("small", ["same"]).values()
    assert list(alone.arms) == [BASELINE]
    assert alone.arms[BASELINE] == table_squad("small")["paper"].arms[BASELINE]
    both = table_squad("paper", ["faster_qk", "released_faster"], epochs=1)
    assert {protocol: list(experiment.arms) for protocol, experiment in both.items()} == {
        "paper": [FASTER],
        "released": [FASTER],
    }
    slower = table_squad("small", lr=1e-4)["paper"].arms
    assert slower[FASTER] == slower[BASELINE].replace(qk_ratio=20)
    assert slower[BASELINE].optimisation.lr == 1e-4
    assert {config.optimisation.epochs for each in both.values() for config in each.arms.values()} == {1}


def test_unknown_sizes_and_arms_are_one_line():
    with pytest.raises(InputError, match="unknown size 'huge'; choose from paper, small, tiny"):
        table_squad("huge")
    with pytest.raises(InputError, match="size 'small' has no arm 'released_same'; choose from same, fast"):
        table_squad("small", ["released_same"])
