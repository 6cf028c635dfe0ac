import json

import pytest

from fasterqk.errors import InputError
from fasterqk_lab.tasks import load_task
from fasterqk_lab.tasks.jsonl import split_of


def lines(count=60):
    return [
        {
            "id": f"x{i}",
            "tokens": ["a", "GOOD" if i % 2 else "bad", "day"],
            "relevance": [0, 1, 0],
            "label": i % 2,
        }
        for i in range(count)
    ]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_words_are_tokens_and_labels_are_classes(tmp_path):
    task = load_task("jsonl", file=write(tmp_path / "mine.jsonl", lines()))
    assert task.classes == ("0", "1")
    assert set(task.vocabulary) == {"[PAD]", "[UNK]", "a", "bad", "day", "good"}
    assert sum(len(split) for split in task.splits.values()) == 60
    example = task.splits["train"][0]
    assert example.relevance.tolist() == [0, 1, 0]
    assert task.files["mine.jsonl"]


def test_a_file_that_changed_is_read_again(tmp_path):
    for count in (60, 80):
        task = load_task("jsonl", file=write(tmp_path / "mine.jsonl", lines(count)))
        assert sum(len(split) for split in task.splits.values()) == count


def test_splits_depend_on_the_id_alone(tmp_path):
    short = load_task("jsonl", file=write(tmp_path / "short.jsonl", lines(60)))
    longer = load_task("jsonl", file=write(tmp_path / "longer.jsonl", lines(80)))
    for name, split in short.splits.items():
        assert set(split.ids) <= set(longer.splits[name].ids)
    assert all(split_of(identity) == "train" for identity in short.splits["train"].ids)


def test_text_with_spans_marks_the_words_they_touch(tmp_path):
    records = [
        {"id": f"x{i}", "text": "one  two three", "spans": [[5, 8]], "label": "ab"[i % 2]} for i in range(60)
    ]
    task = load_task("jsonl", file=write(tmp_path / "mine.jsonl", records))
    example = task.splits["train"][0]
    assert [task.vocabulary[token] for token in example.tokens] == ["one", "two", "three"]
    assert example.relevance.tolist() == [0, 1, 0]
    assert task.classes == ("a", "b")


def test_words_that_training_does_not_have_are_unknown(tmp_path):
    records = lines()
    outside = next(record for record in records if split_of(record["id"]) == "test")
    outside["tokens"] = ["zebra", *outside["tokens"][1:]]
    task = load_task("jsonl", file=write(tmp_path / "mine.jsonl", records))
    place = task.splits["test"].ids.index(outside["id"])
    assert task.vocabulary[task.splits["test"][place].tokens[0]] == "[UNK]"


def test_without_rationale_there_is_no_mask(tmp_path):
    records = [{**record, "relevance": [0, 0, 0]} for record in lines()]
    task = load_task("jsonl", file=write(tmp_path / "mine.jsonl", records))
    assert not task.splits["train"].rated.any()


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"tokens": ["a"], "relevance": [1], "target": "b"}] * 1, "has a 'target'"),
        ([{"id": str(i), "tokens": ["a"], "relevance": [1], "label": 0} for i in range(9)], "one class '0'"),
        ([{"id": str(i), "tokens": ["a"], "relevance": [1], "label": i} for i in range(2)], "split"),
        ([{"tokens": ["a"], "relevance": [1, 0], "label": 0}], "2 numbers but 'tokens' has 1"),
    ],
)
def test_bad_data_is_one_line(tmp_path, records, message):
    path = write(tmp_path / "mine.jsonl", records)
    with pytest.raises(InputError, match=message) as error:
        load_task("jsonl", file=path)
    assert "mine.jsonl" in str(error.value)


def test_no_file_given():
    with pytest.raises(InputError, match=r"--data FILE\.jsonl"):
        load_task("jsonl")


def test_file_that_does_not_exist(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.jsonl"):
        load_task("jsonl", file=str(tmp_path / "nowhere.jsonl"))
