"""What is measured on generated answers, against the plain way: one question and one step at a time."""

import string

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasterqk.attention import Aggregation
from fasterqk.attention import _rows as library
from fasterqk.attention.aggregation import aggregate, aggregate_null
from fasterqk.trace import capture
from fasterqk_lab.models._generator import GeneratorConfig, GPTAnswerGenerator
from fasterqk_lab.tasks import AnswerTask, Questions
from fasterqk_lab.training import TrainConfig
from fasterqk_lab.training import _generation as module
from fasterqk_lab.training._batches import pack_questions
from fasterqk_lab.training._generation import (
    exact_match,
    generate,
    greedy,
    measure_answers,
    measure_fit,
    normalized,
    token_f1,
)

END, TOKENS, LAYERS = 0, 13, 3


@pytest.fixture
def model():
    config = GeneratorConfig(
        vocabulary_size=TOKENS, layers=LAYERS, width=12, heads=2, head_width=6, mlp_width=16, context=32
    )
    model = GPTAnswerGenerator(config, torch.Generator().manual_seed(5)).eval()
    with torch.no_grad():
        model.embedding.weight *= 8
        model.head_bias[END] += 3
        for block in model.blocks:  # attention that is not all but uniform
            block.attention.query.weight *= 6
    return model


@pytest.fixture
def task():
    draw = np.random.default_rng(1)
    prompts = tuple(draw.integers(1, TOKENS, draw.integers(4, 15)) for _ in range(11))
    answers = tuple(np.append(draw.integers(1, TOKENS, draw.integers(1, 4)), END) for _ in range(11))
    relevance = tuple((np.arange(len(prompt)) % 4 == 1) * 1.0 for prompt in prompts[:-1])
    questions = Questions(
        ids=tuple(map(str, range(11))),
        prompts=prompts,
        answers=answers,
        relevance=(*relevance, np.zeros(len(prompts[-1]))),  # one question without relevant tokens
        gold=tuple((" ".join(map(str, answer[:-1])), "5 5") for answer in answers),
    )
    return AnswerTask(
        name="made up",
        splits={"test": questions},
        vocabulary=tuple(map(str, range(TOKENS))),
        end=END,
        text=lambda ids: " ".join(map(str, ids)),
    )


@pytest.fixture
def config():
    return TrainConfig("kvqa", layers=LAYERS, answer_tokens=5, rationale_k=(5, 30))


def single_steps(model, prompt, answer):
    """Every step of one answer: what was read before it, its token, and the attention of all layers."""
    for step, token in enumerate(answer):
        text = torch.tensor([[*prompt.tolist(), *answer[:step]]])
        captured = capture(model, text)
        yield text, token, list(captured), captured.outputs[0, -1].softmax(0)


