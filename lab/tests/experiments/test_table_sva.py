from pathlib import Path
from types import SimpleNamespace

import pytest

from fasterqk.errors import InputError
from fasterqk.files import config_values
from fasterqk_lab.compare import read_values
from fasterqk_lab.experiments import _registry
from fasterqk_lab.experiments import table_main as module
from fasterqk_lab.experiments._comparison import BASELINE, FASTER
from fasterqk_lab.experiments.table_main import RATES, choose_rate, released_epochs, table_sva


def differences(comparison):
    one, other = (dict(config_values(comparison.arms[arm])) for arm in (BASELINE, FASTER))
    return {name: other[name] for name in one if one[name] != other[name]}


def test_paper_arms_have_the_papers_architecture_and_the_rate_that_is_given():
    comparison = table_sva("paper", "prefix", lr=3e-4)
    base = comparison.arms[BASELINE]
    rates = base.optimisation.lr, base.optimisation.batch_size, base.optimisation.optimizer
    assert (base.data.form, *rates) == ("prefix", 3e-4, 256, "adamw")
    assert (base.model.mlp_width, base.model.residual, base.model.read) == (0, False, "last")
    assert base.optimisation.decay == "independent"
    assert comparison.seeds == (1234, 1235, 1236, 1237, 1238)


def test_released_arms_differ_in_all_that_the_notebooks_multiply():
    experiment = table_sva("released")
    faster = differences(experiment)
    assert faster.pop("qk_ratio") == 100.0
    assert set(faster.pop("faster")) >= {"embedding.*", "positions", "*.W_Q", "*.b_Q", "*.W_K", "*.b_K"}
    assert not faster
    base = experiment.arms[BASELINE]
    assert (
        base.optimisation.optimizer,
        base.optimisation.momentum,
        base.optimisation.lr,
        base.optimisation.batch_size,
    ) == ("sgd", 0.99, 5e-4, 32)
    assert (
        base.optimisation.epochs,
        base.optimisation.weight_decay,
        base.optimisation.clip,
        base.data.form,
    ) == (15, 1e-5, None, "released")
    assert base.evaluation.protocol == "released-sva"


def test_only_whole_sentences_have_printed_numbers_and_a_released_protocol():
    assert set(table_sva("paper", "whole").printed) == {"paper"}
    assert not table_sva("paper", "prefix").printed
    assert set(table_sva("released", "whole").printed) == {"paper", "released"}
    with pytest.raises(InputError, match="'released' has no form 'prefix'; its forms are whole"):
        table_sva("released", "prefix")


@pytest.fixture
def choose(monkeypatch, tmp_path):
    """Choose among made-up validation accuracies on so many sentences."""

    def choose(accuracies, sentences):
        by_rate = dict(zip(RATES, accuracies, strict=True))
        asked = []

        def sweep(cells, function, out, **options):
            asked.extend(cells)
            reached = [by_rate[cell.optimisation.lr] for cell in asked]
            splits = {"train": {}, "test": {}, "loss": 0.1}
            return [{"diverged": a is None, "validation": {"accuracy": a}, **splits} for a in reached]

        task = SimpleNamespace(splits={"validation": range(sentences)})
        monkeypatch.setattr(_registry, "sweep", sweep)
        monkeypatch.setattr(module, "load_task", lambda name, form: task)
        runner = _registry.CellRunner(tmp_path, experiment="table-sva")
        return choose_rate("prefix", runner, epochs=2), asked, runner.write_results()

    return choose


def test_the_rate_is_the_smallest_within_one_standard_error_of_the_best(choose):
    accuracies = [0.7, 0.85, 0.88, 0.9, None]
    assert choose(accuracies, 10_000)[0]["lr"] == 3e-3  # a standard error of 0.003
    assert choose(accuracies, 225)[0]["lr"] == 1e-3  # 0.02
    chosen, asked, path = choose(accuracies, 36)  # 0.05
    assert chosen["lr"] == 3e-4
    assert chosen["standard_error"] == pytest.approx(0.05)
    assert chosen["validation_accuracy"] == {
        "0.0001": 0.7,
        "0.0003": 0.85,
        "0.001": 0.88,
        "0.003": 0.9,
        "0.01": None,
    }
    settings = {
        (cell.optimisation.qk_ratio, cell.seed, cell.optimisation.epochs, cell.data.form) for cell in asked
    }
    assert settings == {(1.0, 1234, 2, "prefix")}
    # What was tried is in the table of results, under a name of its own.
    tried = {value.arm: value.value for value in read_values(Path(path))}
    assert tried == {"base rate 0.0001": 0.7, "base rate 0.0003": 0.85, "base rate 0.001": 0.88} | {
        "base rate 0.003": 0.9
    }


def test_rates_that_all_diverge_are_one_line(choose):
    with pytest.raises(InputError, match="diverged at every base rate"):
        choose([None] * len(RATES), 10)


def test_released_takes_the_notebooks_number_of_steps_whatever_the_data():
    assert released_epochs(157_721) == 15
    assert released_epochs(50_000) * 1563 == pytest.approx(73_935, rel=0.02)
    assert released_epochs(10**9) == 1


def test_a_base_rate_that_is_given_is_not_searched_for():
    runner = SimpleNamespace(run=lambda *_, **__: pytest.fail("searched"))
    comparison, chosen = module.choose_arms(runner, "paper", "whole", 1, None, lr=1e-3)
    assert chosen is None
    assert {config.optimisation.lr for config in comparison.arms.values()} == {1e-3}
    with pytest.raises(InputError, match=r"lr 0.001: the rates of protocol 'released' are the notebooks'"):
        module.choose_arms(runner, "released", "whole", 1, None, lr=1e-3)


def test_the_recorded_rates_are_what_the_rule_chooses_from_the_recorded_accuracies(tmp_path):
    cells = Path(__file__).parents[3] / "lab" / "paper" / "cells" / "table-sva.jsonl.xz"
    for form, rate in module.FOUND_RATES.items():
        runner = _registry.CellRunner(tmp_path, experiment="table-sva", files=[str(cells)])
        assert choose_rate(form, runner)["lr"] == rate
