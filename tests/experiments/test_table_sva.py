import dataclasses

import pytest

from fasterqk.errors import InputError
from fasterqk.experiments import table_sva as module
from fasterqk.experiments.arms import BASELINE, FASTER
from fasterqk.experiments.table_sva import RATES, choose_rate, released_epochs, table_sva


def differences(experiment):
    one, other = (dataclasses.asdict(experiment.arms[arm]) for arm in (BASELINE, FASTER))
    return {name: other[name] for name in one if one[name] != other[name]}


@pytest.mark.parametrize("form", ["whole", "prefix"])
def test_paper_arms_differ_in_the_query_key_rate_and_nothing_else(form):
    experiment = table_sva("paper", form, lr=3e-4)
    assert differences(experiment) == {"qk_ratio": 100.0}
    base = experiment.arms[BASELINE]
    assert (base.form, base.lr, base.batch_size, base.optimizer) == (form, 3e-4, 256, "adamw")
    assert (base.mlp_width, base.residual, base.read, base.decay) == (0, False, "last", "independent")
    assert experiment.seeds == (1234, 1235, 1236, 1237, 1238)


def test_released_arms_differ_in_all_that_the_notebooks_multiply():
    experiment = table_sva("released")
    faster = differences(experiment)
    assert faster.pop("qk_ratio") == 100.0
    assert set(faster.pop("faster")) >= {"embedding.*", "positions", "*.W_Q", "*.b_Q", "*.W_K", "*.b_K"}
    assert not faster
    base = experiment.arms[BASELINE]
    assert (base.optimizer, base.momentum, base.lr, base.batch_size) == ("sgd", 0.99, 5e-4, 32)
    assert (base.epochs, base.weight_decay, base.clip, base.form) == (15, 1e-5, None, "released")
    assert base.evaluation == "released-sva"


def test_only_whole_sentences_have_printed_numbers_and_a_released_protocol():
    assert set(table_sva("paper", "whole").printed) == {"paper"}
    assert not table_sva("paper", "prefix").printed
    assert set(table_sva("released", "whole").printed) == {"paper", "released"}
    with pytest.raises(InputError, match="'released' has no form 'prefix'; its forms are whole"):
        table_sva("released", "prefix")


def test_the_rate_is_that_of_the_best_validation_accuracy(monkeypatch, tmp_path):
    accuracies = dict(zip(RATES, [0.7, 0.9, 0.8, None, None], strict=True))
    seen = []

    def sweep(cells, function, out, **options):
        seen.extend(cells)
        found = [accuracies[cell.lr] for cell in seen]
        return [{"diverged": a is None, "validation": a and {"accuracy": a}} for a in found]

    monkeypatch.setattr(module, "sweep", sweep)
    chosen = choose_rate("prefix", tmp_path, epochs=2)
    assert chosen["lr"] == RATES[1]
    assert chosen["validation_accuracy"] == {
        "0.0001": 0.7,
        "0.0003": 0.9,
        "0.001": 0.8,
        "0.003": None,
        "0.01": None,
    }
    assert {(cell.qk_ratio, cell.seed, cell.epochs, cell.form) for cell in seen} == {(1.0, 1234, 2, "prefix")}


def test_released_takes_the_notebooks_number_of_steps_whatever_the_data():
    assert released_epochs(157_721) == 15
    assert released_epochs(50_000) * 1563 == pytest.approx(73_935, rel=0.02)
    assert released_epochs(10**9) == 1