def test_every_score_is_that_of_single_questions_and_steps(model, task, config):
    split = pack_questions(task.splits["test"])
    written = generate(model, split, END, config.evaluation.answer_tokens)
    assert len({len(answer) for answer in written}) > 1
    found = measure_answers(model, split, task, config, attention=True)
    names = ("rollout", "null", "uniform", "average", "entropy", "uniform entropy")
    mass = {name: [] for name in (*names, *range(LAYERS), *(f"entropy {n}" for n in range(LAYERS)))}
    faithful = {(name, k): [] for name in ("sufficiency", "comprehensiveness") for k in (5, 30)}
    for number, answer in enumerate(written):
        prompt, relevance = split.questions.prompts[number], split.questions.relevance[number]
        own = {name: [] for name in (*mass, *faithful)}
        for text, token, layers, outcome in single_steps(model, prompt, answer):
            length = text.shape[1]
            read = torch.tensor([length - 1])
            allowed = torch.ones(1, length, length, dtype=torch.bool).tril()
            rows = {
                "rollout": aggregate(layers, read, allowed, Aggregation("rollout", residual=0.5)),
                "null": aggregate_null(allowed, LAYERS, read, Aggregation("rollout", residual=0.5)),
                "uniform": torch.full((1, length), 1 / length),
                "average": aggregate(layers, read, allowed, Aggregation("mean")),
            }
            rows |= {
                n: aggregate([layer], read, allowed, Aggregation("last")) for n, layer in enumerate(layers)
            }
            for name, row in rows.items():
                own[name].append(float(row[0, : len(prompt)].double() @ torch.from_numpy(relevance)))
            weights = rows["rollout"][0].double()
            own["entropy"].append(float(-(weights * weights.log()).nansum()))
            own["uniform entropy"].append(np.log(length))
            for n, layer in enumerate(layers):
                heads = layer[0, :, -1].double()
                own[f"entropy {n}"].append(float(-(heads * heads.log()).sum(1).mean()))
            for k in (5, 30):
                count = -(-k * (length - 1) // 100)
                top = weights[:-1].argsort(descending=True, stable=True)[:count].tolist()
                kept = {
                    "sufficiency": [*sorted(top), length - 1],
                    "comprehensiveness": [place for place in range(length) if place not in top],
                }
                for name, places in kept.items():
                    changed = model(text[:, places])[0, -1].detach().softmax(0)
                    own[name, k].append(float(outcome[token] - changed[token]))
        for name, values in own.items():
            (mass if name in mass else faithful)[name].append(np.mean(values))
    rated = slice(0, 10)
    assert found["mrta"] == pytest.approx(np.mean(mass["rollout"][rated]), abs=1e-6)
    assert found["null"]["mrta"] == pytest.approx(np.mean(mass["null"][rated]), abs=1e-6)
    assert found["average"]["mrta"] == pytest.approx(np.mean(mass["average"][rated]), abs=1e-6)
    assert found["average"]["null"]["mrta"] == pytest.approx(np.mean(mass["uniform"][rated]), abs=1e-6)
    assert found["entropy"] == pytest.approx(np.mean(mass["entropy"]), abs=1e-5)
    for n in range(LAYERS):
        layer = found["layer"][str(n + 1)]
        assert layer["mrta"] == pytest.approx(np.mean(mass[n][rated]), abs=1e-6)
        assert layer["entropy"] == pytest.approx(np.mean(mass[f"entropy {n}"]), abs=1e-5)
        assert layer["null"]["entropy"] == pytest.approx(np.mean(mass["uniform entropy"]), abs=1e-9)
    for (name, k), values in faithful.items():
        assert found[name][str(k)] == pytest.approx(np.mean(values), abs=1e-6)


def test_probabilities_are_those_of_the_gold_answer_with_its_end(model, task):
    split = pack_questions(task.splits["test"])
    fit = measure_fit(model, split)
    total, count = 0.0, 0
    for number, (prompt, answer) in enumerate(
        zip(split.questions.prompts, split.questions.answers, strict=True)
    ):
        text = torch.tensor([[*prompt, *answer]])
        chances = (
            model(text)[0].softmax(1)[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None])[:, 0]
        )
        assert fit.mean[number] == pytest.approx(chances[:-1].mean().item(), abs=1e-6)
        assert fit.product[number] == pytest.approx(chances.prod().item(), abs=1e-6)
        total, count = total - chances.log().sum().item(), count + len(answer)
    assert fit.loss == pytest.approx(total / count, abs=1e-5)


def test_batches_of_one_measure_the_same(model, task, config, monkeypatch):
    split = pack_questions(task.splits["test"])
    together = measure_answers(model, split, task, config, attention=True)
    monkeypatch.setattr(module, "EVALUATION_BATCH", 1)
    monkeypatch.setattr(library, "ROWS_AT_ONCE", 1)
    alone = measure_answers(model, split, task, config, attention=True)
    assert alone.keys() == together.keys()
    for name, value in together.items():
        if isinstance(value, float):
            assert alone[name] == pytest.approx(value, abs=1e-6)
    assert alone["dtap"] == together["dtap"]


def test_answers_are_scored_against_all_gold_answers(model, task, config):
    split = pack_questions(task.splits["test"])
    texts = [
        task.text([token for token in answer if token != END])
        for answer in generate(model, split, END, config.evaluation.answer_tokens)
    ]
    right = [bool(text) and n % 3 < 2 for n, text in enumerate(texts)]
    gold = tuple(("nothing", text if own else "else") for text, own in zip(texts, right, strict=True))
    questions = Questions(**{**vars(task.splits["test"]), "gold": gold})
    found = measure_answers(model, pack_questions(questions), task, config, attention=False)
    assert found["accuracy"] == found["f1"] == pytest.approx(np.mean(right))
    assert 0 < sum(right) < 11
    assert "mrta" not in found


