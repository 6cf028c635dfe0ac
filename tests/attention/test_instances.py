"""Instances, batches, and the examples of users."""

import json

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from fasterqk.attention import Instance, read_examples
from fasterqk.attention.instances import (
    collate,
    encode_for_causal,
    encode_for_classifier,
    read_example,
    read_rows,
)
from fasterqk.errors import InputError


def instance(*tokens, special=1, **more):
    rankable = np.arange(len(tokens)) >= special
    return Instance(np.array(tokens), rankable, rankable * 0.5, **more)


def test_padding_comes_last():
    batch = collate([instance(1, 2, 3), instance(4, 5, label=2)])
    assert batch.tokens.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert batch.first.tolist() == [0, 0]
    assert batch.last.tolist() == [2, 1]
    assert batch.label.tolist() == [-1, 2]
    assert not (batch.rankable & ~batch.real).any()


def test_targets_are_padded_and_absent_for_classifiers():
    batch = collate([instance(1, target=np.array([7, 8])), instance(1, target=np.array([9]))])
    assert batch.target.tolist() == [[7, 8], [9, 0]]
    assert batch.target_real.tolist() == [[True, True], [True, False]]
    assert collate([instance(1)]).target.shape == (1, 0)


def test_keeping_some_tokens_closes_gaps_and_trims():
    batch = collate([instance(1, 2, 3, 4), instance(5, 6, 7)])
    kept = batch.keep(~np.isin(batch.tokens, [2, 3, 6]))
    assert kept.tokens.tolist() == [[1, 4], [5, 7]]
    assert kept.real.all()
    uneven = batch.keep(~np.isin(batch.tokens, [2, 6, 7]))
    assert uneven.tokens.tolist() == [[1, 3, 4], [5, 0, 0]]
    assert uneven.rankable.sum() == 2


def test_single_texts_lose_the_padding_they_do_not_need():
    batch = collate([instance(1, 2, 3, 4), instance(5, 6, 7, label=2)])
    _, alone = batch.singles
    assert alone.tokens.tolist() == [[5, 6, 7]]
    assert alone.label.tolist() == [2]


def test_lengths_must_fit():
    with pytest.raises(InputError, match="relevance of instance 'x' has 2 entries for 1 tokens"):
        Instance(np.array([1]), np.array([True]), np.array([1.0, 0.0]), id="x")
    with pytest.raises(InputError, match="tokens of instance 'x' are float64; give whole numbers"):
        Instance(np.array([1.5]), np.ones(1, bool), np.zeros(1), id="x")
    with pytest.raises(InputError, match="has no tokens"):
        Instance(np.zeros(0, int), np.zeros(0, bool), np.zeros(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relevance": [5, 0]}, "the relevance of instance 'x' is not in 0..1"),
        ({"relevance": [np.nan, 0]}, "the relevance of instance 'x' is not in 0..1"),
        ({"tokens": [[1, 2], [3, 4]]}, "tokens of instance 'x' has shape (2, 2) for 2 tokens"),
        ({"pieces": ("a",)}, "instance 'x' has 1 pieces for 2 tokens"),
        ({"label": "good"}, "the label of instance 'x' is 'good'; give the number of a class"),
    ],
)
def test_an_instance_has_possible_values(change, message):
    options = {"tokens": [1, 2], "rankable": [1, 1], "relevance": [0, 1], "id": "x"}
    with pytest.raises(InputError) as caught:
        Instance(**{**options, **change})
    assert str(caught.value) == message


def test_lists_and_marks_of_0_and_1_are_arrays_of_their_kind():
    instance = Instance([4, 5, 6], [0, 1, 1], [0, 0, 1])
    assert (instance.tokens.dtype, instance.rankable.dtype, instance.relevance.dtype) == (
        np.int64,
        bool,
        float,
    )
    assert instance.rationale.tolist() == [False, True]


def test_rows_may_have_tuples_and_arrays():
    row = {"text": "a fine film", "spans": [(2, 6)], "label": np.int64(1)}
    words = {"tokens": ("a", "fine"), "relevance": np.array([0, 1]), "label": 0}
    first, second = read_rows([row, words])
    assert (first.relevant, first.label, second.relevance) == (((2, 6, 1.0),), 1, (0.0, 1.0))
    with pytest.raises(InputError, match="row 1: cannot write a object as JSON"):
        read_rows([{**row, "id": object()}])


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return path


