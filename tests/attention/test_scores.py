"""The registry of scores; MRTA, AC, ACMC and DTAP; entropy, sinks and logits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fasterqk.attention.scores import (
    DTAP_EDGES,
    SCORES,
    Rows,
    ScoreName,
    dtap,
    dtap_over_seeds,
    entropy,
    format_score,
    summarize,
    table_scores,
    title_of,
)
from fasterqk.errors import InputError

unit = st.floats(0, 1)
pairs = st.lists(st.tuples(unit, unit), min_size=1, max_size=40)


def mass_scores(mass, probability, mass_threshold=0.5, probability_threshold=0.5):
    thresholds = {"mass_threshold": mass_threshold, "probability_threshold": probability_threshold}
    return summarize(mass, probability, **thresholds)


def test_hand_worked_instances():
    mass, probability = [0.5, 0.49, 0.9, 0.0], [0.5, 0.9, 0.2, 1.0]
    scores = mass_scores(mass, probability)
    assert scores["mrta"] == pytest.approx(0.4725, abs=1e-12)
    assert (scores["ac"], scores["acmc"]) == (50.0, 25.0)
    lower = mass_scores(mass, probability, 0.4, 0.6)
    assert (lower["ac"], lower["acmc"]) == (75.0, 25.0)


def test_the_papers_worked_example():
    """The baseline on SQuAD: 11.13 + 1.47 + .01 + .04 = 12.65 and 11.13 + 1.47 = 12.6 (appendix, metrics)."""
    edges = (0.0, 0.05, 0.1, 0.5, 1.0)
    counts = {(0.3, 0.7): 1113, (0.7, 0.7): 147, (0.3, 0.07): 1, (0.7, 0.02): 4, (0.02, 0.7): 8735}
    mass, probability = np.repeat(list(counts), list(counts.values()), axis=0).T
    scores = summarize(mass, probability, edges=edges, mass_threshold=0.1, probability_threshold=0.1)
    assert scores["ac"] == pytest.approx(12.65, abs=1e-12)
    assert scores["acmc"] == pytest.approx(12.6, abs=1e-12)
    assert np.array(scores["dtap"])[:, 2:].sum() == pytest.approx(12.65, abs=1e-9)


def test_dtap_rows_are_probability_from_below_and_columns_mass():
    table = dtap([0.95, 0.95, 0.95, 0.05], [0.1, 0.3, 1.0, 1.0])
    assert table[0][4] == table[1][4] == table[4][4] == table[4][0] == 25.0


def test_an_edge_belongs_to_the_interval_above_it_and_one_to_the_last():
    assert dtap([0.2], [1.0])[4][1] == 100.0
    assert dtap([1.0], [0.0])[0][4] == 100.0


def test_mass_above_one_of_a_maximum_over_layers_counts_in_the_last_column():
    assert dtap([1.7], [0.5])[2][4] == 100.0


@settings(deadline=None)
@given(pairs)
def test_dtap_sums_to_100_and_agrees_with_ac_at_its_edges(instances):
    mass, probability = zip(*instances, strict=True)
    table = np.array(dtap(mass, probability))
    assert table.sum() == pytest.approx(100)
    assert table.min() >= 0
    scores, edges = mass_scores(mass, probability, 0.6, 0.4), np.array(DTAP_EDGES[:-1])
    assert scores["ac"] == pytest.approx(table[:, edges >= 0.6].sum())
    assert scores["acmc"] == pytest.approx(table[edges >= 0.4][:, edges >= 0.6].sum())


@settings(deadline=None)
@given(pairs, st.randoms(use_true_random=False))
def test_shuffling_instances_changes_nothing(instances, random):
    shuffled = list(instances)
    random.shuffle(shuffled)
    one, other = ([np.array(x) for x in zip(*some, strict=True)] for some in (instances, shuffled))
    before, after = summarize(one[0], one[1], one[0] / 2), summarize(other[0], other[1], other[0] / 2)
    assert before["dtap"] == after["dtap"]
    assert (before["ac"], before["acmc"]) == (after["ac"], after["acmc"])
    assert before["mrta"] == pytest.approx(after["mrta"], abs=1e-12)
    assert before["null"] == pytest.approx(after["null"], abs=1e-12)


@settings(deadline=None)
@given(pairs)
def test_acmc_is_part_of_ac(instances):
    mass, probability = zip(*instances, strict=True)
    scores = mass_scores(mass, probability)
    assert 0 <= scores["acmc"] <= scores["ac"] <= 100


def test_summary_has_the_shared_keys_and_the_null_beside_them():
    scores = summarize([0.9, 0.1], [0.8, 0.9], [0.6, 0.2])
    assert set(scores) == {"mrta", "ac", "acmc", "dtap", "dtap_edges", "null"}
    assert scores["null"] == {"mrta": pytest.approx(0.4), "ac": 50.0, "acmc": 50.0}
    assert summarize([0.9], [0.8])["null"] == {"mrta": None, "ac": None, "acmc": None}


def test_dtap_over_seeds_is_mean_and_sample_deviation():
    mean, deviation = dtap_over_seeds([[[1.0, 2.0], [3.0, 94.0]], [[3.0, 2.0], [3.0, 92.0]]])
    assert mean == [[2.0, 2.0], [3.0, 93.0]]
    assert deviation[0][0] == pytest.approx(np.sqrt(2))
    assert deviation[0][1] == 0.0
    assert np.isnan(dtap_over_seeds([[[100.0]]])[1]).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: summarize([], []), "no instance has a relevant token"),
        (lambda: summarize([0.1, float("nan")], [0.1, 0.1]), "mass of instance 1"),
        (lambda: summarize([-0.2], [0.1]), "negative"),
        (lambda: summarize([0.1], [0.2, 0.3]), "1 masses but 2 probabilities"),
        (lambda: summarize([0.1], [1.2]), "above 1"),
        (lambda: dtap([0.1], [0.2], (0, 0.5)), "do not cover"),
        (lambda: dtap([0.1], [0.2], (0, 0.5, 0.5, 1)), "do not increase"),
        (lambda: dtap([[0.1]], [0.2]), "shape (1, 1)"),
        (lambda: dtap_over_seeds([]), "no DTAP table"),
        (lambda: dtap_over_seeds([[[1.0]], [[1.0, 2.0]]]), "differ in shape"),
    ],
)
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(InputError) as raised:
        call()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


TITLES = {
    "loss": "training loss",
    "train_accuracy": "train accuracy",
    "validation_accuracy": "validation accuracy",
    "test_accuracy": "test accuracy",
    "train_f1": "train F1",
    "validation_f1": "validation F1",
    "test_f1": "test F1",
    "mrta": "MRTA",
    "ac": "AC, %",
    "acmc": "ACMC, %",
    "entropy": "attention entropy, nats",
    "sufficiency_5": "sufficiency, top 5%",
    "sufficiency_50": "sufficiency, top 50%",
    "comprehensiveness_5": "comprehensiveness, top 5%",
    "comprehensiveness_50": "comprehensiveness, top 50%",
    "aopc_sufficiency": "sufficiency, mean over k (AOPC)",
    "aopc_comprehensiveness": "comprehensiveness, mean over k (AOPC)",
    "auprc": "plausibility, AUPRC",
    "token_f1": "plausibility, token F1",
    "iou_f1": "plausibility, IOU F1",
}


def test_titles_and_order_of_tables():
    assert {name: title_of(name) for name in TITLES} == TITLES
    others = ["epoch", "null_mrta", "test_loss", "accuracy", "layer_1_mrta", "average_ac", "probability"]
    assert table_scores([*others, *reversed(TITLES)]) == [
        *list(TITLES)[:11],
        "sufficiency_50",
        "sufficiency_5",
        "comprehensiveness_50",
        "comprehensiveness_5",
        *list(TITLES)[15:],
    ]


def test_flat_names_find_their_score_and_their_place():
    for name, score in SCORES.items():
        flat = f"{name}_20" if score.per_k else name
        for prefix in ("", "null_", "layer_3_"):
            assert ScoreName.parse(prefix + flat).score is score
        assert ScoreName.parse(flat).place[0] == (score.group or name)
    assert title_of("test_loss") == "test loss"
    for unknown in ("speed", "mrta_5", "aopc_5", "sufficiency_"):
        with pytest.raises(InputError, match=f"no score is called '{unknown}'; the registry has loss,"):
            ScoreName.parse(unknown)


def test_every_score_is_described_and_bounded():
    for name, score in SCORES.items():
        assert score.name == name
        assert score.title
        assert score.description
        assert None in (score.low, score.high) or score.low < score.high
        assert score.null == "uniform" if score.compute else score.better or score.null


def test_numbers_as_text():
    assert format_score(SCORES["acmc"], None) == format_score(SCORES["mrta"], float("nan")) == "–"
    assert format_score(SCORES["sufficiency"], -0.0001) == "0.000"
    assert format_score(SCORES["sufficiency"], -0.25) == "-0.250"


def test_the_documentation_lists_every_score():
    text = (Path(__file__).parents[2] / "docs" / "scores.md").read_text(encoding="utf-8")
    for score in SCORES.values():
        assert score.low is not None
        bounds = f"from {score.low:g}" if score.high is None else f"{score.low:g} to {score.high:g}"
        row = (
            f"| `{score.name}` | {score.description} | {bounds} | {score.better or ''} | {score.null or ''} |"
        )
        assert row in text.splitlines()


rows = arrays(float, (3, 5), elements=st.floats(0, 1)).filter(lambda x: (x.sum(1) > 1e-3).all())


def computed(name, weights, real=None):
    """A registered score of plain rows."""
    real = np.ones(weights.shape, dtype=bool) if real is None else real
    return SCORES[name].compute(Rows(weights, np.zeros(weights.shape), real, real, real, (), ()))


def test_uniform_and_one_hot():
    both = np.array([[0.25] * 4, [0, 1.0, 0, 0]])
    assert entropy(both) == pytest.approx([np.log(4), 0], abs=1e-12)
    assert computed("effective_tokens", both) == pytest.approx([4, 1], abs=1e-12)
    assert computed("largest_weight", both).tolist() == [0.25, 1.0]


@settings(deadline=None)
@given(rows)
def test_bounds_and_scale_freedom(weights):
    found = entropy(weights)
    assert (found >= 0).all()
    assert (found <= np.log(5) + 1e-12).all()
    assert entropy(7 * weights) == pytest.approx(found, abs=1e-9)
    assert (computed("largest_weight", weights) >= 1 / 5 - 1e-12).all()


def test_first_real_token_is_found_behind_padding():
    real = np.array([[False, True, True], [True, True, True]])
    weights = np.array([[0, 0.75, 0.25], [0.5, 0.25, 0.25]])
    assert computed("first_token_share", weights, real).tolist() == [0.75, 0.5]


def test_max_logit_recovers_logits_up_to_their_mean():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, 4, dtype=torch.float64) * 5
    allowed = torch.ones(2, 4, dtype=torch.bool)
    read = torch.tensor([0, 3])
    at_read = logits[torch.arange(2), :, read]
    expected = (at_read - at_read.mean(-1, keepdim=True)).amax((1, 2))
    nothing = np.zeros((2, 4))
    score = SCORES["max_logit"].compute
    rows = Rows(nothing, nothing, *[nothing > 0] * 3, [at_read.softmax(-1)], [allowed])
    assert score(rows) == pytest.approx(expected.numpy(), abs=1e-4)
    uniform = torch.full((2, 1, 4), 0.25)
    assert score(replace(rows, layers=[uniform, uniform], allowed=[allowed, allowed])).tolist() == [0, 0]
