import json
import lzma

import pytest

WORDS = ["you", "are", "kind", "mean", "and", "loud", "##er", "quiet", "neighbour", "<", "user", ">"]
POSTS = {
    "b1": ("train", ["kind", "kind", "normal"], "you are kind", []),
    "a2": ("train", ["mean", "mean", "loud"], "you are meaner and loud", ["00100", "00101"]),
    "c3": ("val", ["loud", "mean", "loud"], "<user> and you are loud", ["00001", "00011", "00001"]),
    "d4": ("test", ["mean", "mean", "mean"], "you neighbour are mean", ["0001", "0001", "0101"]),
    "e5": ("test", ["kind", "mean", "loud"], "you are you", ["001"]),
}
LABEL = {"kind": "normal", "normal": "normal", "mean": "hatespeech", "loud": "offensive"}


def majority(labels):
    named = [LABEL[label] for label in labels]
    return next((label for label in named if named.count(label) > 1), None)


@pytest.fixture
def write_vocabulary(tmp_path):
    """Write a vocabulary laid out as BERT's: [PAD] first, [UNK] at 100."""

    def write(folder=tmp_path):
        path = folder / "tokenizers" / "bert-base-uncased" / "vocab.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        tokens = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", *WORDS]
        path.write_text("\n".join(tokens) + "\n")
        return path

    return write


def official_record(labels, text, masks):
    return {
        "annotators": [{"label": LABEL[label], "annotator_id": i} for i, label in enumerate(labels)],
        "rationales": [[int(mark) for mark in mask] for mask in masks],
        "post_tokens": text.split(" "),
    }


def compact_record(name, split, labels, text, masks):
    record = {
        "id": name,
        "split": split,
        "label": majority(labels),
        "annotator_labels": [LABEL[label] for label in labels],
        "text": text,
    }
    if masks:
        columns = zip(*masks, strict=True)
        record["rationale_union"] = "".join("1" if "1" in column else "0" for column in columns)
    if split != "train":
        record["rationales"] = masks
    return record


@pytest.fixture
def official_folder(tmp_path, write_vocabulary):
    """A data folder with a made-up data set in HateXplain's official two files."""
    folder = tmp_path / "official"
    write_vocabulary(folder)
    (folder / "hatexplain").mkdir()
    dataset = {name: official_record(*post[1:]) for name, post in POSTS.items()}
    divisions = {s: [n for n, post in POSTS.items() if post[0] == s] for s in ("train", "val", "test")}
    (folder / "hatexplain" / "dataset.json").write_text(json.dumps(dataset))
    (folder / "hatexplain" / "post_id_divisions.json").write_text(json.dumps(divisions))
    return folder


@pytest.fixture
def compact_folder(tmp_path, write_vocabulary):
    """The same made-up data in the compact file."""
    folder = tmp_path / "compact"
    write_vocabulary(folder)
    (folder / "hatexplain").mkdir()
    records = [compact_record(name, *post) for name, post in POSTS.items() if majority(post[1])]
    write_compact(folder, records)
    return folder


def write_compact(folder, records):
    path = folder / "hatexplain" / "hatexplain.jsonl.xz"
    with lzma.open(path, "wt") as stream:
        stream.write("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def rewrite_compact(compact_folder):
    """Change the records of the compact file; ``change`` gets and returns the list."""

    def rewrite(change):
        records = [compact_record(name, *post) for name, post in POSTS.items() if majority(post[1])]
        return write_compact(compact_folder, change(records))

    return rewrite


MERGES = ["t h", "th e", "Ġ the", "i n", "Ġ C", "Ġ A", "r i", "ri v", "riv e", "rive r", "Ġ river"]


@pytest.fixture
def write_byte_pairs(tmp_path):
    """Write byte pairs laid out as GPT-2's: all 256 bytes, some merges, end-of-text."""

    def write(folder=tmp_path):
        tokens = [*written_bytes(), *(merge.replace(" ", "") for merge in MERGES), "<|endoftext|>"]
        place = folder / "tokenizers" / "gpt2"
        place.mkdir(parents=True, exist_ok=True)
        numbers = {token: number for number, token in enumerate(tokens)}
        (place / "encoder.json").write_text(json.dumps(numbers))
        (place / "vocab.bpe").write_text("\n".join(["#version: 0.2", *MERGES]) + "\n", encoding="utf-8")
        return place / "encoder.json", place / "vocab.bpe"

    return write


def written_bytes():
    """The 256 characters that GPT-2's files write bytes with, from the library."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())
