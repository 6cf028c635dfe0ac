"""BERT's word pieces: words to token ids, each piece with the word it came from."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fasterqk.errors import InputError
from fasterqk.tasks.data_folder import read_lines, require_files

VOCABULARY_FILES = [["tokenizers/bert-base-uncased/vocab.txt"]]
DOWNLOAD = (
    "download vocab.txt of bert-base-uncased (https://huggingface.co/google-bert/bert-base-uncased)"
    " to tokenizers/bert-base-uncased/vocab.txt there"
)


class WordPieces:
    """The tokenizer of bert-base-uncased from its vocabulary file; no special tokens are added."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        self.path = path
        self.vocabulary = tuple(read_lines(path))
        for position, token in ((0, "[PAD]"), (100, "[UNK]")):
            if self.vocabulary[position : position + 1] != (token,):
                raise InputError(
                    f"{str(path)!r} is not BERT's vocabulary: line {position + 1} is not {token}"
                )
        pieces = {token: index for index, token in enumerate(self.vocabulary)}
        self._tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
        self._tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    @classmethod
    def find(cls, folder: Path) -> "WordPieces":
        """The word pieces whose vocabulary file is in the data folder."""
        (path,) = require_files(folder, VOCABULARY_FILES, DOWNLOAD)
        return cls(path)

    def encode(self, texts: Sequence[Sequence[str]]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """For every text (a list of words) its token ids and, for each token, the index of its word."""
        # Words do not see each other, so each distinct word is cut once.
        distinct = list(dict.fromkeys(word for words in texts for word in words))
        cut = self._tokenizer.encode_batch(
            [[word] for word in distinct], is_pretokenized=True, add_special_tokens=False
        )
        pieces = {word: encoding.ids for word, encoding in zip(distinct, cut, strict=True)}
        encoded = []
        for words in texts:
            ids = [pieces[word] for word in words]
            tokens = np.fromiter(chain.from_iterable(ids), dtype=np.int64)
            encoded.append((tokens, np.repeat(np.arange(len(ids)), [len(own) for own in ids])))
        return encoded
