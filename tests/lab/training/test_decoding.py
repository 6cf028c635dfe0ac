import pytest
import torch

from fasterqk.lab.models._generator import GeneratorConfig, GPTAnswerGenerator
from fasterqk.lab.training._answer_measure import greedy

END = 0


def model_of(seed, context=24):
    config = GeneratorConfig(
        vocabulary_size=9, layers=2, width=12, heads=2, head_width=6, mlp_width=16, context=context
    )
    model = GPTAnswerGenerator(config, torch.Generator().manual_seed(seed)).double().eval()
    with torch.no_grad():
        model.embedding.weight *= 10  # untrained logits are all but equal otherwise
        model.head_bias[END] += 4
    return model


@torch.no_grad()
def one_by_one(model, prompt, limit):
    """The whole text again for every token, as anybody would write it."""
    text, written = prompt.tolist(), []
    while len(written) < limit and len(text) <= model.config.context:
        written.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        if written[-1] == END:
            break
        text.append(written[-1])
    return written


@pytest.mark.parametrize("context", [24, 13])
def test_batches_with_a_cache_write_what_single_texts_write_without(context):
    lengths = torch.tensor([3, 12, 5, 1, 8])
    different, ended = set(), 0
    for seed in range(6):
        model = model_of(seed, context)
        tokens = torch.randint(1, 9, (5, 14), generator=torch.Generator().manual_seed(seed))
        answers = greedy(model, tokens, lengths, end=END, limit=7)
        for prompt, length, answer in zip(tokens, lengths, answers, strict=True):
            assert answer == one_by_one(model, prompt[:length], 7)
        different |= {len(answer) for answer in answers}
        ended += sum(answer[-1] == END for answer in answers)
    assert len(different) > 1  # texts that stop early, and texts that do not
    assert ended


def test_nothing_is_asked_of_texts_that_have_ended(monkeypatch):
    model = model_of(0)
    with torch.no_grad():
        model.head_bias[END] = 1e3
    monkeypatch.setattr(model, "extend", lambda *_: pytest.fail("all texts had ended"))
    assert (
        greedy(model, torch.ones(3, 4, dtype=torch.long), torch.tensor([4, 2, 3]), end=END, limit=5)
        == [[END]] * 3
    )
