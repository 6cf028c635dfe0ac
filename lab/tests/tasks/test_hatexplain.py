import json

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk_lab.tasks import check_data, load_task
from fasterqk_lab.tasks.hatexplain import majority


def words(task, example):
    return [task.vocabulary[token] for token in example.tokens]


def test_official_and_compact_files_give_the_same_examples(official_folder, compact_folder):
    official = load_task("hatexplain", data_dir=official_folder)
    compact = load_task("hatexplain", data_dir=compact_folder)
    for name, examples in official.splits.items():
        other = compact.splits[name]
        assert examples.ids == other.ids
        assert examples.labels.tolist() == other.labels.tolist()
        assert examples.tokens.tolist() == other.tokens.tolist()
        assert examples.relevance.tolist() == other.relevance.tolist()
        assert examples.rated.tolist() == other.rated.tolist()


def test_label_is_that_of_the_majority_and_undecided_posts_are_dropped(official_folder):
    task = load_task("hatexplain", data_dir=official_folder)
    assert task.classes == ("hatespeech", "normal", "offensive")
    assert task.splits["train"].ids == ("a2", "b1")
    assert [task.classes[label] for label in task.splits["train"].labels] == ["hatespeech", "normal"]
    assert task.splits["test"].ids == ("d4",)
    assert majority(["normal", "offensive", "hatespeech"]) is None


def test_word_pieces_inherit_the_union_of_the_rationales(official_folder):
    task = load_task("hatexplain", data_dir=official_folder)
    example = task.splits["train"][0]
    assert words(task, example) == ["you", "are", "mean", "##er", "and", "loud"]
    assert example.relevance.tolist() == [0, 0, 1, 1, 0, 1]
    assert task.splits["train"][1].relevance is None


def test_votes_count_annotators_out_of_three_and_cleaning_drops_marks(compact_folder):
    task = load_task("hatexplain", form="votes", data_dir=compact_folder)
    example = task.splits["validation"][0]
    assert words(task, example) == ["user", "and", "you", "are", "loud"]
    assert example.relevance.tolist() == pytest.approx([0, 0, 0, 1 / 3, 1])
    # The compact file has no single masks for training posts.
    assert not task.splits["train"].rated.any()


def test_a_normal_post_has_votes_of_zero(official_folder):
    task = load_task("hatexplain", form="votes", data_dir=official_folder)
    example = task.splits["train"][1]
    assert example.relevance is not None
    assert not example.relevance.any()


def test_missing_file_says_where_it_looked_and_what_to_download(tmp_path):
    with pytest.raises(InputError) as error:
        load_task("hatexplain", data_dir=tmp_path / "nothing")
    message = str(error.value)
    assert str(tmp_path / "nothing") in message
    assert "dataset.json" in message
    assert "https://github.com/hate-alert/HateXplain" in message
    assert "\n" not in message


def test_missing_vocabulary_is_told_apart(official_folder):
    (official_folder / "tokenizers" / "bert-base-uncased" / "vocab.txt").unlink()
    with pytest.raises(InputError, match=r"vocab\.txt.*google-bert/bert-base-uncased"):
        load_task("hatexplain", data_dir=official_folder)


def test_truncated_archive(compact_folder):
    path = compact_folder / "hatexplain" / "hatexplain.jsonl.xz"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(InputError, match=r"hatexplain\.jsonl\.xz' is truncated; download it again"):
        load_task("hatexplain", data_dir=compact_folder)


def test_file_that_is_no_archive(compact_folder):
    (compact_folder / "hatexplain" / "hatexplain.jsonl.xz").write_bytes(b"hello, this is text")
    with pytest.raises(InputError, match=r"hatexplain\.jsonl\.xz' is damaged"):
        load_task("hatexplain", data_dir=compact_folder)


def test_wrong_json_names_the_file(official_folder):
    (official_folder / "hatexplain" / "dataset.json").write_text('{"a": [1,')
    with pytest.raises(InputError, match=r"dataset\.json' is not JSON"):
        load_task("hatexplain", data_dir=official_folder)


@pytest.mark.parametrize("column", ["label", "text", "split", "id"])
def test_missing_column(rewrite_compact, compact_folder, column):
    def drop(records):
        del records[1][column]
        return records

    rewrite_compact(drop)
    with pytest.raises(InputError, match=rf"line 2 has no text '{column}'"):
        load_task("hatexplain", data_dir=compact_folder)


def test_unknown_label(rewrite_compact, compact_folder):
    rewrite_compact(lambda records: [{**records[0], "label": "friendly"}, *records[1:]])
    with pytest.raises(InputError, match=r"line 1: unknown label 'friendly'; labels are hatespeech"):
        load_task("hatexplain", data_dir=compact_folder)


def test_rationales_of_the_wrong_length_are_counted_and_named(rewrite_compact, compact_folder):
    def shorten(records):
        return [{**r, "rationale_union": "01"} if r["id"] in ("a2", "d4") else r for r in records]

    rewrite_compact(shorten)
    with pytest.raises(InputError, match=r"2 rationales of the wrong length: 'a2' \(2 for 5 words\), 'd4'"):
        load_task("hatexplain", data_dir=compact_folder)


def test_official_rationale_of_the_wrong_length(official_folder):
    path = official_folder / "hatexplain" / "dataset.json"
    dataset = json.loads(path.read_text())
    dataset["d4"]["rationales"][1] = [0, 1]
    path.write_text(json.dumps(dataset))
    with pytest.raises(InputError, match=r"dataset\.json': .*wrong length: 'd4' \(2 for 4 words\)"):
        load_task("hatexplain", data_dir=official_folder)


def test_division_that_names_an_unknown_post(official_folder):
    path = official_folder / "hatexplain" / "post_id_divisions.json"
    path.write_text(json.dumps({"train": ["a2"], "val": ["c3"], "test": ["zz"]}))
    with pytest.raises(InputError, match=r"dataset\.json' has no object 'zz'"):
        load_task("hatexplain", data_dir=official_folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [("annotators", 3), ("rationales", "01"), ("rationales", [None]), ("post_tokens", "you are"), (None, 7)],
)
def test_records_of_another_shape_are_told_in_one_line(official_folder, field, value):
    path = official_folder / "hatexplain" / "dataset.json"
    dataset = json.loads(path.read_text())
    if field:
        dataset["d4"][field] = value
    else:
        dataset["d4"] = value
    path.write_text(json.dumps(dataset))
    with pytest.raises(InputError, match=r"dataset\.json'"):
        load_task("hatexplain", data_dir=official_folder)


def test_compact_record_of_another_shape(rewrite_compact, compact_folder):
    rewrite_compact(lambda records: [{**records[0], "text": 5}, *records[1:]])
    with pytest.raises(InputError, match="line 1 has no text 'text'"):
        load_task("hatexplain", data_dir=compact_folder)


def test_check_counts_what_is_there(official_folder, compact_folder, tmp_path):
    for folder in (official_folder, compact_folder):
        report = check_data("hatexplain", folder)
        assert report["counts"] == {"train": 2, "validation": 1, "test": 1}
        assert report["with_rationale"] == {"train": 1, "validation": 1, "test": 1}
        assert report["missing"] == []
    assert len(check_data("hatexplain", tmp_path / "nothing")["missing"]) == 2


def test_examples_come_in_the_order_of_their_ids(official_folder):
    task = load_task("hatexplain", data_dir=official_folder)
    ids = task.splits["train"].ids
    assert list(ids) == sorted(ids)
    assert np.all(task.splits["train"].lengths > 0)
