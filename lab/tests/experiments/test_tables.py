"""The arms of every table: what they differ in, whose sizes and rates they have, whose numbers beside."""

import pytest

from fasterqk.errors import InputError
from fasterqk.files import config_values
from fasterqk_lab.compare import Measured, Value
from fasterqk_lab.experiments._comparison import BASELINE, FASTER, Outcome
from fasterqk_lab.experiments.table_generated import learnt_values, table_agreement, table_kvqa
from fasterqk_lab.experiments.table_hatexplain import table_hatexplain, table_layers
from fasterqk_lab.experiments.table_main import SIZES, SQUAD_STEPS, arms_of, table_squad, table_sva

RATIOS = {
    "agreement": (table_agreement(), 30),
    "kvqa": (table_kvqa(), 5),
    "hatexplain": (table_hatexplain(), 30),
    "layers-2": (table_layers(2), 30),
    "layers-4": (table_layers(4), 30),
    "sva-whole": (table_sva("paper", "whole", lr=3e-4), 100),
    "sva-prefix": (table_sva("paper", "prefix", lr=3e-4), 100),
    **{f"squad-{size}": (table_squad(size)["paper"], 3 if size == "paper-short" else 20) for size in SIZES},
}


def differences(comparison):
    one, other = (dict(config_values(comparison.arms[arm])) for arm in (BASELINE, FASTER))
    return {name: other[name] for name in one if one[name] != other[name]}


def settings(config, names):
    values = dict(config_values(config))
    return [values[name] for name in names.split()]


@pytest.mark.parametrize("name", RATIOS)
def test_arms_of_the_paper_differ_in_the_query_key_rate_and_nothing_else(name):
    comparison, ratio = RATIOS[name]
    assert comparison.protocol == "paper"
    assert differences(comparison) == {"qk_ratio": ratio}
    assert comparison.arms[BASELINE].optimisation.qk_ratio == 1
    assert comparison.decides == ("mrta",)


def test_options_choose_seeds_and_epochs():
    assert (table_agreement(seeds=2).seeds, table_kvqa(seeds=2).seeds) == ((0, 1), (0, 1))
    for comparison in (table_agreement(epochs=3), table_kvqa(epochs=3), table_hatexplain(epochs=3)):
        assert {config.optimisation.epochs for config in comparison.arms.values()} == {3}
    assert table_hatexplain("released", seeds=5).seeds == (1234, 1235, 1236, 1237, 1238)


# --- HateXplain ---


def test_hatexplain_has_the_papers_settings():
    base = table_hatexplain("paper").arms[BASELINE]
    assert settings(base, "lr epochs batch_size weight_decay decay") == [5e-5, 30, 32, 1e-4, "independent"]
    assert settings(base, "warmup clip optimizer") == [0.1, 1.0, "adamw"]
    assert settings(base, "layers width heads head_width mlp_width") == [1, 64, 4, 64, 256]


def test_released_arms_differ_in_all_that_the_notebooks_change():
    comparison = table_hatexplain("released")
    assert differences(comparison) == {
        "qk_ratio": 30.0,
        "weight_decay": 1e-3,
        "faster": ("embedding.*", "*.W_Q", "*.W_K"),
        "frozen": ("*.mlp.*",),
        "stale_gradients": True,
    }
    base = comparison.arms[BASELINE]
    assert (base.data.form, base.evaluation.protocol) == ("votes", "released-hatexplain")
    assert base.model.context == 128


def test_printed_numbers_stand_beside_the_protocol_they_belong_to():
    (paper,) = table_hatexplain("paper").printed.values()
    both = table_hatexplain("released").printed
    assert (paper, list(both)) == (both["paper"], ["paper", "released"])
    assert (paper[FASTER]["mrta"], both["released"][FASTER]["validation_accuracy"]) == (0.31, 0.5690)
    printed = table_layers(4).printed["paper"][FASTER]
    assert (printed["test_accuracy"], printed["ac"], printed["comprehensiveness_5"]) == (0.5851, 12.89, 0.26)


# --- Layers ---


