import pytest
from fasterqk_lab.experiments._arms import BASELINE, FASTER

from fasterqk.files import config_values
from fasterqk_lab.experiments.table_layers import MODELS, PAPER, table_layers


@pytest.mark.parametrize("layers", MODELS)
def test_arms_differ_in_the_query_key_rate_and_nothing_else(layers):
    one, other = (dict(config_values(table_layers(layers).arms[arm])) for arm in (BASELINE, FASTER))
    assert {name: other[name] for name in one if one[name] != other[name]} == {"qk_ratio": 30.0}


def test_sizes_are_those_of_the_papers_appendix():
    two, four = (table_layers(layers).arms[BASELINE] for layers in (2, 4))
    sizes = ("layers", "width", "heads", "head_width", "mlp_width", "context")
    assert [getattr(two.model, name) for name in sizes] == [2, 32, 4, 8, 128, 96]
    assert [getattr(four.model, name) for name in sizes] == [4, 64, 4, 64, 256, 256]


@pytest.mark.parametrize("epochs", [1, 5, 8, 30])
def test_fewer_epochs_go_as_far_as_the_papers_thirty(epochs):
    config = table_layers(2, epochs=epochs).arms[BASELINE]
    assert config.optimisation.lr * config.optimisation.epochs == pytest.approx(30 * 5e-5)


def test_the_papers_numbers_stand_beside():
    printed = table_layers(4).printed["paper"][FASTER]
    assert (printed["test_accuracy"], printed["ac"], printed["comprehensiveness_5"]) == (0.5851, 12.89, 0.26)
    assert PAPER.keys() == MODELS.keys()
