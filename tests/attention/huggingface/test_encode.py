"""From words and characters to the tokens of a model."""

import numpy as np
import pytest

from fasterqk.attention import read_example
from fasterqk.attention._instances import encode_for_causal, encode_for_classifier
from fasterqk.errors import InputError

CLASSES = ("bad", "good")


def example(**record):
    return read_example(record, "'data.jsonl' line 4", 4)


def words(*tokens, relevance, **more):
    return example(tokens=list(tokens), relevance=list(relevance), **more)


def test_sub_tokens_inherit_relevance_and_special_tokens_are_not_ranked(word_pieces):
    given = words("the", "awful", "cats", relevance=[0, 1, 0.5], label="good")
    (found,) = encode_for_classifier([given], word_pieces, CLASSES, 64)
    assert found.pieces == ("[CLS]", "the", "aw", "##ful", "cat", "##s", "[SEP]")
    assert found.relevance.tolist() == [0, 0, 1, 1, 0.5, 0.5, 0]
    assert found.rankable.tolist() == [False, True, True, True, True, True, False]
    assert (found.label, found.id) == (1, "4")


def test_unknown_words_are_ranked_like_others(word_pieces):
    given = words("zebra", "cat", relevance=[1, 0], label=0)
    (found,) = encode_for_classifier([given], word_pieces, CLASSES, 64)
    assert found.pieces[1] == "[UNK]"
    assert found.rankable.tolist() == [False, True, True, False]
    assert found.relevance.tolist() == [0, 1, 0, 0]


def test_character_spans_touch_every_token_they_reach(word_pieces):
    given = example(text="The  awful cats", spans=[[7, 9]], label=0)
    (found,) = encode_for_classifier([given], word_pieces, CLASSES, 64)
    # Characters 7 and 8 are "fu" of "awful", inside its second piece.
    assert found.relevance.tolist() == [0, 0, 0, 1, 0, 0, 0]


def test_blanks_are_never_relevant(bytes_with_blanks):
    given = example(text="a cat", spans=[[0, 2]], label=0)
    (found,) = encode_for_classifier([given], bytes_with_blanks, CLASSES, 64)
    assert found.pieces == ("a", "Ġcat")
    assert found.relevance.tolist() == [1, 0]


def test_long_texts_are_cut(word_pieces):
    given = words(*["cat"] * 9, "dog", relevance=[0] * 9 + [1], label=0)
    (found,) = encode_for_classifier([given], word_pieces, CLASSES, 6)
    assert len(found.tokens) == 6
    assert found.truncated
    assert not found.relevant
    assert not encode_for_classifier([given], word_pieces, CLASSES, 12)[0].truncated


def test_target_follows_the_prompt_as_one_text(bytes_with_blanks):
    given = words("a", "cat", relevance=[0, 1], target="cat")
    (found,) = encode_for_causal([given], bytes_with_blanks, 64)
    assert found.pieces == ("a", "Ġcat")
    assert bytes_with_blanks.convert_ids_to_tokens(found.target.tolist()) == ["Ġcat"]
    assert found.relevance.tolist() == [0, 1]
    assert found.label is None


@pytest.mark.parametrize(("text", "target"), [("a ", "cat"), ("a", " cat")])
def test_white_space_of_their_own_is_kept(bytes_with_blanks, text, target):
    (found,) = encode_for_causal([example(text=text, spans=[], target=target)], bytes_with_blanks, 64)
    assert found.pieces == ("a",)
    assert bytes_with_blanks.convert_ids_to_tokens(found.target.tolist()) == ["Ġcat"]


def test_special_tokens_behind_the_target_are_no_target(word_pieces):
    (found,) = encode_for_causal([words("the", relevance=[1], target="cats")], word_pieces, 64)
    assert found.pieces == ("[CLS]", "the")
    assert found.rankable.tolist() == [False, True]
    assert word_pieces.convert_ids_to_tokens(found.target.tolist()) == ["cat", "##s"]


@pytest.mark.parametrize("label", [2, -1, "ugly"])
def test_a_label_outside_the_classes(word_pieces, label):
    with pytest.raises(InputError) as raised:
        encode_for_classifier([words("a", relevance=[1], label=label)], word_pieces, CLASSES, 64)
    assert str(raised.value) == (
        f"'data.jsonl' line 4: the label {label!r} is none of the model's classes (0 = 'bad', 1 = 'good')"
    )


def test_other_bad_input(word_pieces, bytes_with_blanks):
    with pytest.raises(InputError, match="line 4: a classifier needs 'label', one of bad, good"):
        encode_for_classifier([words("a", relevance=[1], target="b")], word_pieces, CLASSES, 64)
    with pytest.raises(InputError, match="line 4: a causal model needs 'target'"):
        encode_for_causal([words("a", relevance=[1], label=0)], bytes_with_blanks, 64)
    with pytest.raises(InputError, match="line 4: 4 tokens, but the model reads 3"):
        encode_for_causal([words("abc", relevance=[1], target="cat")], bytes_with_blanks, 3)
    with pytest.raises(InputError, match="fast tokenizer"):
        encode_for_classifier([words("a", relevance=[1], label=0)], object(), CLASSES, 64)


def test_positions_and_labels_stay_in_the_order_of_the_data(word_pieces):
    given = [words("cat", relevance=[1], label=0), words("the", "dog", relevance=[0, 1], label=1)]
    found = encode_for_classifier(given, word_pieces, CLASSES, 64)
    assert [x.label for x in found] == [0, 1]
    assert [len(x.tokens) for x in found] == [3, 4]
    assert all(x.tokens.dtype == np.int64 for x in found)
