"""The whole measurement on a small model of our own."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fasterqk.attention import (
    Aggregation,
    HuggingFaceCausal,
    HuggingFaceClassifier,
    Instance,
    Nulls,
    Passes,
    Removal,
    TorchClassifier,
    measure,
)
from fasterqk.attention._measure import batches
from fasterqk.attention.aggregation import Pattern, aggregate, uniform_attention
from fasterqk.attention.instances import collate
from fasterqk.attention.models import Answer, Reading
from fasterqk.attention.scores import SCORES, Score
from fasterqk.errors import InputError
from fasterqk.trace import capture

COLUMNS = [score.column for score in SCORES.values() if score.compute]
HOWS = [Aggregation(), Aggregation("mean"), Aggregation("max"), Aggregation("last"), Aggregation("layer", 0)]


def measured(model, instances, *, percents=None, removal=None, aggregation=None, scores=None, **passes):
    removal = removal or Removal()
    return measure(
        model,
        instances,
        aggregation=aggregation,
        scores=scores,
        removal=removal if percents is None else replace(removal, percents=percents),
        passes=Passes(**passes),
    )


def assert_same(one, other, tolerance=1e-6):
    for name in one.columns:
        assert other.columns[name] == pytest.approx(one.columns[name], abs=tolerance), name
    for ours, theirs in (
        (one.faithfulness, other.faithfulness),
        (one.random[0].faithfulness, other.random[0].faithfulness),
    ):
        assert theirs.sufficiency == pytest.approx(ours.sufficiency, abs=tolerance)
        assert theirs.comprehensiveness == pytest.approx(ours.comprehensiveness, abs=tolerance)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("removal", [Removal(), Removal("mask", 0), Removal("attention")])
def test_batched_equals_single(small_model, some_instances, causal, removal):
    model, instances = small_model(causal=causal), some_instances()
    single = measured(model, instances, batch_size=1, removal=removal)
    assert_same(single, measured(model, instances, batch_size=4, removal=removal))


@pytest.mark.parametrize("how", HOWS)
def test_every_aggregation_batched_equals_single(small_model, some_instances, how):
    model, instances = small_model(causal=True), some_instances()
    single = measured(model, instances, batch_size=1, aggregation=how, percents=[20])
    assert_same(single, measured(model, instances, batch_size=7, aggregation=how, percents=[20]))


class Everything:
    """A model that never leaves out a row."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def read(self, batch, *, read_only=False):
        reading = self.model.read(batch)
        # The rows are cut out here, after all was captured.
        place = torch.arange(len(batch))
        rows = [layer[place, :, reading.read].unsqueeze(2) for layer in reading.layers]
        return replace(reading, layers=rows) if read_only else reading


@pytest.mark.parametrize("how", HOWS[1:])
@pytest.mark.parametrize("causal", [True, False])
def test_read_rows_alone_give_the_same(small_model, some_instances, how, causal):
    model, instances = small_model(causal=causal), some_instances()
    asked = []
    read = model.read
    model.read = lambda batch, **options: asked.append(options) or read(batch, **options)
    ours = measured(model, instances, aggregation=how, percents=[20])
    assert all(options == {"read_only": True} for options in asked)
    model.read = read
    assert_same(ours, measured(Everything(model), instances, aggregation=how, percents=[20]), tolerance=0)


def test_gradient_ranking_batched_equals_single(small_model, some_instances):
    model, instances = small_model(), some_instances()
    single = measured(model, instances, batch_size=1, scores="gradient")
    batched = measured(model, instances, batch_size=5, scores="gradient")
    assert_same(single, batched)
    rankings = [measurement.rankings["gradient"] for measurement in (single, batched)]
    for one, other in zip(*(ranking.importance for ranking in rankings), strict=True):
        assert other == pytest.approx(one, abs=1e-9)
    one, other = (ranking.faithfulness.comprehensiveness for ranking in rankings)
    assert other == pytest.approx(one, abs=1e-6)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6))
def test_permuting_tokens_with_their_relevance_changes_nothing(small_model, some_instances, seed):
    model = small_model(positions=False)
    (instance,) = some_instances(1, seed)
    instance = replace(instance, relevance=(np.arange(len(instance.tokens)) == 1) * 1.0)
    # The first token stays: it is the one that reads.
    order = np.concatenate([[0], 1 + np.random.default_rng(seed).permutation(len(instance.tokens) - 1)])
    moved = replace(instance, tokens=instance.tokens[order], relevance=instance.relevance[order])
    one, other = (measured(model, [x], percents=[20]).columns for x in (instance, moved))
    for name in one:
        assert other[name] == pytest.approx(one[name], abs=1e-6), name
    assert 0 <= one["mass"][0] <= 1


