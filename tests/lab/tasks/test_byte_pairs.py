import json

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from fasterqk.errors import InputError
from fasterqk.lab.tasks._tokens import END, BytePairs

PARTS = [
    "the river",
    " ",
    "  ",
    "\n",
    "\t",
    "\xa0",
    "\x1c",
    "\x85",
    "'s",
    "'S",
    ".",
    "!?",
    "7",
    "é",
    "中",
    "🌊",
    "\r",
]
TEXTS = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=4))).map("".join)


@pytest.fixture
def pairs(write_byte_pairs):
    return BytePairs(*write_byte_pairs())


def plain_tokenizer(pairs):
    """The library's own way: the whole text at once."""
    lines = pairs.paths[1].read_text(encoding="utf-8").splitlines()[1:]
    tokenizer = Tokenizer(models.BPE(pairs.numbers, [tuple(line.split(" ")) for line in lines]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def tokens_of(encoded, text):
    return slice(*encoded.bounds[text : text + 2])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(texts=st.lists(TEXTS, max_size=4))
@example(texts=["", " the river", "the  river\n the", "a\x1cb !\x1c! \x1f7", " \n\n x  ", "中\u3000🌊 é's"])
def test_chunks_give_the_tokens_of_the_whole_text(pairs, texts):
    encoded = pairs.encode(texts)
    assert len(encoded.bounds) == len(texts) + 1
    for number, (text, one) in enumerate(zip(texts, plain_tokenizer(pairs).encode_batch(texts), strict=True)):
        own = tokens_of(encoded, number)
        assert encoded.ids[own].tolist() == one.ids
        assert (
            list(zip(encoded.starts[own].tolist(), encoded.stops[own].tolist(), strict=True)) == one.offsets
        )
        assert pairs.decode(encoded.ids[own]) == text


def test_tokens_are_shown_as_text_and_half_characters_as_bytes(pairs):
    encoded = pairs.encode([" the river é"])
    shown = [pairs.vocabulary[token] for token in encoded.ids]
    assert shown == [" the", " river", " ", "<C3>", "<A9>"]
    assert pairs.vocabulary[pairs.end] == END
    assert pairs.decode(encoded.ids[-1:]) == "\ufffd"


def test_overlap_counts_characters_of_each_text(pairs):
    encoded = pairs.encode(["x the river", " the é"])
    # Characters 2 to 5 of the first ("the"), 5 to 6 of the second (the accented letter, two tokens).
    marked = encoded.overlap(np.array([2, 5]), np.array([5, 6]))
    assert marked[tokens_of(encoded, 0)].tolist() == [False, True, False]
    assert marked[tokens_of(encoded, 1)].tolist() == [False, False, True, True]


def test_either_pair_of_names_is_found(write_byte_pairs, tmp_path):
    vocabulary, merges = write_byte_pairs()
    assert BytePairs.find(tmp_path).paths == [vocabulary, merges]
    vocabulary.rename(vocabulary.with_name("vocab.json"))
    merges.rename(merges.with_name("merges.txt"))
    assert BytePairs.find(tmp_path).encode([" the"]).ids.size == 1
    with pytest.raises(
        InputError, match=r"no tokenizers/gpt2/encoder.json .* vocab.json and merges.txt of gpt2"
    ):
        BytePairs.find(tmp_path / "empty")


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (["a"], "does not number its tokens"),
        ({"a": 3}, "does not number its tokens"),
        ({"a": "zero"}, "does not number its tokens"),
        ({"a": 0, END: 1}, "not every byte has a token"),
    ],
)
def test_another_vocabulary_is_refused(write_byte_pairs, numbers, message):
    vocabulary, merges = write_byte_pairs()
    vocabulary.write_text(json.dumps(numbers))
    with pytest.raises(InputError, match=rf"encoder.json' is not GPT-2's vocabulary: .*{message}"):
        BytePairs(vocabulary, merges)


def test_merges_of_another_vocabulary_are_refused(write_byte_pairs):
    vocabulary, merges = write_byte_pairs()
    merges.write_text("#version: 0.2\nq z\n")
    with pytest.raises(InputError, match=r"vocab.bpe' does not belong to .*encoder.json'"):
        BytePairs(vocabulary, merges).encode(["the"])
