from fasterqk_lab.experiments._arms import BASELINE, FASTER

from fasterqk.files import config_values
from fasterqk_lab.experiments.table_hatexplain import PAPER, RELEASED, table_hatexplain


def differences(experiment):
    one, other = (dict(config_values(experiment.arms[arm])) for arm in (BASELINE, FASTER))
    return {name: other[name] for name in one if one[name] != other[name]}


def test_paper_arms_differ_in_the_query_key_rate_and_nothing_else():
    experiment = table_hatexplain("paper")
    assert differences(experiment) == {"qk_ratio": 30.0}
    base = experiment.arms[BASELINE]
    assert (
        base.optimisation.lr,
        base.optimisation.epochs,
        base.optimisation.batch_size,
        base.optimisation.weight_decay,
    ) == (5e-5, 30, 32, 1e-4)
    assert (
        base.optimisation.decay,
        base.optimisation.warmup,
        base.optimisation.clip,
        base.optimisation.optimizer,
    ) == ("independent", 0.1, 1.0, "adamw")
    assert (
        base.model.layers,
        base.model.width,
        base.model.heads,
        base.model.head_width,
        base.model.mlp_width,
    ) == (1, 64, 4, 64, 256)


def test_released_arms_differ_in_all_that_the_notebooks_change():
    experiment = table_hatexplain("released")
    assert differences(experiment) == {
        "qk_ratio": 30.0,
        "weight_decay": 1e-3,
        "faster": ("embedding.*", "*.W_Q", "*.W_K"),
        "frozen": ("*.mlp.*",),
        "stale_gradients": True,
    }
    base = experiment.arms[BASELINE]
    assert (base.data.form, base.evaluation.protocol, base.model.context) == (
        "votes",
        "released-hatexplain",
        128,
    )


def test_seeds_are_those_of_the_notebooks():
    assert table_hatexplain("released", seeds=5).seeds == (1234, 1235, 1236, 1237, 1238)
    assert table_hatexplain("paper", seeds=1, epochs=2).arms[FASTER].optimisation.epochs == 2


def test_printed_numbers_stand_beside_the_protocol_they_belong_to():
    assert table_hatexplain("paper").printed == {"paper": PAPER}
    assert table_hatexplain("released").printed == {"paper": PAPER, "released": RELEASED}