def test_mass_and_null_are_what_their_definitions_say(small_model, some_instances):
    model, instances = small_model(causal=True), some_instances()
    found = measured(model, instances, aggregation=Aggregation())
    batch = collate(instances)
    reading = model.read(batch)
    layers, read = reading.layers, reading.read
    allowed = Pattern(causal=True).pairs(torch.from_numpy(batch.real))
    relevance = torch.from_numpy(batch.relevance)
    rows = aggregate(layers, read, allowed)
    null = aggregate([uniform_attention(allowed)] * 2, read, allowed)
    assert found.columns["mass"] == pytest.approx((rows * relevance).sum(1).numpy(), abs=1e-9)
    assert found.columns["null_mass"] == pytest.approx((null * relevance).sum(1).numpy(), abs=1e-6)


def test_uniform_attention_equals_its_null(small_model, some_instances):
    model = small_model()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.q_proj.weight)
        torch.nn.init.zeros_(layer.q_proj.bias)
    columns = measured(model, some_instances()).columns
    for name in COLUMNS:
        assert columns[name] == pytest.approx(columns[f"null_{name}"], abs=1e-6), name
    assert columns["max_logit"] == pytest.approx(0, abs=1e-6)


def test_summary_counts_and_keys(small_model, some_instances):
    instances = some_instances()
    nothing = replace(instances[0], relevance=np.zeros(len(instances[0].tokens)))
    summary = measured(small_model(), [nothing, *instances[1:]], percents=[5, 50]).summary().to_json()
    assert list(summary)[:17] == [
        "n",
        "n_without_relevance",
        "accuracy",
        "mrta",
        "ac",
        "acmc",
        "dtap",
        "dtap_edges",
        "mrta_among_words",
        "entropy",
        "sufficiency",
        "comprehensiveness",
        "aopc",
        "wins",
        "plausibility",
        "null",
        "random",
    ]
    assert summary["n"] == 7
    assert summary["n_without_relevance"] == 1 + sum(not x.relevant for x in instances[1:])
    assert set(summary["sufficiency"]) == set(summary["random"]["comprehensiveness"]) == {"5", "50"}
    for name in ("sufficiency", "comprehensiveness"):
        assert summary["aopc"][name] == pytest.approx(np.mean(list(summary[name].values())), abs=1e-12)
    assert np.sum(summary["dtap"]) == pytest.approx(100)
    assert set(summary["plausibility"]) == {"auprc", "token_f1", "token_iou", "iou_f1"}
    assert {"mrta", "ac", "acmc", "entropy"} <= set(summary["null"])
    # Every metric of the registry is reported with its null.
    reported = {**summary["concentration"], "entropy": None, "mrta_among_words": None}
    assert set(reported) - set(summary["concentration"]) <= set(summary)
    assert set(reported) == set(COLUMNS) - {"mass"} == set(summary["null"]) - {"mrta", "ac", "acmc"}


def test_wins_against_random_rankings_text_by_text(small_model, some_instances):
    together = measure(
        small_model(),
        some_instances(),
        removal=["delete", "attention"],
        nulls=Nulls(draws=4),
        scores="gradient",
    )
    for measurement in (together, *together.others):
        for kind, sign in (("comprehensiveness", 1), ("sufficiency", -1)):
            wins = []
            for number in range(len(together.instances)):
                means = [
                    np.mean(getattr(x.faithfulness, kind)[number])
                    for x in (measurement.rankings["rollout"], *measurement.random)
                ]
                beaten = [sign * (means[0] - drawn) for drawn in means[1:]]
                wins.append(np.mean([1.0 if x > 0 else 0.5 if x == 0 else 0.0 for x in beaten]))
            assert measurement.instance_scores()[f"wins_{kind}"] == pytest.approx(wins)
            assert measurement.summary()[f"wins_{kind}"] == pytest.approx(np.mean(wins))
            assert measurement.summary().null[f"wins_{kind}"] == 0.5
    rows = together.removals_table([None, None])
    assert [row["removal"] for row in rows] == ["delete"] * 4 + ["attention"] * 4
    alone = measure(small_model(), some_instances(), removal="attention", nulls=Nulls(draws=4))
    expected = {name: value for name, value in alone.summary().scores.items() if "tau" not in name}
    scores = together.others[0].summary().scores
    # Batches of other sizes round the last bit otherwise on some processors.
    assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-11)
    with pytest.raises(InputError, match="give one, or several different ones"):
        measure(small_model(), some_instances(), removal=["delete", "delete"])


