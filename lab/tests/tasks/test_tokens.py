import json

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from fasterqk.errors import InputError
from fasterqk_lab.tasks._tokens import (
    END,
    WORD_VECTORS,
    BytePairs,
    WordPieces,
    read_word_vectors,
    start_vectors,
)


def test_longest_pieces_first_and_unknown_words(write_vocabulary):
    pieces = WordPieces(write_vocabulary())
    ((tokens, words),) = pieces.encode([["louder", "Zebra", "kind"]])
    assert [pieces.vocabulary[token] for token in tokens] == ["loud", "##er", "[UNK]", "kind"]
    assert words.tolist() == [0, 0, 1, 2]


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("hello\nworld\n")
    with pytest.raises(InputError, match=r"vocab\.txt' is not BERT's vocabulary: line 1 is not \[PAD\]"):
        WordPieces(path)


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


VOCABULARY = (" The", "river", " River", "<A9>", "Ġ", " 's")


def write_official(folder, lines):
    path = folder / "glove.6B.100d.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_official_rows_are_found_as_written_in_lower_case_and_without_the_blank(tmp_path):
    path = write_official(tmp_path, ["the 1 2", "river 3 4", "unused 5 6", "'s 7 8"])
    vectors = read_word_vectors(path, VOCABULARY)
    nan = np.nan
    np.testing.assert_array_equal(vectors, [[1, 2], [3, 4], [3, 4], [nan, nan], [nan, nan], [7, 8]])
    assert vectors.dtype == np.float32


def test_the_spelling_itself_goes_first(tmp_path):
    path = write_official(tmp_path, ["river 3 4", "River 9 9"])
    assert read_word_vectors(path, ("River", "river", " River")).tolist() == [[9, 9], [3, 4], [3, 4]]


def test_packed_rows_go_by_token_id(tmp_path):
    path = tmp_path / "glove.6B.100d.gpt2vocab.f16.npz"
    table = np.array([[1, 2], [3, 4]], dtype=np.float16)
    np.savez(path, token_ids=np.array([4, 0, 2]), row=np.array([1, 0, 1]), vectors=table)
    vectors = read_word_vectors(path, VOCABULARY)
    assert vectors[[4, 0, 2]].tolist() == [[3, 4], [1, 2], [3, 4]]
    assert np.isnan(vectors[[1, 3, 5]]).all()
    with pytest.raises(InputError, match=r"npz' does not hold GloVe for GPT-2's tokens"):
        read_word_vectors(path, VOCABULARY[:2])


@pytest.mark.parametrize("lines", [["the 1 x"], ["the 1 2", "river 3"], ["nothing 1 2"]])
def test_damaged_text_is_one_line(tmp_path, lines):
    with pytest.raises(InputError, match=r"glove.6B.100d.txt' (line 1 is not|does not hold)"):
        read_word_vectors(write_official(tmp_path, lines), VOCABULARY)


def test_damaged_archive_is_one_line(tmp_path):
    path = tmp_path / "glove.6B.100d.gpt2vocab.f16.npz"
    path.write_bytes(b"PK\x03\x04 not an archive")
    with pytest.raises(InputError, match=r"npz' does not hold GloVe"):
        read_word_vectors(path, VOCABULARY)


def test_the_longest_vectors_are_preferred_and_none_is_no_error(tmp_path):
    assert WORD_VECTORS.find(tmp_path) == []
    short = write_official(tmp_path, ["the 1"])
    assert WORD_VECTORS.find(tmp_path) == [short]
    (tmp_path / "glove").mkdir()
    longer = tmp_path / "glove" / "glove.6B.300d.txt"
    longer.write_text("the 1\n")
    assert WORD_VECTORS.find(tmp_path) == [longer]


@pytest.fixture
def vectors():
    generator = np.random.default_rng(1)
    drawn = generator.normal(size=(400, 10)) @ np.diag(np.arange(10, 0, -1.0))
    drawn[::4] = np.nan
    return drawn.astype(np.float32)


@pytest.mark.parametrize("width", [10, 30])
def test_a_wider_start_keeps_inner_products(vectors, width):
    start = start_vectors(vectors, width, seed=3)
    known = np.isfinite(vectors[:, 0])
    assert start.shape == (400, width)
    assert start.dtype == np.float32
    np.testing.assert_allclose(
        start[known] @ start[known].T, vectors[known] @ vectors[known].T, rtol=1e-4, atol=1e-3
    )


def test_a_narrower_start_keeps_as_much_as_any_map_can(vectors):
    known = np.isfinite(vectors[:, 0])
    start = start_vectors(vectors, 6, seed=3)
    singular = np.linalg.svd(vectors[known], compute_uv=False)
    assert np.square(start[known]).sum() == pytest.approx(np.square(singular[:6]).sum(), rel=1e-4)


@pytest.mark.parametrize("width", [6, 30])
def test_unknown_rows_are_drawn_at_the_scale_of_the_known(vectors, width):
    known = np.isfinite(vectors[:, 0])
    start = start_vectors(vectors, width, seed=3)
    assert np.isfinite(start).all()
    assert start[~known].std() == pytest.approx(start[known].std(), rel=0.1)
    np.testing.assert_array_equal(start, start_vectors(vectors, width, seed=3))
    assert not np.array_equal(start[~known], start_vectors(vectors, width, seed=4)[~known])
