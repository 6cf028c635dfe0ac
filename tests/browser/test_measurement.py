"""The page of a measurement in a browser: silent, deaf to markup hidden in data, narrow and wide."""

import numpy as np
import pytest
import torch
from tests.browser.chromium import HOSTILE
from torch import nn

from fasterqk.attention import Instance, Nulls, TorchClassifier, measure, score_intervals
from fasterqk.attention.page import Measured, save_measured
from fasterqk.trace import record

SCRIPT = "<script>window.broken = true</script>"
IMAGE = HOSTILE


class Attention(nn.Module):
    """One layer of attention of random weights."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.q_proj, self.k_proj, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, tokens, visible):
        stream = self.embedding(tokens)
        scores = self.q_proj(stream) @ self.k_proj(stream).transpose(1, 2)
        weights = scores.masked_fill(~visible[:, None], -1e9).softmax(-1)
        record(self, weights.unsqueeze(1))
        return self.head((weights @ stream)[:, 0])


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two models on the same instances, every text hostile and one without a break."""
    generator, models = np.random.default_rng(0), {}
    instances = []
    for number in range(12):
        pieces = (SCRIPT, IMAGE, "x" * 120, *["word"] * 9)
        relevance = np.array([0, 1, *generator.integers(0, 2, 10)], dtype=float)
        options = {"label": number % 2, "pieces": pieces, "id": f"{number} {IMAGE}"}
        instances.append(Instance(generator.integers(0, 20, 12), np.ones(12, bool), relevance, **options))
    for seed, name in enumerate((f"one {SCRIPT}", f"two {IMAGE}")):
        torch.manual_seed(seed)
        module = Attention()
        model = TorchClassifier(module, classes=(SCRIPT, IMAGE), embedding=module.embedding)
        found = measure(
            model,
            instances,
            scores={IMAGE: "gradient", "leave_one_out": "leave_one_out"},
            nulls=Nulls(seed=generator),
        )
        models[name] = Measured(found, SCRIPT, IMAGE, [score_intervals(found, generator, resamples=20)])
    rows = [{"score": SCRIPT, "k": None, "one": 0.5, "low": 0.1, "high": 0.2, "verdict": IMAGE}]
    return save_measured(tmp_path_factory.mktemp("measured"), models, rows)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_silent_and_no_wider_than_the_screen(page, open_page, width, scheme):
    opened = open_page(page, viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert opened.evaluate("window.broken") is None
    assert opened.locator("img, script:not(#data):not(:last-of-type)").count() == 0
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    body = opened.inner_text("body")
    assert SCRIPT in body and IMAGE in body
    assert opened.locator("h2", has_text="most agreement with the rationale").count() == 2
    # Every importance of the same instance stands on the page.
    assert opened.get_by_text("leave_one_out", exact=True).count() > 10
    # Both models, every table: scores, importances, removals, groups, heads and DTAP.
    assert opened.locator("table").count() == 1 + 2 * 6
    assert opened.locator("h2", has_text="The same texts under both models").count() == 1
    assert opened.locator("details dt").count() > 20
    assert opened.locator("tr.apart").count() == 1
