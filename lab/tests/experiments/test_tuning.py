import json

import pytest

import fasterqk_lab.training
from fasterqk.errors import InputError
from fasterqk.files import canonical_json
from fasterqk_lab.experiments._registry import CellRunner
from fasterqk_lab.experiments.tuning import HIGHEST, LOWEST, RATES, RATIOS, Search, search_of, tune
from fasterqk_lab.training import TrainConfig


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "little.jsonl"
    lines = [{"id": str(i), "tokens": ["a", "b"], "relevance": [0, 1], "label": i % 2} for i in range(60)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return search_of(TrainConfig("jsonl", file=str(path))).base


class Landscape:
    """Stands in for training: validation accuracy as a function of rate, ratio and seed, and who asked."""

    def __init__(self, accuracy, stop_after=None):
        self.accuracy = accuracy
        self.asked = []
        self.stop_after = stop_after

    def __call__(self, config, *, folder=None, progress=None):
        if len(self.asked) == self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(config)
        value = self.accuracy(config.optimisation.lr, config.optimisation.qk_ratio, config.seed)
        best = None if value is None else {"validation_accuracy": value, "epoch": 2.0}
        return {"diverged": value is None, "best": best}


@pytest.fixture
def landscape(monkeypatch):
    def install(accuracy, stop_after=None):
        found = Landscape(accuracy, stop_after)
        monkeypatch.setattr(fasterqk_lab.training, "train", found)
        return found

    return install


def search(base, **options):
    return Search(base, **{"rates": (1e-4, 1e-3, 1e-2), "ratios": (5.0, 30.0), "finalists": 2, **options})


def peak_at_one_thousandth(lr, ratio, seed):
    return {1e-4: 0.5, 1e-3: 0.7, 1e-2: 0.6}[lr] + (0.05 if ratio == 30 else 0.0)


def test_the_grid_is_the_papers_range():
    assert (min(RATES), max(RATES)) == (LOWEST, HIGHEST) == (1e-6, 1e-2)
    assert 5e-5 in RATES
    assert RATIOS == (5, 10, 20, 30, 100)


def test_runs_of_a_search_measure_no_attention_and_start_from_equal_rates(base):
    assert (base.evaluation.protocol, base.optimisation.qk_ratio) == ("fit", 1)
    assert search_of(TrainConfig("hatexplain", qk_ratio=30), epochs=4).base.optimisation.epochs == 4


def test_the_rate_comes_first_then_the_multiplier_at_that_rate(base, landscape, tmp_path):
    asked = landscape(peak_at_one_thousandth).asked
    found = tune(search(base), CellRunner(tmp_path, workers=0))
    assert (found["lr"], found["qk_ratio"]) == (1e-3, 30)
    stages = [config.optimisation.qk_ratio == 1 for config in asked]
    assert stages == sorted(stages, reverse=True)
    assert {config.optimisation.lr for config in asked if config.optimisation.qk_ratio != 1} == {1e-3}
    assert found["accuracy"]["equal_rates"]["mean"] == pytest.approx(0.7)
    assert found["accuracy"]["faster_qk"]["mean"] == pytest.approx(0.75)


def test_only_the_best_values_are_tried_with_more_seeds(base, landscape, tmp_path):
    asked = landscape(peak_at_one_thousandth).asked
    found = tune(search(base, seeds=3), CellRunner(tmp_path, workers=0))
    tried = {row["lr"]: row["accuracy"]["n"] for row in found["stages"]["lr"]["tried"]}
    assert tried == {1e-4: 1, 1e-3: 3, 1e-2: 3}
    assert found["runs"] == len(asked) == (3 + 2 * 2) + (2 + 2 * 2)


def test_the_mean_over_seeds_decides_and_not_the_luck_of_the_first(base, landscape, tmp_path):
    def lucky(lr, ratio, seed):
        return {1e-4: 0.1, 1e-3: 0.6, 1e-2: 0.9 if seed == 0 else 0.3}[lr]

    landscape(lucky)
    assert tune(search(base), CellRunner(tmp_path, workers=0))["lr"] == 1e-3


def test_equal_means_choose_the_smaller_value_and_name_the_other(base, landscape, tmp_path):
    landscape(lambda lr, ratio, seed: 0.6)
    found = tune(search(base), CellRunner(tmp_path, workers=0))
    assert (found["lr"], found["qk_ratio"]) == (1e-4, 5)
    assert found["stages"]["lr"]["not_told_apart"] == [1e-3]
    # The standard error of a share of .6 among the validation examples.
    error = (0.24 / found["validation_examples"]) ** 0.5
    assert found["stages"]["lr"]["standard_error"] == pytest.approx(error)


def test_a_rate_that_diverges_is_said_and_never_chosen(base, landscape, tmp_path):
    landscape(lambda lr, ratio, seed: None if lr == 1e-2 else 0.5 + lr)
    found = tune(search(base, finalists=3), CellRunner(tmp_path, workers=0))
    assert found["lr"] == 1e-3
    assert [row["diverged"] for row in found["stages"]["lr"]["tried"]] == [False, False, True]


def test_when_everything_diverges_the_values_are_named(base, landscape, tmp_path):
    landscape(lambda lr, ratio, seed: None)
    with pytest.raises(InputError, match=r"every run diverged at lr 0\.0001, 0\.001, 0\.01"):
        tune(search(base), CellRunner(tmp_path, workers=0))


@pytest.mark.parametrize("runs", [1, 5, 9])
def test_an_interrupted_search_goes_on_where_it_was(base, landscape, tmp_path, runs):
    landscape(peak_at_one_thousandth)
    whole = tune(search(base), CellRunner(tmp_path / "whole", workers=0))
    stopped = landscape(peak_at_one_thousandth, stop_after=runs)
    with pytest.raises(KeyboardInterrupt):
        tune(search(base), CellRunner(tmp_path / "stopped", workers=0))
    resumed = landscape(peak_at_one_thousandth)
    assert canonical_json(tune(search(base), CellRunner(tmp_path / "stopped", workers=0))) == canonical_json(
        whole
    )
    assert len(stopped.asked) + len(resumed.asked) == whole["runs"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rates": (1e-7, 1e-3)}, "rate 1e-07 lies outside"),
        ({"rates": (1e-3, 1e-3)}, "each once"),
        ({"ratios": ()}, "one value or more"),
    ],
)
def test_values_that_make_no_search_are_refused(base, options, message):
    with pytest.raises(InputError, match=message):
        search(base, **options)