def test_the_null_of_faithfulness_is_a_ranking_by_chance(model, task, config):
    split = pack_questions(task.splits["test"])
    found = measure_answers(model, split, task, config, attention=True, seed=0)
    for name in ("sufficiency", "comprehensiveness"):
        assert found["null"][name].keys() == found[name].keys() == {"5", "30"}
        assert found["null"][name] != found[name]
    some = measure_answers(model, split, task, config, attention=True, sample=3)
    few = pack_questions(split.questions.take(range(3)))
    assert some["sufficiency"] == pytest.approx(
        measure_answers(model, few, task, config, attention=True)["sufficiency"]
    )
    assert some["mrta"] == found["mrta"]


def test_every_answer_runs_once_and_its_steps_without_some_tokens(model, task, config):
    split = pack_questions(task.splits["test"])
    ran = []
    model.register_forward_hook(lambda *arguments: ran.append(1))
    measure_answers(model, split, task, config, attention=True)
    # The gold answers, the written ones, and both parts for each k; decoding calls no forward.
    assert len(ran) == 2 + 2 * 2


PARTS = ["a", "an", "the", "A", "The", " ", " ", ".", "'", "x", "é", "—", "7"]
ANY_TEXT = st.lists(st.sampled_from(PARTS)).map("".join)


@pytest.mark.parametrize(
    ("answer", "compared"),
    [
        ("The  Broncos ", "broncos"),
        ("an apple, a day", "apple day"),
        # Punctuation goes first: "a.m." is one word, and "A." becomes an article, which then goes too.
        ("8:30 a.m.", "830 am"),
        ("Vitamin A.", "vitamin"),
        ("t-h-e end", "end"),
        ("anthem", "anthem"),
        ("rock'n'roll", "rocknroll"),
        # Only ASCII punctuation is removed; accents and other scripts stay.
        ("“Café” — the Ñandú", "“café” — ñandú"),
        ("§ 5", "§ 5"),
        ("a\tb\nc", "b c"),
        ("the a an", ""),
        (string.punctuation, ""),
    ],
)
def test_normal_form_by_hand(answer, compared):
    assert normalized(answer) == compared


@pytest.mark.parametrize(
    ("prediction", "golds", "matches", "f1"),
    [
        ("Denver Broncos", ["the Denver Broncos!"], 1, 1),
        # One common word of one and two: precision 1, recall 1/2.
        ("Denver", ["Denver Broncos"], 0, 2 / 3),
        # The best gold counts, not the first and not the mean.
        ("in 1066", ["William", "1066", "the year 1066"], 0, 2 / 3),
        # Repeated words count as often as both have them: 2 of 3 and 2 of 2.
        ("very very very", ["very very"], 0, 0.8),
        ("Paris", ["London"], 0, 0),
        ("", ["Paris"], 0, 0),
        ("the", ["Paris"], 0, 0),
        ("", [""], 1, 1),
        ("", [], 1, 1),
        ("a", ["the"], 1, 1),
        # An accepted answer without words does not count beside one with words.
        ("", ["the", "Paris"], 0, 0),
    ],
)
def test_scores_by_hand(prediction, golds, matches, f1):
    assert exact_match(prediction, golds) == matches
    assert token_f1(prediction, golds) == pytest.approx(f1)


@settings(deadline=None)
@given(ANY_TEXT, st.lists(ANY_TEXT, min_size=1, max_size=3))
def test_f1_is_at_least_the_match_and_symmetric(prediction, golds):
    assert exact_match(prediction, golds) <= token_f1(prediction, golds) <= 1
    assert exact_match(golds[0], golds) == 1 or not normalized(golds[0])
    first = golds[:1]
    assert token_f1(prediction, first) == token_f1(first[0], [prediction])
    assert token_f1(prediction, golds + golds[::-1]) == token_f1(prediction, golds)


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
