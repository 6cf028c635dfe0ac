import pytest

from fasterqk.errors import InputError
from fasterqk.lab.tasks._tokens import WordPieces


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
