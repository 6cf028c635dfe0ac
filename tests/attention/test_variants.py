"""Variants of many texts predicted together are what they are one by one."""

from dataclasses import replace

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from fasterqk.attention import HuggingFaceClassifier, Instance, Nulls, Passes, Removal, measure
from fasterqk.attention import _measure as measuring
from fasterqk.attention.faithfulness import _PASS, Variants, _chunks, faithfulness
from fasterqk.attention.instances import collate


def counted(model):
    """The model, and a list to which every batch that it predicts is added."""
    asked, predict = [], model.predict
    model.predict = lambda batch: asked.append(batch) or predict(batch)
    return asked


@pytest.mark.parametrize("removal", [Removal(), Removal("mask", 3), Removal("attention")])
@pytest.mark.parametrize("causal", [False, True])
def test_together_equals_each_batch_alone(small_model, some_instances, removal, causal, monkeypatch):
    model, instances = small_model(causal=causal), some_instances(9)
    instances.append(replace(instances[2], id="again"))
    removal = replace(removal, percents=(10, 50, 100))
    options = {"removal": removal, "passes": Passes(batch_size=3)}
    found = measure(model, instances, **options)
    for ranking in (found.rankings[next(iter(found.rankings))], *found.random):
        for number, instance in enumerate(instances):
            batch = collate([instance])
            plain = faithfulness(model.predict, batch, ranking.importance[number][None], removal)
            own = ranking.faithfulness
            assert own.sufficiency[number] == pytest.approx(plain.sufficiency[0], abs=1e-12)
            assert own.comprehensiveness[number] == pytest.approx(plain.comprehensiveness[0], abs=1e-12)
            assert own.whole[number] == pytest.approx(plain.whole[0], abs=1e-12)
    # Few at a time is the same as all together.
    monkeypatch.setattr(measuring, "VARIANTS_IN_MEMORY", 4)
    again = measure(model, instances, **options)
    assert again.faithfulness.sufficiency == pytest.approx(found.faithfulness.sufficiency, abs=1e-12)


def test_each_distinct_variant_runs_once_and_the_whole_text_never_again(small_model, some_instances):
    model, instances = small_model(), some_instances(6)
    asked = counted(model)
    # The same text three times; at 100% the top tokens alone are the whole text.
    data = [replace(instances[0], id=str(number)) for number in range(3)]
    data = [replace(one, relevance=one.rankable * 1.0) for one in data]
    measure(model, data, removal=Removal(percents=[50, 100]), nulls=Nulls(draws=0))
    del asked[
        :11
    ]  # the self-check: two texts four times and one by one, three likewise once, and two once more
    # Top half, without the top half, and without everything; the whole text is known from its attention.
    assert sum(len(batch) for batch in asked) == 3
    texts = {row.tobytes() for batch in asked for row in batch.tokens}
    assert len(texts) == 3


def test_variants_of_all_posts_are_sorted_by_length(small_model, some_instances):
    model, instances = small_model(), some_instances(20)
    asked = counted(model)
    measure(
        model,
        instances,
        removal=Removal(percents=[20, 50]),
        nulls=Nulls(draws=0),
        passes=Passes(batch_size=4),
    )
    del asked[
        :16
    ]  # the self-check: two texts four times and one by one, eight likewise once, and two once more
    longest = max(len(one.tokens) for one in instances)
    lengths = [batch.real.sum(1) for batch in asked]
    flat = np.concatenate(lengths)
    assert (np.diff(flat) >= 0).all()
    for batch in asked:
        assert batch.tokens.size <= 4 * longest


def test_labels_hidden_tokens_and_targets_tell_variants_apart(some_instances):
    one = some_instances(1)[0]
    batch = collate([one, replace(one, label=(one.label + 1) % 3), one])
    variants = Variants()
    assert variants.add(batch).tolist() == [0, 1, 0]
    hidden = batch.hidden.copy()
    hidden[0, 1] = True
    assert variants.add(replace(batch, hidden=hidden)).tolist() == [2, 1, 0]
    known = Variants()
    known.add(batch, np.array([[0.1, 0.9], [0.2, 0.8], [0.1, 0.9]]))
    assert known.ask(lambda batch: 1 / 0, 100).tolist() == [[0.1, 0.9], [0.2, 0.8]]


def test_chunks_hold_as_many_tokens_as_they_may():
    lengths = np.array([1, 2, 2, 3, 9, 30])
    assert list(_chunks(lengths, 9)) == [(0, 3), (3, 4), (4, 5), (5, 6)]
    assert list(_chunks(lengths, 0)) == [(n, n + 1) for n in range(6)]
    assert list(_chunks(lengths[:0], 9)) == []


@given(st.lists(st.integers(1, 60), max_size=60), st.integers(1, 300))
def test_chunks_pad_only_where_that_is_cheaper_than_another_pass(drawn, tokens):
    lengths = np.sort(np.array(drawn, dtype=np.int64))
    found = list(_chunks(lengths, tokens))
    assert [n for start, stop in found for n in range(start, stop)] == list(range(len(drawn)))
    assert all(stop == start + 1 or (stop - start) * lengths[stop - 1] <= tokens for start, stop in found)

    for start, stop in found:
        gaps = np.diff(lengths[start:stop]) * np.arange(1, stop - start)
        assert (gaps <= _PASS).all()
        if stop < len(lengths) and (stop + 1 - start) * lengths[stop] <= tokens:
            assert (stop - start) * (lengths[stop] - lengths[stop - 1]) > _PASS


def test_the_answer_of_the_capture_is_that_of_a_plain_pass(make_model, some_instances):
    for head, config in (
        ("BertForSequenceClassification", "BertConfig"),
        ("GPT2ForSequenceClassification", "GPT2Config"),
    ):
        own = make_model(head, config, num_labels=3)
        assert isinstance(own, transformers.PreTrainedModel)
        model, batch = HuggingFaceClassifier(own), collate(some_instances(5))
        found, plain = model.read(batch).answer.outcomes, model.predict(batch)
        assert found == pytest.approx(plain, abs=1e-6)
        # Kernels of half precision round differently, so that there it is the plain pass itself.
        half = HuggingFaceClassifier(own.bfloat16())
        assert (half.read(batch).answer.outcomes == half.predict(batch)).all()


@pytest.mark.parametrize("how", ["delete", "attention"])
def test_rounded_down_to_no_token_a_text_without_special_tokens_is_still_a_text(small_model, how):
    three = Instance(np.array([3, 4, 5]), np.ones(3, dtype=bool), np.array([0.0, 1.0, 0.0]), label=0)
    removal = Removal(how, percents=(10, 50), rounding="down")
    scores = measure(small_model(causal=True), [three], removal=removal).instance_scores()
    assert np.isnan(scores["sufficiency_10"]).all() and np.isfinite(scores["sufficiency_50"]).all()
