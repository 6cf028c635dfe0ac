import lzma

import numpy as np
import pytest

from fasterqk.errors import InputError
from fasterqk_lab.tasks import check_data, left_out, load_task
from fasterqk_lab.tasks.sva import (
    COMPACT,
    OFFICIAL,
    RELEASED_TRAIN,
    SIZES,
    UNKNOWN_POS,
    WRONG_INDEX,
    WRONG_VERB,
    official_splits,
)

# Split, part of speech, subject, verb (from 0), the verb, its other number, the sentence.
SENTENCES = [
    ("train", "VBZ", 1, 2, "sings", "sing", "the bird sings ."),
    ("train", "VBP", 1, 5, "ripen", "ripens", "the pears near the wall VBP late ."),
    ("val", "VBZ", 0, 1, "rains", "rain", "it rains ."),
    ("test", "VBP", 1, 2, "are", "is", "two doors are open ."),
]
BROKEN = {
    WRONG_INDEX: [
        ("train", "VBZ", 1, 9, "sings", "sing", "the bird sings ."),
        ("train", "VBZ", 2, 2, "sings", "sing", "the bird sings ."),
        ("train", "VBZ", "one", 2, "sings", "sing", "the bird sings ."),
    ],
    WRONG_VERB: [("train", "VBZ", 1, 3, "sings", "sing", "the bird sings .")],
    UNKNOWN_POS: [("train", "VBD", 1, 2, "sang", "sing", "the bird sang .")],
}
# Set, part of speech, attractors, subject, whether a sentence begins so, the prefix.
PREFIXES = [
    ("val", "VBP", 0, 1, 0, "the birds"),
    ("val", "VBZ", 0, 0, 0, "bread"),
    ("val", "VBZ", 0, 1, 1, "the bird"),
    ("val", "VBZ", 1, 1, 0, "a wall of pears"),
    ("test.1", "VBP", 1, 1, 0, "the keys to the door"),
    ("test.2", "VBZ", 2, 1, 0, "the bird near the pears and doors"),
    ("test.2", "VBZ", 2, 1, 1, "the wall behind two birds or pears"),
]


def write_table(path, names, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(names.split()), *("\t".join(str(cell) for cell in row) for row in rows)]
    data = "\n".join(lines).encode() + b"\n"
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    return path


def write_compact(folder, sentences=tuple(SENTENCES), prefixes=tuple(PREFIXES)):
    names = "split verb_pos subj_idx verb_idx verb inflected_verb sentence"
    write_table(folder / COMPACT[0], names, sentences)
    write_table(folder / COMPACT[1], "set verb_pos n_attractors subj_idx in_sentences_file prefix", prefixes)
    return folder


def write_official(folder, sentences, attractors=0):
    rows = [
        (text, text.upper(), verb, pos, subject + 1, place + 1, attractors)
        for _, pos, subject, place, verb, _, text in sentences
    ]
    names = "sentence orig_sentence verb verb_pos subj_index verb_index n_diff_intervening"
    write_table(folder / OFFICIAL[0], names, rows)
    return folder


def words(task, example):
    return [task.vocabulary[token] for token in example.tokens]


def marked(task, example):
    return [word for word, weight in zip(words(task, example), example.relevance, strict=True) if weight]


def test_whole_sentences_show_the_verb_where_a_placeholder_stood(tmp_path):
    task = load_task("sva", data_dir=write_compact(tmp_path))
    example = task.splits["train"][1]
    assert words(task, example) == ["the", "pears", "near", "the", "wall", "ripen", "late", "."]
    assert marked(task, example) == ["pears", "ripen"]
    assert task.classes[example.label] == "VBP"
    assert {name: len(split) for name, split in task.splits.items()} == {
        "train": 2,
        "validation": 1,
        "test": 1,
    }
    assert task.skipped == {}


def test_words_that_training_never_met_are_unknown(tmp_path):
    task = load_task("sva", data_dir=write_compact(tmp_path))
    assert words(task, task.splits["test"][0]) == ["[UNK]", "[UNK]", "[UNK]", "[UNK]", "."]


def test_prefixes_end_before_the_verb_and_know_their_attractors(tmp_path):
    task = load_task("sva", form="prefix", data_dir=write_compact(tmp_path))
    example = task.splits["train"][1]
    assert words(task, example) == ["the", "pears", "near", "the", "wall"]
    assert marked(task, example) == ["pears"]
    # The first and third prefix of the validation set that begins no sentence; the second is for test.
    assert len(task.splits["validation"]) == 2
    test = task.splits["test"]
    assert test.groups["attractors"].tolist() == [0, 1, 2]
    assert [task.classes[label] for label in test.labels] == ["VBZ", "VBP", "VBZ"]


