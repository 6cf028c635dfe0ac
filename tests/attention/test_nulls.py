"""Sharp and permuted attention: exact where they can be, drawn where not, and never better by sharpness."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from fasterqk.attention import Aggregation, Passes, Removal, measure
from fasterqk.attention.aggregation import DRAWS, Pattern, null_row, null_scores, permuted_mass, sharp_mass
from fasterqk.attention.scores import SCORES, STRONGER_NULLS, table_scores, title_of


@pytest.mark.parametrize("residual", [0.5, 0.0])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_the_permuted_null_of_rollout_deals_out_what_the_residuals_leave_on_the_read_position(
    residual, layers
):
    row = null_row((Pattern(causal=False),) * layers, Aggregation(residual=residual), 20, 0).double().numpy()
    relevance = (np.arange(20) % 4 == 3) * 1.0
    assert row @ relevance == pytest.approx((1 - residual**layers) / 4, abs=1e-6)
    permuted = permuted_mass(row[None], relevance[None], np.ones((1, 20), bool), 0)
    assert permuted.expected == pytest.approx(1 / 4, abs=1e-6)


def test_ac_of_sharp_attention_is_100_times_the_mrta_of_uniform_attention():
    generator = np.random.default_rng(0)
    masses, uniform = [], []
    for number in range(50):
        count = int(generator.integers(2, 30))
        relevance = (generator.random((1, count)) < 0.4) * 1.0
        even = np.full((1, count), 1 / count)
        masses.append(sharp_mass(even, relevance, number))
        uniform.append(relevance.mean())
    scores = null_scores(masses, np.ones(50))
    assert scores["mrta"] == pytest.approx(np.mean(uniform), abs=1e-12)
    assert scores["ac"] == scores["acmc"] == pytest.approx(100 * np.mean(uniform), abs=1e-10)


def test_sharp_attention_on_fractions_reaches_the_threshold_where_the_fraction_does():
    mass = sharp_mass(np.full((1, 4), 0.25), np.array([[0, 1 / 3, 2 / 3, 1]]), number=0)
    assert mass.expected == pytest.approx(0.5)
    assert [mass.chance_from(threshold) for threshold in (0.3, 0.5, 0.9)] == [0.75, 0.5, 0.25]


def test_sharp_attention_of_several_rows_is_binomial():
    rows, count = 4, 10
    relevance = np.zeros((rows, count))
    relevance[:, 3:6] = 1
    even = np.full((rows, count), 1 / count)
    masses = [sharp_mass(even, relevance, number) for number in range(200)]
    expected = sum(
        np.prod([0.3 if hit else 0.7 for hit in hits])
        for hits in itertools.product((0, 1), repeat=rows)
        if sum(hits) >= 2
    )
    found = np.mean([mass.chance_from(0.5) for mass in masses])
    assert found == pytest.approx(expected, abs=4 * np.sqrt(expected / (200 * DRAWS)))
    assert masses[0].expected == pytest.approx(0.3)


def test_permuted_attention_has_the_mass_of_all_orders_and_sees_nothing_hidden():
    weights = np.array([[0.6, 0.2, 0.15, 0.05, 0.0]])
    relevance = np.array([[1.0, 0.0, 0.0, 0.0, 1.0]])
    seen = np.array([[True, True, True, True, False]])
    masses = [permuted_mass(weights, relevance, seen, number) for number in range(200)]
    orders = list(itertools.permutations(weights[0, :4]))
    assert masses[0].expected == pytest.approx(np.mean([order[0] for order in orders]))
    found = np.mean([mass.chance_from(0.5) for mass in masses])
    assert found == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / (200 * DRAWS)))
    assert set(np.unique(masses[0].values).round(12)) <= {0.6, 0.2, 0.15, 0.05}


def test_permuting_uniform_attention_changes_nothing():
    even, relevance = np.full((1, 8), 0.125), np.array([[1, 1, 1, 1, 1, 0, 0, 0.5]])
    mass = permuted_mass(even, relevance, even > 0, 0)
    assert mass.values == pytest.approx(np.full(DRAWS, 5.5 / 8))
    assert mass.expected == pytest.approx(5.5 / 8)


def test_draws_depend_on_the_place_in_the_data_alone(small_model, some_instances):
    model, instances = small_model(causal=True), some_instances()
    one, other = (
        measure(
            model, instances, removal=Removal(percents=()), passes=Passes(batch_size=size, by_layer=True)
        ).summary()
        for size in (1, 5)
    )
    for null in STRONGER_NULLS:
        assert other.stronger_nulls[null] == pytest.approx(one.stronger_nulls[null], abs=1e-9)
        for number, layer in one.layers.items():
            assert other.layers[number][null] == pytest.approx(layer[null], abs=1e-9)


@pytest.mark.parametrize("how", [Aggregation("last"), Aggregation("rollout", residual=0)])
@pytest.mark.parametrize("causal", [True, False])
def test_measured_nulls_follow_their_definitions(small_model, some_instances, how, causal):
    model = small_model(causal=causal)
    model.pattern = Pattern(causal)
    instances = [
        replace(instance, relevance=(instance.relevance > 0) * 1.0)
        for instance in some_instances()
        if instance.relevant
    ]
    found = measure(model, instances, aggregation=how, removal=Removal(percents=()))
    summary = found.summary(mass_threshold=0.3)
    sharp, permuted = summary.stronger_nulls["sharp"], summary.stronger_nulls["permuted"]
    assert sharp["mrta"] == pytest.approx(summary.null["mrta"], abs=1e-6)
    assert sharp["ac"] == pytest.approx(100 * summary.null["mrta"], abs=1e-4)
    assert sharp["acmc"] <= sharp["ac"]
    if how.method == "last":
        assert permuted["mrta"] == pytest.approx(summary.null["mrta"], abs=1e-6)
    document = summary.to_json()
    assert document["sharp"] == sharp and document["permuted"] == permuted


def test_every_stronger_null_has_a_title_and_stands_behind_its_score():
    for score in SCORES.values():
        names = [f"{null}_{score.name}" for null in score.stronger_nulls]
        assert all(title_of(name).startswith(score.title) for name in names)
        if names:
            assert table_scores([*names, score.name]) == [score.name, *names]


def test_without_relevant_tokens_there_are_no_stronger_nulls(small_model, some_instances):
    nothing = [replace(x, relevance=np.zeros(len(x.tokens))) for x in some_instances()]
    summary = measure(small_model(), nothing, removal=Removal(percents=())).summary()
    assert summary.stronger_nulls == {}
    assert "sharp" not in summary.to_json()
