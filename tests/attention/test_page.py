"""A measurement as HTML: escaped, complete, and the right instances on top."""

from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from fasterqk.attention import Instance, Nulls, Removal, measure, score_intervals
from fasterqk.attention.page import extremes, instance_html, measurement_html

EVIL = "<script>alert(1)</script>&\"'"


@pytest.fixture
def found(small_model, some_instances):
    instances = [replace(x, id=EVIL, pieces=(EVIL,) * len(x.tokens)) for x in some_instances(9)]
    names = {EVIL: lambda x: np.linspace(-1, 1, len(x.tokens))}
    return measure(small_model(), instances, scores=names, nulls=Nulls(draws=2))


class Reader(HTMLParser):
    """Counts tags and checks that they nest."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("br", "rect", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("br", "rect", "line"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_text_of_data_stays_text_and_tags_nest(found):
    page = measurement_html(found, score_intervals(found, np.random.default_rng(0)))
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert "script" not in reader.tags and EVIL in reader.text
    assert "95% from" in reader.text and "standard error" in reader.text and "permuted null" in reader.text


def test_every_importance_has_its_panel(found):
    page = instance_html(found, 0)
    assert page.count(">rollout<") == 1
    # Tokens below zero have the other colour.
    assert "var(--against" in page and "var(--shade" in page


def test_instances_with_most_and_least_agreement(found):
    most, least = extremes(found, 2).values()
    values = found.instance_scores()["auprc"]
    rated = np.flatnonzero(~np.isnan(values))
    assert values[most[0]] == values[rated].max() and values[least[0]] == values[rated].min()
    assert not set(most) & set(least) and len(most) == len(least) == 2


def test_without_rationales_importances_are_compared_with_each_other(small_model, some_instances):
    unrated = [replace(x, relevance=np.zeros(len(x.tokens)), rated=False) for x in some_instances()]
    found = measure(
        small_model(), unrated, scores="gradient", removal=Removal(percents=[50]), nulls=Nulls(draws=0)
    )
    assert next(iter(extremes(found))) == "most agreement of rollout with gradient (rank correlation)"
    assert "plausibility are left out" in found.counts
    alone = measure(small_model(), unrated, removal=Removal(percents=[50]), nulls=Nulls(draws=0))
    assert list(extremes(alone)) == ["most comprehensiveness", "least comprehensiveness"]
    nothing = measure(small_model(), unrated[:1], removal=Removal(percents=()))
    assert extremes(nothing) == {"the first instances": [0]}
    assert "<h4>The first instances</h4>" in measurement_html(nothing)


def test_what_stands_beside_an_instance(small_model):
    """The text as it was written, what is scored underlined, and both probabilities."""
    places = np.array([[-1, 0, 0], [0, 0, 3], [0, 3, 8]])
    written = {"texts": ("the café",), "places": places, "pieces": ("<s>", "the", "ĠcafÃ©"), "label": 0}
    relevance = np.array([0.0, 0.4, 0.5])
    instance = Instance(np.array([1, 2, 3]), np.arange(3) > 0, relevance, **written)
    found = measure(small_model(), [instance])
    page, whole = instance_html(found, 0), found.faithfulness.whole[0]
    predicted = int(whole.argmax())
    assert predicted != 0
    assert f"predicted {'abc'[predicted]}, p = {whole[predicted]:.3f}; label a, p = {whole[0]:.3f}" in page
    assert ">café<" in page and ">&lt;s&gt;<" in page and "Ġ" not in page
    assert page.count("text-decoration:underline") == 1
    faint = measure(small_model(), [replace(instance, relevance=relevance * 0.9)])
    assert "In 1 no token has a relevance of one half: plausibility leaves them out" in faint.counts


def test_the_special_tokens_of_a_chat_are_written_once(small_model):
    text = "<s>user\nhi<s>"
    places = np.array([[-1, 0, 3], [0, 3, 7], [0, 7, 8], [0, 8, 10], [-1, 10, 13]])
    pieces = ("<s>", "user", "Ċ", "hi", "<s>")
    instance = Instance(
        np.arange(5), places[:, 0] == 0, np.zeros(5), label=0, texts=(text,), places=places, pieces=pieces
    )
    reader = Reader()
    reader.feed(instance_html(measure(small_model(), [instance], removal=Removal(percents=())), 0))
    assert reader.text.endswith("<s> user\n↵hi <s>")


def test_a_rationale_of_everything_is_not_the_best_agreement(small_model, some_instances):
    every, *others = some_instances(9)
    found = measure(small_model(), [replace(every, relevance=every.rankable * 1.0), *others])
    assert found.instance_scores()["auprc"][0] == 1
    assert not any(0 in numbers for numbers in extremes(found).values())