def test_right_and_wrong_answers_classes_and_heads(small_model, some_instances):
    found = measured(small_model(), some_instances(12))
    rows = {row["instances"]: row for row in found.groups_table()}
    assert rows["all"]["n"] == rows["right"]["n"] + rows["wrong"]["n"] == 12
    assert sum(row["n"] for name, row in rows.items() if name.startswith("label")) == 12
    assert rows["right"]["accuracy"] == 1 and rows["wrong"]["accuracy"] == 0
    right = (found.columns["correct"] > 0) & found.relevant
    assert not found.relevant.all()
    assert rows["right"]["mrta"] == pytest.approx(found.columns["mass"][right].mean())
    assert rows["right"]["null mrta"] == pytest.approx(found.columns["null_mass"][right].mean())
    assert rows["all"]["null mrta"] == pytest.approx(found.summary().null["mrta"])
    # The only head of a layer is the layer.
    for layer, row in enumerate(found.heads_table()):
        alone = measured(small_model(), some_instances(12), aggregation=Aggregation("layer", layer))
        assert row["head 0"] == pytest.approx(alone.summary()["mrta"])
        assert row["uniform"] == pytest.approx(alone.summary().null["mrta"])
    assert found.summary().to_json()["heads"] == found.heads_table()


def test_tables_are_tidy(small_model, some_instances):
    found = measured(small_model(), some_instances(), percents=[5, 50])
    scores, rows = found.scores_table(), found.instances_table()
    assert {frozenset(row) for row in scores} == {
        frozenset({"score", "k", "n", "value", "null", "sharp", "permuted"})
    }
    summary = found.summary().to_json()
    by_name = {(row["score"], row["k"]): row for row in scores}
    assert by_name["sufficiency", 50]["value"] == summary["sufficiency"]["50"]
    assert by_name["sufficiency", 50]["null"] == summary["random"]["sufficiency"]["50"]
    assert by_name["mrta", None]["null"] == summary["null"]["mrta"]
    assert [row["id"] for row in rows] == [str(i) for i in range(7)]
    assert np.mean([row["sufficiency_50"] for row in rows]) == pytest.approx(summary["sufficiency"]["50"])


def test_notebook_view_escapes_what_users_wrote(small_model, some_instances):
    instances = [replace(x, id="<script>&") for x in some_instances(1)]
    text = measured(small_model(), instances)._repr_html_()
    assert "<script>" not in text
    assert "&lt;script&gt;&amp;" in text
    assert "&lt;w1&gt;" in text
    assert text.count("<table>") == text.count("</table>") > 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 8), st.integers(1, 5000))
def test_batches_cover_everything_once_within_memory(lengths, batch_size, weights):
    lengths = np.sort(np.array(lengths, dtype=np.int64))
    runs = list(batches(lengths, batch_size, heads=3, weights=weights))
    assert [place for start, stop in runs for place in range(start, stop)] == list(range(len(lengths)))
    for start, stop in runs:
        assert 1 <= stop - start <= batch_size
        assert stop - start == 1 or (stop - start) * 3 * lengths[stop - 1] ** 2 <= weights


def test_progress_and_reproducible_randomness(small_model, some_instances):
    calls = []
    one = measured(small_model(), some_instances(), batch_size=3, progress=lambda a, b: calls.append((a, b)))
    done = [own for own, total in calls if total == 7]
    assert len(done) == len(calls) > 3
    assert done == sorted(done)
    assert done[-1] == 7
    other = measured(small_model(), some_instances(), batch_size=2)
    for a, b in zip(one.random[0].importance, other.random[0].importance, strict=True):
        assert np.array_equal(a, b)


def test_bad_input_is_one_clear_line(small_model, some_instances):
    model, instances = small_model(), some_instances()
    with pytest.raises(InputError, match="no instance was given"):
        measured(model, [])
    with pytest.raises(InputError, match="embedding module"):
        measured(
            TorchClassifier(model.model, classes="abc", inputs=model.inputs), instances, scores="gradient"
        )
    model.model.layers[0].k_proj.bias.data[0] = torch.nan
    with pytest.raises(InputError, match="attention of layer 1 is not a number"):
        measured(model, instances)


def test_without_generator_nothing_is_compared_with_chance(small_model, some_instances):
    model, instances = small_model(), some_instances()
    found = measure(model, instances, removal=Removal(percents=[20]), nulls=Nulls(draws=0))
    assert found.random == ()
    summary = found.summary()
    assert "random" not in summary.to_json()
    drawn = measured(model, instances, percents=[20])
    assert set(drawn.summary().to_json()) - set(summary.to_json()) == {"random", "wins"}
    # Other texts share the batches, so the last digits may differ.
    scores = drawn.summary().scores
    expected = {name: value for name, value in scores.items() if not name.startswith("wins_")}
    assert summary.scores == pytest.approx(expected, abs=1e-12)
    given = measure(
        model, instances, removal=Removal(percents=[20]), nulls=Nulls(rankings=drawn.random[0].importance)
    )
    assert given.summary() == drawn.summary()


