"""Causal models: probability of the target, greedy match, attention before the target."""

import numpy as np
import pytest
import torch

from fasterqk.attention import Instance, Removal, collate, measure
from fasterqk.attention._models import HuggingFaceCausal
from fasterqk.errors import InputError

MODELS = [("GPT2LMHeadModel", "GPT2Config"), ("LlamaForCausalLM", "LlamaConfig")]


def instances(count=5, seed=0):
    generator = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = int(generator.integers(2, 10))
        tokens, target = generator.integers(0, 40, length), generator.integers(0, 40, 1 + number % 3)
        relevance = (np.arange(length) == 0) * 1.0
        made.append(Instance(tokens, np.ones(length, bool), relevance, target=target, id=str(number)))
    return made


def one_by_one(own, prompt, target):
    """Probability of each target token and the greedy continuation, one forward pass a token."""
    prompt, probabilities, greedy = list(prompt), [], []
    written = list(prompt)
    for token in target:
        with torch.no_grad():
            after_truth = own(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)
            after_own = own(input_ids=torch.tensor([written])).logits[0, -1]
        probabilities.append(float(after_truth[token]))
        greedy.append(int(after_own.argmax()))
        written.append(greedy[-1])
        prompt.append(int(token))
    return np.mean(probabilities), greedy


@pytest.mark.parametrize(("head", "config"), MODELS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_probability_of_the_target_tokens(make_model, head, config, side):
    own = make_model(head, config)
    data = instances()
    answer = HuggingFaceCausal(own).read(collate(data, side)).answer
    for row, instance in enumerate(data):
        probability, _ = one_by_one(own, instance.tokens, instance.target)
        assert answer.probability[row] == pytest.approx(probability, abs=1e-6)


def test_right_is_what_greedy_decoding_writes(make_model):
    own = make_model("GPT2LMHeadModel", "GPT2Config")
    prompt = instances(1)[0]
    _, greedy = one_by_one(own, prompt.tokens, [0, 0, 0])
    wrong = [*greedy[:2], (greedy[2] + 1) % 40]
    targets = [greedy, wrong, greedy[:1]]
    data = [
        Instance(prompt.tokens, prompt.rankable, prompt.relevance, target=np.array(target))
        for target in targets
    ]
    assert HuggingFaceCausal(own).read(collate(data)).answer.correct.tolist() == [True, False, True]


@pytest.mark.parametrize(("head", "config"), MODELS)
@pytest.mark.parametrize("removal", [Removal(), Removal("mask", 3), Removal("attention")])
def test_batched_equals_single_on_both_sides(make_model, head, config, removal):
    model, data = HuggingFaceCausal(make_model(head, config)), instances()
    options = {"percents": [10, 50], "removal": removal}
    single = measure(model, data, generator=np.random.default_rng(0), batch_size=1, **options)
    for side in ("right", "left"):
        batched = measure(model, data, generator=np.random.default_rng(0), batch_size=5, side=side, **options)
        for name in ("mass", "null_mass", "probability", "entropy", "correct"):
            assert batched.columns[name] == pytest.approx(single.columns[name], abs=1e-6), name
        for scores, others in (
            (single.faithfulness, batched.faithfulness),
            (single.random_faithfulness, batched.random_faithfulness),
        ):
            assert others.sufficiency == pytest.approx(scores.sufficiency, abs=1e-6)
            assert others.comprehensiveness == pytest.approx(scores.comprehensiveness, abs=1e-6)


@pytest.mark.parametrize("side", ["right", "left"])
def test_read_rows_are_those_of_the_whole(make_model, side):
    model, batch = HuggingFaceCausal(make_model(*MODELS[0])), collate(instances(), side)
    whole, rows = model.read(batch), model.read(batch, read_only=True)
    read = whole.read
    assert torch.equal(read, rows.read)
    for layer, row in zip(whole.layers, rows.layers, strict=True):
        torch.testing.assert_close(row, layer[torch.arange(len(read)), :, read].unsqueeze(2), rtol=0, atol=0)


def test_attention_is_read_before_the_target(make_model):
    own = make_model("GPT2LMHeadModel", "GPT2Config")
    data = instances()
    reading = HuggingFaceCausal(own).read(collate(data))
    assert reading.read.tolist() == [len(x.tokens) - 1 for x in data]
    assert reading.layers[0].shape[-1] == max(len(x.tokens) for x in data)


@pytest.mark.parametrize("side", ["right", "left"])
def test_gradient_times_input_is_the_gradient(make_model, side):
    own = make_model("LlamaForCausalLM", "LlamaConfig")
    data = instances(3)
    found = HuggingFaceCausal(own).gradient_times_input(collate(data, side))
    for row, instance in enumerate(data):
        both = np.concatenate([instance.tokens, instance.target])
        embedded = own.get_input_embeddings()(torch.from_numpy(both)[None]).detach().requires_grad_()
        logits = own(inputs_embeds=embedded).logits[0].log_softmax(-1)
        start = len(instance.tokens)
        sum(logits[start - 1 + i, token] for i, token in enumerate(instance.target)).backward()
        expected = (embedded.grad * embedded).sum(-1)[0, :start].detach().numpy()
        real = collate(data, side).real[row]
        assert found[row][real] == pytest.approx(expected, abs=1e-4)
        assert not found[row][~real].any()


def test_a_model_that_looks_ahead_is_refused(make_model):
    own = make_model("BertLMHeadModel", "BertConfig")
    with pytest.raises(InputError, match="not causal"):
        HuggingFaceCausal(own).read(collate(instances()))