def test_words_become_text_with_spans(tmp_path):
    line = {"tokens": ["a", "fine", "film"], "relevance": [0, 1, 0.5], "label": "good", "id": "x"}
    (example,) = read_examples(write(tmp_path / "data.jsonl", line))
    assert example.text == "a fine film"
    assert example.relevant == ((2, 6, 1.0), (7, 11, 0.5))
    assert example.words == ("a", "fine", "film")
    assert example.relevance == (0.0, 1.0, 0.5)
    assert (example.id, example.label, example.target) == ("x", "good", None)


def test_text_keeps_its_spans_and_blank_lines_are_passed_over(tmp_path):
    path = write(
        tmp_path / "data.jsonl", {"text": "a fine film", "spans": [[2, 6]], "target": "yes"}, "", "  "
    )
    (example,) = read_examples(path)
    assert example.relevant == ((2, 6, 1.0),)
    assert (example.id, example.label, example.target) == ("1", None, "yes")
    assert example.words is None


WORDS = {"tokens": ["a", "b"], "relevance": [0, 1], "label": 0}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 holds no JSON object but '[1]'"),
        (WORDS | {"relevance": [0, 1, 1]}, "line 2: 'relevance' has 3 numbers but 'tokens' has 2 words"),
        (WORDS | {"text_b": "x"}, "unknown field 'text_b'; a line may have tokens, relevance, text, spans"),
        (WORDS | {"spans": [[0, 1]]}, "'spans' belongs to 'text', which this line does not have"),
        (
            {"text": "ab", "spans": [], "relevance": [1], "label": 0},
            "'relevance' belongs to 'tokens', which this line does not have",
        ),
        (WORDS | {"relevance": [0]}, "'relevance' has 1 numbers but 'tokens' has 2 words"),
        (WORDS | {"relevance": [0, 2]}, "the relevance 2 is not a number in 0..1"),
        (WORDS | {"relevance": [0, float("nan")]}, "the relevance nan is not a number"),
        (WORDS | {"relevance": [0, "1"]}, "the relevance '1' is not a number"),
        (WORDS | {"relevance": None}, "'relevance' is None"),
        (WORDS | {"tokens": []}, "'tokens' is []"),
        (WORDS | {"tokens": "a b"}, "'tokens' is 'a b'"),
        (WORDS | {"tokens": ["a", " "]}, "the token ' ' is not a word"),
        (WORDS | {"text": "a b"}, "either 'tokens' with 'relevance' or 'text' with 'spans'"),
        ({"relevance": [1], "label": 0}, "either 'tokens' with 'relevance' or 'text' with 'spans'"),
        (WORDS | {"target": "x"}, "either 'label' (classifier) or 'target' (causal model)"),
        ({"tokens": ["a"], "relevance": [1]}, "either 'label' (classifier) or 'target' (causal model)"),
        (WORDS | {"label": 0.5}, "the label 0.5 is neither"),
        (WORDS | {"label": True}, "the label True is neither"),
        ({"text": " ", "spans": [], "label": 0}, "'text' is ' '"),
        ({"text": "ab", "spans": None, "label": 0}, "'spans' is None"),
        ({"text": "ab", "spans": [[1, 3]], "label": 0}, "the span [1, 3] does not lie in the text of 2"),
        ({"text": "ab", "spans": [[1, 1]], "label": 0}, "the span [1, 1] does not lie"),
        ({"text": "ab", "spans": [[0.0, 1]], "label": 0}, "the span [0.0, 1] does not lie"),
        ({"text": "ab", "spans": [1], "label": 0}, "the span 1 does not lie"),
        ({"tokens": ["a"], "relevance": [1], "target": ""}, "'target' is ''"),
        (WORDS | {"id": 1}, "the id '1' was used before"),
    ],
)
def test_bad_lines(tmp_path, line, message):
    path = write(tmp_path / "data.jsonl", WORDS, line)
    with pytest.raises(InputError) as raised:
        read_examples(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"'.*none.jsonl': No such file"):
        read_examples(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="is empty"):
        read_examples(write(tmp_path / "empty.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    with pytest.raises(InputError, match="not UTF-8"):
        read_examples(tmp_path / "latin.jsonl")


# --- From words and characters to the tokens of a model ---

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


def test_special_tokens_inside_a_text_are_not_ranked(word_pieces):
    copied = Tokenizer.from_str(word_pieces.backend_tokenizer.to_str())
    named = {name: f"[{name[:3].upper()}]" for name in ("cls_token", "sep_token", "unk_token")}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=copied, **named)
    given = example(text="cat [SEP] dog", spans=[[0, 9]], label=0)
    (found,) = encode_for_classifier([given], tokenizer, CLASSES, 64)
    assert found.pieces == ("[CLS]", "cat", "[SEP]", "dog", "[SEP]")
    assert found.rankable.tolist() == [False, True, False, True, False]
    assert found.relevance.tolist() == [0, 1, 0, 0, 0]
    (found,) = encode_for_causal([example(text="cat [SEP] dog", target="sat")], tokenizer, 64)
    assert found.rankable.tolist() == [False, True, False, True]


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


@pytest.mark.parametrize(
    ("record", "joined"),
    [
        ({"text": "猫は", "target": "座った"}, "猫は座った"),
        ({"text": "print(", "target": "x)", "separator": ""}, "print(x)"),
        ({"text": "2 + 2", "target": "4", "separator": "\n= "}, "2 + 2\n= 4"),
        ({"text": "a", "target": "cat"}, "a cat"),
    ],
)
def test_text_and_target_are_joined_as_the_script_or_the_data_wants(bytes_with_blanks, record, joined):
    (found,) = encode_for_causal([example(**record)], bytes_with_blanks, 64)
    ids = [*found.tokens.tolist(), *found.target.tolist()]
    assert bytes_with_blanks.decode(ids) == joined
    assert bytes_with_blanks.decode(found.target.tolist()).strip() == record["target"]


def test_a_chat_template_brings_its_first_token_itself(word_pieces):
    copied = Tokenizer.from_str(word_pieces.backend_tokenizer.to_str())
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=copied, **names)
    tokenizer.chat_template = "[CLS]{% for message in messages %}{{ message.content }} [SEP] {% endfor %}a"
    chat = [{"role": "user", "content": "the cats sat"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False)
    (found,) = encode_for_causal([example(text=prompt, spans=[[9, 13]], target="mat")], tokenizer, 64)
    assert found.pieces == ("[CLS]", "the", "cat", "##s", "sat", "[SEP]", "a")
    assert found.rankable.tolist() == [False, True, True, True, True, False, True]
    assert found.relevance.tolist() == [0, 0, 1, 1, 0, 0, 0]
    assert tokenizer.convert_ids_to_tokens(found.target.tolist()) == ["mat"]


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
        f"'data.jsonl' line 4: the label {label!r} is not a class of the model (0 = 'bad', 1 = 'good')"
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


def test_a_rationale_behind_the_cut_is_counted(word_pieces):
    given = [
        words(*["cat"] * 9, "dog", relevance=[0] * 9 + [1], label=0),
        words("dog", *["cat"] * 9, relevance=[1] + [0] * 9, label=0),
        words(*["cat"] * 10, relevance=[0] * 10, label=0),
        words("cat", "dog", relevance=[0, 1], label=0),
    ]
    found = encode_for_classifier(given, word_pieces, ("a", "b"), 6)
    assert [one.truncated for one in found] == [True, True, True, False]
    assert [one.relevance_cut for one in found] == [True, False, False, False]


def test_the_blank_that_sentencepiece_puts_before_a_text_is_never_relevant():
    pieces = [("<unk>", 0.0), ("\u2581", -3.0), ("\u2581a", -2.0), ("1", -2.0), ("2", -2.0), ("/", -2.0)]
    own = Tokenizer(models.Unigram(pieces, 0))
    own.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>")
    (found,) = encode_for_classifier([example(text="1/2 a", spans=[[0, 1]], label=0)], tokenizer, "ab", 64)
    assert found.pieces == ("\u2581", "1", "/", "2", "\u2581a")
    assert found.relevance.tolist() == [0, 1, 0, 0, 0]
    (found,) = encode_for_causal([example(text="1/2 a", spans=[[0, 1]], target="a")], tokenizer, 64)
    assert found.relevance.tolist() == [0, 1, 0, 0, 0]