def test_nothing_removed_and_chosen_scores(small_model, some_instances):
    model, instances = small_model(), some_instances()
    asked = []
    predict = model.predict
    model.predict = lambda batch: asked.append(batch) or predict(batch)
    summary = measure(
        model, instances, removal=Removal(percents=()), passes=Passes(batch_size=3, only=["mrta"])
    ).summary()
    assert set(summary.scores) == {
        "accuracy",
        "mrta",
        "ac",
        "acmc",
        "auprc",
        "token_f1",
        "token_iou",
        "iou_f1",
    }
    # The self-check predicts two texts twice, twice more to see whether tokens keep their places, and one by
    # one, seven in a batch and one by one, and two again to see what mixes tokens; then each text runs once,
    # for its attention and its answer.
    assert [len(batch) for batch in asked] == [2, 2, 2, 2, 1, 1, 7, *[1] * 7, 2]


def test_plausibility_of_a_sample(small_model, some_instances):
    found = measured(small_model(), some_instances(40), percents=())
    rated = sorted(
        (instance for instance in found.instances if instance.rationale.any()), key=lambda x: len(x.tokens)
    )
    assert len(found.agreements(found.importance)) == len(rated)
    sampled = found.agreements(found.importance, sample=10)
    assert len(sampled) == len(rated[:: -(-len(rated) // 10)]) <= 10


def test_a_score_added_to_the_registry_is_measured(small_model, some_instances, monkeypatch):
    squared = Score(
        "squared", "squared weight", "sum", null="uniform", compute=lambda x: (x.weights**2).sum(1)
    )
    monkeypatch.setitem(SCORES, "squared", squared)
    found = measured(small_model(), some_instances(), percents=[20])
    summary = found.summary().to_json()
    assert summary["squared"] == found.columns["squared"].mean()
    assert summary["null"]["squared"] == found.columns["null_squared"].mean()
    assert "squared" in [row["score"] for row in found.scores_table()]
    assert "squared" in found.instances_table()[0]


def test_layers_alone_are_what_their_aggregation_gives(small_model, some_instances):
    model, instances = small_model(causal=True), some_instances()
    found = measured(model, instances, percents=(), by_layer=True)
    for layer in (0, 1):
        alone = measured(model, instances, percents=(), aggregation=Aggregation("layer", layer))
        for name in ("mass", "entropy", "null_mass", "null_entropy"):
            assert found.layers[layer].columns[name] == pytest.approx(alone.columns[name], abs=1e-6)
        own, other = found.summary().layers[str(layer + 1)], alone.summary()
        assert own["ac"] == other["ac"]
        assert own["mrta"] == pytest.approx(other["mrta"])
        assert own["null"]["mrta"] == pytest.approx(other.null["mrta"])


class Writer:
    """A causal model that writes its target token by token: one read row for each."""

    classes = ()
    pattern = Pattern(causal=True)

    def __init__(self, model):
        self.model = model.model

    def read(self, batch, *, read_only=False):
        rows = batch.target.shape[1]
        start = batch.real.sum(1) - batch.target_real.sum(1)
        read = np.minimum(start[:, None] + np.arange(rows), batch.tokens.shape[1] - 1)
        outcomes = np.zeros((len(batch), rows, 1))
        for i, r in zip(*np.nonzero(batch.target_real), strict=True):
            text = torch.from_numpy(batch.tokens[i : i + 1, : read[i, r] + 1])
            outcomes[i, r] = self._probabilities(text)[0, batch.target[i, r] % 3]
        layers = self._capture(batch).select("self")
        probability = outcomes.sum((1, 2)) / batch.target_real.sum(1)
        answer = Answer(probability, probability > 0.5, outcomes)
        return Reading(layers, torch.from_numpy(read), answer)

    def predict(self, batch):
        with torch.no_grad():
            found = self.model(*self._inputs(batch)).softmax(-1).numpy()
        return np.take_along_axis(found, batch.target[:, :1] % 3, 1)

    def _probabilities(self, text):
        with torch.no_grad():
            whole = torch.ones_like(text, dtype=torch.bool)
            return self.model(text, whole, torch.arange(text.shape[1])[None]).softmax(-1).numpy()

    def _inputs(self, batch):
        place = np.maximum(batch.real.cumsum(1) - 1, 0)
        return tuple(torch.from_numpy(x) for x in (batch.tokens, batch.visible, place))

    def _capture(self, batch):
        return capture(self.model, self._inputs(batch))


@pytest.mark.parametrize("how", [Aggregation(), Aggregation("mean")])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_several_rows_are_the_mean_over_single_ones(small_model, how, batch_size):
    draw = np.random.default_rng(3)
    instances, singles = [], []
    for _ in range(6):
        prompt, answer = draw.integers(1, 30, draw.integers(2, 9)), draw.integers(1, 30, draw.integers(1, 4))
        tokens = np.concatenate([prompt, answer[:-1]])
        relevance = (np.arange(len(tokens)) == 1) * 1.0
        whole = np.ones(len(tokens), dtype=bool)
        instances.append(Instance(tokens, whole, relevance, target=answer))
        for row, token in enumerate(answer):
            stop = len(prompt) + row
            singles.append(
                Instance(
                    tokens[:stop], np.arange(stop) < stop - 1, relevance[:stop], target=np.array([token])
                )
            )
    counts = [len(instance.target) for instance in instances]
    owner = np.repeat(np.arange(6), counts)
    rankings = [draw.random((count, len(x.tokens))) for count, x in zip(counts, instances, strict=True)]
    of_rows = [
        ranking[r, : len(prompt.tokens)]
        for ranking, prompts in _by_owner(rankings, singles, owner)
        for r, prompt in enumerate(prompts)
    ]
    model = Writer(small_model(causal=True))
    options = {"aggregation": how, "removal": Removal(percents=(20, 50))}
    options["passes"] = Passes(batch_size=batch_size, by_layer=True)
    found = measure(model, instances, nulls=Nulls(rankings=rankings), **options)
    single = measure(model, singles, nulls=Nulls(rankings=of_rows), **options)

    def mean(values):
        return np.array([values[owner == number].mean(0) for number in range(6)])

    for ours, theirs in zip((found, *found.layers), (single, *single.layers), strict=True):
        for name, values in theirs.columns.items():
            # The token at which a single row is read cannot be ranked there.
            if name != "correct" and "among_words" not in name and "special" not in name:
                assert ours.columns[name] == pytest.approx(mean(values), abs=1e-6), name
    for name in ("sufficiency", "comprehensiveness"):
        for ours, theirs in (
            (found.faithfulness, single.faithfulness),
            (found.random[0].faithfulness, single.random[0].faithfulness),
        ):
            assert getattr(ours, name) == pytest.approx(mean(getattr(theirs, name)), abs=1e-6)


def _by_owner(rankings, singles, owner):
    return [
        (ranking, [single for single, of in zip(singles, owner, strict=True) if of == number])
        for number, ranking in enumerate(rankings)
    ]


def test_a_deep_decoder_is_not_measured_by_its_first_token(make_model):
    model = HuggingFaceCausal(make_model("LlamaForCausalLM", "LlamaConfig", num_hidden_layers=30))
    instances = [
        Instance(np.arange(5, 30), np.ones(25, dtype=bool), (np.arange(25) == 9) * 1.0, target=np.array([3]))
    ]
    rollout = measure(model, instances, aggregation=Aggregation(), removal=Removal(percents=()))
    share = rollout.summary()["first_token_share"]
    assert share > 0.99
    note = rollout.notes[0]
    assert note.startswith(f"{share:.2%} of the aggregated attention is on the first token")
    assert "rollout ends there whatever the model attends to" in note
    found = measure(model, instances, removal=Removal(percents=()))
    assert found.settings["aggregation"]["method"] == "mean"
    assert found.summary()["first_token_share"] < 0.6
    assert "whatever" not in str(found.notes)
    words = measure(
        model, instances, aggregation=Aggregation("mean", among="words"), removal=Removal(percents=())
    )
    assert words.summary()["first_token_share"] == words.summary().null["first_token_share"] == 0
    share = found.columns["first_token_share"]
    assert words.columns["mass"] == pytest.approx(found.columns["mass"] / (1 - share))
    assert words.columns["mass"] == pytest.approx(found.columns["mrta_among_words"])
    assert words.columns["null_mass"] == pytest.approx(1 / 24)
    assert not any("on the first token" in note for note in words.notes)
    # An encoder keeps rollout.
    bert = HuggingFaceClassifier(make_model("BertForSequenceClassification", "BertConfig"))
    one = Instance(np.arange(5, 15), np.ones(10, dtype=bool), (np.arange(10) == 2) * 1.0, label=0)
    assert measure(bert, [one], removal=Removal(percents=())).settings["aggregation"]["method"] == "rollout"
