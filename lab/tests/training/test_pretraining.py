"""The byte-level decoder: logits and entropy against attention itself, methods that differ as they say."""

import doctest
import json
import math
from dataclasses import replace

import pytest
import torch

from fasterqk import LogitMonitor
from fasterqk.errors import InputError
from fasterqk.trace import capture
from fasterqk_lab.training import _pretraining as module
from fasterqk_lab.training._pretraining import PretrainingCell, null_entropy, pretrain, watch_scores

TINY = PretrainingCell(width=16, heads=2, context=12, batch=3, steps=10, warmup=2)
TEXT = torch.randint(97, 123, (500,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def training(**changes):
    return module.Pretraining(replace(TINY, **changes), TEXT, TEXT.flip(0))


def test_examples_in_docstrings():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("method", ["plain", "qk_norm"])
def test_scores_and_entropy_are_those_of_the_attention(method):
    state = training(method=method, lr=0.1)
    state.run()
    tokens = state.windows[:8, :-1]
    weights = [layer.double() for layer in capture(state.model, {"tokens": tokens})]
    watched, monitor = {}, LogitMonitor(state.model)
    with watch_scores(state.model, watched.__setitem__):
        state.model(tokens)
    for layer, expected in enumerate(weights):
        scores = watched[layer].double().unflatten(0, (8, TINY.heads))
        torch.testing.assert_close(scores.softmax(3), expected, atol=1e-6, rtol=1e-5)
        entropy = -torch.special.xlogy(expected, expected).sum(3).mean()
        assert float(state.entropy(8)[layer]) == pytest.approx(float(entropy), rel=1e-4)
        by_head = monitor.last.readings[f"blocks.{layer}.attention"].logit
        # Two kernels in single precision: the last bit depends on the processor.
        torch.testing.assert_close(by_head.float(), scores.amax((0, 2, 3)).float())


def test_the_largest_logit_is_that_of_all_steps_and_visible_pairs():
    state, seen = training(lr=0.1), []
    hidden = state.model.hidden

    def watched(tokens, **options):
        if state.model.training:
            with torch.no_grad():
                stream = state.model.embedding(tokens) + state.model.positions.weight
                for layer, block in enumerate(state.model.blocks):
                    normed, attention = block.attention_norm(stream), block.attention
                    query, key = (
                        part(normed).unflatten(2, (2, 8)) for part in (attention.query, attention.key)
                    )
                    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(8)
                    seen.append((layer, float(scores[..., torch.ones(12, 12).tril().bool()].max())))
                    stream = block(stream)
        return hidden(tokens, **options)

    state.model.hidden = watched
    result = state.run()
    for layer in range(2):
        largest = max(value for place, value in seen if place == layer)
        assert result["largest_logit_by_layer"][str(layer + 1)] == pytest.approx(largest, rel=1e-4)
    assert result["largest_logit"] == max(result["largest_logit_by_layer"].values())
    assert result["largest_logit"] == max(record["largest_logit"] for record in result["along"])


def test_methods_share_start_and_batches_and_ratio_one_is_plain():
    results = {name: training(**cell).run() for name, cell in METHODS.items()}
    assert len({results[name]["initial_loss"] for name in METHODS if name != "qk_norm"}) == 1
    assert results["one"] == results["plain"]
    assert len({results[name]["loss"] for name in METHODS}) == len(METHODS) - 1
    for result in results.values():
        assert json.loads(json.dumps(result)) == result
        assert result["null_entropy"] == null_entropy(12) > result["entropy"]
        assert not result["diverged"]


METHODS = {
    "plain": {},
    "one": {"method": "qk_ratio"},
    "slower": {"method": "qk_ratio", "qk_ratio": 0.1},
    "qk_norm": {"method": "qk_norm"},
    "partner_norm": {"method": "partner_norm", "lr": 0.01},
}


def test_a_slower_circuit_takes_smaller_steps_and_decays_alike():
    before, plain, slower = training(), training(), training(method="qk_ratio", qk_ratio=0.1)
    for state in (plain, slower):
        state._step(0)
    weights = [state.model.blocks[0].attention for state in (before, plain, slower)]
    start, one, tenth = (each.query.weight.detach() for each in weights)
    decay = 1 - 1e-3 / 2 * 0.01  # rate after half of the warm-up, times decay
    torch.testing.assert_close(tenth - decay * start, 0.1 * (one - decay * start), rtol=1e-3, atol=1e-8)
    start, one, tenth = (each.value.weight.detach() for each in weights)
    assert torch.equal(one, tenth)
    assert not torch.equal(one, start)


def test_a_cell_that_diverges_says_so():
    result = training(lr=1e30).run()
    assert result["diverged"]
    assert result["steps"] < TINY.steps
    assert result["loss"] is result["validation_loss"] is result["entropy"] is None
    assert math.isfinite(result["initial_loss"])
    json.dumps(result, allow_nan=False)


def test_the_clip_holds_logits_at_its_threshold(monkeypatch):
    monkeypatch.setattr(PretrainingCell, "CLIP_THRESHOLD", 1.0)
    plain, clipped = (training(method=method, lr=0.1, steps=20) for method in ("plain", "qk_clip"))
    results = [state.run() for state in (plain, clipped)]
    assert results[0]["initial_loss"] == results[1]["initial_loss"]
    assert results[1]["clipped_heads"] > 0
    assert results[1]["largest_logit"] < results[0]["largest_logit"]
    # One step later, a logit may pass the threshold again, but not by much.
    assert results[1]["along"][-1]["largest_logit"] < 1.5


def test_cells_read_the_paragraphs(tmp_path, monkeypatch):
    for part in ("train", "dev"):
        paragraphs = [{"context": f"{part} Ærø {number}", "qas": []} for number in range(3)]
        document = {"data": [{"title": "t", "paragraphs": paragraphs}]}
        (tmp_path / f"{part}-v1.1.json").write_text(json.dumps(document), encoding="utf-8")
    monkeypatch.setenv("FASTERQK_DATA", str(tmp_path))
    assert pretrain(replace(TINY, steps=2))["steps"] == 2
    with pytest.raises(InputError, match="the text has 41 bytes; give more than 128"):
        pretrain(replace(TINY, context=128))
    assert bytes(module._text(str(tmp_path / "dev-v1.1.json")).tolist()).decode().startswith("dev Ærø 0\ndev")
    with pytest.raises(InputError, match="unknown method 'clip'; choose from plain"):
        PretrainingCell(method="clip")