def test_sizes_of_layers_are_those_of_the_papers_appendix():
    two, four = (table_layers(layers).arms[BASELINE] for layers in (2, 4))
    sizes = "layers width heads head_width mlp_width context"
    assert settings(two, sizes) == [2, 32, 4, 8, 128, 96]
    assert settings(four, sizes) == [4, 64, 4, 64, 256, 256]


@pytest.mark.parametrize("epochs", [1, 5, 8, 30])
def test_fewer_epochs_go_as_far_as_the_papers_thirty(epochs):
    config = table_layers(2, epochs=epochs).arms[BASELINE]
    assert config.optimisation.lr * config.optimisation.epochs == pytest.approx(30 * 5e-5)


# --- Key-value questions ---


def test_steps_until_learnt_are_values_and_a_cell_that_never_learns_has_none():
    comparison = table_kvqa(seeds=2)
    learnt = [{"step": 10 * n, "validation_accuracy": 0.5 * n} for n in range(3)]
    histories = {(BASELINE, 0): learnt, (FASTER, 0): learnt, (BASELINE, 1): learnt[:2], (FASTER, 1): learnt}
    values = learnt_values(Outcome(comparison, {}, Measured(comparison.key, (), histories)))
    assert values[0] == Value(
        "table-kvqa-paper", BASELINE, 0, "exact match 0.95", None, "steps until learnt", 19.0
    )
    assert [(value.arm, value.seed) for value in values] == [(BASELINE, 0), (FASTER, 0), (FASTER, 1)]


# --- SQuAD ---


def test_squad_has_the_papers_size_and_rates():
    protocols = table_squad("paper", seeds=5)
    arm = protocols["paper"].arms[BASELINE]
    assert settings(arm, "layers width heads head_width mlp_width context") == [6, 300, 6, 50, 1200, 256]
    assert settings(arm, "lr dropout") == [5e-5, 0.2]
    assert arm.optimisation.batch_size * arm.optimisation.accumulate == 64
    released = protocols["released"].arms
    rates = {
        place: (config.optimisation.lr * config.optimisation.qk_ratio, config.optimisation.lr)
        for place, config in released.items()
    }
    assert rates == {BASELINE: (5e-4, 5e-4), FASTER: (pytest.approx(1e-3), 5e-5)}
    for config, epochs in zip(released.values(), (70, 100), strict=True):
        assert config.optimisation.epochs == epochs
        assert config.optimisation.warmup * epochs * SQUAD_STEPS == pytest.approx(1000)
    assert protocols["paper"].seeds == tuple(range(1234, 1239))
    assert set(protocols["paper"].printed) == {"paper", "released"}


def test_arms_of_squad_are_chosen_by_name():
    assert arms_of("small") == ("same", "faster_qk")
    (alone,) = table_squad("small", ["same"]).values()
    assert alone.arms == {BASELINE: table_squad("small")["paper"].arms[BASELINE]}
    both = table_squad("paper", ["faster_qk", "released_faster"], epochs=1)
    assert {protocol: list(comparison.arms) for protocol, comparison in both.items()} == {
        "paper": [FASTER],
        "released": [FASTER],
    }
    assert {comparison.arms[FASTER].optimisation.epochs for comparison in both.values()} == {1}
    assert differences(table_squad("small")["paper"]) == {"qk_ratio": 20}


def test_short_windows_have_the_papers_architecture():
    sizes = "layers width heads head_width mlp_width"
    short, paper = (table_squad(size)["paper"].arms[BASELINE] for size in ("paper-short", "paper"))
    assert settings(short, sizes) == settings(paper, sizes) == [6, 300, 6, 50, 1200]
    assert settings(short, "form lr epochs") == ["random-mixed", 3e-4, 4]


def test_unknown_sizes_and_arms_are_one_line():
    with pytest.raises(InputError, match="unknown size 'huge'; choose from paper, paper-short, small, tiny"):
        table_squad("huge")
    with pytest.raises(InputError, match="size 'small' has no arm 'released_same'; choose from same, fast"):
        table_squad("small", ["released_same"])
