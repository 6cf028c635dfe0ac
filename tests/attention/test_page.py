"""A measurement as HTML: escaped, complete, and the right instances on top."""

from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from fasterqk.attention import Nulls, Removal, measure, score_intervals
from fasterqk.attention.page import counts_text, extremes, instance_html, measurement_html, spreads_html

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
    assert "plausibility are left out" in counts_text(found)
    alone = measure(small_model(), unrated, removal=Removal(percents=[50]), nulls=Nulls(draws=0))
    assert list(extremes(alone)) == ["most comprehensiveness", "least comprehensiveness"]
    nothing = measure(small_model(), unrated[:1], removal=Removal(percents=()))
    assert extremes(nothing) == {"the first instances": [0]}
    assert "mean" in spreads_html(nothing) and measurement_html(nothing)