@pytest.mark.parametrize("reason", BROKEN)
def test_what_contradicts_itself_is_counted_skipped_and_said(tmp_path, reason):
    folder = write_compact(tmp_path, [*SENTENCES, *BROKEN[reason]])
    task = load_task("sva", data_dir=folder)
    assert len(task.splits["train"]) == 2
    assert task.skipped == {reason: len(BROKEN[reason])}
    assert check_data("sva", folder)["note"] == f"left out: {left_out(task.skipped)}"


def test_broken_prefixes_are_counted_too(tmp_path):
    broken = [("test.1", "VBD", 1, 0, 0, "keys to the door"), ("test.1", "VBP", 1, 7, 0, "keys to the door")]
    task = load_task("sva", form="prefix", data_dir=write_compact(tmp_path, prefixes=[*PREFIXES, *broken]))
    assert task.skipped == {UNKNOWN_POS: 1, WRONG_INDEX: 1}


def test_nothing_usable_is_one_line_that_says_why(tmp_path):
    rows = [row if row[0] != "val" else ("val", "VBD", *row[2:]) for row in SENTENCES]
    with pytest.raises(InputError, match=r"no usable sentence for the validation split \(1 with an unknown"):
        load_task("sva", data_dir=write_compact(tmp_path, rows))


def test_official_indices_count_from_one(tmp_path):
    sentences = [(None, *row[1:]) for row in SENTENCES] * 4
    task = load_task("sva", data_dir=write_official(tmp_path / "official", sentences, attractors=3))
    compact = load_task("sva", data_dir=write_compact(tmp_path / "compact"))
    shown = {(tuple(words(task, x)), tuple(marked(task, x)), x.label) for x in task.splits["train"]}
    known = {tuple(words(compact, x)): (tuple(marked(compact, x)), x.label) for x in compact.splits["train"]}
    both = [entry for entry in shown if entry[0] in known]
    assert both
    assert all(known[text] == (marks, label) for text, marks, label in both)
    assert set(task.splits["test"].groups["attractors"].tolist()) == {3}


def test_official_sample_is_the_notebooks_draw():
    splits = official_splits(1_577_211, {**SIZES, "train": RELEASED_TRAIN})
    # The first rows of their printed training frame.
    assert {splits[row] for row in (1407142, 80973, 233479, 1533334, 42107)} == {"train"}
    counted = dict(zip(*np.unique(list(splits.values()), return_counts=True), strict=True))
    assert counted == {"train": 157_721, "validation": 20_000, "test": 20_000}


def test_a_smaller_table_is_split_in_proportion():
    splits = official_splits(14, SIZES)
    assert sorted(splits) == list(range(14))
    assert [list(splits.values()).count(name) for name in SIZES] == [10, 2, 2]


def test_released_form_has_word_pieces_and_a_class_that_never_occurs(tmp_path, write_vocabulary):
    write_vocabulary(tmp_path)
    rows = [(split, "VBP", 1, 2, "are", "is", "you louder are .") for split in ("train", "val", "test")]
    task = load_task("sva", form="released", data_dir=write_compact(tmp_path, rows))
    example = task.splits["train"][0]
    assert words(task, example) == ["you", "loud", "##er", "are", "[UNK]"]
    assert marked(task, example) == ["loud", "##er", "are"]
    assert task.classes == ("VBZ", "VBP", "(never)")


def test_missing_files_say_where_and_what(tmp_path):
    with pytest.raises(
        InputError, match=r"agr_50_mostcommon_10K.tsv or .* in the data folder .*rnn_agreement"
    ):
        load_task("sva", data_dir=tmp_path / "empty")
    assert "rnn_agreement" in check_data("sva", tmp_path)["missing"][0]


def test_missing_column_and_short_line_name_the_file(tmp_path):
    write_table(tmp_path / OFFICIAL[0], "sentence verb", [])
    with pytest.raises(InputError, match=r"mostcommon_10K.tsv' has no column 'orig_sentence'; its columns"):
        load_task("sva", data_dir=tmp_path)
    folder = write_compact(tmp_path / "other", [*SENTENCES, ("train", "VBZ")])
    with pytest.raises(InputError, match=r"line 6 has 2 cells for 7 columns"):
        load_task("sva", data_dir=folder)
    folder = write_compact(tmp_path / "third", [("trial", *SENTENCES[0][1:])])
    with pytest.raises(InputError, match=r"line 2: unknown split 'trial'"):
        load_task("sva", data_dir=folder)


def test_check_counts_what_is_there(tmp_path):
    report = check_data("sva", write_compact(tmp_path))
    assert report["counts"] == report["with_rationale"] == {"train": 2, "validation": 1, "test": 1}
    assert "note" not in report
