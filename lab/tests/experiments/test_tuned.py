import pytest

from fasterqk.errors import InputError
from fasterqk_lab.experiments.ratio_or_rate import ratio_or_rate
from fasterqk_lab.experiments.tuning import choose, tuned_arms, tunings


class MadeUp:
    """Stands in for the runner: the judge of a cell is a function of its base rate and ratio."""

    def __init__(self, judge, value, diverged=()):
        self.judge, self.value, self.diverged, self.values = judge, value, diverged, []

    def run(self, cells, function, *, title, table):
        results = {}
        for key, config in cells.items():
            point = config.optimisation.lr, config.optimisation.qk_ratio
            history = [{"loss": 1.0, self.judge: value} for value in (0.1, self.value(*point), 0.2)]
            splits = {"train": {}, "validation": {}, "test": {}}
            results[key] = {"diverged": point in self.diverged, "loss": 1.0, "history": history, **splits}
        return results

    def add(self, values):
        self.values += values


@pytest.mark.parametrize("name", tunings())
def test_both_arms_get_the_best_point_of_their_own(name):
    tuning = tunings()[name]
    best = {tuning.rates[-1]: 0.9, tuning.rates[0]: 0.5}
    sign = -1 if tuning.judge.endswith("loss") else 1

    def value(rate, ratio):
        return sign * (best.get(rate, 0.3) - 0.001 * ratio)

    runner = MadeUp(tuning.judge, value)
    found = choose(tuning, name, runner)
    judged = {value.arm: value.value for value in runner.values if value.at == "best along the search"}
    assert {value.experiment for value in runner.values} == {f"tuned-{name}-search"}
    assert [point.judge.mean for point in found.tried] == pytest.approx(list(judged.values()))
    ratios = sorted(tuning.ratios)
    assert found.chosen["baseline"].lr == tuning.rates[-1]
    assert found.chosen["faster_qk"].qk_ratio == ratios[1]
    # The highest base rate for both, and the smallest of the larger ratios.
    assert found.edges == {"baseline": ["base rate"], "faster_qk": ["base rate", "ratio"]}
    comparison = tuned_arms(tuning, name, found.chosen, seeds=3)
    assert (comparison.decides, comparison.at) == (("mrta",), "best")  # as named before any run
    assert comparison.planned == (2 if name == "squad" else None)
    assert comparison.arms["baseline"].optimisation.qk_ratio == 1
    assert comparison.arms["faster_qk"].optimisation.lr == tuning.rates[-1]


def test_the_search_of_hatexplain_is_made_of_the_cells_of_ratio_or_rate():
    done = {config.replace(seed=1234) for config in ratio_or_rate().arms.values()}
    assert {config.replace(seed=1234) for config in tunings()["hatexplain"].grid().values()} <= done


def test_a_point_that_diverged_is_not_chosen_and_an_arm_without_any_is_an_error():
    tuning = tunings()["sva-whole"]
    *others, highest = tuning.rates
    lost = {(highest, 1.0)}
    found = choose(tuning, "sva-whole", MadeUp(tuning.judge, lambda rate, ratio: 0.2 + rate, lost))
    assert found.chosen["baseline"].lr == others[-1]
    lost |= {(rate, 1.0) for rate in others}
    with pytest.raises(InputError, match="diverged at every base rate"):
        choose(tuning, "sva-whole", MadeUp(tuning.judge, lambda rate, ratio: 0.2 + rate, lost))


def test_squad_is_searched_with_less_and_chooses_its_epoch_by_what_chose_its_rates():
    tuning = tunings()["squad"]
    searched = tuning.grid()[1e-3, 10]
    assert tuning.judge == tuning.base.evaluation.best_by == "validation_loss"
    assert (searched.optimisation.lr, searched.optimisation.qk_ratio) == (1e-3, 10)
    assert searched.optimisation.epochs < tuning.base.optimisation.epochs
    assert (searched.evaluation.protocol, tuning.base.evaluation.protocol) == ("fit", "paper")
